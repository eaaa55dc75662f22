"""Features of a frozen model: extracted once per data set, and cached by content."""

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
from vitrail.data.source import Source, Split, split_indices
from vitrail.data.sources.places import cache_folder
from vitrail.data.split import hash_items
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError
from vitrail.model.vit import ViT
from vitrail.training.learner import compute_dtype

FeatureKind = Literal["pooled", "cls", "average"]
FEATURE_KINDS: tuple[str, ...] = get_args(FeatureKind)

CACHE_VERSION = 2  # part of every cache key: a new number invalidates older cache files
DIGEST_BYTES = hashlib.sha256().digest_size  # the checksum in front of a cache file's content
MAX_BATCH = 1_000_000  # images in a forward pass; larger numbers are mistakes
HEAD_PREFIXES = ("head.", "head_dist.", "pre_logits.")  # tensors that features do not depend on

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Features:
    """Which features of a model a head reads."""

    kind: FeatureKind = "pooled"  # input of the model's own head, [CLS] token, or patch average
    layers: tuple[int, ...] = ()  # blocks whose features are concatenated; empty: the last block

    def __post_init__(self) -> None:
        if self.kind not in FEATURE_KINDS:
            raise UserError(
                f"features {self.kind!r} are unknown; choose one of {', '.join(FEATURE_KINDS)}"
            )

    def check_model(self, model: ViT) -> None:
        if self.kind == "cls" and not model.config.has_cls:
            raise UserError(
                f"the model has no [CLS] token: its pool is {model.config.pool!r}; "
                f"choose pooled or average features"
            )

    def extract(self, model: ViT, x: Tensor) -> Tensor:
        """One vector for each image, with the layers concatenated in their order."""
        tokens = model.features(x, self.layers or None, norm=False, prefix=True)
        if self.kind == "pooled":
            return torch.cat([model.pool(layer) for layer in tokens], dim=1)
        if self.kind == "cls":
            return torch.cat([model.norm(layer[:, 0]) for layer in tokens], dim=1)
        prefix = model.config.prefix
        return torch.cat([model.norm(layer[:, prefix:]).mean(dim=1) for layer in tokens], dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Features and labels of a split, to fit or evaluate a head on."""

    x: NDArray[np.float32]  # (images, features)
    y: NDArray[Any]  # class indices; multi-label: (images, classes) of 0 and 1
    items: NDArray[np.int64]  # indices of the images in the data set

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureExtractor:
    """Extracts the features of single batches and of whole splits."""

    model: ViT
    preprocess: Preprocess
    features: Features
    batch: int = 64  # batch size
    skip_broken: bool = False  # skip images that cannot be read

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= MAX_BATCH:
            raise UserError(f"`batch` is {self.batch}; give a number from 1 to {MAX_BATCH:,}")
        self.features.check_model(self.model)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> NDArray[np.float32]:
        """Features of a batch of preprocessed images."""
        device = next(self.model.parameters()).device
        dtype = compute_dtype("auto", device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            images = images.to(device, non_blocking=device.type == "cuda")
            output = self.features.extract(self.model, images)
        rows: NDArray[np.float32] = output.float().cpu().numpy()
        if not np.isfinite(rows).all():
            raise UserError(
                "features are NaN or infinite: the weights are damaged; use other weights"
            )
        return rows

    def extract_split(self, source: Source, split: Split) -> Examples:
        """Features of a split, from the cache if it has those of the same weights and images."""
        items = split_indices(source, split)
        if not len(items):
            empty = np.empty((0, self.width), np.float32)
            return Examples(x=empty, y=source.labels[items], items=items)
        path = cache_folder() / "features" / f"{self.cache_key(source, items)}.features"
        arrays = read_feature_cache(path)
        if arrays is None:
            arrays = self.compute_split(source, split, items)
            write_feature_cache(path, arrays)
        readable = items[arrays["positions"]]
        return Examples(x=arrays["x"], y=source.labels[readable], items=readable)

    @property
    def width(self) -> int:
        """Number of features of an image."""
        config = self.model.config
        width = config.feature_width if self.features.kind == "pooled" else config.width
        return width * max(1, len(self.features.layers))

    def cache_key(self, source: Source, items: NDArray[np.int64]) -> str:
        """A checksum of every weight, image and setting that the features depend on."""
        settings = {
            "version": CACHE_VERSION,
            "weights": hash_weights(self.model),
            "preprocess": self.preprocess.to_dict(),
            "kind": self.features.kind,
            "layers": self.model.block_indices(self.features.layers or None),
            "precision": str(compute_dtype("auto", next(self.model.parameters()).device)),
            "skip_broken": self.skip_broken,
        }
        checksum = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        checksum.update(hash_items(source, items).tobytes())
        return checksum.hexdigest()

    def compute_split(
        self, source: Source, split: Split, items: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """Features `x` of all readable images, and their `positions` among `items`."""
        config = DataConfig(skip_broken=self.skip_broken, disk_gb=0)
        device = next(self.model.parameters()).device
        loader = Loader(source, self.preprocess, config, batch=self.batch, device=device)
        loader.prepare(split, training=False)
        rows, readable = [], []
        with progress_bar(f"extracting {split} features", len(items)) as advance:
            for batch in loader.evaluation(split, self.batch):
                rows.append(self(batch.images))
                readable.append(batch.items)
                advance(len(batch.items))
        if not rows:
            raise UserError(f"no {split} image of {source.name} can be read; run `vitrail check`")
        return {
            "x": np.concatenate(rows),
            "positions": np.searchsorted(items, np.concatenate(readable)),
        }


def hash_weights(model: ViT) -> str:
    """A checksum of what features depend on: the config and all tensors except the head's."""
    checksum = hashlib.sha256(json.dumps({**asdict(model.config), "classes": 0}).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(HEAD_PREFIXES):
            checksum.update(name.encode() + tensor.detach().cpu().float().numpy().tobytes())
    return checksum.hexdigest()


def write_feature_cache(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Writes arrays behind their checksum: safetensors does not detect a flipped byte."""
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    try:
        files.write_file(path, hashlib.sha256(content).digest() + content)
    except UserError as error:
        log.warning(f"features are not cached and will be extracted again next time: {error}")


def read_feature_cache(path: Path) -> dict[str, NDArray[Any]] | None:
    """The cached arrays; None if the file does not exist or is damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[DIGEST_BYTES:]).digest() != content[:DIGEST_BYTES]:
            return None
        return load(content[DIGEST_BYTES:])
    except (OSError, SafetensorError):
        return None
