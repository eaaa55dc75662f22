"""Compares a model with timm or transformers: the same weights and images, the difference."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.zoo.convert import convert
from vitrail.zoo.load import LoadedModel, load_weights
from vitrail.zoo.locate import locate_checkpoint
from vitrail.zoo.weights import Normalisation

Peer = Literal["timm", "transformers"]
LAYOUT_OF = {"timm": "timm", "transformers": "huggingface"}
IMAGES, SEED = 4, 0  # of the batch


@dataclass(frozen=True, kw_only=True)
class PeerCheck:
    """How far the outputs of two libraries for the same weights are apart."""

    peer: str
    version: str
    output: str  # what is compared: logits, or features of a model without a head
    images: int
    largest_difference: float
    largest_output: float  # for scale


def check_with_peer(
    path: str | Path,
    peer: Peer,
    *,
    vit: Mapping[str, Any] | None = None,
    preprocess: Normalisation | None = None,
) -> PeerCheck:
    """Runs a seeded batch through Vitrail and through timm or transformers.

    Weights of another layout are converted for the peer first, into a temporary folder.
    """
    library = import_peer(peer)
    loaded = load_weights(path, vit=vit, preprocess=preprocess)
    config = loaded.model.config
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(IMAGES, config.channels, *config.size, generator=generator)
    with tempfile.TemporaryDirectory() as temporary:
        folder = locate_checkpoint(path).weights.parent
        if not loaded.report.format.startswith(LAYOUT_OF[peer]) or vit:
            folder = Path(temporary, "model")
            convert(path, LAYOUT_OF[peer], folder, vit=vit, preprocess=preprocess)  # type: ignore[arg-type]
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json, from which {peer} builds the model")
        theirs = run_peer(library, peer, folder, x, loaded)
    with torch.inference_mode():
        ours: Tensor = loaded.model.eval()(x)
    if ours.shape != theirs.shape:
        raise UserError(
            f"{peer} returns {tuple(theirs.shape)}, Vitrail {tuple(ours.shape)}: "
            f"these are different models"
        )
    return PeerCheck(
        peer=peer,
        version=str(library.__version__),
        output="features" if config.head == "none" else "logits",
        images=IMAGES,
        largest_difference=float((ours - theirs).abs().max()),
        largest_output=float(theirs.abs().max()),
    )


def import_peer(peer: str) -> Any:
    if peer not in LAYOUT_OF:
        raise UserError(f"peer {peer!r} is unknown; choose one of {', '.join(LAYOUT_OF)}")
    try:
        return import_module(peer)
    except ImportError as error:
        raise UserError(f"{peer} is not installed: pip install {peer}") from error


def run_peer(library: Any, peer: str, folder: Path, x: Tensor, loaded: LoadedModel) -> Tensor:
    """The output of the peer's own model, built from the files in the folder."""
    headless = loaded.model.config.head == "none"
    if peer == "timm":
        model: nn.Module = library.create_model(f"local-dir:{folder}", pretrained=True)
    else:
        kind = library.AutoModel if headless else library.AutoModelForImageClassification
        model = kind.from_pretrained(folder)
        model = getattr(model, "vision_model", model)  # of CLIP and SigLIP with a text tower
    with torch.inference_mode():
        output = model.eval()(x)
    if isinstance(output, Tensor):
        return output
    if not headless:
        return torch.as_tensor(output.logits)
    if output.get("pooler_output") is not None:
        return torch.as_tensor(output.pooler_output)
    hidden: Tensor = output.last_hidden_state
    return hidden.mean(dim=1) if loaded.model.config.pool == "avg" else hidden[:, 0]
