"""Each mechanism of a guarantee, taken out: what the negative controls do in a child."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

from PIL import Image

from vitrail import files
from vitrail.data import image
from vitrail.data.loader import Loader
from vitrail.data.reading import workers
from vitrail.data.sources.folder import Files, Item, read_file
from vitrail.errors import UserError
from vitrail.run import drive, run
from vitrail.run.drive import Driver
from vitrail.run.journal import Journal
from vitrail.training import checkpoint, loop
from vitrail.training.learner import Learner


def written_in_place() -> None:
    @contextmanager
    def replacing(path: str | Path) -> Iterator[Path]:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield Path(path)

    files.replacing = replacing


def old_state_deleted_first() -> None:
    def set_aside(path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)

    checkpoint.set_aside = set_aside


def not_synced() -> None:
    files.sync = lambda path: None


def not_swept() -> None:
    files.sweep = lambda folder, *names: None


def no_checksums() -> None:
    checkpoint.check = lambda found, written: None


def newest_state_only() -> None:
    checkpoint.load = lambda folder: checkpoint.read(checkpoint.saved(Path(folder))[0])


def no_lock() -> None:
    checkpoint.lock = lambda folder: nullcontext()


def disk_not_told() -> None:
    checkpoint.disk_told = lambda failure, left: nullcontext()
    files.ADVICE = {}  # by which the command line knows what the system refused


def journal_not_told() -> None:
    Journal.told = lambda self: nullcontext()
    files.ADVICE = {}


def position_forgotten() -> None:
    training = Loader.training
    Loader.training = lambda self, *of: training(self)


def part_forgotten(part: str) -> None:
    restore = Learner.restore

    def forgetful(self: Learner, given: dict[str, Any]) -> None:
        mine = {name: t.clone() for name, t in self.tensors().items() if name.startswith(part)}
        kept = {name: t for name, t in given.items() if not name.startswith(part)}
        restore(self, {**kept, **mine})

    Learner.restore = forgetful


def signal_without_save() -> None:
    Driver.save = lambda self: None


def any_data_taken() -> None:
    run.fingerprint = lambda source: ANY


def any_model_trusted() -> None:
    run.holds_model = lambda folder: True


def results_trusted() -> None:
    run.read_metrics = lambda folder: json.loads((folder / "metrics.json").read_text())


def recipe_invented() -> None:
    run.read_recipe = lambda path: {"source": "digits"}


def sizes_trusted() -> None:
    def item(self: Files, index: int) -> Item:
        content = read_file(self.root / self.ids[index])
        return Item(content, int(self.labels[index]), self.ids[index])

    Files.__getitem__ = item


def refused_is_broken() -> None:
    files.SHORT = ()


def death_overlooked() -> None:
    def overlooking(method: Any) -> Any:
        def called(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except UserError:
                return None

        return called

    workers.Worker.reply = overlooking(workers.Worker.reply)
    workers.Worker.send = overlooking(workers.Worker.send)


def gone_overlooked() -> None:
    real = Path.is_dir
    Path.is_dir = lambda self: self.name.startswith("run-") or real(self)


def nan_taken() -> None:
    loop.math = SimpleNamespace(isfinite=lambda number: True)


def nan_saved() -> None:
    def save(self: Driver) -> None:
        tensors = self.learner.tensors()
        checkpoint.save(self.folder / "checkpoints", self.facts["step"], tensors, dict(self.facts))
        self.saved = drive.time.monotonic()

    Driver.save = save


def any_float_taken() -> None:
    taken = image.to_bytes

    def to_bytes(values: Any) -> Any:
        return taken(values if values.dtype.kind == "u" else (values * 255).astype("uint8"))

    image.to_bytes = to_bytes


def clock_on_the_wall() -> None:
    drive.time = SimpleNamespace(monotonic=time.time)


def memory_not_told() -> None:
    loop.memory_told = lambda config: nullcontext()


def pixels_not_counted() -> None:
    image.check_pixels = lambda width, height, limit: None
    Image.MAX_IMAGE_PIXELS = None


def images_mended() -> None:
    """As a well-known library once did with its users' files."""
    item = Files.__getitem__

    def mending(self: Files, index: int) -> Item:
        path = self.root / self.ids[index]
        path.write_bytes(path.read_bytes())
        return item(self, index)

    Files.__getitem__ = mending


def notes_elsewhere() -> None:
    write = Journal.write

    def writing(self: Journal, line: dict[str, Any]) -> None:
        Path("notes.txt").write_text("step")
        write(self, line)

    Journal.write = writing


def anything_raised() -> None:
    """A file's damage reaches the caller as Pillow raises it."""
    image.UserError = KeyError  # what `load_image` lets through
    image.reason = lambda error: (_ for _ in ()).throw(error)
