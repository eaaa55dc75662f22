"""Drift: whether the images that a model sees now are still like its validation images."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail import __version__, files
from vitrail.arguments import check_arguments
from vitrail.decoding import parse_json
from vitrail.display import page
from vitrail.display.figures import Chart, Curve, draw_curves, to_svg
from vitrail.display.text import format_count, format_percent
from vitrail.errors import UserError
from vitrail.evaluation.drift import compare_rate, compare_samples, compare_shares
from vitrail.evaluation.odd import ODD
from vitrail.inference.classifier import Classifier
from vitrail.inference.load import load

ALPHA = 0.01  # p-value of a change, shared among the tests (Bonferroni)
MIN_IMAGES = 20  # without which no test means anything


@dataclass(frozen=True, kw_only=True)
class DriftTest:
    """One test for change."""

    name: str  # labels, confidence, odd images
    p_value: float  # of seeing such a difference without a change
    changed: bool
    now: str  # what was found, in words
    then: str  # what validation images had


@dataclass(frozen=True, kw_only=True, repr=False)
class Drift:
    """New images compared with validation images; `save` writes a page.

    >>> vitrail.monitor("runs/digits-1", "predictions.jsonl").changed
    False
    """

    model: str
    images: int  # new ones
    unreadable: int  # of them, which were skipped
    validation: int  # images that they are compared with
    changed: bool  # any of the tests found a change
    tests: tuple[DriftTest, ...]
    shares: dict[str, tuple[float, float]]  # of each predicted class: now, and on validation images
    confidence: tuple[tuple[float, ...], tuple[float, ...]]  # quantiles: now, and then

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail monitor --json` prints.

        >>> vitrail.monitor("runs/digits-1", "predictions.jsonl").to_dict()["images"]
        24
        """
        return asdict(self)

    def __repr__(self) -> str:
        verdict = "changed" if self.changed else "no change found"
        lines = [f"Drift of {format_count(self.images, 'image')}: {verdict}"]
        for test in self.tests:
            mark = "changed" if test.changed else "same"
            lines.append(
                f"  {test.name:<12} {mark:<8} p {test.p_value:.2g}: {test.now}; then {test.then}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{test.name}</td><td>{'changed' if test.changed else 'same'}</td>"
            f"<td>{test.p_value:.2g}</td></tr>"
            for test in self.tests
        )
        return f"<table><tr><th>test</th><th></th><th>p-value</th></tr>{rows}</table>"

    @check_arguments
    def save(self, path: str | Path) -> Path:
        """Writes the page: one HTML file that works offline.

        >>> vitrail.monitor("runs/digits-1", "predictions.jsonl").save("drift.html").name
        'drift.html'
        """
        target = files.expand_user(path)
        files.write_file(target, render_drift(self))
        return target


@check_arguments
def monitor(model: str | Path, predictions: str | Path, *, device: str = "auto") -> Drift:
    """Compares new predictions, or new images, with the model's validation images.

    Tests the shares of the predicted classes (chi-squared), the confidence (Kolmogorov-Smirnov)
    and the rate of odd images (binomial).

    Args:
        model: run folder or model file with a calibration
        predictions: lines that `vitrail predict --json` printed, or a folder of images
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one

    >>> vitrail.monitor("runs/digits-1", "predictions.jsonl")
    Drift of 24 images: no change found
      labels       same     p ...
      confidence   same     p ...
      odd images   same     p ...
    """
    classifier = load(model, device=device)
    calibration = classifier.metadata.calibration
    if calibration is None or calibration.reference is None:
        raise UserError(
            f"{model} holds no results of validation images to compare with; "
            f"`vitrail calibrate MODEL DATA` adds them"
        )
    path = files.expand_user(predictions)
    answers, unreadable = (
        predict_folder(classifier, path) if path.is_dir() else read_predictions(path)
    )
    if len(answers) < MIN_IMAGES:
        raise UserError(
            f"{predictions} has {format_count(len(answers), 'prediction')}; "
            f"give at least {MIN_IMAGES} to test for a change"
        )
    return compare_with_validation(classifier, str(model), answers, unreadable)


