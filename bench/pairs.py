"""Trainings on their own cores that are not repeated, and the differences between pairs of them."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


class Cores:
    """Shares of the available cores for jobs at the same time, which no two jobs have in common."""

    def __init__(self, parallel: int, each: int = 1):
        available = available_cores()
        if parallel * each > len(available):
            raise UserError(f"{parallel} jobs on {len(available)} cores; lower `jobs`")
        self.free: SimpleQueue[list[int]] = SimpleQueue()
        for number in range(parallel):
            self.free.put(available[number * each : (number + 1) * each])

    @contextmanager
    def take(self) -> Iterator[list[int]]:
        """Waits for a share, which is free again after the `with` block."""
        share = self.free.get()
        try:
            yield share
        finally:
            self.free.put(share)


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def run_jobs(jobs: Sequence[Job], parallel: int) -> list[dict[str, Any]]:
    """The results of all jobs, of one core each; those that exist are not run again."""
    cores = Cores(parallel)

    def run(job: Job) -> dict[str, Any]:
        if not job.path.is_file():
            with cores.take() as share:
                run_job(job, share)
        result: dict[str, Any] = json.loads(job.path.read_text())
        return result

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(run, jobs))


def run_job(
    job: Job, cores: Sequence[int], on_wait: Callable[[float], None] = lambda seconds: None
) -> None:
    """Runs a job to its end on these cores; its output goes to its log.

    `on_wait` gets the seconds since the start, twice a second; its error terminates the job.
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    pinned = ["taskset", "-c", ",".join(map(str, cores))]
    # waiting threads sleep instead of spinning, as in `vitrail train` on a shared machine
    environment = {"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(len(cores))}
    with job.log.open("w") as output:
        process = subprocess.Popen(
            [*pinned, sys.executable, "-W", "ignore", "-m", *job.command],
            env=os.environ | environment | {"PYTHONPATH": str(job.checkout)},
            cwd=job.checkout,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                on_wait(time.monotonic() - start)
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise UserError(f"a training failed with exit code {process.returncode}; see {job.log}")


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
