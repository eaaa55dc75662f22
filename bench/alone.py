"""Each contender alone in a process of its own, as users run it; they are asked in turn.

In one process they would share what one of them left behind: threads, caches, torn memory.
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

from bench import runtime
from bench.measure import Budget, Case, Task, Tick, Times, interleave, measure, seconds_of
from vitrail.data.reading.memory import retain_freed_memory
from vitrail.zoo.presets import preset

ROOT = Path(__file__).resolve().parents[1]  # from where a new process finds all modules
Size = tuple[str, int]  # a model's name, and how many images it is given at once


@dataclass(frozen=True)
class Alone:
    """One contender in its process."""

    process: subprocess.Popen[str]
    errors: IO[str]  # what it wrote there

    def ask(self, order: str, *words: object) -> float:
        self.tell(order, *words)
        return self.hear()

    def tell(self, order: str, *words: object) -> None:
        """Without waiting for the answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([order, *words]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # who hears, hears why

    def hear(self) -> float:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return float(line)
        self.process.wait()
        self.errors.seek(0)
        raise RuntimeError(f"a process of the bench failed:\n{self.errors.read()}")


@contextmanager
def alone(
    bench: str, contender: str, folder: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[Alone]:
    """Starts it, and ends it with the `with`; `folder` has the models in files."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.alone", bench, contender, folder],
            env={**os.environ, **(environment or {})},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Alone(process, errors)
        finally:
            process.kill()


@contextmanager
def all_alone(
    bench: str, contenders: Iterable[str], folder: str = ""
) -> Iterator[dict[str, Alone]]:
    """Each of them in a process, which lives through all cases of a bench."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(alone(bench, name, folder)) for name in contenders}


def in_turn(
    bench: str,
    contenders: Sequence[str],
    sizes: Sequence[Size],
    budget: Budget,
    tick: Tick,
    folder: str = "",
) -> list[dict[str, Any]]:
    """All cases of a bench of models."""
    with all_alone(bench, contenders, folder) as processes:
        cases = [
            Case(label=label(*size), unit="ms", measure=partial(turns, processes, size))
            for size in sizes
        ]
        return measure(cases, budget, tick)


def turns(processes: Mapping[str, Alone], words: Sequence[object], budget: Budget) -> Times:
    """Each process makes its task ready from these words; then the tasks are timed."""
    for process in processes.values():
        process.tell("prepare", *words)
    for process in processes.values():
        process.hear()
    return interleave(
        {name: partial(process.ask, "time") for name, process in processes.items()}, budget
    )


def label(name: str, batch: int) -> str:
    return f"{name}, {preset(name).image} px, batch {batch}"


def main(bench: str, contender: str, folder: str) -> None:
    """The process itself: a line of orders, a number for an answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    task: Task | None = None
    for line in sys.stdin:
        order, *words = json.loads(line)
        answer = 0.0
        if order == "prepare":
            task = None
            gc.collect()  # of the case before
            if (bench, contender) == ("step", "vitrail"):
                retain_freed_memory()  # as every training of ours does
            task = prepared(bench, contender, folder, words)
        elif order == "time":
            assert task is not None
            answer = seconds_of(task, *words)
        else:
            answer = peak(bench, contender, *words)
        print(answer, file=answers, flush=True)


def prepared(bench: str, contender: str, folder: str, words: Sequence[Any]) -> Task:
    if contender == runtime.NAME:  # without torch
        return runtime.prepare(*words, folder)
    prepare: Callable[..., Task] = import_module(f"bench.{bench}").prepare
    return prepare(contender, *words)


def peak(bench: str, contender: str, name: str, batch: int) -> float:
    """Megabytes that the model and calls of it take, imports and caches not counted."""
    prepared(bench, contender, "", ("Pico/4", 1))()  # all that is imported and made once
    gc.collect()
    before = forget_peak()
    run = prepared(bench, contender, "", (name, batch))
    run()
    if bench == "step":
        run()  # only now gradients and the optimizer's state lie in memory together
    return resident("VmHWM") - before


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
