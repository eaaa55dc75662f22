"""Google's arrays under the names and in the shapes that all others use."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.zoo.files.stored import Shape, Stored


def unstacked(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, tuple[str, Stored]]]:
    """Each tensor with its name here and there; big_vision may stack those of all blocks."""
    for theirs, stored in tensors.items():
        name = plain(theirs)
        if "Transformer.encoderblock." in name:
            for number, one in enumerate(stored.split()):
                inner = name.replace("encoderblock.", f"encoderblock_{number}.")
                yield inner, (f"{theirs}[{number}]", one)
        else:
            yield name, (theirs, stored)


def plain(name: str) -> str:
    """Google's slashes and words become the dots and words of all others."""
    if "/" not in name:
        return name
    name = name.replace("/", ".").replace("MultiHeadDotProductAttention_", "Attention_")
    name = re.sub(r"\.(kernel|scale)$", ".weight", name)
    return re.sub(
        r"\bblock(\d+)\.unit(\d+)\.",
        lambda found: f"stages.{int(found[1]) - 1}.blocks.{int(found[2]) - 1}.",
        name,
    )


def turn(pieces: Mapping[str, dict[int, Stored]], source: str) -> int:
    """Turns every array, for inputs stand before outputs there; says how many heads they have."""
    heads = set()
    for name, those in pieces.items():
        for number, one in those.items():
            if re.search(r"\.(qkv|q|kv)\.weight$", name) and len(one.shape) == 3:
                heads.add(one.shape[1])
            those[number] = turned(name, one, source)
    if len(heads) != 1:
        raise UserError(f"{source} has blocks of {sorted(heads)} heads; all must have the same")
    return heads.pop()


def turned(name: str, one: Stored, source: str) -> Stored:
    shape = one.shape
    if name in ("cls_token", "pos_embed", "attn_pool.latent") and len(shape) == 3:
        return one
    if not name.endswith(".weight") or one_axis(shape):  # a bias, or the scale of a norm
        return one.turned((torch.Size(shape).numel(),), Tensor.flatten)
    if len(shape) == 4:
        return one.turned((shape[3], shape[2], *shape[:2]), lambda x: x.permute(3, 2, 0, 1))
    if len(shape) == 3 and name.endswith("proj.weight"):  # heads, width of each, width
        return one.turned((shape[2], shape[0] * shape[1]), lambda x: x.flatten(0, 1).T)
    if len(shape) == 3:  # width, heads, width of each
        return one.turned((shape[1] * shape[2], shape[0]), lambda x: x.flatten(1).T)
    if len(shape) == 2:
        return one.turned(shape[::-1], Tensor.t)
    raise UserError(f"{source} has {name} with {len(shape)} axes; that is not Google's layout")


def one_axis(shape: Shape) -> bool:
    return len(shape) == 1 or (len(shape) == 4 and shape[:3] == (1, 1, 1))
