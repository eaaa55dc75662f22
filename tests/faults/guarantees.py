"""What can happen to a run, one function for each kind: it yields how many tries were survived.

Each takes the `broken` mechanisms of a negative control too, with which it must fail.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import fuzz, harm, saves
from tests.faults.children import Harm, Nursery
from tests.faults.lab import DIGITS, PHOTOS, STOP, Lab, digest, reports_in_one_line
from vitrail.cli.main import main
from vitrail.training import checkpoint
from vitrail.zoo.file import load_model

Harms = Sequence[Harm]


def killed_at_calls(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    every = max(1, 120 // tries)
    yield lab.nursery.ask(saves.killed_at_calls, lab.fresh(), every, harms=broken)


def killed_at_system_calls(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    every = max(1, 80 // tries)
    kills = lab.nursery.ask(saves.killed_at_system_calls, lab.fresh(), every, harms=broken)
    if kills is None:
        pytest.skip("strace may not attach here")
    yield kills


def killed_in_writing(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    yield lab.nursery.ask(saves.killed_in_writing, lab.fresh(), tries, harms=broken)


def synced(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    yield lab.nursery.ask(saves.synced, lab.fresh(), harms=broken)


def killed_in_a_run(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """At a call that changes the disk: of the log, the model or a checkpoint; then resumed."""
    rng = np.random.default_rng(0)
    for _ in range(tries):
        run, moment = lab.copy(), partial(harm.mortal, int(rng.integers(200)))
        done = lab.resume(run, harm.ticking, *broken, moment)
        assert done.code == -signal.SIGKILL, done
        lab.recovers(run, *broken)
        yield 1


def killed_from_outside(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """Twice, at any moment from the first step on; before that there is nothing to lose."""
    rng = np.random.default_rng(0)
    for _ in range(tries):
        run = lab.fresh()
        arguments = ["train", *DIGITS, "--out", str(run)]
        for _ in range(2):
            child = lab.nursery.start(main, arguments, harms=[harm.quick, harm.ticking, *broken])
            wait_for_lines(child.process, run / "log.jsonl", int(rng.integers(1, 12)))
            time.sleep(rng.uniform(0, 0.02))
            child.process.kill()
            assert child.done().code in (-signal.SIGKILL, 0)
            arguments = ["resume", str(run)]
        lab.recovers(run, *broken)
        yield 1


def wait_for_lines(process: Any, journal: Path, count: int) -> None:
    while process.is_alive():
        if journal.exists() and journal.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)


def signalled(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        run = lab.copy()
        done = lab.resume(run, *broken, partial(harm.at_step, 20, harm.signalled, number))
        assert done.code == code and "Traceback" not in done.told, done
        saved = checkpoint.load_checkpoint(run / "checkpoints")
        assert saved is not None and saved.step == 20
        lab.recovers(run, *broken)
        yield 1


def flipped(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run = lab.copy()
    yield lab.nursery.ask(saves.flipped, run / "checkpoints", tries, harms=broken)
    newest = checkpoint.list_checkpoints(run / "checkpoints")[0] / checkpoint.TENSORS
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x55")
    assert f"falling back to step {STOP - 1}" in lab.recovers(run, *broken).told
    yield 1


def shortened(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run = lab.copy()
    yield lab.nursery.ask(saves.shortened, run / "checkpoints", tries, harms=broken)
    shutil.rmtree(checkpoint.list_checkpoints(run / "checkpoints")[0])
    os.truncate(run / "log.jsonl", 1000)
    lab.recovers(run, *broken, journal=False)
    yield 1
    run = lab.copy()
    (run / "log.jsonl").unlink()
    lab.recovers(run, *broken, journal=False)
    yield 1


def all_damaged(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run = lab.copy()
    for path in checkpoint.list_checkpoints(run / "checkpoints"):
        os.truncate(path / checkpoint.TENSORS, 100)
    reports_in_one_line(lab.resume(run, *broken), "all checkpoints in")
    load_model(run / "model.safetensors")  # the best so far is still there
    yield 1


def model_lost(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """The best so far cannot be had again; the run still ends with a model."""
    for share in (None, 0.5):
        run = lab.copy()
        if share is None:
            (run / "model.safetensors").unlink()
        else:
            os.truncate(run / "model.safetensors", 5000)
        done = lab.recovers(run, *broken)
        assert "model.safetensors is missing or damaged" in done.told
        yield 1


def recipe_lost(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    for share, words in (
        (None, "is not a run folder"),
        (0.7, "the recipe"),
        (0.0, "is incomplete"),
    ):
        run = lab.copy()
        path = run / "recipe.toml"
        if share is None:
            path.unlink()
        else:
            os.truncate(path, int(share * path.stat().st_size))
        reports_in_one_line(lab.resume(run, *broken), words)
        yield 1


def metrics_damaged(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run = lab.copy(lab.whole)
    os.truncate(run / "metrics.json", 50)
    reports_in_one_line(lab.resume(run, *broken), "metrics.json is damaged")
    yield 1


def file_size_limit(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    for size in np.linspace(500, 20_000, tries).astype(int).tolist():
        act = partial(harm.at_step, 20, harm.files_limited, size)
        lab.stumbles(lab.copy(), "File too large", harm.ticking, act, *broken)
        yield 1


def no_handles(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    for more in range(tries):
        act = partial(harm.at_step, 20, harm.handles_limited, more % 2)
        lab.stumbles(lab.copy(), "Too many open files", harm.ticking, act, *broken)
        yield 1


def no_handles_for_data(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """No image is taken for a broken one: the split of a set hangs on the bytes of all of them."""
    for harms in (partial(harm.handles_now, 0), partial(harm.no_handle_for, "7.png")):
        flags = [lab.photos / "train", *PHOTOS, "--data.skip-broken", "--out", lab.fresh()]
        done = lab.nursery.vitrail("train", *flags, harms=[harm.quick, harms, *broken])
        reports_in_one_line(done, "raise the limit with ulimit -n")
        yield 1


def disk_full(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """Rooms from none to that of a whole save; on a small disk of its own."""
    need_mounts(lab)
    assert lab.whole and lab.part
    rooms = np.linspace(0, 60_000, tries).astype(int).tolist()
    place = lab.fresh()
    place.mkdir()
    yield lab.nursery.ask(on_a_full_disk, place, lab.whole, lab.part, rooms, tuple(broken))


def on_a_full_disk(
    place: Path, whole: Path, part: Path, rooms: list[int], broken: tuple[Harm, ...]
) -> int:
    inner = lab_of_a_child(place, whole, part)
    place = place / "disk"
    place.mkdir()
    harm.small_disk(place, 4_000_000)
    for room in rooms:
        run, filler = place / f"run-{room}", place / "filler"
        inner.copy(to=run)
        act = partial(harm.at_step, 20, harm.disk_filled, filler, room)
        done = inner.resume(run, harm.ticking, act, *broken)
        reports_in_one_line(done, "No space left on device", begun=True)
        filler.unlink()
        inner.recovers(run)
        shutil.rmtree(run)
    return len(rooms)


def lab_of_a_child(place: Path, whole: Path, part: Path) -> Lab:
    """For a child that mounts disks, which only its own children see."""
    harm.own_mounts()
    inner = Lab(place, Nursery(place, "fork"))
    inner.whole, inner.part = whole, part
    return inner


def read_only(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    need_mounts(lab)
    assert lab.whole and lab.part
    place = lab.fresh()
    place.mkdir()
    yield lab.nursery.ask(on_a_read_only_disk, place, lab.whole, lab.part, tuple(broken))


def on_a_read_only_disk(place: Path, whole: Path, part: Path, broken: tuple[Harm, ...]) -> int:
    """Before a run, before a resume, and in the middle."""
    inner = lab_of_a_child(place, whole, part)
    run = inner.copy()
    harm.read_only(run)
    reports_in_one_line(inner.resume(run, *broken), "Read-only file system")
    done = inner.nursery.vitrail("train", *DIGITS, "--out", run / "deeper", harms=broken)
    reports_in_one_line(done, "Read-only file system")
    harm.writable(run)
    act = partial(harm.at_step, 20, harm.disk_read_only, run / "checkpoints")
    done = inner.resume(run, harm.ticking, act, *broken)
    reports_in_one_line(done, "Read-only file system", begun=True)
    harm.writable(run / "checkpoints")
    inner.recovers(run)
    return 3


def need_mounts(lab: Lab) -> None:
    if not lab.nursery.ask(can_mount):
        pytest.skip("this machine lets nobody mount a disk of its own")


def can_mount() -> bool:
    try:
        harm.own_mounts()
    except OSError:
        return False
    return True


def two_processes(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run, there, go = lab.copy(), lab.fresh(), lab.fresh()
    act = partial(harm.at_step, 20, harm.waiting, there, go)
    first = lab.nursery.start(main, ["resume", str(run)], harms=[harm.quick, *broken, act])
    pid = first.process.pid
    try:
        while not there.exists() and first.process.is_alive():
            time.sleep(0.01)
        reports_in_one_line(lab.resume(run, *broken), f"is in use by process {pid}")
    finally:
        go.touch()
        assert first.done().code == 0
    lab.recovers(run)
    yield 1


def moved(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """Before a save, and before a better model is kept."""
    for step in (20, 24):
        run, target = lab.copy(), lab.fresh()
        act = partial(harm.at_step, step, harm.moved, target)
        done = lab.resume(run, *([harm.ticking] if step == 20 else []), act, *broken)
        reports_in_one_line(done, f"{run} was moved or deleted", begun=True)
        assert not run.exists()
        lab.recovers(target)
        yield 1


def deleted(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run = lab.copy()
    act = partial(harm.at_step, 20, harm.deleted)
    done = lab.resume(run, harm.ticking, act, *broken)
    reports_in_one_line(done, f"{run} was moved or deleted", begun=True)
    assert not run.exists()
    reports_in_one_line(lab.resume(run), "is not a run folder")
    yield 1


def data_gone(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """In the middle: told, saved, and after that no other data is taken for it."""
    path = lab.photos / "train" / "dark" / "3.png"
    for act, words in ((harm.removed, "no such file"), (harm.rewritten, "changed since")):
        run, good = lab.copy(lab.photos_part), path.read_bytes()
        done = lab.resume(run, partial(harm.at_step, 6, act, path), *broken)
        try:
            reports_in_one_line(done, f"train/dark/3.png: {words}", begun=True)
            reports_in_one_line(
                lab.resume(run, *broken), "is not the data this run was started with"
            )
        finally:
            path.write_bytes(good)
        saved = checkpoint.load_checkpoint(run / "checkpoints")
        assert saved is not None and saved.step > 6  # all steps that could be taken
        lab.recovers(run, like=lab.photos_whole)
        yield 1


def data_folder_gone(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run, away = lab.copy(lab.photos_part), lab.fresh()
    lab.photos.rename(away)
    try:
        reports_in_one_line(lab.resume(run, *broken), "does not exist")
    finally:
        away.rename(lab.photos)
    lab.recovers(run, like=lab.photos_whole)
    yield 1


def dead_worker(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    run = lab.copy(lab.photos_part)
    act = partial(harm.at_step, 7, harm.worker_killed)
    words = "a worker process was killed by SIGKILL"
    lab.stumbles(run, words, act, *broken, like=lab.photos_whole)
    yield 1


def nan(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """In images, loss, gradient, weights: no such step is taken, no such weight is saved."""
    cases = {
        "contain NaN": partial(harm.at_step, 20, harm.nan_images),
        "loss nan": partial(harm.nan_loss, 21 - STOP),
        "gradient norm nan": partial(harm.at_step, 20, harm.nan_gradient),
        "the weights already contained NaN": partial(harm.at_step, 20, harm.nan_weights),
    }
    for words, case in cases.items():
        lab.stumbles(lab.copy(), words, harm.ticking, case, *broken)
        yield 1


def nan_in_a_file(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    data, run = lab.fresh(), lab.fresh()
    shutil.copytree(lab.photos, data)
    np.save(data / "train" / "dark" / "nan.npy", np.full((16, 16, 3), np.nan, np.float32))
    done = lab.nursery.vitrail("train", data, *PHOTOS, "--out", run, harms=[harm.quick, *broken])
    reports_in_one_line(done, "nan.npy: NaN or infinity among its pixels", begun=True)
    assert not run.exists()
    yield 1


def clock_jumps(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """States are saved at their pace whatever the clock on the wall says."""
    run = lab.copy()
    act = partial(harm.at_step, 22, harm.signalled, signal.SIGKILL)
    lab.resume(run, harm.ticking, harm.wild_clock, act, *broken)
    saved = checkpoint.load_checkpoint(run / "checkpoints")
    assert saved is not None and saved.step == 21
    lab.recovers(run, harm.wild_clock, *broken)
    yield 1


def no_memory(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    large = ["--vit.width", "256", "--vit.depth", "8", "--vit.heads", "4", "--train.batch", "1024"]
    run, limit = lab.fresh(), partial(harm.memory_limited, 400 << 20)
    flags = ["digits", *large, "--train.steps", "9", "--data.workers", "0", "--out", run]
    done = lab.nursery.vitrail("train", *flags, harms=[harm.quick, limit, *broken])
    words = "micro-batches of 1024 images; raise --train.accumulate to 2"
    reports_in_one_line(done, words, begun=True)
    assert not run.exists()
    yield 1


def nothing_else_touched(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """A run writes below its folder and the cache; the data has the same hash after it."""
    run, before = lab.fresh(), digest(lab.photos)
    fence = partial(harm.fenced, run, lab.nursery.folder / "cache")
    flags = [lab.photos, *PHOTOS, "--out", run]
    done = lab.nursery.vitrail("train", *flags, harms=[harm.quick, fence, *broken])
    assert done.code == 0, done
    assert digest(lab.photos) == before
    yield 1


def bomb(lab: Lab, tries: int, broken: Harms = ()) -> Iterator[int]:
    """A 17 kB file that claims 144 megapixels is refused before room is made for them."""
    assert lab.nursery.ask(fuzz.room_of_a_bomb, harms=broken) < 16 << 20
    yield 1


@dataclass(frozen=True)
class Case:
    check: Callable[..., Iterator[int]]
    short: int = 1  # tries in `make test`, where they can be chosen
    full: int = 1  # tries in `make faults`


CASES = {
    "killed at a call of a save": Case(killed_at_calls, 12, 120),
    "killed at a system call of a save": Case(killed_at_system_calls, 10, 80),
    "killed inside a write of a save": Case(killed_in_writing, 20, 200),
    "bytes on the disk before the name": Case(synced),
    "killed at a call of a run, resumed": Case(killed_in_a_run, 2, 60),
    "killed from outside twice, resumed": Case(killed_from_outside, 1, 15),
    "Ctrl-C and SIGTERM": Case(signalled),
    "a bit of a checkpoint flipped": Case(flipped, 200, 2000),
    "a file of a checkpoint missing or truncated": Case(shortened, 9, 90),
    "all checkpoints damaged": Case(all_damaged),
    "the best model missing or truncated": Case(model_lost),
    "the recipe missing or truncated": Case(recipe_lost),
    "the metrics truncated": Case(metrics_damaged),
    "disk full": Case(disk_full, 2, 40),
    "folder read-only": Case(read_only),
    "file size limit": Case(file_size_limit, 2, 30),
    "no file handles at a save": Case(no_handles, 1, 4),
    "no file handles for the data": Case(no_handles_for_data),
    "two processes in one run folder": Case(two_processes),
    "run folder moved": Case(moved),
    "run folder deleted": Case(deleted),
    "an image gone or changed": Case(data_gone),
    "the data gone before a resume": Case(data_folder_gone),
    "a data worker dead": Case(dead_worker),
    "NaN in images, loss, gradient, weights": Case(nan),
    "NaN in a file": Case(nan_in_a_file),
    "the clock jumps": Case(clock_jumps),
    "no memory for the batch": Case(no_memory),
    "an image that claims 144 megapixels": Case(bomb),
    "data unchanged, nothing written elsewhere": Case(nothing_else_touched),
}
