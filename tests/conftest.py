"""What several tests share."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits

# Photos start from published weights where these are at hand; tests set what they need.
os.environ.pop("VITRAIL_WEIGHTS", None)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="vitrail-tests-hub-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

# Runs flush every file to the disk: in memory this takes no time.
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 4 << 30  # a file system of Linux, and its free space
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A job in the background of a shell ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("VITRAIL_FAULTS") != "full":
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip("only in `make faults`"))


def pytest_collection_finish() -> None:
    """Garbage collection takes a twentieth of the time with Python's own thresholds."""
    gc.freeze()  # a million objects of imports
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture
def need() -> Callable[[str], str]:
    """The path of a program; without it the test is skipped, and in CI it fails."""

    def find(program: str) -> str:
        path = shutil.which(program)
        if path is None and os.environ.get("VITRAIL_CI") == "1":
            pytest.fail(f"this test needs the program {program}, and CI must have it")
        if path is None:
            pytest.skip(f"needs the program {program}")
        return path

    return find


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, or None where it is missing; the tests of a module share it."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        yield None
        return
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=flags)
        yield running
        running.close()


@pytest.fixture
def shared() -> Path:
    """Real weights and photographs that lie beside the project, where they do."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the weights and data in {SHARED}")
    return SHARED
