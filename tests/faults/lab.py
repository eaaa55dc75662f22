"""Two small runs, one whole and one stopped on its way, and what is expected of copies of it."""

import hashlib
import shutil
import signal
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.faults import harm
from tests.faults.children import Done, Harm, Nursery
from tests.run.conftest import tensors
from vitrail.run.storage.journal import read_journal
from vitrail.training import checkpoint

STEPS, STOP = 24, 17  # it evaluates after steps 15 and 24
TINY = [
    *("--vit.width", "16", "--vit.depth", "1", "--vit.heads", "1", "--train.ema", "0.9"),
    *("--train.save-every", "1", "--train.log-every", "1", "--train.evaluate-every", "3"),
]
DIGITS = [
    *("digits", *TINY, "--train.batch", "256", "--train.steps", str(STEPS)),
    *("--data.workers", "0", "--data.augment.mixup", "0.5", "--data.augment.shift", "0.1"),
]
PHOTOS = [  # decoded anew in every epoch, by another process
    *(*TINY, "--train.batch", "8", "--train.steps", "12", "--data.workers", "1"),
    *("--data.cache-gb", "0", "--data.disk-gb", "0"),
]
PHOTOS_STOP = 5


class Lab:
    def __init__(self, folder: Path, nursery: Nursery | None = None):
        self.folder, self.count = folder, 0
        self.nursery = nursery or Nursery(folder)

    def fresh(self) -> Path:
        """A name that nothing has yet."""
        self.count += 1
        return self.folder / f"run-{self.count}"

    @cached_property
    def whole(self) -> Path:
        return self.train(*DIGITS)

    @cached_property
    def part(self) -> Path:
        """Stopped after 17 of 24 steps; the checkpoints of 16 and 17 exist, and a model of 15."""
        return self.train(*DIGITS, stop=STOP)

    @cached_property
    def photos(self) -> Path:
        """A folder of tiny images of two classes, in given splits."""
        root, rng = self.folder / "photos", np.random.default_rng(0)
        for split, count in (("train", 16), ("val", 6), ("test", 6)):
            for number, label in enumerate(("dark", "light")):
                (root / split / label).mkdir(parents=True)
                for picture in range(count):
                    pixels = rng.integers(0, 60, (16, 16, 3)) + 190 * number
                    path = root / split / label / f"{picture}.png"
                    Image.fromarray(pixels.astype(np.uint8)).save(path)
        return root

    @cached_property
    def photos_whole(self) -> Path:
        return self.train(self.photos, *PHOTOS)

    @cached_property
    def photos_part(self) -> Path:
        return self.train(self.photos, *PHOTOS, stop=PHOTOS_STOP)

    def train(self, *flags: str | Path, stop: int = 0) -> Path:
        run = self.fresh()
        harms = [harm.quick]
        if stop:
            harms += [harm.ticking, partial(harm.at_step, stop, harm.signalled, signal.SIGTERM)]
        done = self.nursery.vitrail("train", *flags, "--out", run, harms=harms)
        assert done.code == (143 if stop else 0), done
        return run

    def copy(self, run: Path | None = None, to: Path | None = None) -> Path:
        """Of the run that was stopped on its way."""
        to = to or self.fresh()
        shutil.copytree(run or self.part, to)
        return to

    def resume(self, run: Path, *harms: Harm) -> Done:
        return self.nursery.vitrail("resume", run, harms=[harm.quick, *harms])

    def recovers(
        self, run: Path, *harms: Harm, like: Path | None = None, journal: bool = True
    ) -> Done:
        """Goes on, and ends with the bits of a run that nothing stopped, and its `journal` too."""
        done = self.resume(run, *harms)
        assert done.code == 0, done
        ours, theirs = tensors(run), tensors(like or self.whole)
        assert ours.keys() == theirs.keys()
        assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
        if journal:
            assert lines(run) == lines(like or self.whole)
        leftovers = [str(path) for path in run.rglob(".*.tmp")]
        assert not leftovers, leftovers
        return done

    def stumbles(self, run: Path, words: str, *harms: Harm, like: Path | None = None) -> None:
        """Is stopped by what goes wrong, says so, has lost nothing, and recovers without it."""
        reports_in_one_line(self.resume(run, *harms), words, begun=True)
        assert checkpoint.load_checkpoint(run / "checkpoints") is not None
        self.recovers(run, like=like)


def lines(run: Path) -> list[dict[str, Any]]:
    """Of the journal, without what the clock said."""
    timed = ("seconds", "images_per_s")
    found = read_journal(run / "log.jsonl")
    return [{k: v for k, v in line.items() if k not in timed} for line in found]


def reports_in_one_line(done: Done, words: str, begun: bool = False) -> None:
    """The last line of what a run says that has `begun`, else the only one."""
    assert done.code == 1 and "Traceback" not in done.told, done
    assert done.line.startswith("error: ") and words in done.line, done.line
    assert done.told.count("error: ") == 1, done.told
    assert begun or done.told == f"{done.line}\n", done.told


def digest(tree: Path) -> str:
    """Of all names and bytes below a folder."""
    found = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        found.update(str(path.relative_to(tree)).encode() + b"\0")
        if path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
