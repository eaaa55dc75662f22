"""Which layout a file has, and where each of its tensors belongs here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.zoo.files.stored import Contents, Shape, Stored
from vitrail.zoo.layouts import google, names
from vitrail.zoo.layouts.names import translate

# By the name of the patch projection, which every ViT has.
ANCHORS = {
    "timm": "patch_embed.proj.weight",
    "huggingface": "embeddings.patch_embeddings.projection.weight",
    "google": "embedding.weight",  # before torchvision: its ResNets have a conv_proj too
    "torchvision": "conv_proj.weight",
}
TABLES: dict[str, Mapping[str, str]] = {
    "timm": names.TIMM | names.KIN_OF_TIMM,
    "huggingface": (names.HUGGING_FACE_DEIT | names.HUGGING_FACE_SWIGLU | names.HUGGING_FACE_5),
    "torchvision": names.TORCHVISION | names.OLD_TORCHVISION,
    "google": names.GOOGLE,
}
PREFERRED = ("teacher", "ema")  # of several models in one file, the averaged one is published


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The tensors of a file under our names, each in pieces that lie above one another."""

    format: str
    pieces: dict[str, dict[int, Stored]]
    left_out: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    vit: dict[str, Any] = field(default_factory=dict)  # settings that only names or arrays reveal

    def shape(self, name: str) -> Shape | None:
        """Of the joined pieces; none if the file has no such tensor."""
        if name not in self.pieces:
            return None
        shapes = [one.shape for one in self.pieces[name].values()]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def sort(contents: Contents, source: str, head: bool = True) -> Parts:
    """Recognises the layout and gives every tensor its place, or a reason why it has none.

    `head` says whether the file's own head is needed.
    """
    tensors = dict(google.unstacked(contents.tensors))
    format, front, told, rivals = recognise(tensors, source)
    pieces: dict[str, dict[int, Stored]] = {}
    reasons: dict[str, list[str]] = {}
    lost: list[str] = []
    vit: dict[str, Any] = {}
    for name, (theirs, stored) in tensors.items():
        short = normal(strip(name, front))
        ours = translate(short, TABLES[format])
        if name.split(".")[0] in rivals:
            reasons.setdefault(f"another model in the same file than {front[:-1]}", []).append(
                theirs
            )
        elif ours is not None:
            put(pieces, ours, stored, source)
            vit |= {"norm_after_pool": True} if short.startswith("fc_norm.") else {}
        elif reason := why(short):
            reasons.setdefault(reason, []).append(theirs)
        else:
            lost.append(theirs)
    if lost:
        raise UserError(
            f"{source} has no place here for {listing(lost)}: "
            f"it holds more than a plain ViT in the layout of {format}"
        )
    if contents.others:
        reasons["no weights"] = sorted({name.split(".")[0] for name in contents.others})
    left_out = [f"{listing(those)}: {reason}" for reason, those in reasons.items()]
    if format == "google":
        vit |= {"heads": google.turn(pieces, source), "mlp": "gelu_tanh"}
        told.append("mlp gelu_tanh: as Google's code has it")
    if any(name.endswith("rope_embed.periods") for name in tensors):
        vit |= {"positions": "rotary", "eps": 1e-5}
        told.append("positions rotary, eps 1e-05: as DINOv3's code has it")
    parts = Parts(format=format, pieces=pieces, left_out=left_out, told=told, vit=vit)
    halve_head(parts, head, source)
    if any(name.endswith(".bias_mask") for name in tensors):
        mask_keys(parts)
    return parts


def normal(name: str) -> str:
    """Other spellings of the same place: DINOv2's chunks of blocks, transformers 5."""
    name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
    return re.sub(r"^layers\.(\d+)\.", r"encoder.layer.\1.", name)


def recognise(tensors: Mapping[str, Any], source: str) -> tuple[str, str, list[str], set[str]]:
    """The layout, what stands in front of its names, what to tell, and models not chosen."""
    for format, anchor in ANCHORS.items():
        fronts = [
            name.removesuffix(anchor)
            for name in tensors
            if name == anchor or name.endswith(f".{anchor}")
        ]
        if len(fronts) == 1:
            return format, fronts[0], [], set()
        if len(fronts) > 1:
            front = prefer(fronts, source)
            told = [f"weights: {front[:-1]}, of the models {listing([f[:-1] for f in fronts])}"]
            return format, front, told, {other.split(".")[0] for other in fronts if other != front}
    raise UserError(
        f"{source} holds no Vision Transformer that is known here: it has "
        f"{listing(list(tensors)) or 'no tensors'}"
    )


def prefer(fronts: list[str], source: str) -> str:
    averaged = [front for front in fronts if any(word in front for word in PREFERRED)]
    if len(averaged) != 1:
        raise UserError(
            f"{source} holds several models ({listing([front[:-1] for front in fronts])}); "
            f"save one of them by itself"
        )
    return averaged[0]


def strip(name: str, front: str) -> str:
    """Without what stands in front: `vit.` of a body, `model.` of body and head."""
    while front:
        if name.startswith(front):
            return name.removeprefix(front)
        front = front[: front.rstrip(".").rfind(".") + 1]
    return name


def why(name: str) -> str | None:
    """The reason for which a published file's tensor is not needed."""
    for pattern, reason in names.LEFT_OUT.items():
        if re.fullmatch(pattern, name):
            return reason
    return None


def put(pieces: dict[str, dict[int, Stored]], ours: str, stored: Stored, source: str) -> None:
    name, _, number = ours.partition("#")
    place = pieces.setdefault(name, {})
    if int(number or 0) in place:
        raise UserError(f"{source} has two tensors for {name}; save one model by itself")
    place[int(number or 0)] = stored


def mask_keys(parts: Parts) -> None:
    """DINOv3 multiplies the bias of keys by zero; whatever lies there does not count."""

    def masked(x: Tensor) -> Tensor:
        q, k, v = x.chunk(3)
        return torch.cat([q, torch.zeros_like(k), v])

    for name, those in parts.pieces.items():
        if name.endswith(".attn.qkv.bias"):
            those[0] = those[0].turned(those[0].shape, masked)


def halve_head(parts: Parts, needed: bool, source: str) -> None:
    """DINOv2's head there reads [CLS] and the average of the patches; ours reads [CLS]."""
    head, kernel = (
        parts.pieces.get("head.weight", {}).get(0),
        parts.shape("patch_embed.proj.weight"),
    )
    if head is None or kernel is None or head.shape[1:] != (2 * kernel[0],):
        return
    width = kernel[0]
    if not head.read()[:, width:].any():
        parts.pieces["head.weight"][0] = head.turned((head.shape[0], width), lambda x: x[:, :width])
        return
    if needed:
        raise UserError(
            f"{source} has a head that reads the average of the patches beside [CLS], which no "
            f"model here does; load it without: --vit.head none"
        )
    del parts.pieces["head.weight"], parts.pieces["head.bias"]
    parts.left_out.append("classifier: it reads the average of the patches beside [CLS]")


def listing(those: list[str]) -> str:
    """The first of many names."""
    if len(those) <= 3:
        return ", ".join(those)
    return f"{', '.join(those[:2])} and {len(those) - 2} more"
