"""What goes wrong: with a process, its disk, its clock, its numbers; done inside a child."""

import ctypes
import errno
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vitrail.run import dataset, drive, finish, plan
from vitrail.run.drive import Driver
from vitrail.training import loop

CALLS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")  # of os, in any writing
TWO_PATHS = ("os.rename", "os.link", "os.symlink")  # audit events, and what they name
ONE_PATH = ("os.mkdir", "os.remove", "os.rmdir", "os.utime", "os.chmod", "shutil.rmtree")
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MS_LOCKED = 2 | 4 | 8  # nosuid, nodev, noexec: who is not root may not remove them


def quick() -> None:
    """No timing before a run, no page after it."""
    plan.TRIAL = 0.0
    finish.make_report = lambda folder, loader, terminal: None


def ticking() -> None:
    """A second passes at every reading of the clock: a checkpoint is saved after every step."""
    ticks = count()
    drive.time = SimpleNamespace(monotonic=lambda: float(next(ticks)))


def wild_clock() -> None:
    """The system clock jumps back by months at every reading."""
    turns = count()
    time.time = lambda: 1.7e9 - 1e7 * next(turns)


def at_step(number: int, act: Callable[..., None], *arguments: Any) -> None:
    """Something happens right after a step."""
    record = Driver.record_step

    def recording(self: Driver, step: loop.Step) -> None:
        record(self, step)
        if step.number == number:
            act(self, *arguments)

    Driver.record_step = recording


def signalled(driver: Driver, number: int) -> None:
    os.kill(os.getpid(), number)


def moved(driver: Driver, target: Path) -> None:
    driver.folder.rename(target)


def deleted(driver: Driver) -> None:
    shutil.rmtree(driver.folder)


def removed(driver: Driver, path: Path) -> None:
    path.unlink()


def rewritten(driver: Driver, path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def worker_killed(driver: Driver) -> None:
    os.kill(active_children()[0].pid or 0, signal.SIGKILL)


def waiting(driver: Driver, there: Path, go: Path) -> None:
    """Says that it is there, and waits for a file."""
    there.touch()
    while not go.exists():
        time.sleep(0.01)


def files_limited(driver: Driver, size: int) -> None:
    limit(resource.RLIMIT_FSIZE, size)


def handles_limited(driver: Driver, more: int) -> None:
    no_more_handles(more)


def no_more_handles(more: int) -> None:
    lowest = os.dup(0)  # of those that are free
    os.close(lowest)
    limit(resource.RLIMIT_NOFILE, lowest + more)


def handles_now(more: int) -> None:
    """No more than these once the data is looked at."""
    open_data = dataset.open_data

    def opening(*arguments: Any, **options: Any) -> Any:
        no_more_handles(more)
        return open_data(*arguments, **options)

    dataset.open_data = opening


def no_handle_for(name: str) -> None:
    """The system has none when this file is opened."""
    opens = os.open

    def opening(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(path, *arguments, **options)

    os.open = opening


def limit(kind: int, soft: int) -> None:
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def memory_limited(more: int) -> None:
    """So many bytes above what this process has mapped already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def disk_filled(driver: Driver, filler: Path, room: int) -> None:
    """Leaves so many bytes on the disk."""
    status = os.statvfs(filler.parent)
    filler.write_bytes(bytes(max(0, status.f_bavail * status.f_bsize - room)))


def disk_read_only(driver: Driver, place: Path) -> None:
    read_only(place)


def nan_weights(driver: Driver) -> None:
    next(driver.learner.model.parameters()).data.view(-1)[0] = torch.nan


def nan_gradient(driver: Driver) -> None:
    next(driver.learner.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)


def nan_images(driver: Driver) -> None:
    batches = driver.loader._normalise
    driver.loader._normalise = lambda images: batches(images) * torch.nan


def nan_loss(step: int) -> None:
    """Of the `step`-th step of this process."""
    turns, entropy = count(1), loop.cross_entropy

    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        loss = entropy(*arguments, **options)
        return loss * torch.nan if next(turns) == step else loss

    loop.cross_entropy = poisoned


def mortal(number: int) -> None:
    """Dies instead of the `number`-th call that changes a disk, counted from 0."""
    turns = count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if next(turns) >= number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return called

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


def mortal_in_writing(size: int) -> None:
    """Dies when a file would grow beyond so many bytes, whoever writes it, in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    limit(resource.RLIMIT_FSIZE, size)


def fenced(*allowed: Path) -> None:
    """A write to anywhere else is an error."""
    sys.dont_write_bytecode = True
    roots = tuple(map(str, allowed))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        for path in touched(event, arguments, writing):
            if isinstance(path, str | bytes | os.PathLike):
                full = os.path.abspath(os.fsdecode(path))
                device = full.startswith("/dev/") and "/pytest-of-" not in full
                if not device and not full.startswith(roots):
                    raise AssertionError(f"{event} outside: {full}")

    sys.addaudithook(watch)


def touched(event: str, arguments: tuple[Any, ...], writing: int) -> Iterator[Any]:
    """Paths that a call is about to change; those below an open folder count as that folder."""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
        yield arguments[0]
    elif event in TWO_PATHS and arguments[-1] == -1:
        yield arguments[1]
    elif event in ONE_PATH and (event == "shutil.rmtree" or arguments[-1] == -1):
        yield arguments[0]


def own_mounts() -> None:
    """From here on this process and its children mount for themselves alone."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    kind = CLONE_NEWNS | (CLONE_NEWUSER if user else 0)
    check(libc.unshare(kind))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))


def small_disk(place: Path, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, f"size={size}".encode()))


def read_only(place: Path) -> None:
    """A folder without files open for writing can no longer be written below."""
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.mount(bytes(place), bytes(place), None, MS_BIND, None))
    flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_LOCKED
    check(libc.mount(None, bytes(place), None, flags, None))


def writable(place: Path) -> None:
    check(ctypes.CDLL(None, use_errno=True).umount2(bytes(place), 2))  # when its last user is gone


def check(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
