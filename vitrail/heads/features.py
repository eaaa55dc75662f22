"""What a head reads of images: computed once, in batches, and kept by content."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from vitrail import files
from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.source import Source, Split, indices
from vitrail.data.sources.places import cache_folder
from vitrail.data.split import digests
from vitrail.display.progress import bar
from vitrail.errors import UserError
from vitrail.model.vit import ViT
from vitrail.training.learner import computed_in

What = Literal["pooled", "cls", "average"]

LAYOUT = 1  # of the kept files: a new number makes old ones unknown

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Features:
    what: What = "pooled"  # what the model's own head reads, [CLS], or the average of the patches
    layers: tuple[int, ...] = ()  # blocks whose features are joined, from 0; empty: the last one

    def __post_init__(self) -> None:
        if self.what not in get_args(What):
            raise UserError(f"features {self.what!r} are unknown; choose {' or '.join(WHATS)}")

    def check(self, model: ViT) -> None:
        if self.what == "cls" and model.config.pool != "cls":
            raise UserError(
                f"the model has no [CLS] token, it pools by {model.config.pool!r}; "
                f"choose pooled or average features"
            )

    def of(self, model: ViT, x: Tensor) -> Tensor:
        """One vector for each image, the chosen layers one behind the other."""
        tokens = model.features(x, self.layers or None, norm=False, prefix=True)
        if self.what == "pooled":
            return torch.cat([model.pool(layer) for layer in tokens], dim=1)
        if self.what == "cls":
            return torch.cat([model.norm(layer[:, 0]) for layer in tokens], dim=1)
        front = model.config.prefix
        return torch.cat([model.norm(layer[:, front:]).mean(dim=1) for layer in tokens], dim=1)


WHATS: tuple[str, ...] = get_args(What)


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """What of a split a head learns from, or is judged on."""

    x: NDArray[np.float32]  # a row for each image
    y: NDArray[np.int64]
    items: NDArray[np.int64]  # positions of the images in the data set

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, kw_only=True, eq=False)
class Extractor:
    """Features of whole splits."""

    model: ViT
    view: Preprocess
    features: Features
    batch: int = 64  # images at once
    skip_broken: bool = False  # go on without images that cannot be read

    def __post_init__(self) -> None:
        self.features.check(self.model)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> NDArray[np.float32]:
        """Of preprocessed images."""
        device = next(self.model.parameters()).device
        dtype = computed_in("auto", device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            found = self.features.of(self.model, images.to(device, non_blocking=True))
        rows: NDArray[np.float32] = found.float().cpu().numpy()
        if not np.isfinite(rows).all():
            raise UserError("some features are NaN or infinite; the weights are damaged")
        return rows

    def examples(self, source: Source, split: Split) -> Examples:
        """From the cache folder, if these weights saw these images before."""
        items = indices(source, split)
        if not len(items):
            empty = np.empty((0, self.width), np.float32)
            return Examples(x=empty, y=source.labels[items], items=items)
        path = cache_folder() / "features" / f"{self.key(source, items)}.kept"
        kept = read(path)
        if kept is None:
            kept = self.compute(source, split, items)
            keep(path, kept)
        chosen = items[kept["places"]]
        return Examples(x=kept["x"], y=source.labels[chosen], items=chosen)

    @property
    def width(self) -> int:
        return self.model.config.width * max(1, len(self.features.layers))

    def key(self, source: Source, items: NDArray[np.int64]) -> str:
        """Changes with every weight, pixel and setting that the features depend on."""
        told = {
            "layout": LAYOUT,
            "weights": weights_digest(self.model),
            "view": self.view.plain(),
            "what": self.features.what,
            "layers": self.model.chosen(self.features.layers or None),
            "precision": str(computed_in("auto", next(self.model.parameters()).device)),
            "skip_broken": self.skip_broken,
        }
        checksum = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        checksum.update(digests(source, items).tobytes())
        return checksum.hexdigest()

    def compute(
        self, source: Source, split: Split, items: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        config = DataConfig(skip_broken=self.skip_broken, disk_gb=0)
        device = next(self.model.parameters()).device
        loader = Loader(source, self.view, config, batch=self.batch, device=device)
        loader.prepare(split, training=False)
        rows, seen = [], []
        with bar(f"features of {split} images", len(items)) as advance:
            for batch in loader.evaluation(split, self.batch):
                rows.append(self(batch.images))
                seen.append(batch.items)
                advance(len(batch.items))
        if not rows:
            raise UserError(f"no {split} image of {source.name} can be read; run `vitrail check`")
        return {
            "x": np.concatenate(rows),
            "places": np.searchsorted(items, np.concatenate(seen)),
        }


def weights_digest(model: ViT) -> str:
    """A checksum of all that features depend on: every tensor but those of the head."""
    checksum = hashlib.sha256(json.dumps({**asdict(model.config), "classes": 0}).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(("head.", "head_dist.", "pre_logits.")):
            checksum.update(name.encode() + tensor.detach().cpu().float().numpy().tobytes())
    return checksum.hexdigest()


def keep(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """A checksum first: safetensors does not notice a flipped byte."""
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    try:
        files.write(path, hashlib.sha256(content).digest() + content)
    except UserError as error:
        log.warning(f"the features will be computed again next time: {error}")


def read(path: Path) -> dict[str, NDArray[Any]] | None:
    """What was kept; None if there is nothing, or if it is damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            return None
        return load(content[32:])
    except (OSError, SafetensorError):
        return None
