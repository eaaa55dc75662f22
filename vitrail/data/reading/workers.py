"""Processes that work ahead, in order; one that dies is reported with what it was doing."""

import mmap
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail import files
from vitrail.data.reading.memory import SHARED, ask_for_pages, keep_freed_memory
from vitrail.errors import Refused, UserError

Slot = NDArray[np.uint8]  # memory that both sides see: nothing large goes through the pipe
Note = Callable[[int], None]
Task = TypeVar("Task")
Reply = TypeVar("Reply")
# Does one task: may fill the slot, answers something small, and notes each item it is on.
Work = Callable[[Task, Slot, Note], Reply]
Answer = tuple[str, Any]  # "done" and the reply, or what went wrong and the message

# A fork shares the decoded images without a copy; macOS forbids it and Windows has none.
METHOD = "fork" if sys.platform == "linux" else "spawn"
AHEAD = 2  # tasks in the hands of each worker: one to do, and the next


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
    room = max(1, room)
    count = 2 * AHEAD * workers  # half of the slots for what is done before its turn
    forked = METHOD == "fork"
    memory = SHARED.take(count * room) if forked else context.RawArray("B", count * room)
    team: list[Worker] = []
    try:
        try:
            for _ in range(workers):
                team.append(Worker(context, work, memory, room, name))
        except OSError as error:
            why = f"cannot start reading process {len(team) + 1}: {files.refusal(error)}"
            raise UserError(f"{why}, or take --data.workers {len(team)}") from error
        yield from in_order(team, slots_in(memory, room)[:count], iter(tasks))
    finally:
        for worker in team:
            worker.process.kill()  # it holds nothing that could be lost
        for worker in team:
            if worker.busy:  # until its end it might still write into the memory
                worker.process.join()
            worker.pipe.close()
        if forked:
            SHARED.give(memory)


def in_order(
    team: "list[Worker]", slots: NDArray[np.uint8], tasks: Iterator[Task]
) -> Iterator[tuple[Task, Any, Slot]]:
    """Whoever has least to do takes the next task; what is done waits until its turn comes."""
    free = list(range(len(slots)))  # the last one used is the first to be used again
    waiting: deque[tuple[Task, int]] = deque()  # given to a worker, with their slots
    done: dict[int, Answer] = {}  # by slot
    while True:
        done |= answers(team, waiting=False)  # who is done has time for the next task
        while free and (worker := min(team, key=lambda worker: worker.busy)).busy < AHEAD:
            if (task := next(tasks, None)) is None:
                for idle in team:
                    if not idle.busy:
                        idle.process.kill()  # now, beside those that still work: it takes a while
                break
            slot = free.pop()
            worker.send(slot, task)
            waiting.append((task, slot))
        if not waiting:
            return
        task, slot = waiting[0]
        if slot in done:
            waiting.popleft()
            yield task, opened(done.pop(slot)), slots[slot]
            free.append(slot)
        else:
            done |= answers(team, waiting=True)


def answers(team: "list[Worker]", waiting: bool) -> dict[int, Answer]:
    """What the workers have done, by slot; if wanted, as soon as there is something."""
    found: dict[int, Answer] = {}
    while pipes := {worker.pipe: worker for worker in team if worker.busy}:
        ready = wait(pipes, None if waiting and not found else 0)  # so is that of one that died
        found |= dict(pipes[pipe].receive() for pipe in ready)
        if not ready:
            break
    return found


def opened(answer: Answer) -> Any:
    kind, content = answer
    if kind == "refused":
        raise Refused(content)
    if kind == "mistake":
        raise UserError(content)
    if kind == "bug":
        raise RuntimeError(f"in a reading process:\n{content}")
    return content


class Worker:
    """The other process, seen from this one."""

    def __init__(self, context: Any, work: Any, memory: Any, room: int, name: Callable[[int], str]):
        self.busy = 0  # tasks in its hands
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
        # a script that ends amid an epoch would ask it to end, which it ignores, and wait forever
        Finalize(self, self.process.kill, exitpriority=0)

    def send(self, slot: int, task: Any) -> None:
        self.busy += 1
        try:
            self.pipe.send((slot, task))
        except OSError as error:
            raise self.death() from error

    def receive(self) -> tuple[int, Answer]:
        """The slot of a task that is done, and how it went."""
        try:
            slot, answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self.death() from error
        self.busy -= 1
        return slot, answer

    def death(self) -> UserError:
        self.process.join(5)
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        where = f"on {self.name(self.on.value)}" if self.on.value >= 0 else "starting"
        return UserError(
            f"a reading process {how} while it was {where}; look at that file, "
            f"or try fewer workers if memory was short"
        )


def slots_in(memory: Any, room: int) -> NDArray[np.uint8]:
    slots = np.frombuffer(memory, np.uint8)
    return slots[: len(slots) // room * room].reshape(-1, room)


def serve(pipe: Connection, work: Any, memory: Any, room: int, on: Any) -> None:
    """The life of a worker: it ends with its parent, and leaves signals to all of them to it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    torch.set_num_threads(1)  # after a fork more than one would wait forever
    slots, known = slots_in(memory, room), set[int]()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def note(item: int) -> None:
        on.value = item

    while pipe in wait([pipe, parent.sentinel]):
        try:
            slot, task = pipe.recv()
        except (EOFError, OSError):
            return
        if slot not in known and isinstance(memory, mmap.mmap):
            ask_for_pages(memory, slot * room, room)
            known.add(slot)
        try:
            answer = "done", work(task, slots[slot], note)
        except Refused as error:
            answer = "refused", str(error)
        except UserError as error:
            answer = "mistake", str(error)
        except Exception:
            answer = "bug", traceback.format_exc()
        try:
            pipe.send((slot, answer))
        except OSError:  # nobody is there any more
            return
