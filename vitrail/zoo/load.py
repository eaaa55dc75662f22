"""Find, check, rename, stretch positions, swap the head: any weights become a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.vit import ViT
from vitrail.zoo.file import load_model

Means = Literal["half", "imagenet", "clip"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a file's tensors; nothing that happened to them is left unsaid."""

    source: str  # path or hub name, as it was given
    format: str  # vitrail, timm, huggingface, torchvision, google
    loaded: int  # tensors of the file that found their place
    resized: list[str]  # positions, patch kernel: from what to what
    adapted: list[str]  # classes, channels, depth, precision: from what to what
    left_out: list[str]  # tensors without a place here, and why
    told: list[str]  # what the file could not say, and who said it: a table or a flag


@dataclass(frozen=True, kw_only=True)
class Loaded:
    model: ViT  # in evaluation mode
    classes: tuple[str, ...] | None  # none: the file does not say
    view: Preprocess | None  # none: neither config, table nor flag says
    facts: dict[str, Any]  # Vitrail's own metadata; of a foreign file none
    report: Report


def load(
    path: str | Path, *, vit: Mapping[str, Any] | None = None, preprocess: Means | None = None
) -> Loaded:
    """A run folder, a weight file or folder of any known layout, or "hf:owner/name".

    `vit` are settings that shall be, or that nobody else can tell: image, patch, channels,
    classes, depth, heads. `preprocess` names mean and standard deviation of a bare file.
    """
    place = Path(path)
    file = place / "model.safetensors" if place.is_dir() else place
    model, facts = load_model(file)
    if vit or preprocess:
        raise UserError(f"{path} cannot be changed yet; leave {sorted(vit or {'preprocess'})} out")
    view = Preprocess.from_plain(facts["view"]) if facts.get("view") else None
    report = Report(
        source=str(path),
        format="vitrail",
        loaded=len(model.state_dict()),
        resized=[],
        adapted=[],
        left_out=[],
        told=[],
    )
    classes = tuple(facts["classes"]) if facts.get("classes") else None
    return Loaded(model=model, classes=classes, view=view, facts=facts, report=report)
