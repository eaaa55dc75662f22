"""Processes that share one training: the leader decides and broadcasts, every rank computes."""

import json
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import UserError

TIMEOUT = 1800.0  # seconds; long, because machines may take unequally long to decode their images
GRACE = 3.0  # seconds in which the ranks that timed out find out which rank is missing
POLL = 0.02  # seconds between two reads of the store
SIGNS = 8  # of life per timeout, of a leader that works alone
TORCHRUN_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

T = TypeVar("T")


class PeerLost(UserError):
    """Another process ended or does not respond; the weights are those before the failed step."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a training, seen from one rank; by default there is only one.

    Every rank must call the same methods in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # rank among the processes of this machine
    launch_id: str = ""  # identifies the torchrun invocation, also after it restarts its processes
    timeout: float = TIMEOUT
    store: Store | None = None  # key-value store that all ranks share

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides, writes files and prints."""
        return self.rank == 0

    def on_leader(self, function: Callable[[], T]) -> T:
        """Calls `function` on the leader only and returns its result, any JSON, on every rank.

        If it raises, the leader raises that exception and the other ranks raise `PeerLost`.
        """
        if self.size == 1:
            return function()
        if not self.is_leader:
            succeeded, value = self.broadcast((False, None))
            if not succeeded:
                raise PeerLost("rank 0 failed; see its own error message")
            return value  # type: ignore[return-value]
        try:
            result = function()
        except Exception:
            with suppress(PeerLost):
                self.broadcast((False, None))
            raise
        self.broadcast((True, result))
        return result

    def load_on_leader(
        self, function: Callable[[], tuple[Mapping[str, Tensor], T]]
    ) -> tuple[dict[str, Tensor], T]:
        """Like `on_leader`, for a function that returns tensors by name and any JSON."""
        loaded: list[Mapping[str, Tensor]] = []

        def load() -> T:
            tensors, value = function()
            loaded.append(tensors)
            return value

        value = self.on_leader(load)
        return self.broadcast_tensors(loaded[0] if loaded else {}), value

    def on_slow_leader(self, function: Callable[[], T]) -> T:
        """Like `on_leader`, for a function that may take longer than the timeout.

        The other ranks wait as long as the process of the leader shows that it is alive.
        """
        if self.size == 1:
            return function()
        assert self.store is not None
        with self.report_lost_peers():
            call = f"slow/call-{self.store.add(f'slow/rank-{self.rank}', 1)}"
            if not self.is_leader:
                self._wait_while_alive(call)
        return self.on_leader(lambda: self._show_alive(call, function))

    def _show_alive(self, call: str, function: Callable[[], T]) -> T:
        """Counts up in the store from another thread while `function` runs."""
        store, ended = self.store, threading.Event()
        assert store is not None

        def count() -> None:
            while not ended.wait(self.timeout / SIGNS):
                store.add(f"{call}/signs", 1)

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            return function()
        finally:
            ended.set()
            thread.join()
            store.set(f"{call}/ended", "")

    def _wait_while_alive(self, call: str) -> None:
        assert self.store is not None
        signs, end = 0, time.monotonic() + self.timeout
        while not self.store.check([f"{call}/ended"]):
            if (seen := self.store.add(f"{call}/signs", 0)) != signs:
                signs, end = seen, time.monotonic() + self.timeout
            if time.monotonic() > end:
                raise PeerLost(self._describe_loss("timeout"))
            time.sleep(10 * POLL)

    def leader_first(self, function: Callable[[], T], *, slow: bool = False) -> T:
        """Calls `function` on every rank, but on the leader before the others.

        For a function that downloads or fills a cache which the other ranks then read; `slow` if
        that may take longer than the timeout.
        """
        results: list[T] = []
        call = self.on_slow_leader if slow else self.on_leader
        call(lambda: results.append(function()))
        return results[0] if results else function()

    def all_reduce(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        with self.report_lost_peers():
            dist.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums

    def broadcast(self, value: T) -> T:
        """The leader's value, any JSON; the values of the other ranks are ignored."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.is_leader else b""
        size = int(self.all_reduce(len(text))[0])
        buffer = torch.frombuffer(bytearray(text or bytes(size)), dtype=torch.uint8)
        with self.report_lost_peers():
            dist.broadcast(buffer, 0)
        received: T = json.loads(buffer.numpy().tobytes())
        return received

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leader's tensors by name, on the CPU; those of the other ranks are ignored."""
        if self.size == 1:
            return dict(tensors)
        specs = self.broadcast({name: [f"{t.dtype}", *t.shape] for name, t in tensors.items()})
        received = {}
        for name, (dtype, *shape) in specs.items():
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            if self.is_leader:
                received[name].copy_(tensors[name])
            with self.report_lost_peers():
                dist.broadcast(received[name], 0)
        return received

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, any JSON, in the order of the ranks."""
        text = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(text)]
        lengths = self.all_reduce(*(len(text) * (rank == self.rank) for rank in range(self.size)))
        buffer = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.empty_like(buffer) for _ in range(self.size)]
        with self.report_lost_peers():
            dist.all_gather(parts, buffer)
        return [
            json.loads(part[: int(length)].numpy().tobytes())
            for part, length in zip(parts, lengths, strict=True)
        ]

    def gather(self, rows: Tensor) -> Tensor | None:
        """On the leader, the rows of all ranks in turn (rank 0, 1, ..., 0, 1, ...); else None."""
        if self.size == 1:
            return rows
        total = int(self.all_reduce(len(rows))[0])
        padded = rows.new_zeros(-(-total // self.size), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.is_leader else None
        with self.report_lost_peers():
            dist.gather(padded, parts, dst=0)
        return torch.stack(parts, dim=1).flatten(0, 1)[:total] if parts else None

    def wrap_model(self, model: nn.Module, images: Tensor) -> nn.Module:
        """Wraps the model in DDP, which averages the gradients of all ranks; FSDP does it itself.

        One image passes through it before the first step. After its first backward pass DDP
        reorders its gradient buckets, and with three or more ranks the last bits of a sum depend
        on the position in its bucket. With the buckets settled, a resumed run reproduces every bit.
        """
        if self.size == 1 or is_sharded(model):
            return model
        with self.report_lost_peers():
            wrapped = DistributedDataParallel(model.eval())
            wrapped(images[:1]).sum().backward()
        model.zero_grad()
        return wrapped

    def average_buffers(self, model: nn.Module) -> None:
        """Averages the statistics of batch norms over all ranks, which saw different images."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        mean = torch.cat([buffer.flatten() for buffer in buffers])
        with self.report_lost_peers():
            dist.all_reduce(mean)
        mean /= self.size
        parts = mean.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    @contextmanager
    def report_lost_peers(self) -> Iterator[None]:
        """Turns torch's errors about a missing process into one line, a `PeerLost`."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                raise
            raise PeerLost(self._describe_loss(str(error).lower())) from error

    def _describe_loss(self, reason: str) -> str:
        timed_out = "timed out" in reason or "timeout" in reason
        missing = self._missing_ranks(GRACE if timed_out else 0.0)
        if not timed_out:
            return f"another of the {self.size} processes ended; see its own error message"
        ranks = ", ".join(map(str, missing)) or "unknown"
        return (
            f"rank {ranks} of {self.size} did not respond for {self.timeout:g} seconds; "
            f"find out why it hangs, or raise `timeout`"
        )

    def _missing_ranks(self, grace: float) -> list[int]:
        """The ranks that do not report a lost peer themselves within `grace` seconds."""
        assert self.store is not None
        end = time.monotonic() + grace
        try:
            self.store.set(f"here/{self.rank}", "")
            while True:
                missing = [
                    rank for rank in range(self.size) if not self.store.check([f"here/{rank}"])
                ]
                if not missing or time.monotonic() > end:
                    return missing
                time.sleep(POLL)
        except RuntimeError:  # the store ended with the process that hosted it
            return []


SINGLE = World()


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 divides the parameters among the ranks; without its import of half a second."""
    return hasattr(model, "reshard")


def skip_gradient_sync(model: nn.Module) -> AbstractContextManager[None]:
    """For all micro-batches but the last, which synchronises the accumulated gradients."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    no_sync: AbstractContextManager[None] = model.no_sync()
    return no_sync


@contextmanager
def join_world(timeout: float = TIMEOUT) -> Iterator[World]:
    """Connects to the other processes of the same torchrun; without torchrun yields `SINGLE`."""
    if not 0 < timeout < math.inf:
        raise UserError(f"timeout is {timeout:g}; give a number of seconds above 0")
    if not os.environ.keys() >= TORCHRUN_VARIABLES:
        yield SINGLE
        return
    rank, size, local_rank = (
        int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    if size == 1:
        agent = next(rendezvous("env://"))[0] if has_agent_store() else None
        yield World(launch_id=find_launch_id(agent))
        return
    try:
        agent, store = connect(rank, size, timeout)
    except RuntimeError as error:
        raise PeerLost(
            f"rank {rank} did not find all {size} processes within {timeout:g} seconds; "
            f"check which one torchrun could not start"
        ) from error
    try:
        launch = find_launch_id(agent) if rank == 0 else ""  # only the leader needs it
        with warnings.catch_warnings():
            # DDP warns of the [CLS] token: its gradient is correct, only its strides differ
            warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
            yield World(
                rank=rank,
                size=size,
                local_rank=local_rank,
                launch_id=launch,
                timeout=timeout,
                store=store,
            )
    finally:
        dist.destroy_process_group()


def connect(rank: int, size: int, timeout: float) -> tuple[Store, Store]:
    """Starts the process group; returns torchrun's store, and this attempt's part of it."""
    limit = timedelta(seconds=timeout)
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    agent, _, _ = next(rendezvous("env://", timeout=limit))
    store = PrefixStore(agree_on_prefix(agent, rank, size, timeout), agent)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return agent, store


def agree_on_prefix(store: Store, rank: int, size: int, timeout: float) -> str:
    """A key prefix that the leader invents and that no earlier attempt has used.

    torchrun restarts its processes with the same store, in which the keys of earlier attempts
    remain, and machines count restarts differently. So a rank trusts a prefix only once the
    leader has acknowledged it.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("vitrail/prefix", mine)
        for other in range(1, size):
            hello = store.get(f"{mine}/hello/{other}").decode()
            store.set(f"{mine}/welcome/{other}", hello)
        return mine
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        prefix: str = store.get("vitrail/prefix").decode()
        store.set(f"{prefix}/hello/{rank}", mine)
        answer = f"{prefix}/welcome/{rank}"
        if store.check([answer]) and store.get(answer).decode() == mine:
            return prefix
        time.sleep(POLL)
    raise RuntimeError("rank 0 did not answer")


def has_agent_store() -> bool:
    """Whether torchrun hosts the store, which then survives restarts of the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def find_launch_id(store: Store | None) -> str:
    """Identifies the torchrun that started this process; empty if none did.

    The first attempt leaves an id in torchrun's store, where the later ones find it.
    """
    if store is None or not has_agent_store():
        return ""
    launch: str = store.compare_set("vitrail/launch", "", uuid.uuid4().hex).decode()
    return launch
