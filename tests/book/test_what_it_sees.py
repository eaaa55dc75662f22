"""The second chapter: its blocks run on the real weights, its numbers are those of its commands."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from book import build, corners, faithfulness, finder, gallery, seeing
from tests.book.test_book import WEIGHTS, run
from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.insight.faithfulness import Faithfulness, compare_methods
from vitrail.insight.methods import METHODS
from vitrail.run.classifier import Classifier

CHAPTER = build.ROOT / "book" / "what-it-sees.md"
PHOTOS = "data/imagenet-val-300"


def told(start: str) -> list[str]:
    """The lines of the printed block that begins like this."""
    blocks = re.findall(r"^```text\n(.*?)```$", CHAPTER.read_text(), re.M | re.S)
    (block,) = [block for block in blocks if block.startswith(start)]
    lines: list[str] = block.splitlines()
    return lines


def tiny(**changes: Any) -> Classifier:
    torch.manual_seed(0)
    config = {"image": 28, "patch": 2, "width": 32, "depth": 12, "heads": 2, "classes": 3}
    model = vitrail.ViT(vitrail.ViTConfig(**{**config, **changes})).requires_grad_(False)
    torch.nn.init.normal_(model.head.weight)
    view = Preprocess(size=model.config.size, channels=model.config.channels)
    return Classifier(model, ["cat", "dog", "owl"], view)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of five small pictures."""
    shades = np.random.default_rng(0).integers(0, 256, (5, 40, 48, 3), np.uint8)
    for number, shade in enumerate(shades):
        Image.fromarray(shade).save(tmp_path / f"{number}.jpg")
    return tmp_path


@pytest.mark.slow
def test_every_block_prints_what_it_says(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / Path(WEIGHTS).name).symlink_to(shared / WEIGHTS)
    monkeypatch.chdir(tmp_path)
    assert run(CHAPTER)["corners"] == [0, 13, 182, 195]


@pytest.mark.slow
def test_the_corners_are_as_told(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corners.main([str(shared / WEIGHTS), str(shared / PHOTOS)])
    assert capsys.readouterr().out.splitlines() == told("long after")


@pytest.mark.slow
def test_relevance_scores_as_told(shared: Path) -> None:
    """The other rows of the table come from the same lines; all five take minutes."""
    classifier = vitrail.load(shared / WEIGHTS)
    x = torch.stack([classifier.tensor(path) for path in faithfulness.some(shared / PHOTOS)])
    measured = faithfulness.table(compare_methods(classifier.model, x, ["relevance"])).splitlines()
    stated = told(" ")
    assert measured[1].split()[:5] == stated[1].split()[:5]
    assert measured[-1] == stated[6]


@pytest.mark.slow
def test_the_toy_is_found_as_told() -> None:
    stated = {line.split()[0]: float(line.split()[1]) for line in told("answer")}
    # three of 64 images more or less: another processor trains other bits
    assert finder.found() == pytest.approx(stated, abs=0.05)


def curves(*scores: float) -> Faithfulness:
    """A method with these scores: nothing is lost by deletion, so much gained by insertion."""
    flat = torch.tensor(scores)[:, None].expand(-1, 3)
    none = torch.zeros_like(flat)
    return Faithfulness(
        fractions=torch.linspace(0, 1, 3), deletion=none, insertion=flat, random=none
    )


def test_the_table_has_the_best_method_first() -> None:
    lines = faithfulness.table({"poor": curves(0.1, 0.2), "good": curves(0.3, 0.5)}).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["good", "0.000", "0.400", "0.400", "0.100", "2"],
        ["poor", "0.000", "0.150", "0.150", "0.050", "0"],
    ]


def test_pairs_are_compared_photo_by_photo() -> None:
    words = faithfulness.pairs({"poor": curves(0.1, 0.4), "good": curves(0.3, 0.5)})
    assert words.splitlines()[1].split() == ["good", "poor", "0.150", "0.050", "2"]


def test_each_so_many_th_photo_is_taken(photos: Path) -> None:
    assert [path.name for path in faithfulness.some(photos, 2)] == ["0.jpg", "2.jpg", "4.jpg"]


def test_a_neighbour_stands_in_for_a_photo_left_out(photos: Path) -> None:
    left = faithfulness.some(photos, 4, without=["4.jpg"])
    assert [path.name for path in left] == ["0.jpg"]
    assert [path.name for path in faithfulness.some(photos, 2, ["2.jpg"])][1] == "3.jpg"


def test_a_folder_without_photos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.jpg files; give a folder of photos"):
        faithfulness.some(tmp_path)


def test_the_gallery_is_as_wide_as_a_readme_wants(photos: Path) -> None:
    shown = [tiny().explain(path) for path in sorted(photos.iterdir())]
    width, _ = gallery.gallery(shown).get_size_inches()
    assert width * 200 == 1800


def test_a_class_is_shown_by_its_first_name() -> None:
    assert gallery.name("African_grey, parrot") == "African grey"


@pytest.mark.slow
def test_figures_are_drawn_of_any_model(
    photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    paths = sorted(photos.iterdir())
    classifier = tiny()
    x = torch.stack([classifier.tensor(path) for path in paths])
    heats = {method: torch.rand(5, 14, 14) for method in METHODS}
    judged = {method: curves(*torch.rand(5).tolist()) for method in METHODS}
    trial = faithfulness.Trial(paths=paths, classifier=classifier, x=x, heats=heats, judged=judged)
    digits = tiny(channels=1, image=8, depth=2, pool="avg")
    seen = seeing.Seen(trial, digits, seeing.of_each_class())
    drawn = seeing.draw(seen, tmp_path_factory.mktemp("drawn"))
    assert {path.name for path in drawn} < {path.name for path in seeing.FIGURES.iterdir()}
