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
from vitrail.data.sources.folder import FileSource, Item, read_file
from vitrail.errors import UserError
from vitrail.run import dataset, drive, resume
from vitrail.run.drive import Driver
from vitrail.run.storage import lock
from vitrail.run.storage.journal import Journal
from vitrail.training import checkpoint, loop
from vitrail.training.learner import Learner


def written_in_place() -> None:
    @contextmanager
    def atomic_write(path: str | Path) -> Iterator[Path]:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield Path(path)

    files.atomic_write = atomic_write


def old_checkpoint_deleted_first() -> None:
    def move_aside(path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)

    checkpoint.move_aside = move_aside


def not_synced() -> None:
    files.fsync = lambda path: None


def not_swept() -> None:
    files.remove_temporary = lambda folder, *names: None


def no_checksums() -> None:
    checkpoint.check_manifest = lambda actual, stored: None


def newest_checkpoint_only() -> None:
    def load_checkpoint(folder: str | Path) -> checkpoint.Checkpoint:
        return checkpoint.read_checkpoint(checkpoint.list_checkpoints(Path(folder))[0])

    checkpoint.load_checkpoint = load_checkpoint


def no_lock() -> None:
    lock.lock_folder = lambda folder: nullcontext()


def disk_errors_not_reported() -> None:
    checkpoint.report_disk_errors = lambda failure, consequence: nullcontext()
    files.ADVICE = {}  # by which the command line knows what the system refused


def journal_errors_not_reported() -> None:
    Journal._report_errors = lambda self: nullcontext()
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
    dataset.fingerprint = lambda source, **mtimes: ANY


def any_model_trusted() -> None:
    resume.has_model = lambda folder: True


def results_trusted() -> None:
    resume.read_metrics = lambda folder: json.loads((folder / "metrics.json").read_text())


def recipe_invented() -> None:
    resume.read_recipe = lambda path: {"source": "digits"}


def sizes_trusted() -> None:
    def item(self: FileSource, index: int) -> Item:
        content = read_file(self.root / self.ids[index])
        return Item(content, int(self.labels[index]), self.ids[index])

    FileSource.__getitem__ = item


def refused_is_broken() -> None:
    files.RESOURCE_ERRORS = ()


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
        self.recorder.save_checkpoint(self.learner, self.progress)
        self.saved = drive.time.monotonic()

    Driver.save = save


def any_float_taken() -> None:
    checked = image.as_pixels

    def unchecked(values: Any) -> Any:
        return checked(values) if values.dtype.kind == "u" else values.astype("float32")

    image.as_pixels = unchecked


def clock_on_the_wall() -> None:
    drive.time = SimpleNamespace(monotonic=time.time)


def out_of_memory_not_reported() -> None:
    loop.report_out_of_memory = lambda images, accumulate: nullcontext()


def pixels_not_counted() -> None:
    image.check_pixel_count = lambda width, height, limit: None
    Image.MAX_IMAGE_PIXELS = None


def images_mended() -> None:
    """As a well-known library once did with its users' files."""
    item = FileSource.__getitem__

    def mending(self: FileSource, index: int) -> Item:
        path = self.root / self.ids[index]
        path.write_bytes(path.read_bytes())
        return item(self, index)

    FileSource.__getitem__ = mending


def notes_elsewhere() -> None:
    write = Journal.write

    def writing(self: Journal, line: dict[str, Any]) -> None:
        Path("notes.txt").write_text("step")
        write(self, line)

    Journal.write = writing


def anything_raised() -> None:
    """A file's damage reaches the caller as Pillow raises it."""
    image.UserError = KeyError  # what `load_image` lets through
    image.describe_decode_error = lambda error: (_ for _ in ()).throw(error)
