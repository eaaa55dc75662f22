"""What one process can check of its machine: versions, device, memory, disk and weights."""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from vitrail import files
from vitrail.data.reading.memory import available_memory
from vitrail.data.sources.places import cache_folder
from vitrail.display.text import format_count, printable
from vitrail.errors import UserError
from vitrail.zoo.hub import inspect_hub_file
from vitrail.zoo.suggest import SUGGESTIONS, VARIABLE
from vitrail.zoo.weights import find_published

Status = Literal["ok", "warning", "problem"]

PACKAGES = ("vitrail", "torch", "numpy", "pillow", "safetensors")
SHARED_MEMORY = Path("/dev/shm")
LOW_SHARED_MEMORY = 512e6  # bytes; docker's default of 64 MB ends NCCL
LOW_MEMORY, LOW_SPACE, LOW_SPEED = 1e9, 2e9, 50e6  # bytes free, bytes free, bytes per second
LOW_FILES = 1024  # open files
DISK_BYTES = 32 << 20  # written and read to measure the disk


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of a diagnosis."""

    name: str
    status: Status
    found: str
    advice: str = ""  # what to do; empty if the status is "ok"

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.status:<8} {self.name}: {self.found}{advice}"


def judge(name: str, found: str, advice: str = "", status: Status = "warning") -> Check:
    """A check that is ok unless there is something to do."""
    return Check(name=name, status=status if advice else "ok", found=found, advice=advice)


def check_machine(folder: Path, hub: bool) -> Iterator[Check]:
    """What one process sees by itself."""
    tests: list[Callable[[], Check]] = [
        check_versions,
        check_device,
        check_memory,
        check_shared_memory,
        check_open_files,
        lambda: check_disk("disk", folder),
        lambda: check_disk("cache", cache_folder()),
    ]
    yield from (test() for test in tests)
    if hub:
        yield check_hub()


def check_versions() -> Check:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} of unknown version")
    return judge("versions", ", ".join(found))


def check_device() -> Check:
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    cpu = f"CPU with {format_count(cores, 'core')}, {format_count(threads, 'thread')}"
    gpus = torch.cuda.device_count()
    if not gpus:
        if not list(Path("/dev").glob("nvidia[0-9]*")):
            return judge("device", f"{cpu}; no GPU")
        advice = "install a torch that is built for CUDA"
        if torch.version.cuda:
            advice = "update the driver, or install a torch for an older CUDA"
        return judge("device", f"{cpu}; torch cannot use the NVIDIA GPU here", advice, "problem")
    names = []
    for number in range(gpus):
        free, total = torch.cuda.mem_get_info(number)
        names.append(
            f"{torch.cuda.get_device_name(number)} ({free / 1e9:.0f} of {total / 1e9:.0f} GB free)"
        )
        ones = torch.ones(64, 64, device=f"cuda:{number}")
        if not bool((ones @ ones == 64).all()):
            wrong = f"GPU {number} computes a wrong product"
            return judge("device", wrong, "replace it", "problem")
    return judge("device", f"{', '.join(names)}; {cpu}")


def check_memory() -> Check:
    free = available_memory()
    advice = "close other programs" if free < LOW_MEMORY else ""
    return judge("memory", f"{free / 1e9:.1f} GB available", advice)


def check_shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return judge("shared memory", "not used on this system")
    free = shutil.disk_usage(SHARED_MEMORY).free
    advice = (
        "several GPUs need more; docker sets it by shm-size" if free < LOW_SHARED_MEMORY else ""
    )
    return judge("shared memory", f"{free / 1e9:.2f} GB free in {SHARED_MEMORY}", advice)


def check_open_files() -> Check:
    try:
        resource = import_module("resource")
    except ImportError:  # Windows
        return judge("open files", "no limit on this system")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return judge("open files", "no limit")
    advice = f"raise the limit with ulimit -n {LOW_FILES}" if limit < LOW_FILES else ""
    return judge("open files", f"at most {limit:,}", advice)


def check_disk(name: str, folder: Path) -> Check:
    """Writes and reads a file in a folder, or in the nearest existing folder above it."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    where = printable(str(place))
    data = os.urandom(1 << 20)
    try:
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryFile(dir=place) as file:
            start = time.perf_counter()
            for _ in range(DISK_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            speed = DISK_BYTES / (time.perf_counter() - start)
            file.seek(0)
            intact = all(file.read(len(data)) == data for _ in range(DISK_BYTES // len(data)))
    except OSError as error:
        why = f"{where} cannot be written: {error.strerror}"
        return judge(name, why, "choose another folder, or make it writable", "problem")
    if not intact:
        why = f"{where} returns other bytes than were written"
        return judge(name, why, "replace the disk", "problem")
    advice = "free some space" if free < LOW_SPACE else ""
    if speed < LOW_SPEED:
        advice = "choose a faster disk for runs and caches"
    found = f"{where}: {speed / 1e6:,.0f} MB/s written, {free / 1e9:,.1f} GB free"
    return judge(name, found, advice)


def check_hub() -> Check:
    """Whether weights to fine-tune can be downloaded, or are on this machine."""
    if path := os.environ.get(VARIABLE):
        found = f"{VARIABLE} is {printable(path)}"
        if path.startswith("hf:") or files.expand_user(path).exists():
            return judge("weights", found)
        return judge("weights", f"{found}, which does not exist", "correct it", "problem")
    published = find_published(SUGGESTIONS[0].name)
    assert published is not None and published.hub is not None
    start = time.perf_counter()
    try:
        inspect_hub_file(published.hub)
    except UserError as error:
        advice = f"connect to the network, or set {VARIABLE} to a folder of weights"
        return judge("weights", printable(str(error).removesuffix("; try again later")), advice)
    return judge("weights", f"the hub answers in {1000 * (time.perf_counter() - start):.0f} ms")
