"""Many processes that share one training; one process is the case of world size 1."""

import json
import math
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import UserError

TIMEOUT = 1800.0  # seconds: machines may differ so much in decoding their images
GRACE = 3.0  # seconds in which those that gave up waiting find out who is missing
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # what torchrun sets

T = TypeVar("T")


class Lost(UserError):
    """Another process ended or does not answer; the weights are still those before the step."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """The processes of a training, seen from one of them; by default there is no other.

    What one of them calls, all call, in the same order.
    """

    rank: int = 0
    world: int = 1
    local: int = 0  # number of this process on its machine
    launch: str = ""  # names the torchrun that started it, and stays through its restarts
    timeout: float = TIMEOUT
    store: Store | None = None  # where the processes leave words for each other

    @property
    def first(self) -> bool:
        """Whether this is the one that decides, writes and speaks."""
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        if self.world == 1:
            return list(numbers)
        added = torch.tensor(numbers, dtype=torch.float64)
        with self.answered():
            dist.all_reduce(added)
        found: list[float] = added.tolist()
        return found

    def tell(self, value: T) -> T:
        """What the first process says, anything that JSON holds; what others say is not heard."""
        if self.world == 1:
            return value
        text = json.dumps(value).encode() if self.first else b""
        size = int(self.sum(len(text))[0])
        told = torch.frombuffer(bytearray(text or bytes(size)), dtype=torch.uint8)
        with self.answered():
            dist.broadcast(told, 0)
        heard: T = json.loads(told.numpy().tobytes())
        return heard

    def hand_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first process's tensors, by name and on the CPU; those of others are not read."""
        if self.world == 1:
            return dict(tensors)
        kinds = self.tell({name: [f"{t.dtype}", *t.shape] for name, t in tensors.items()})
        found = {}
        for name, (kind, *shape) in kinds.items():
            dtype = getattr(torch, kind.removeprefix("torch."))
            found[name] = torch.empty(shape, dtype=dtype)
            if self.first:
                found[name].copy_(tensors[name])
            with self.answered():
                dist.broadcast(found[name], 0)
        return found

    def gather(self, share: Tensor) -> Tensor | None:
        """At the first process the rows of all, dealt out one by one; None at the others."""
        if self.world == 1:
            return share
        total = int(self.sum(len(share))[0])
        rows = share.new_zeros(-(-total // self.world), *share.shape[1:])
        rows[: len(share)] = share
        parts = [torch.empty_like(rows) for _ in range(self.world)] if self.first else None
        with self.answered():
            dist.gather(rows, parts, dst=0)
        return torch.stack(parts, dim=1).flatten(0, 1)[:total] if parts else None

    def spread(self, model: nn.Module, images: Tensor) -> nn.Module:
        """The model with gradients that are the mean of all processes'.

        One image goes through it ahead of the first step: after its first backward pass DDP packs
        the gradients in the order they came, and among three or more processes the last bits of
        a sum hang on the place in its pack. So a run that goes on adds up as it did before.
        """
        if self.world == 1:
            return model
        with self.answered():
            shared = DistributedDataParallel(model.eval())
            shared(images[:1]).sum().backward()
        model.zero_grad()
        return shared

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Tells in one line that another process is missing, where torch tells it in many."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                raise
            raise Lost(self.complaint(str(error).lower())) from error

    def complaint(self, reason: str) -> str:
        late = "timed out" in reason or "timeout" in reason
        absent = self.absent(GRACE if late else 0.0)
        if not late:
            return f"another of the {self.world} processes ended; its own lines say why"
        who = ", ".join(map(str, absent)) or "unknown"
        return (
            f"rank {who} of {self.world} gave no answer for {self.timeout:g} seconds; "
            f"look why it hangs, or wait longer with --timeout"
        )

    def absent(self, grace: float) -> list[int]:
        """Ranks that do not say that they miss somebody too."""
        assert self.store is not None
        end = time.monotonic() + grace
        try:
            self.store.set(f"here/{self.rank}", "")
            while True:
                missing = [
                    rank for rank in range(self.world) if not self.store.check([f"here/{rank}"])
                ]
                if not missing or time.monotonic() > end:
                    return missing
                time.sleep(0.05)
        except RuntimeError:  # the store went with the process that kept it
            return []


ALONE = Together()


def unsynced(model: nn.Module) -> AbstractContextManager[None]:
    """For all parts of a batch but the last, whose gradients go round with those before."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    apart: AbstractContextManager[None] = model.no_sync()
    return apart


@contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[Together]:
    """All processes that torchrun started, once they have met; without torchrun this one alone."""
    if not 0 < timeout < math.inf:
        raise UserError(f"timeout is {timeout:g}; give a number of seconds above 0")
    if not os.environ.keys() >= LAUNCHED:
        yield ALONE
        return
    rank, world, local = (
        int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    if world == 1:
        yield Together(launch=launch())
        return
    limit = timedelta(seconds=timeout)
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        shared, _, _ = next(rendezvous("env://", timeout=limit))
        store = PrefixStore(meeting(shared, rank, world, timeout), shared)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except RuntimeError as error:
        raise Lost(
            f"rank {rank} did not meet all {world} processes within {timeout:g} seconds; "
            f"look which one torchrun could not start"
        ) from error
    try:
        with warnings.catch_warnings():
            # a token that is learned from one image: nothing is wrong with its gradient
            warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
            yield Together(
                rank=rank, world=world, local=local, launch=launch(), timeout=timeout, store=store
            )
    finally:
        dist.destroy_process_group()


def meeting(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that the first process gives, and that no earlier attempt has used.

    torchrun keeps its store when it starts the processes again, with all that was written there,
    and machines count restarts differently. So one believes a name only when it was answered.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("vitrail/meeting", mine)
        for other in range(1, world):
            hello = store.get(f"{mine}/hello/{other}").decode()
            store.set(f"{mine}/welcome/{other}", hello)
        return mine
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        name: str = store.get("vitrail/meeting").decode()
        store.set(f"{name}/hello/{rank}", mine)
        answer = f"{name}/welcome/{rank}"
        if store.check([answer]) and store.get(answer).decode() == mine:
            return name
        time.sleep(0.02)
    raise RuntimeError("rank 0 did not answer")


def launch() -> str:
    """Names the torchrun that is this process's parent: by its id, its machine and its start."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    agent = os.getppid()
    facts = Path(f"/proc/{agent}/stat")
    started = facts.read_text().rpartition(")")[2].split()[19] if facts.exists() else ""
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {started}"
