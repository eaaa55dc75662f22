"""Sharding (FSDP2): a rank holds its rows of every parameter, and gathers one block at a time.

Optimizer, EMA, clipping and checkpoints see plain tensors that share the memory of these rows, so
that they work as with one process. Only what needs whole matrices exchanges them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vitrail.training.distributed import World


def shard_model(
    model: nn.Module, blocks: Iterable[nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """Shards a model of the meta device; its values on `device` are not initialised.

    The weights of blocks are gathered in `dtype`, in which their residual stream is computed, too;
    gradients are summed in float32. What is outside of the blocks stays in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)


def recompute_activations(blocks: Iterable[nn.Module]) -> None:
    """Activation checkpointing: stores the inputs of the blocks only (Chen et al., 2016)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, in the same memory; other tensors as they are."""
    if not has_rows_elsewhere(tensor):
        return tensor
    with torch.no_grad():
        rows: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return rows.detach()


def has_rows_elsewhere(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without its slow import."""
    return hasattr(tensor, "to_local")


def rank_rows(rows: int, rank: int, size: int) -> slice:
    """The rows of a parameter that a rank holds; the last ranks may have fewer, or none."""
    length = -(-rows // size)
    return slice(min(rows, rank * length), min(rows, (rank + 1) * length))


@torch.no_grad()
def fill_shards(model: nn.Module, tensors: Mapping[str, Tensor], world: World) -> None:
    """Gives each rank its rows of the leader's tensors; those of the other ranks are ignored."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        if world.is_leader:
            whole.copy_(tensors[name])
        with world.report_lost_peers():
            dist.broadcast(whole, 0)
        if has_rows_elsewhere(tensor):
            whole = whole[rank_rows(len(whole), world.rank, world.size)]
        local_rows(tensor).copy_(whole)


@torch.no_grad()
def gather_model(model: nn.Module, world: World) -> dict[str, Tensor]:
    """On the leader, all parameters and buffers, in the memory of the host; else nothing.

    They are gathered one by one, so that no device needs room for a second of them.
    """
    whole = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        rows = local_rows(tensor).cpu()
        if has_rows_elsewhere(tensor):
            rows = gather_rows(rows, len(tensor), world)
        if world.is_leader:
            whole[name] = rows.clone()
    return whole


def gather_rows(rows: Tensor, total: int, world: World) -> Tensor:
    """On the leader, the rows of all ranks in their order; on the others, their own."""
    padded = rows.new_zeros(-(-total // world.size), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(world.size)] if world.is_leader else None
    with world.report_lost_peers():
        dist.gather(padded, parts, dst=0)
    return torch.cat(parts)[:total] if parts else rows


class MatrixExchange:
    """Whole matrices from the rows that ranks hold, for Muon; each rank works on some of them.

    The rows of a matrix are sent to the rank that owns it, and those of the result sent back.
    """

    def __init__(self, world: World, total_rows: Mapping[Tensor, int]):
        self.world, self.total_rows = world, total_rows  # rows of the whole parameters
        self.none = next(iter(total_rows)).new_empty(0)  # for ranks that own no matrix

    def __call__(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        function: Callable[[list[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """This rank's rows of `function(whole updates)`, each flattened to a matrix."""
        size, rows = self.world.size, [update.flatten(1) for update in updates]
        totals = [self.total_rows[parameter] for parameter in parameters]
        owned = assign_evenly([n * x.shape[1] for n, x in zip(totals, rows, strict=True)], size)
        mine = owned[self.world.rank]
        slices = [[rank_rows(totals[i], rank, size) for i in mine] for rank in range(size)]
        received = self.exchange(
            [[rows[i] for i in numbers] for numbers in owned],
            [
                [
                    (part.stop - part.start, rows[i].shape[1])
                    for i, part in zip(mine, parts, strict=True)
                ]
                for parts in slices
            ],
        )
        results = function([torch.cat(parts) for parts in zip(*received, strict=True)])
        returned = self.exchange(
            [[x[part] for x, part in zip(results, parts, strict=True)] for parts in slices],
            [[tuple(rows[i].shape) for i in numbers] for numbers in owned],
        )
        found = {
            i: x
            for numbers, tensors in zip(owned, returned, strict=True)
            for i, x in zip(numbers, tensors, strict=True)
        }
        return [found[i] for i in range(len(rows))]

    def exchange(
        self, tensors: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Sends a list of tensors to each rank; returns what each rank sent, of these shapes."""
        sent = torch.cat([self.none, *(x.flatten() for some in tensors for x in some)])
        sizes = [[math.prod(shape) for shape in some] for some in shapes]
        received = sent.new_empty(sum(map(sum, sizes)))
        with self.world.report_lost_peers():
            dist.all_to_all_single(
                received,
                sent,
                [sum(some) for some in sizes],
                [sum(x.numel() for x in some) for some in tensors],
            )
        pieces = iter(received.split([size for some in sizes for size in some]))
        return [[next(pieces).view(shape) for shape in some] for some in shapes]


def assign_evenly(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the tasks of each rank: the largest first, each to the least busy rank."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        rank = loads.index(min(loads))
        assigned[rank].append(number)
        loads[rank] += costs[number]
    return assigned


class ShardedForward(nn.Module):
    """A sharded model for evaluation: inference mode would leave weights that cannot be trained."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            outputs: Tensor = self.model(x)
            # the root, which stays gathered for a backward pass
            self.model.reshard()  # type: ignore[operator]
        return outputs
