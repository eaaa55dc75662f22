"""Starts several processes of one test, which find each other as those of torchrun do."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from vitrail.training.distributed import PeerLost, join_world


def ranks(
    size: int, work: Callable[[Any], Any], timeout: float = 30, join: bool = True
) -> list[Any]:
    """What `work` returns, or raises, in each of `size` processes; it must not return tensors.

    It gets the `World`, or without `join` its rank, and then joins by itself. A fork of a process
    with many threads may die at its start: if some rank never joined, all are started once more.
    """
    found = start_ranks(size, work, timeout, join)
    if any(isinstance(one, PeerLost) and "did not find all" in str(one) for one in found):
        return start_ranks(size, work, timeout, join)
    return found


def start_ranks(size: int, work: Callable[[Any], Any], timeout: float, join: bool) -> list[Any]:
    context = multiprocessing.get_context("fork")
    port = free_port()
    started = []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        arguments = (rank, size, port, work, timeout if join else 0, theirs)
        process = context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        started.append((process, mine))
    end = time.monotonic() + 3 * timeout
    found = [answer(pipe, end) for _, pipe in started]
    for process, _ in started:
        process.kill()
        process.join()
    return found


def answer(pipe: Any, end: float) -> Any:
    """None for a process that died or hangs."""
    try:
        return pipe.recv() if pipe.poll(max(0, end - time.monotonic())) else None
    except EOFError:
        return None


def run_rank(rank: int, size: int, port: int, work: Any, timeout: float, pipe: Any) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        if timeout:
            with join_world(timeout) as world:
                found = work(world)
        else:
            found = work(rank)
    except BaseException as error:
        found = error
    pipe.send(found)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