def predict_folder(classifier: Classifier, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The predictions for all images of a folder, and how many could not be read."""
    from vitrail.data.image import SUFFIXES

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    results = [result for _, result in classifier.predict_each(paths, top=1)]
    read = [one.to_dict() for one in results if not isinstance(one, UserError)]
    return read, len(results) - len(read)


def read_predictions(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that `vitrail predict --json` printed, and how many of them report an error."""
    answers, unreadable = [], 0
    files.check_regular(path)
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                answer = check_answer(parse_json(line), number)
                answers.extend([answer] if answer else [])
                unreadable += answer is None
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give predictions or a folder") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the predictions {path}: {error}") from error
    return answers, unreadable


def check_answer(answer: Any, number: int) -> dict[str, Any] | None:
    """One prediction; None if it reports that an image could not be read."""
    if isinstance(answer, dict) and "error" in answer:
        return None
    probability = answer.get("probability") if isinstance(answer, dict) else None
    if (
        not isinstance(probability, int | float)
        or not 0 <= probability <= 1
        or not isinstance(answer.get("label"), str)
        or not isinstance(answer.get("p_value", 0.5), int | float)
    ):
        raise UserError(f"line {number} is not a prediction of `vitrail predict`")
    return dict(answer)


def compare_with_validation(
    classifier: Classifier, model: str, answers: list[dict[str, Any]], unreadable: int
) -> Drift:
    calibration = classifier.metadata.calibration
    assert calibration is not None and calibration.reference is not None
    reference, classes = calibration.reference, classifier.classes
    if unknown := {answer["label"] for answer in answers} - set(classes):
        raise UserError(f"the predictions have the class {min(unknown)!r}, which {model} lacks")
    index = {name: number for number, name in enumerate(classes)}
    counts = np.bincount([index[a["label"]] for a in answers], minlength=len(classes))
    shares = np.array(reference.shares)
    confidence = [float(answer["probability"]) for answer in answers]
    p_values = [answer["p_value"] for answer in answers if "p_value" in answer]
    odd = sum(value < ODD for value in p_values)
    found = [
        (
            "labels",
            compare_shares(counts, shares, calibration.images),
            *describe_shares(counts / counts.sum(), shares, classes),
        ),
        (
            "confidence",
            compare_samples(confidence, reference.confidence, calibration.images),
            f"mean {format_percent(float(np.mean(confidence)))}",
            f"mean {format_percent(float(np.mean(reference.confidence)))}",
        ),
    ]
    if p_values:
        found.append(
            (
                "odd images",
                compare_rate(odd, len(p_values), ODD),
                format_percent(odd / len(p_values)),
                f"{format_percent(ODD)} expected",
            )
        )
    tests = tuple(
        DriftTest(
            name=name,
            p_value=float(p),
            changed=bool(p < ALPHA / len(found)),
            now=now,
            then=then,
        )
        for name, p, now, then in found
    )
    return Drift(
        model=model,
        images=len(answers),
        unreadable=unreadable,
        validation=calibration.images,
        changed=any(test.changed for test in tests),
        tests=tests,
        shares={
            name: (float(counts[k] / counts.sum()), float(shares[k]))
            for k, name in enumerate(classes)
        },
        confidence=(quantiles(confidence), quantiles(reference.confidence)),
    )


def describe_shares(now: NDArray[Any], then: NDArray[Any], classes: Any) -> tuple[str, str]:
    """The class whose share changed most, now and then."""
    most = int(np.abs(now - then).argmax())
    return (
        f"{classes[most]} {format_percent(float(now[most]))}",
        f"{format_percent(float(then[most]))}",
    )


def quantiles(values: Any) -> tuple[float, ...]:
    return tuple(float(one) for one in np.quantile(values, np.linspace(0, 1, 51)))


def render_drift(drift: Drift) -> str:
    """The page of a comparison."""
    levels = [number / 50 for number in range(51)]
    chart = Chart(
        curves=[
            Curve(label="now", x=list(drift.confidence[0]), y=levels, colour="ruby"),
            Curve(label="validation", x=list(drift.confidence[1]), y=levels),
        ],
        x="confidence",
        y="fraction of images below",
        percent=True,
    )
    largest = sorted(drift.shares.items(), key=lambda pair: -abs(pair[1][0] - pair[1][1]))
    return (
        page.load_templates(Path(__file__).parent)
        .get_template("monitor.html")
        .render(
            version=__version__,
            drift=drift,
            images=format_count(drift.images, "image"),
            chart=to_svg(draw_curves(chart)),
            rows=[
                {"name": name, "now": format_percent(now), "then": format_percent(then)}
                for name, (now, then) in largest[:30]
            ],
        )
    )
