"""`python -m bench.guard`: five small data sets that a change of the defaults must not harm.

Compares this checkout with another one, or with itself under changed settings, in paired trainings
of one core and a fixed number of steps each, so that a busy machine does not matter.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from PIL import Image

from bench.pairs import Job, format_difference, paired_difference, run_jobs
from bench.process import ROOT, report_errors
from bench.report import current_commit
from vitrail.data.image import load_image
from vitrail.data.open import open_data
from vitrail.data.source import Source, Split, split_indices
from vitrail.errors import UserError

FEW, FASHION, NUMBERS = 300, 5000, 4000  # training images, validation images included
TESTED = 2000  # test images at most, of each set
PHOTO_SIDE = 64
NUMBER_SIDE = 24  # of an image with two digits, each 8 x 8
Pictures = Iterator[tuple[Split, str, np.ndarray]]  # split, class, pixels (height, width)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    sets: tuple[str, ...] = ("digits", "few", "photos", "numbers", "fashion")  # data sets
    # an earlier checkout to compare with
    before: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    change: str = ""  # flags of `vitrail train` for this checkout only: "--train.smoothing 0.2"
    # of class folders, for the set photos
    photos: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    seeds: int = 3  # pairs of trainings of each set
    jobs: int = 1  # trainings at the same time, one core each
    work: Path = Path("runs/guard")  # folder of finished trainings, which are not repeated

    def __post_init__(self) -> None:
        if unknown := [name for name in self.sets if name not in SETS]:
            raise UserError(f"unknown set {unknown[0]!r}; choose from {', '.join(SETS)}")
        if "photos" in self.sets and self.photos is None:
            raise UserError("the set photos needs a folder: give `photos`, or name other `sets`")
        if self.seeds < 1:
            raise UserError(f"{self.seeds} seeds; give at least 1")
        if self.before is not None and not (self.before / "vitrail").is_dir():
            raise UserError(f"{self.before} is not a checkout of Vitrail; give its folder")


@dataclass(frozen=True, kw_only=True)
class GuardSet:
    steps: int  # 20 to 60 seconds of a core
    pictures: Callable[[GuardSettings], Pictures] | None = None  # None: a built-in set


def few_digits(settings: GuardSettings) -> Pictures:
    """A few hundred images to learn from."""
    return sample_pictures(open_data("digits", progress=False), FEW)


def fashion(settings: GuardSettings) -> Pictures:
    return sample_pictures(open_data("fashion-mnist", progress=False), FASHION)


def small_photos(settings: GuardSettings) -> Pictures:
    """Photos of 64 pixels, in their own splits."""
    assert settings.photos is not None
    source = open_data(settings.photos, progress=False)
    for index, split in enumerate(source.splits):
        pixels = load_image(source[index].content, None, None)
        small = Image.fromarray(pixels).resize((PHOTO_SIDE, PHOTO_SIDE), Image.Resampling.BICUBIC)
        yield split, source.classes[source.labels[index]], np.asarray(small)


def numbers(settings: GuardSettings) -> Pictures:
    """A hundred classes: two digits at random places, one in each half."""
    source, rng = open_data("digits", progress=False), np.random.default_rng(0)
    for split, count in (("train", NUMBERS), ("test", TESTED)):
        items = split_indices(source, "test") if split == "test" else learning_indices(source)
        for pair in rng.choice(items, (count, 2)):
            canvas = np.zeros((NUMBER_SIDE, NUMBER_SIDE), np.uint8)
            for half, index in enumerate(pair):
                digit = source[int(index)].content
                assert isinstance(digit, np.ndarray)
                top, left = rng.integers(0, (17, 5))
                left += half * NUMBER_SIDE // 2
                canvas[top : top + 8, left : left + 8] = digit[:, :, 0]
            yield split, "".join(str(source.labels[index]) for index in pair), canvas


def sample_pictures(source: Source, count: int) -> Pictures:
    """So many images to learn from, and up to `TESTED` of the test split."""
    rng = np.random.default_rng(0)
    tested = split_indices(source, "test")
    chosen = {"train": rng.choice(learning_indices(source), count, replace=False)}
    chosen["test"] = rng.choice(tested, min(TESTED, len(tested)), replace=False)
    for split, indices in chosen.items():
        for index in indices.tolist():
            pixels = load_image(source[index].content, None, None)
            yield split, source.classes[source.labels[index]], pixels.squeeze(2)


def learning_indices(source: Source) -> Any:
    """Training and validation images."""
    return np.flatnonzero(np.asarray(source.splits) != "test")


SETS = {
    "digits": GuardSet(steps=600),
    "few": GuardSet(steps=400, pictures=few_digits),
    "photos": GuardSet(steps=200, pictures=small_photos),
    "numbers": GuardSet(steps=200, pictures=numbers),
    "fashion": GuardSet(steps=200, pictures=fashion),
}


def run(settings: GuardSettings) -> str:
    """Trains what has not been trained yet; returns the table of test accuracies."""
    variants = {"after": (ROOT, shlex.split(settings.change))}
    if settings.before is not None or settings.change:
        variants = {"before": ((settings.before or ROOT).absolute(), []), **variants}
    places = {name: str(prepare_set(name, settings)) for name in settings.sets}
    keys = [
        (name, seed, variant)
        for name in settings.sets
        for seed in range(settings.seeds)
        for variant in variants
    ]
    jobs = [make_job(key, places[key[0]], *variants[key[2]], settings) for key in keys]
    results = dict(zip(keys, run_jobs(jobs, settings.jobs), strict=True))
    columns = [*variants, "difference in points", "verdict"] if len(variants) > 1 else ["accuracy"]
    lines = [f"| {settings.seeds} seeds | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in settings.sets:
        scores = {
            variant: [
                results[name, seed, variant]["test"]["accuracy"] for seed in range(settings.seeds)
            ]
            for variant in variants
        }
        cells = [f"{sum(found) / len(found):.1%}" for found in scores.values()]
        if len(scores) > 1:
            cells += format_difference(*paired_difference(scores["before"], scores["after"]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prepare_set(name: str, settings: GuardSettings) -> str | Path:
    """The name of a built-in set, or a folder of images that is written once."""
    pictures = SETS[name].pictures
    if pictures is None:
        return name
    folder = settings.work.absolute() / "sets" / name
    if not folder.is_dir():
        new = folder.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)  # of an interrupted run
        for number, (split, label, pixels) in enumerate(pictures(settings)):
            path = new / split / label.replace("/", "-") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
        new.rename(folder)
    return folder


def make_job(
    key: tuple[str, int, str],
    place: str,
    checkout: Path,
    flags: list[str],
    settings: GuardSettings,
) -> Job:
    name, seed, _ = key
    code = "_".join([current_commit(checkout), *flags])  # other code or flags, another training
    label = re.sub(r"[^\w.+-]", "-", f"{name}_{code}_seed-{seed}")
    folder = settings.work.absolute() / label
    if not (folder / "metrics.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    command = ["vitrail", "train", place, "--from", "none", "--seed", str(seed)]
    command += ["--train.steps", str(SETS[name].steps), "--out", str(folder), *flags]
    return Job(
        path=folder / "metrics.json",
        log=folder.parent / f"{label}.log",
        command=tuple(command),
        checkout=checkout,
    )


if __name__ == "__main__":
    with report_errors():
        print(run(tyro.cli(GuardSettings, prog="python -m bench.guard")))
