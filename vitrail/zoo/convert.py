"""Weights out again: what Vitrail can load, written as each peer's own loader wants it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail import files
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.embed import sincos
from vitrail.model.vit import ViT
from vitrail.zoo.file import save_model
from vitrail.zoo.layouts import names
from vitrail.zoo.layouts.huggingface import processor, to_hugging_face
from vitrail.zoo.layouts.names import inverse, translate
from vitrail.zoo.layouts.timm import to_timm
from vitrail.zoo.load import Loaded, Means, Report, load

Format = Literal["timm", "huggingface", "torchvision", "vitrail"]

EPS = {"timm": (1e-6, 1e-5), "torchvision": (1e-6,)}  # of norms, that their files imply
SAME = 1e-5  # logits that differ by less are the same
LONE = (".safetensors", ".pth", ".bin")  # what a file of weights without config may end in


@dataclass(frozen=True, kw_only=True)
class Converted:
    report: Report
    target: str


def convert(
    path: str | Path,
    to: Format,
    out: str | Path,
    *,
    vit: Mapping[str, Any] | None = None,
    preprocess: Means | None = None,
) -> Converted:
    """Loads weights as `load` does, and writes them to `out`: a folder, or a file of weights."""
    out = files.expanded(out)
    lone = out.suffix in LONE
    if to == "torchvision" and not lone:
        raise UserError(f"torchvision's weights are one file; end --out {out} in .pth")
    if out.is_dir() or (out.exists() and not lone):
        raise UserError(f"{out} is there already; choose another --out")
    loaded = load(path, vit=vit, preprocess=preprocess)
    if to == "vitrail":
        if out.suffix in (".pth", ".bin"):
            raise UserError(f"Vitrail's weights are safetensors; end --out {out} in .safetensors")
        save_model(out if lone else out / "model.safetensors", loaded.model, own_facts(loaded))
    else:
        write(loaded, to, out, lone)
    return Converted(report=loaded.report, target=str(out))


def own_facts(loaded: Loaded) -> dict[str, Any]:
    """What a file of ours says of itself, beside its architecture."""
    kept = {k: v for k, v in loaded.facts.items() if k not in ("format", "vit", "versions")}
    source = {"source": loaded.report.source, "format": loaded.report.format}
    return {
        "temperature": None,
        "metrics": {},
        "weights": source,
        **kept,
        "classes": list(loaded.classes) if loaded.classes else None,
        "channels": loaded.model.config.channels,
        "preprocess": loaded.view.plain() if loaded.view else None,
    }


def write(loaded: Loaded, to: Format, out: Path, lone: bool) -> None:
    vit, state = loaded.model.config, dict(loaded.model.state_dict())
    notes = loaded.report.adapted
    check_eps(loaded.model, to, notes)
    if vit.positions == "sincos":
        positions = sincos(vit.grid, vit.width, torch.zeros(1))[None]
        front = positions.new_zeros(1, vit.readers, vit.width)
        state["pos_embed"] = torch.cat([front, positions], dim=1)
        notes.append("positions sincos -> learned: written out")
    others: dict[str, Any] = {}
    if to == "timm":
        tensors, others["config.json"] = to_timm(vit, state, loaded.classes, loaded.view)
    elif to == "huggingface":
        tensors, others["config.json"] = to_hugging_face(vit, state, loaded.classes)
        if loaded.view is not None:
            others["preprocessor_config.json"] = processor(loaded.view)
    else:
        tensors = to_torchvision(vit, state)
    with files.replacing(out) as temporary:
        if lone:
            save(tensors, temporary)
            return
        temporary.mkdir()
        save(tensors, temporary / "model.safetensors")
        for name, content in others.items():
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (temporary / name).write_text(text + "\n", encoding="utf-8")


def save(tensors: Mapping[str, Tensor], path: Path) -> None:
    whole = {name: x.detach().contiguous() for name, x in tensors.items()}
    whole = {
        name: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
        for name, x in whole.items()
    }
    if path.suffix == ".safetensors":
        save_file(whole, path, {"format": "pt"})
    else:
        torch.save(whole, path)


def check_eps(model: ViT, to: Format, notes: list[str]) -> None:
    """Some files cannot say the eps of norms; stops if that of the peer changes the logits."""
    usual = EPS.get(to)
    if usual is None or model.config.eps in usual:
        return
    difference = with_eps(model, usual[0])
    line = f"eps {model.config.eps:g} -> {usual[0]:g}, which a file of {to} cannot say"
    if difference > SAME:
        raise UserError(
            f"{line}: logits would differ by {difference:.1g}; try --to huggingface or vitrail"
        )
    notes.append(f"{line}: logits of a random image differ by {difference:.1g}")


@torch.no_grad()
def with_eps(model: ViT, eps: float) -> float:
    """The largest difference that another eps makes to what the model says of a random image."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, model.config.channels, *model.config.size, generator=generator)
    before = model(x)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    kept = [norm.eps for norm in norms]
    for norm in norms:
        norm.eps = eps
    after = model(x)
    for norm, old in zip(norms, kept, strict=True):
        norm.eps = old
    return float((after - before).abs().max())


def to_torchvision(vit: ViTConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    odd = {
        f"pool {vit.pool}": vit.pool != "cls",
        f"positions {vit.positions}": vit.positions == "rotary",
        f"mlp {vit.mlp}": vit.mlp != "gelu",
        "registers": bool(vit.registers),
        "distillation": vit.distilled,
        "layer scale": vit.layer_scale is not None,
        "qk_norm": vit.qk_norm,
        "pre_norm": vit.pre_norm,
        f"stem {vit.stem}": vit.stem != "patch",
        f"{vit.channels} channels": vit.channels != 3,
        "images that are not square": vit.size[0] != vit.size[1],
        "model without head": vit.head == "none",
    }
    for what, present in odd.items():
        if present:
            raise UserError(f"torchvision's VisionTransformer has no {what}; try --to timm")
    if "pos_embed" not in state:
        state = {**state, "pos_embed": torch.zeros(1, 1 + vit.patches, vit.width)}
    back = inverse(names.TORCHVISION)
    tensors = {}
    for name, x in state.items():
        theirs = translate(name, back)
        assert theirs is not None, f"{name} has no name there"
        tensors[theirs] = x
    return tensors
