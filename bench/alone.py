"""One contender alone in a fresh process: when its first answer comes, and the memory it takes."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from bench import runtime
from vitrail.zoo.presets import preset

# every large tensor goes back to the system when it is freed, so that memory in use is what counts
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
ROOT = Path(__file__).resolve().parents[1]  # from where a new process finds all modules


def ask(*words: str, environment: dict[str, str] | None = None) -> dict[str, float]:
    """What a process started by `python -m` with these words answers in its last line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words],
        env=os.environ | (environment or {}),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def seconds_to_answer(contender: str, name: str, file: str) -> float:
    """From the order of a process to its first answer about one image."""
    words = ("bench.alone", "inference", contender, name, "1", str(time.time()), file)
    return ask(*words)["seconds"]


def megabytes(bench: str, peer: str, name: str, batch: int) -> float:
    words = ("bench.alone", bench, peer, name, str(batch), str(time.time()), "")
    return ask(*words, environment=ENVIRONMENT)["megabytes"]


def main(bench: str, contender: str, name: str, batch: str, start: str, file: str) -> None:
    """The process itself; `start` is the time at which it was ordered."""
    prepared(bench, contender, name, 1, file)()
    first = time.time() - float(start)
    before = forget_peak()
    run = prepared(bench, contender, name, int(batch), file)
    run()
    if bench == "step":
        run()  # only now gradients and the optimizer's state lie in memory together
    print(json.dumps({"seconds": first, "megabytes": resident("VmHWM") - before}))


def prepared(bench: str, contender: str, name: str, batch: int, file: str) -> Callable[[], object]:
    if contender == runtime.NAME:
        return runtime.first_answer(file, name, batch)
    prepare: Callable[..., Callable[[], object]] = import_module(f"bench.{bench}").prepare
    return prepare(contender, preset(name), batch)


def forget_peak() -> float:
    """Forgets the most memory so far: imports, code, caches; says what is in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> float:
    """Megabytes of this process in memory, as Linux tells them: VmRSS now, VmHWM at the peak."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(rf"{field}:\s+(\d+) kB", status)
    assert kilobytes is not None
    return int(kilobytes[1]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
