"""Runs each contender in its own process, as users do, and interleaves their measurements.

In a shared process a contender would inherit the threads, caches and fragmented heap of the others.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from bench import onnx_runtime
from bench.measure import Budget, Case, OnProgress, Task, Times, interleave, measure, time_calls
from vitrail.data.reading.memory import retain_freed_memory
from vitrail.errors import UserError
from vitrail.zoo.presets import preset

ROOT = Path(__file__).resolve().parents[1]  # working directory of the processes, for imports
Size = tuple[str, int]  # a preset and a batch size


@contextmanager
def report_errors() -> Iterator[None]:
    """Exits with one line after a `UserError`, silently after Ctrl-C."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


@dataclass(frozen=True)
class ContenderProcess:
    """The parent's side of a process: sends commands, receives one number for each."""

    process: subprocess.Popen[str]
    errors: IO[str]  # its standard error

    def call(self, command: str, *arguments: object) -> float:
        self.send(command, *arguments)
        return self.receive()

    def send(self, command: str, *arguments: object) -> None:
        """Does not wait for the result."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `receive` raises the error

    def receive(self) -> float:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return float(line)
        self.process.wait()
        self.errors.seek(0)
        raise RuntimeError(f"a benchmark process failed:\n{self.errors.read()}")


@contextmanager
def start_process(
    bench: str, contender: str, folder: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[ContenderProcess]:
    """Runs a process until the `with` block ends; `folder` contains exported models."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.process", bench, contender, folder],
            env={**os.environ, **(environment or {})},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield ContenderProcess(process, errors)
        finally:
            process.kill()


@contextmanager
def start_processes(
    bench: str, contenders: Iterable[str], folder: str = ""
) -> Iterator[dict[str, ContenderProcess]]:
    """Runs one process per contender for all cases of a benchmark."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(start_process(bench, name, folder)) for name in contenders}


def measure_models(
    bench: str,
    contenders: Sequence[str],
    sizes: Sequence[Size],
    budget: Budget,
    progress: OnProgress,
    folder: str = "",
) -> list[dict[str, Any]]:
    """Measures all contenders at all sizes."""
    with start_processes(bench, contenders, folder) as processes:
        cases = [
            Case(
                label=label_size(*size),
                unit="ms",
                measure=partial(interleave_processes, processes, size),
            )
            for size in sizes
        ]
        return measure(cases, budget, progress)


def interleave_processes(
    processes: Mapping[str, ContenderProcess], arguments: Sequence[object], budget: Budget
) -> Times:
    """Prepares the task in all processes at the same time, then times one process after another."""
    for process in processes.values():
        process.send("prepare", *arguments)
    for process in processes.values():
        process.receive()
    return interleave(
        {name: partial(process.call, "time") for name, process in processes.items()}, budget
    )


def label_size(name: str, batch: int) -> str:
    return f"{name}, {preset(name).image} px, batch {batch}"


def main(bench: str, contender: str, folder: str) -> None:
    """The process itself: reads one command per line, writes one number per line."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    task: Task | None = None
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        result = 0.0
        if command == "prepare":
            task = None
            gc.collect()  # frees the previous case
            if (bench, contender) == ("step", "vitrail"):
                retain_freed_memory()  # as `vitrail train` does
            task = prepare_task(bench, contender, folder, arguments)
        elif command == "time":
            assert task is not None
            result = time_calls(task, *arguments)
        else:
            result = measure_peak(bench, contender, *arguments)
        print(result, file=results, flush=True)


def prepare_task(bench: str, contender: str, folder: str, arguments: Sequence[Any]) -> Task:
    if contender == onnx_runtime.NAME and bench != "engines":  # without torch
        return onnx_runtime.prepare_session(*arguments, folder)
    prepare: Callable[..., Task] = import_module(f"bench.{bench}").prepare
    if bench == "engines":
        return prepare(contender, folder, *arguments)
    return prepare(contender, *arguments)


def measure_peak(bench: str, contender: str, name: str, batch: int) -> float:
    """Peak memory in MB of the model and its calls, without imports and one-time allocations."""
    prepare_task(bench, contender, "", ("Pico/4", 1))()  # imports and one-time allocations
    gc.collect()
    before = reset_peak_memory()
    run = prepare_task(bench, contender, "", (name, batch))
    run()
    if bench == "step":
        run()  # the first step with gradients and optimizer state in memory at the same time
    return resident_memory("VmHWM") - before


def reset_peak_memory() -> float:
    """Resets the peak to the current use, and returns that in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_memory("VmRSS")


def resident_memory(field: str) -> float:
    """MB of this process according to Linux: VmRSS is the current use, VmHWM the peak."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(rf"{field}:\s+(\d+) kB", status)
    assert kilobytes is not None
    return int(kilobytes[1]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
