"""Creates, claims and locks run folders."""

import glob
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vitrail import files
from vitrail.data.source import Source
from vitrail.data.sources.places import check_output_path
from vitrail.errors import UserError
from vitrail.run.storage import lock
from vitrail.run.storage.record import RECIPE
from vitrail.training.distributed import World

RUNS = Path("runs")  # where run folders are created by default
LAUNCH = ".launch"  # file in a run folder: the torchrun that started the run
DATA = ".data"  # file in a run folder: the checksum of the data it was started with
MARKS = (lock.LOCK, lock.OWNER, LAUNCH, DATA)  # files of a run that has not started to train


@contextmanager
def lock_run(folder: Path, world: World) -> Iterator[None]:
    """Keeps other processes out of a run folder; the leader holds the lock for all ranks."""
    try:
        with ExitStack() as stack:
            world.on_leader(lambda: stack.enter_context(lock.lock_folder(folder)))
            yield
    except BaseException:
        if world.is_leader:
            with suppress(OSError):  # not empty
                folder.rmdir()
        raise


@contextmanager
def remove_on_failure(folder: Path, world: World) -> Iterator[None]:
    """Removes the folder again if the block fails before the run has written its recipe."""
    try:
        yield
    except BaseException:
        if world.is_leader:
            remove_unstarted(folder)
        raise


def check_available(out: Path | None, launch_id: str) -> None:
    """Raises if `out` contains files, unless this torchrun has started a run there itself."""
    if out is None or is_from_launch(out, launch_id):
        return
    if (out / RECIPE).exists():
        raise UserError(
            f"{out} already contains a run; resume it with `vitrail resume {out}`, "
            f"or choose another `out`"
        )
    if not is_unstarted(out):
        files.check_empty(out)


def find_restarted_run(out: Path | None, source: Source, launch_id: str) -> str:
    """The run folder that an earlier attempt of this torchrun has created, or ""."""
    folders = [out] if out else RUNS.glob(f"{glob.escape(source.name)}-*")
    return next((str(folder) for folder in folders if is_from_launch(folder, launch_id)), "")


def is_from_launch(folder: Path, launch_id: str) -> bool:
    mark = folder / LAUNCH
    return bool(launch_id) and mark.is_file() and mark.read_text(encoding="utf-8") == launch_id


def create_run_folder(out: Path | None, source: Source, suffix: str = "") -> Path:
    """A new run folder, outside the data; `suffix` is part of its default name."""
    default = RUNS / f"{source.name}{suffix}"
    files.check_utf8_name(out or default)
    check_output_path(source, out or default, "out")
    if out is not None and is_unstarted(out):
        return out
    return files.create_output_folder(out, default)


def is_unstarted(folder: Path) -> bool:
    """Whether the folder contains only what a run leaves that is killed in its first seconds."""
    temporary = tuple(f".{name}." for name in (RECIPE, *MARKS))
    return folder.is_dir() and all(
        path.name in MARKS or (path.name.startswith(temporary) and path.suffix == ".tmp")
        for path in folder.iterdir()
    )


def claim_folder(folder: Path, launch_id: str) -> None:
    """Removes what a killed run left, and stores which torchrun this run belongs to."""
    files.remove_temporary(folder, RECIPE, *MARKS)
    (folder / LAUNCH).unlink(missing_ok=True)
    if launch_id:
        files.write_file(folder / LAUNCH, launch_id)


def remove_unstarted(folder: Path) -> None:
    """Removes a run folder in which nothing has been trained."""
    for name in MARKS:
        with suppress(PermissionError):  # Windows keeps the lock file until it is released
            (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
