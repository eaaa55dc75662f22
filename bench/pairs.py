"""Trainings of one core each that are not repeated, and the differences between pairs of them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, stdev
from typing import Any

from bench.process import ROOT
from vitrail.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Job:
    """A Python module whose last act is to write its result as JSON to `path`."""

    path: Path
    log: Path  # of its output
    command: tuple[str, ...]  # module and arguments
    checkout: Path = ROOT


def run_jobs(jobs: Sequence[Job], parallel: int) -> list[dict[str, Any]]:
    """The results of all jobs; those that exist are not run again."""
    cores: SimpleQueue[int] = SimpleQueue()
    available = sorted(os.sched_getaffinity(0))
    if parallel > len(available):
        raise UserError(f"{parallel} jobs on {len(available)} cores; lower `jobs`")
    for core in available[:parallel]:
        cores.put(core)

    def run(job: Job) -> dict[str, Any]:
        if not job.path.is_file():
            core = cores.get()
            try:
                run_job(job, core)
            finally:
                cores.put(core)
        result: dict[str, Any] = json.loads(job.path.read_text())
        return result

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(run, jobs))


def run_job(job: Job, core: int) -> None:
    """Runs a job to its end on one core; its output goes to its log."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    module, *arguments = job.command
    with job.log.open("w") as output:
        ended = subprocess.run(
            ["taskset", "-c", str(core), sys.executable, "-W", "ignore", "-m", module, *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(job.checkout)},
            cwd=job.checkout,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if ended.returncode:
        raise UserError(f"a training failed with exit code {ended.returncode}; see {job.log}")


def paired_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The mean of the differences, and its standard error; infinite for a single pair."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    if len(differences) < 2:
        return fmean(differences), math.inf
    return fmean(differences), stdev(differences) / math.sqrt(len(differences))


def format_difference(mean: float, error: float) -> list[str]:
    """Difference in percentage points, and whether it is larger than its standard error."""
    verdict = "undecided" if abs(mean) <= error else "better" if mean > 0 else "worse"
    spread = f" ± {100 * error:.2f}" if error < math.inf else ""
    return [f"{100 * mean:+.2f}{spread}", verdict]
