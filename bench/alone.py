"""One peer alone in a fresh process: when its first answer comes, and the memory it takes."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median

from vitrail.zoo.presets import preset

REPEATS = 3
# every large tensor goes back to the system when it is freed, so that memory in use is what counts
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def measure(
    bench: str, peers: list[str], name: str, batch: int, tick: Callable[[float], object]
) -> dict[str, dict[str, float]]:
    """Medians of a few processes of each peer, who take turns."""
    found: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    turns = peers * REPEATS
    for done, peer in enumerate(turns):
        tick(done / len(turns))
        command = [sys.executable, "-m", "bench.alone", bench, peer, name, str(batch)]
        answer = subprocess.run(
            [*command, str(time.time())],
            env=os.environ | ENVIRONMENT,
            check=True,
            stdout=subprocess.PIPE,
        )
        found[peer].append(json.loads(answer.stdout))
    return {
        peer: {key: median(answer[key] for answer in answers) for key in ("seconds", "megabytes")}
        for peer, answers in found.items()
    }


def main(bench: str, peer: str, name: str, batch: str, start: str) -> None:
    """The process itself; `start` is the time at which it was ordered."""
    prepare = import_module(f"bench.{bench}").prepare
    prepare(peer, preset(name), int(batch))()
    first = time.time() - float(start)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: imports, code, caches
    before = resident("VmRSS")
    run = prepare(peer, preset(name), int(batch))
    run()
    run()  # only now gradients and the optimizer's state lie in memory together
    print(json.dumps({"seconds": first, "megabytes": resident("VmHWM") - before}))


def resident(field: str) -> float:
    """Megabytes of this process in memory, as Linux tells them: VmRSS now, VmHWM at the peak."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(rf"{field}:\s+(\d+) kB", status)
    assert kilobytes is not None
    return int(kilobytes[1]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
