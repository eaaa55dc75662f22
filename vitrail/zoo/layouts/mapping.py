"""Recognises the layout of a file and maps each of its tensors to a parameter of Vitrail."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vitrail.errors import UserError
from vitrail.zoo.files.lazy import FileContents, LazyTensor
from vitrail.zoo.layouts import clip, google, huggingface, timm, torchvision
from vitrail.zoo.layouts.layout import (
    Layout,
    MappedStateDict,
    summarise_names,
    translate_name,
)

# A new layout is a module with a LAYOUT and a line here. The first layout whose patch projection is
# in the file wins: Google before torchvision, because Google's ResNets have a conv_proj too.
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        *(timm.LAYOUT, huggingface.LAYOUT, huggingface.DINOV3_LAYOUT, clip.HUGGINGFACE_LAYOUT),
        *(google.LAYOUT, torchvision.LAYOUT, clip.OPENAI_LAYOUT),
    )
}
PREFERRED = (
    "teacher",
    "ema",
    "target_encoder",
)  # of several models in one file, the averaged one is published

BEIT = "BEiT"  # refused by name: its relative positions are part of the attention

# Regex of tensors in checkpoints that image classification does not need, and the reason.
UNUSED = {
    r"(.*\.)?mask_token": "used in pretraining only",
    r"(.*\.)?decoder(_|\.).*": "a decoder, used in pretraining only",
    r"(.*\.)?predictor(_\w+)?\..*": "I-JEPA's predictor, used in pretraining only",
    r"(.*\.)?relative_position_(bias_table|index)": BEIT,
    r"(.*\.)?(head|dino_head|ibot_head)\.(mlp|last_layer)\..*": "a self-supervision head",
    r"(.*\.)?(dino_loss|ibot_patch_loss|koleo_loss)\..*": "a loss, used in pretraining only",
    r"(optim\w*|opt|scaler|\w*scheduler)\b.*": "training state",
}


@dataclass(frozen=True, kw_only=True)
class LayoutMatch:
    """The layout of a file, and the model in it that is loaded."""

    layout: Layout
    prefix: str  # of the parameter names, such as "module." or "teacher.backbone."
    assumed: list[str] = field(default_factory=list)
    other_models: set[str] = field(default_factory=set)  # first parts of the names of the others


def map_tensors(contents: FileContents, source: str) -> MappedStateDict:
    """Maps every tensor to a parameter, or gives a reason why it has none."""
    tensors = dict(google.unstack_blocks(contents.tensors))
    match = recognise_layout(tensors, source)
    layout, prefix = match.layout, match.prefix
    mapped = MappedStateDict(format=layout.name, chunks={}, assumed=match.assumed)
    reasons: dict[str, list[str]] = {}
    names: list[str] = []
    unknown: list[str] = []
    for name, (original, tensor) in tensors.items():
        if name.split(".")[0] in match.other_models:
            reason = f"part of another model in the same file, not of {prefix[:-1]}"
            reasons.setdefault(reason, []).append(original)
            continue
        if layout.outside and not name.startswith(prefix):
            reasons.setdefault(layout.outside, []).append(original)
            continue
        theirs = layout.normalise(strip_prefix(name, prefix))
        names.append(theirs)
        if ours := translate_name(theirs, layout.names):
            add_chunk(mapped, ours, tensor, source)
        elif find_reason(theirs, layout) == BEIT:
            raise UserError(
                f"{source} is a BEiT: its attention has relative positions, which a plain ViT does "
                f"not have; choose weights of another family"
            )
        elif unused := find_reason(theirs, layout):
            reasons.setdefault(unused, []).append(original)
        else:
            unknown.append(original)
    if unknown:
        raise UserError(
            f"{source} has tensors that a plain ViT in the layout of {layout.name} does not "
            f"have: {summarise_names(unknown)}"
        )
    if contents.others:
        reasons["not a tensor"] = sorted({name.split(".")[0] for name in contents.others})
    mapped.left_out.extend(f"{summarise_names(group)}: {why}" for why, group in reasons.items())
    if layout.finish is not None:
        layout.finish(mapped, names, source)
    return mapped


def recognise_layout(tensors: Mapping[str, tuple[str, LazyTensor]], source: str) -> LayoutMatch:
    for layout in LAYOUTS.values():
        anchor = layout.patch_weight
        prefixes = [
            name.removesuffix(anchor)
            for name in tensors
            if name == anchor or name.endswith(f".{anchor}")
        ]
        if len(prefixes) == 1:
            return LayoutMatch(layout=layout, prefix=prefixes[0])
        if len(prefixes) > 1:
            chosen = choose_model_prefix(prefixes, source)
            models = summarise_names([prefix[:-1] for prefix in prefixes])
            return LayoutMatch(
                layout=layout,
                prefix=chosen,
                assumed=[f"weights: {chosen[:-1]}, of the models {models}"],
                other_models={other.split(".")[0] for other in prefixes if other != chosen},
            )
    found = summarise_names(list(tensors)) or "no tensors"
    raise UserError(
        f"{source} does not contain a Vision Transformer in a known layout "
        f"({', '.join(LAYOUTS)}): it has {found}"
    )


def choose_model_prefix(prefixes: list[str], source: str) -> str:
    averaged = [prefix for prefix in prefixes if any(word in prefix for word in PREFERRED)]
    if len(averaged) != 1:
        models = summarise_names([prefix[:-1] for prefix in prefixes])
        raise UserError(f"{source} contains several models ({models}); save one of them by itself")
    return averaged[0]


def strip_prefix(name: str, prefix: str) -> str:
    """Removes the prefix or its outer part: `model.vit.` of the body, `model.` of the head."""
    while prefix:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
        prefix = prefix[: prefix.rstrip(".").rfind(".") + 1]
    return name


def find_reason(name: str, layout: Layout) -> str | None:
    """Why a tensor is not needed; None if no pattern matches its name."""
    for pattern, reason in {**layout.unused, **UNUSED}.items():
        if re.fullmatch(pattern, name):
            return reason
    return None


def add_chunk(mapped: MappedStateDict, target: str, tensor: LazyTensor, source: str) -> None:
    name, _, number = target.partition("#")
    chunks = mapped.chunks.setdefault(name, {})
    if int(number or 0) in chunks:
        raise UserError(f"{source} has two tensors for {name}; save one model by itself")
    chunks[int(number or 0)] = tensor
