"""One contender alone in a fresh process: when its first answer comes, and the memory it takes."""

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import runtime
from vitrail.zoo.presets import preset

# every large tensor goes back to the system when it is freed, so that memory in use is what counts
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
ROOT = Path(__file__).resolve().parents[1]  # from where a new process finds all modules


def ask(*words: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
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
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def seconds_to_answer(contender: str, name: str, file: str) -> float:
    """From the order of a process to its first answer about one image."""
    words = ("inference", contender, name, str(time.time()), file)
    seconds: float = ask("bench.alone", *words)["seconds"]
    return seconds


def megabytes(bench: str, peer: str, cases: Sequence[tuple[str, int]]) -> list[float]:
    """What each case takes at its peak, one after the other in the same process."""
    words = [bench, peer, cases[0][0], str(time.time()), ""]
    words += [str(word) for case in cases for word in case]
    found: list[float] = ask("bench.alone", *words, environment=ENVIRONMENT)["megabytes"]
    return found


def main(bench: str, contender: str, name: str, start: str, file: str, *cases: str) -> None:
    """The process itself, which warms up with one image; `start` is when it was ordered."""
    prepared(bench, contender, name, 1, file)()
    first = time.time() - float(start)
    sizes = zip(cases[::2], cases[1::2], strict=True)
    peaks = [peak(bench, contender, name, int(batch)) for name, batch in sizes]
    print(json.dumps({"seconds": first, "megabytes": peaks}))


def peak(bench: str, peer: str, name: str, batch: int) -> float:
    gc.collect()  # of the case before
    before = forget_peak()
    run = prepared(bench, peer, name, batch, "")
    run()
    if bench == "step":
        run()  # only now gradients and the optimizer's state lie in memory together
    return resident("VmHWM") - before


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
