"""Converts weights of any known layout to timm's, Hugging Face's, torchvision's or Vitrail's."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.errors import UserError
from vitrail.model.embed import sincos_positions
from vitrail.model.vit import ViT
from vitrail.zoo.file import save_model
from vitrail.zoo.layouts.layout import Layout
from vitrail.zoo.layouts.mapping import LAYOUTS
from vitrail.zoo.load import LoadedModel, load_weights
from vitrail.zoo.reference import compute_reference, describe_reference
from vitrail.zoo.weights import Normalisation

Target = Literal[
    "timm", "huggingface", "torchvision", "vitrail"
]  # Google's layout can only be read

LOGIT_TOLERANCE = 1e-5  # the largest difference in logits that another eps may make
FILE_SUFFIXES = (".safetensors", ".pth", ".bin")  # an `out` with one of these is a single file


@dataclass(frozen=True, kw_only=True, repr=False)
class Conversion:
    """What `convert` read, changed and wrote; its fields are the keys of `convert --json`.

    >>> vitrail.convert("runs/digits-1", to="timm", out="exported", vit={"classes": 5}).adapted
    ['classes 10 -> classes 5: a new head of zeros', 'positions sincos -> learned: ...']
    """

    source: str  # path or hub name as given
    target: str  # folder or file that was written
    format: str  # layout of the source: vitrail, timm, huggingface, torchvision, google
    loaded: int  # tensors of the source that became parameters
    resized: list[str]  # position embedding and patch kernel: old and new size
    adapted: list[str]  # classes, channels, depth, dtype: old and new value
    left_out: list[str]  # tensors that were not used, and why
    assumed: list[str]  # settings that the source does not state, and where they come from

    def __repr__(self) -> str:
        lines = [f"  {kind}: {line}" for kind, line in self._changes()]
        return "\n".join([f"Conversion: {self._title}", *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{kind}</td><td style='text-align:left'>{escape(line)}</td></tr>"
            for kind, line in self._changes()
        )
        return f"<table><caption>{escape(self._title)}</caption>{rows}</table>"

    @property
    def _title(self) -> str:
        return f"{self.source} ({self.format}) -> {self.target}, {self.loaded} tensors"

    def _changes(self) -> list[tuple[str, str]]:
        kinds = ("resized", "adapted", "left_out", "assumed")
        return [(kind.replace("_", " "), line) for kind in kinds for line in getattr(self, kind)]


@check_arguments
def convert(
    source: str | Path,
    to: Target,
    out: str | Path,
    *,
    vit: Mapping[str, Any] | None = None,
    preprocess: Normalisation | None = None,
) -> Conversion:
    """Writes weights in the layout `to`, so that the library's own loader reads them.

    `source` is a run folder, a weight file or folder of any known layout, or "hf:owner/name".
    `out` is a new folder with weights and config files; if it ends in .safetensors, .pth or .bin,
    a file with the state dict alone. `vit` holds settings of `ViTConfig` to adapt the weights to
    (image, patch, channels, classes, depth, head), or that the file does not state (heads, mlp,
    eps, positions). `preprocess` names the mean and standard deviation that the weights expect, if
    the file does not state them.

    >>> vitrail.convert("runs/digits-1", to="timm", out="exported")
    Conversion: runs/digits-1 (vitrail) -> exported, ... tensors
      adapted: positions sincos -> learned: their values are written out
    """
    out = files.expand_user(out)
    is_file = out.suffix in FILE_SUFFIXES
    check_conversion_target(to, out, is_file)
    loaded = load_weights(source, vit=vit, preprocess=preprocess)
    if to == "vitrail":
        path = out if is_file else out / "model.safetensors"
        save_model(path, loaded.model, build_metadata(loaded))
    else:
        write_foreign(loaded, LAYOUTS[to], out, is_file)
    return Conversion(target=str(out), **asdict(loaded.report))


def check_conversion_target(to: str, out: Path, is_file: bool) -> None:
    """Raises if the layout cannot be written at all, or not to this path."""
    if to not in get_args(Target):
        reason = "can only be read" if to in LAYOUTS else "is unknown"
        raise UserError(f"layout {to!r} {reason}; choose one of {', '.join(get_args(Target))}")
    if to == "torchvision" and not is_file:
        raise UserError(f"torchvision's weights are a single file; end `out` ({out}) in .pth")
    if out.is_dir() or (out.exists() and not is_file):
        raise UserError(f"{out} already exists; choose another `out`")
    if to == "vitrail" and out.suffix in (".pth", ".bin"):
        raise UserError(f"Vitrail writes safetensors; end `out` ({out}) in .safetensors")


def build_metadata(loaded: LoadedModel) -> dict[str, Any]:
    """The metadata of a Vitrail model file, without the keys that `save_model` adds."""
    added = ("format", "vit", "versions", "checksums")
    stored = {key: value for key, value in loaded.metadata.document.items() if key not in added}
    return {
        "temperature": None,
        "metrics": {},
        "weights": {"source": loaded.report.source, "format": loaded.report.format},
        **stored,
        "classes": list(loaded.classes) if loaded.classes else None,
        "channels": loaded.model.config.channels,
        "preprocess": loaded.preprocess.to_dict() if loaded.preprocess else None,
        "reference": describe_model_reference(loaded),
    }


def describe_model_reference(loaded: LoadedModel) -> dict[str, Any] | None:
    """The answers to the reference images; None for a model that has none."""
    if loaded.preprocess is None or loaded.model.config.head == "none":
        return None
    return describe_reference(compute_reference(loaded.model, loaded.preprocess))


def write_foreign(loaded: LoadedModel, layout: Layout, out: Path, is_file: bool) -> None:
    vit, state = loaded.model.config, dict(loaded.model.state_dict())
    adapted = loaded.report.adapted
    if vit.small_stem:
        raise UserError(f"only Vitrail has stem {vit.stem}; convert with `to='vitrail'`")
    check_eps(loaded.model, layout, adapted)
    if vit.positions == "sincos":
        positions = sincos_positions(vit.grid, vit.width, torch.zeros(1))[None]
        prefix = positions.new_zeros(1, vit.class_tokens, vit.width)
        state["pos_embed"] = torch.cat([prefix, positions], dim=1)
        adapted.append("positions sincos -> learned: their values are written out")
    assert layout.export is not None, f"{layout.name} has no exporter"
    export = layout.export(vit, state, loaded.classes, loaded.preprocess)
    with files.atomic_write(out) as temporary:
        if is_file:
            save_tensors(export.tensors, temporary)
            return
        temporary.mkdir()
        save_tensors(export.tensors, temporary / "model.safetensors")
        for name, content in export.json_files.items():
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (temporary / name).write_text(text + "\n", encoding="utf-8")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    dense = {name: x.detach().contiguous() for name, x in tensors.items()}
    dense = {  # a view would be saved with all of its storage
        name: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
        for name, x in dense.items()
    }
    if path.suffix == ".safetensors":
        save_file(dense, path, {"format": "pt"})
    else:
        torch.save(dense, path)


def check_eps(model: ViT, layout: Layout, adapted: list[str]) -> None:
    """Raises if the layout's files cannot state this eps, and the eps they imply changes logits."""
    if layout.eps is None or model.config.eps in layout.eps:
        return
    eps = layout.eps[0]
    difference = measure_eps_effect(model, eps)
    change = f"eps {model.config.eps:g} -> {eps:g}, which {layout.name}'s files cannot state"
    if difference > LOGIT_TOLERANCE:
        raise UserError(
            f"{change}: logits would differ by {difference:.1g}; "
            f"try `to='huggingface'` or `to='vitrail'`"
        )
    adapted.append(f"{change}: logits of a random image differ by {difference:.1g}")


@torch.no_grad()
def measure_eps_effect(model: ViT, eps: float) -> float:
    """The largest change of the logits of a random image if all norms had this eps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, model.config.channels, *model.config.size, generator=generator)
    before = model(x)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    originals = [norm.eps for norm in norms]
    for norm in norms:
        norm.eps = eps
    after = model(x)
    for norm, original in zip(norms, originals, strict=True):
        norm.eps = original
    return float((after - before).abs().max())
