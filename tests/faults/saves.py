"""Saving a checkpoint while things fail, tried inside a child."""

import os
import re
import signal
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.faults import harm
from tests.faults.children import Harm
from vitrail.training import checkpoint

SYSTEM_CALLS = "write writev pwrite64 fsync rename renameat renameat2 mkdir unlink unlinkat rmdir"
NUMBERS = 999  # in the saved tensor


def put(folder: Path, step: int, attempt: int = 0) -> None:
    checkpoint.save_checkpoint(
        folder, step, {"weight": torch.full((NUMBERS,), float(step))}, {"try": attempt}
    )


def whole(folder: Path, *steps: int) -> None:
    """One of these states loads, to the last bit, and no other lies broken before it."""
    found = checkpoint.load_checkpoint(folder)
    assert found is not None and not found.warnings, found
    assert found.step in steps, found.step
    assert found.tensors["weight"].tolist() == [float(found.step)] * NUMBERS


def attempt(folder: Path, number: int, harms: Harm) -> int:
    """Saves step 3 in a fork; how that ended."""
    child = os.fork()
    if child == 0:
        harms()
        put(folder, 3, number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at_calls(folder: Path, every: int) -> int:
    """Instead of a call of a save: first of a new state, then of one saved a second time."""
    folder.mkdir()
    folder, kills = folder / "checkpoints", 0
    put(folder, 1), put(folder, 2)
    for steps in ((2, 3), (3,)):
        for number in range(0, 10_000, every):
            ended = attempt(folder, number, partial(harm.mortal, number))
            whole(folder, *steps)
            if ended == 0:
                break
            assert ended == -signal.SIGKILL, ended
            kills += 1
        put(folder, 3)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]
    return kills


def killed_in_writing(folder: Path, tries: int) -> int:
    """Inside a write of any file of a save, whoever does it."""
    folder.mkdir()
    folder, rng = folder / "checkpoints", np.random.default_rng(0)
    put(folder, 1), put(folder, 2)
    for number in range(tries):
        steps = (2, 3) if number < tries // 2 else (3,)
        if number == tries // 2:
            put(folder, 3)
        size = int(rng.integers(1, 4 * NUMBERS))
        ended = attempt(folder, number, partial(harm.mortal_in_writing, size))
        assert ended == -signal.SIGXFSZ, ended
        whole(folder, *steps)
    return tries


def killed_at_system_calls(folder: Path, every: int) -> int | None:
    """As the kernel sees them, by strace; None where that is not allowed."""
    folder.mkdir()
    folder, kills = folder / "checkpoints", 0
    put(folder, 1), put(folder, 2)
    for steps in ((2, 3), (3,)):
        log = folder.with_name("calls")
        if traced(folder, ["-o", str(log)]) is None:
            return None
        names = [re.sub(r"^\d+ +|\(.*", "", line) for line in log.read_text().splitlines()]
        counts = Counter(name for name in names if name in SYSTEM_CALLS.split())
        if steps == (2, 3):
            put(folder, 2)  # states past a saved step are cleared
        moments = [(name, n) for name, most in counts.items() for n in range(1, most + 1)]
        for name, number in moments[::every]:
            kill = f"inject={name}:signal=KILL:when={number}"
            ended = traced(folder, ["-o", "/dev/null", "-e", kill])
            assert ended in (-signal.SIGKILL, 0), ended
            kills += ended != 0
            whole(folder, *steps)
        put(folder, 3)
    return kills


def traced(folder: Path, options: list[str]) -> int | None:
    """How a save ends under strace."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        put(folder, 3)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    calls = ",".join(f"?{name}" for name in SYSTEM_CALLS.split())
    command = ["strace", "-e", f"trace={calls}", *options, "-p", str(child)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        words = tracer.stderr.readline() if tracer.stderr else ""
        if "attached" not in words:
            os.kill(child, signal.SIGKILL)
        os.kill(child, signal.SIGCONT)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ended if "attached" in words else None


def flipped(folder: Path, tries: int) -> int:
    """One bit of any file of the newest of two states: found, and the state before is used."""
    newest, before = checkpoint.list_checkpoints(folder)
    files, rng = sorted(newest.iterdir()), np.random.default_rng(0)
    for _ in range(tries):
        path = files[rng.integers(len(files))]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        path.write_bytes(bad)
        passed_over(folder, newest, before)
        path.write_bytes(good)
    found = checkpoint.load_checkpoint(folder)
    assert found is not None and found.step == checkpoint.step_number(newest)
    return tries


def shortened(folder: Path, tries: int) -> int:
    """Every file of the newest of two states is missing, empty or cut off: the other is used."""
    newest, before = checkpoint.list_checkpoints(folder)
    done = 0
    for path in sorted(newest.iterdir()):
        good = path.read_bytes()
        for share in (None, 0.0, *np.linspace(0.01, 0.999, max(1, tries // 3 - 2))):
            path.unlink()
            if share is not None:
                path.write_bytes(good[: int(share * len(good))])
            passed_over(folder, newest, before)
            path.write_bytes(good)
            done += 1
    return done


def passed_over(folder: Path, newest: Path, before: Path) -> None:
    found = checkpoint.load_checkpoint(folder)
    assert found is not None and found.step == checkpoint.step_number(before)
    assert any(warning.startswith(f"{newest.name} ") for warning in found.warnings)


def synced(folder: Path) -> int:
    """All bytes are on the disk before the name is, and the name before the save ends."""
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def syncing(handle: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renaming(old: Path, new: Path) -> None:
        events.append(("rename", str(new)))
        replace(old, new)

    os.fsync, os.replace = syncing, renaming
    folder.mkdir()
    put(folder / "checkpoints", 1)
    place = events.index(("rename", str(folder / "checkpoints" / "step-00000001")))
    before = {Path(path).name for kind, path in events[:place] if kind == "sync"}
    assert {checkpoint.PROGRESS, checkpoint.TENSORS, checkpoint.MANIFEST, "step-00000001"} <= before
    assert ("sync", str(folder / "checkpoints")) in events[place:]
    return 1
