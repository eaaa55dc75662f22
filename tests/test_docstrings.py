"""Every public docstring has an example, and every example runs."""

import doctest
import inspect
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail

SKIPPED: dict[str, str] = {
    "search": "a search trains several models",
    "SearchResult.to_dict": "a search trains several models",
    "Classifier.export": "an export takes seconds; that of `export` runs",
    "Export": "an export takes seconds; that of `export` runs",
    "Export.proof_page": "an export takes seconds; that of `export` runs",
    "Export.to_dict": "an export takes seconds; that of `export` runs",
    "serve": "a server answers until it is stopped",
}  # name: why its example is marked +SKIP
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
TINY = {
    "vit": {"width": 32, "depth": 1, "heads": 1},
    "train": {"batch": 64},
    "data": {"workers": 0},
}


def public_objects():
    """Functions, classes, and the methods and properties that public classes define themselves."""
    for name in vitrail.__all__:
        thing = getattr(vitrail, name)
        yield name, thing
        if not inspect.isclass(thing) or issubclass(thing, Exception):
            continue
        for attribute, member in vars(thing).items():
            if attribute.startswith("_") or attribute == "forward":
                continue
            if inspect.isfunction(member) or isinstance(
                member, property | classmethod | staticmethod
            ):
                yield f"{name}.{attribute}", member


OBJECTS = dict(public_objects())


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """What examples find in their working directory: runs, an export, an image, data."""
    place = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("VITRAIL_CACHE", str(place / "cache"))
        patch.setattr("vitrail.heads.logistic.ITERATIONS", 5)
        for number in (1, 2):
            vitrail.train(
                "digits",
                epochs=5 + 5 * number,
                settings=TINY,
                seed=number,
                out=f"runs/digits-{number}",
                report=False,
                quiet=True,
            )
        vitrail.pretrain(
            "digits", epochs=1, settings=TINY, out="runs/digits-pre-1", report=False, quiet=True
        )
        vitrail.export("runs/digits-1", "digits.onnx", features=True)
    digits = vitrail.open_data("digits")
    Image.fromarray(digits[0].content[:, :, 0]).save(place / "digit.png")
    classifier = vitrail.load(place / "runs" / "digits-1")
    answers = classifier.predict([digits[item].content for item in range(0, 1797, 75)], top=1)
    printed = "\n".join(json.dumps(answer.to_dict()) for answer in answers)
    (place / "predictions.jsonl").write_text(printed)
    random, lines = np.random.default_rng(0), ["path,label"]
    for brightness, label in ((0, "dark"), (190, "light")):
        (place / "photos" / label).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 60, (16, 16, 3)) + brightness
            Image.fromarray(pixels.astype(np.uint8)).save(
                place / "photos" / label / f"{number}.png"
            )
            lines.append(f"photos/{label}/{number}.png,{label}")
    (place / "photos.csv").write_text("\n".join(lines) + "\n")
    vitrail.features(place / "runs" / "digits-1", place / "photos", out=place / "stored")
    return place


@pytest.fixture
def directory(workplace, tmp_path, monkeypatch):
    """A fresh copy of the working directory for each example."""
    shutil.copytree(workplace, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("VITRAIL_CACHE", str(workplace / "cache"))


def docstring(thing):
    thing = thing.fget if isinstance(thing, property) else thing
    return inspect.getdoc(getattr(thing, "__func__", thing)) or ""


@pytest.mark.parametrize("name", OBJECTS)
def test_every_public_docstring_has_an_example(name):
    assert ">>>" in docstring(OBJECTS[name])


@pytest.mark.slow
@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("name", OBJECTS)
def test_every_example_runs(name):
    assert ("+SKIP" in docstring(OBJECTS[name])) == (name in SKIPPED)
    globs = {"vitrail": vitrail, "np": np, "torch": torch}
    test = doctest.DocTestParser().get_doctest(docstring(OBJECTS[name]), globs, name, None, 0)
    report: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert (results.attempted or name in SKIPPED) and not results.failed, "".join(report)
