"""Processes that work ahead, in order; one that dies is reported with what it was doing."""

import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail import files
from vitrail.errors import Refused, UserError

Slot = NDArray[np.uint8]  # memory that both sides see: nothing large goes through the pipe
Note = Callable[[int], None]
Task = TypeVar("Task")
Reply = TypeVar("Reply")
# Does one task: may fill the slot, answers something small, and notes each item it is on.
Work = Callable[[Task, Slot, Note], Reply]

# A fork shares the decoded images without a copy; macOS forbids it and Windows has none.
METHOD = "fork" if sys.platform == "linux" else "spawn"
AHEAD = 2  # tasks in the hands of each worker


def default_workers() -> int:
    """One for each core that this process may use, at most 8."""
    return max(1, min(8, cores() // ranks_here()))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def ranks_here() -> int:
    """How many training processes `torchrun` started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ahead(
    work: Work[Task, Reply],
    tasks: Iterable[Task],
    *,
    workers: int,
    room: int = 0,
    name: Callable[[int], str] = str,
) -> Iterator[tuple[Task, Reply, Slot]]:
    """Does the tasks in other processes and yields them in order, each with its reply and slot.

    A slot has `room` bytes and is used again as soon as the next task is asked for. Without workers
    the same is done here. `name` says what a noted item is called.
    """
    if workers == 0:
        slot = np.empty(room, np.uint8)
        for task in tasks:
            yield task, work(task, slot, lambda item: None), slot
        return
    context = multiprocessing.get_context(METHOD)
    team: list[Worker] = []
    try:
        try:
            for _ in range(workers):
                team.append(Worker(context, work, room, name))
        except OSError as error:
            why = f"cannot start reading process {len(team) + 1}: {files.refusal(error)}"
            raise UserError(f"{why}, or take --data.workers {len(team)}") from error
        yield from take_turns(team, iter(tasks))
    finally:
        for worker in team:
            worker.stop()


def take_turns(team: "list[Worker]", tasks: Iterator[Task]) -> Iterator[tuple[Task, Any, Slot]]:
    """Deals the tasks round and round; a slot that was looked at gets the next one."""
    waiting: deque[tuple[Worker, int, Task]] = deque()
    for turn, task in enumerate(islice(tasks, AHEAD * len(team))):
        number, slot = turn % len(team), turn // len(team)
        team[number].send(slot, task)
        waiting.append((team[number], slot, task))
    while waiting:
        worker, slot, task = waiting.popleft()
        yield task, worker.reply(), worker.slots[slot]
        for task in islice(tasks, 1):
            worker.send(slot, task)
            waiting.append((worker, slot, task))


class Worker:
    """The other process, seen from this one."""

    def __init__(self, context: Any, work: Any, room: int, name: Callable[[int], str]):
        size = max(1, AHEAD * room)
        # a fork shares a mapping; a RawArray would be filled with zeros first
        memory = mmap.mmap(-1, size) if METHOD == "fork" else context.RawArray("B", size)
        self.slots = slots_in(memory, room)
        self.on = context.RawValue("q", -1)
        self.name = name
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, work, memory, room, self.on)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # from Python 3.12 on: torch's idle threads are no danger to a child that starts none
            warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)
            self.process.start()
        theirs.close()

    def send(self, slot: int, task: Any) -> None:
        try:
            self.pipe.send((slot, task))
        except OSError as error:
            raise self.death() from error

    def reply(self) -> Any:
        try:
            if self.pipe not in wait([self.pipe, self.process.sentinel]):
                raise self.death()
            kind, answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self.death() from error
        if kind == "refused":
            raise Refused(answer)
        if kind == "mistake":
            raise UserError(answer)
        if kind == "bug":
            raise RuntimeError(f"in a reading process:\n{answer}")
        return answer

    def death(self) -> UserError:
        self.process.join(5)
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        where = f"on {self.name(self.on.value)}" if self.on.value >= 0 else "starting"
        return UserError(
            f"a reading process {how} while it was {where}; look at that file, "
            f"or try fewer workers if memory was short"
        )

    def stop(self) -> None:
        self.process.kill()  # it holds nothing that could be lost
        self.process.join()
        self.pipe.close()


def keep_freed_memory() -> None:
    """Tells glibc to use the memory of images again instead of giving it back to the system.

    Getting new pages takes as long as a resize, and longer than to normalise a batch.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**28)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**29)  # M_TRIM_THRESHOLD


def slots_in(memory: Any, room: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)[: AHEAD * room].reshape(AHEAD, room)


def serve(pipe: Connection, work: Any, memory: Any, room: int, on: Any) -> None:
    """The life of a worker: it ends with its parent, and leaves signals to all of them to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    torch.set_num_threads(1)  # after a fork more than one would wait forever
    slots = slots_in(memory, room)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def note(item: int) -> None:
        on.value = item

    while pipe in wait([pipe, parent.sentinel]):
        try:
            slot, task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = "done", work(task, slots[slot], note)
        except Refused as error:
            answer = "refused", str(error)
        except UserError as error:
            answer = "mistake", str(error)
        except Exception:
            answer = "bug", traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:  # nobody is there any more
            return
