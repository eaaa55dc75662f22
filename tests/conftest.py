"""What several tests share."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits

# Photos start from published weights where these are at hand; tests set what they need.
os.environ.pop("VITRAIL_WEIGHTS", None)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="vitrail-tests-hub-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("VITRAIL_FAULTS") != "full":
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip("only in `make faults`"))


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


@pytest.fixture
def shared() -> Path:
    """Real weights and photographs that lie beside the project, where they do."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the weights and data in {SHARED}")
    return SHARED
