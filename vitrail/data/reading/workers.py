"""Worker processes that prefetch in order; one that dies is reported with the item it was on."""

import mmap
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail import files
from vitrail.data.reading.memory import (
    SHARED_BLOCKS,
    local_world_size,
    prefault,
    retain_freed_memory,
)
from vitrail.errors import OutOfResources, UserError
from vitrail.signals import ignore_ending_signals

Slot = NDArray[np.uint8]  # shared memory for images, which are too large for a pipe
ReportItem = Callable[[int], None]
Task = TypeVar("Task")
Reply = TypeVar("Reply")
# Does one task: may fill the slot, returns something small, and reports each item it starts on.
Work = Callable[[Task, Slot, ReportItem], Reply]
# Writes the inputs of a task into its slot, in the main process; returns what to send.
Stage = Callable[[Task, Slot], Any]
Message = tuple[str, Any]  # "done" and the reply, or the kind of failure and its message

TASKS_PER_WORKER = 2  # one that it works on, and the next
MAX_WORKERS = 8  # more seldom help: the training step becomes the bottleneck
JOIN_SECONDS = 5  # to learn how a worker died


def default_workers() -> int:
    """Returns one worker per available core, at most 8, divided among the local ranks."""
    return max(1, min(MAX_WORKERS, available_cores() // local_world_size()))


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer than all under taskset or in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_method() -> str:
    """Returns "fork" where it is safe, which shares decoded images without a copy, else "spawn".

    Frameworks of macOS crash in a forked process, Windows cannot fork, and a program may have
    chosen "spawn" by `multiprocessing.set_start_method`.
    """
    safe = sys.platform == "linux" and hasattr(os, "fork")
    available = safe and "fork" in multiprocessing.get_all_start_methods()
    spawn_chosen = multiprocessing.get_start_method(allow_none=True) == "spawn"
    return "fork" if available and not spawn_chosen else "spawn"


def prefetch(
    work: Work[Task, Reply],
    tasks: Iterable[Task],
    *,
    workers: int,
    slot_size: int = 0,
    stage: Stage[Task] | None = None,
    name: Callable[[int], str] = str,
) -> Iterator[tuple[Task, Reply, Slot]]:
    """Does the tasks in worker processes and yields them in order, each with its reply and slot.

    A slot of `slot_size` bytes is reused as soon as the next task is requested. With 0 workers,
    this process does the work. `stage` prepares what a worker gets instead of the task itself.
    `name` returns the name of a reported item.
    """
    if workers == 0:
        slot = np.empty(slot_size, np.uint8)
        for task in tasks:
            yield task, work(task, slot, lambda item: None), slot
        return
    remaining = iter(tasks)
    first = list(islice(remaining, workers))
    tasks, workers = chain(first, remaining), len(first)  # without a task, a worker need not start
    context = multiprocessing.get_context(start_method())
    slot_size = max(1, slot_size)
    count = 2 * TASKS_PER_WORKER * workers  # half of the slots for results that wait their turn
    forks = start_method() == "fork"
    memory: Any = (
        SHARED_BLOCKS.acquire(count * slot_size)
        if forks
        else context.RawArray("B", count * slot_size)
    )
    pool: list[Worker] = []
    try:
        try:
            for _ in range(workers):
                pool.append(Worker(context, work, memory, slot_size, name))
        except OSError as error:
            raise UserError(
                f"cannot start worker process {len(pool) + 1}: "
                f"{files.describe_os_error(error)}, or try `data.workers={len(pool)}`"
            ) from error
        yield from run_in_order(pool, split_into_slots(memory, slot_size)[:count], tasks, stage)
    finally:
        for worker in pool:
            worker.process.kill()  # it holds no state that could be lost
        for worker in pool:
            if worker.pending:  # until it ends it might still write into the memory
                worker.process.join()
            worker.pipe.close()
        if forks:
            SHARED_BLOCKS.release(memory)


def run_in_order(
    pool: "list[Worker]",
    slots: NDArray[np.uint8],
    tasks: Iterable[Task],
    stage: Stage[Task] | None,
) -> Iterator[tuple[Task, Any, Slot]]:
    """Sends each task to the least busy worker; yields the results in the order of the tasks."""
    remaining = iter(tasks)
    free = list(range(len(slots)))  # a stack: the slot used last is still in the processor's cache
    sent: deque[tuple[Task, int]] = deque()  # tasks and their slots
    done: dict[int, Message] = {}  # by slot
    while True:
        done |= collect_replies(pool, block=False)
        while (
            free and (worker := min(pool, key=lambda one: one.pending)).pending < TASKS_PER_WORKER
        ):
            if (task := next(remaining, None)) is None:
                for idle in pool:
                    if not idle.pending:
                        idle.process.kill()  # now, while others still work: it takes a while
                break
            slot = free.pop()
            worker.send(slot, stage(task, slots[slot]) if stage else task)
            sent.append((task, slot))
        if not sent:
            return
        task, slot = sent[0]
        if slot in done:
            sent.popleft()
            yield task, unwrap_reply(done.pop(slot)), slots[slot]
            free.append(slot)
        else:
            done |= collect_replies(pool, block=True)


def collect_replies(pool: "list[Worker]", block: bool) -> dict[int, Message]:
    """Receives the finished tasks, by slot; with `block`, waits for at least one."""
    replies: dict[int, Message] = {}
    while pipes := {worker.pipe: worker for worker in pool if worker.pending}:
        ready = wait(pipes, None if block and not replies else 0)  # also if a worker died
        replies |= dict(pipes[pipe].receive() for pipe in ready)
        if not ready:
            break
    return replies


def unwrap_reply(message: Message) -> Any:
    """Returns the reply, or raises the error that the worker reported."""
    kind, content = message
    if kind == "out of resources":
        raise OutOfResources(content)
    if kind == "user error":
        raise UserError(content)
    if kind == "bug":
        raise RuntimeError(f"in a worker process:\n{content}")
    return content


class Worker:
    """A worker process, seen from the main process."""

    def __init__(
        self, context: Any, work: Any, memory: Any, slot_size: int, name: Callable[[int], str]
    ):
        self.pending = 0  # tasks sent and not yet done
        self.current_item = context.RawValue("q", -1)
        self.name = name
        self.pipe, worker_pipe = context.Pipe()
        arguments = (worker_pipe, work, memory, slot_size, self.current_item)
        self.process = context.Process(target=run_worker, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # since Python 3.12; torch's idle threads are harmless to a child that starts none
            warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)
            self.process.start()
        worker_pipe.close()
        # at exit, multiprocessing would send SIGTERM, which the worker ignores, and wait forever
        Finalize(self, self.process.kill, exitpriority=0)

    def send(self, slot: int, task: Any) -> None:
        self.pending += 1
        try:
            self.pipe.send((slot, task))
        except OSError as error:
            raise self.describe_death() from error

    def receive(self) -> tuple[int, Message]:
        """Receives the slot of a finished task and its message."""
        try:
            slot, message = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self.describe_death() from error
        self.pending -= 1
        return slot, message

    def describe_death(self) -> UserError:
        self.process.join(JOIN_SECONDS)
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        item = self.current_item.value
        where = f"while reading {self.name(item)}" if item >= 0 else "while starting"
        advice = "check that file"
        if item < 0 and start_method() == "spawn":  # it imports the script that started it
            advice = "in a script, call Vitrail below `if __name__ == '__main__':`"
        return UserError(
            f"a worker process {how} {where}; {advice}, or lower `data.workers` if memory ran out"
        )


def split_into_slots(memory: Any, slot_size: int) -> NDArray[np.uint8]:
    slots = np.frombuffer(memory, np.uint8)
    return slots[: len(slots) // slot_size * slot_size].reshape(-1, slot_size)


def run_worker(pipe: Connection, work: Any, memory: Any, slot_size: int, current_item: Any) -> None:
    """The main loop of a worker: ends with its parent, and leaves all signals to it."""
    ignore_ending_signals()
    retain_freed_memory()
    torch.set_num_threads(1)  # after a fork, OpenMP with more threads deadlocks
    slots, prefaulted = split_into_slots(memory, slot_size), set[int]()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def report_item(item: int) -> None:
        current_item.value = item

    while pipe in wait([pipe, parent.sentinel]):
        try:
            slot, task = pipe.recv()
        except (EOFError, OSError):
            return
        if slot not in prefaulted and isinstance(memory, mmap.mmap):
            prefault(memory, slot * slot_size, slot_size)
            prefaulted.add(slot)
        try:
            message = "done", work(task, slots[slot], report_item)
        except OutOfResources as error:
            message = "out of resources", str(error)
        except UserError as error:
            message = "user error", str(error)
        except Exception:
            message = "bug", traceback.format_exc()
        try:
            pipe.send((slot, message))
        except OSError:  # the main process has ended
            return
