"""The predictions of a run's final model on each split, stored beside the model with a checksum."""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from vitrail import __version__, files
from vitrail.data.loader import Loader
from vitrail.data.source import SPLITS, Source, Split, is_multi_label, split_indices
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.evaluation.loop import compute_logits
from vitrail.evaluation.multi_label import predict_labels
from vitrail.training.checkpoint import describe_machine
from vitrail.training.distributed import World, is_sharded
from vitrail.training.sharding import ShardedForward

FILE = "predictions.safetensors"
FORMAT = 1  # of the file; other numbers are refused
KEY = "predictions"  # the one key of the metadata; its value is JSON
FIELDS = ("items", "labels", "predicted", "probability", "calibrated")


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitPredictions:
    """The predictions on one split, in the order of the data set."""

    items: Tensor  # indices of the images in the data set
    labels: Tensor  # class indices; multi-label: (images, classes) of 0 and 1
    predicted: Tensor  # likewise
    probability: Tensor  # of the predicted class, plain softmax; multi-label: of each, sigmoid
    calibrated: Tensor  # the same, calibrated

    @property
    def correct(self) -> Tensor:
        """Whether each image has the right class, or exactly the right labels."""
        return (self.predicted == self.labels).reshape(len(self), -1).all(dim=1)

    @property
    def accuracy(self) -> float:
        return float(self.correct.double().mean())

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """All that `predictions.safetensors` holds."""

    splits: dict[Split, SplitPredictions]
    metadata: dict[str, Any]  # classes, image counts, checksums, temperature, environment

    @property
    def classes(self) -> list[str]:
        classes: list[str] = self.metadata["classes"]
        return classes

    def confusion(self, split: Split) -> Tensor:
        """The confusion matrix of a split: true classes are rows, predicted classes columns."""
        one = self.splits[split]
        return metrics.confusion_matrix(one.predicted, one.labels, len(self.classes))


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitOutputs:
    """The logits of a model on one split."""

    logits: Tensor
    labels: Tensor
    items: NDArray[np.int64]  # indices of the images in the data set

    def drop_features(self, classes: int) -> "SplitOutputs":
        """Without the features that a `LogitsAndFeatures` returns behind the logits."""
        return replace(self, logits=self.logits[:, :classes])

    def to_predictions(self, temperature: float | None) -> SplitPredictions:
        """The most likely class of each image, with its plain and its calibrated probability."""
        logits = self.logits.double()
        probability, predicted = logits.softmax(dim=1).max(dim=1)
        calibrated = (logits / (temperature or 1.0)).softmax(dim=1).amax(dim=1)
        return SplitPredictions(
            items=torch.from_numpy(self.items),
            labels=self.labels,
            predicted=predicted,
            probability=probability.float(),
            calibrated=calibrated.float(),
        )

    def to_label_predictions(
        self, calibrated: Tensor, thresholds: tuple[float, ...]
    ) -> SplitPredictions:
        """The labels of each image whose calibrated probabilities reach their thresholds."""
        return SplitPredictions(
            items=torch.from_numpy(self.items),
            labels=self.labels.long(),
            predicted=predict_labels(calibrated, thresholds).long(),
            probability=self.logits.sigmoid().float(),
            calibrated=calibrated.float(),
        )


def predict_split(
    model: nn.Module, loader: Loader, split: Split, dtype: torch.dtype, limit: int | None = None
) -> SplitOutputs:
    """Logits for every image of a split, or for `limit` evenly spaced ones."""
    items: list[NDArray[np.int64]] = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in loader.evaluation(split, limit=limit):
            items.append(batch.items)
            yield batch.images, batch.labels

    outputs, labels = compute_logits(model, batches(), dtype)
    return SplitOutputs(logits=outputs, labels=labels, items=np.concatenate(items))


def predict_split_distributed(
    model: nn.Module,
    loader: Loader,
    split: Split,
    dtype: torch.dtype,
    world: World,
    columns: int | None = None,
) -> SplitOutputs | None:
    """Logits for a split that all ranks share; the leader gets all of them, other ranks None.

    `columns` is the number of the model's outputs, if it is not the number of classes.
    """
    if is_sharded(model):
        model = ShardedForward(model)
    if world.size == 1 or len(loader.rank_items(split)):
        with world.report_lost_peers():
            own = predict_split(model, loader, split, dtype)
    else:
        classes = len(loader.source.classes)
        own = SplitOutputs(
            logits=torch.zeros(0, columns or classes),
            labels=torch.zeros(0, classes)
            if is_multi_label(loader.source)
            else torch.zeros(0, dtype=torch.int64),
            items=np.zeros(0, np.int64),
        )
    if isinstance(model, ShardedForward):
        keep_in_step(model, loader, split, dtype, world)
    outputs = world.gather(own.logits)
    labels = world.gather(own.labels)
    items = world.gather(torch.from_numpy(own.items))
    if outputs is None or labels is None or items is None:
        return None
    return SplitOutputs(logits=outputs, labels=labels, items=items.numpy())


def keep_in_step(
    model: nn.Module, loader: Loader, split: Split, dtype: torch.dtype, world: World
) -> None:
    """Blank images instead of the batches that other ranks have more: all ranks gather weights."""
    size = max(1, loader.batch // world.size)
    total = len(loader.as_single_process().rank_items(split))
    most, own = (
        math.ceil(n / size) for n in (math.ceil(total / world.size), len(loader.rank_items(split)))
    )
    shape = (1, loader.preprocess.channels, loader.preprocess.height, loader.preprocess.width)
    blank = torch.zeros(shape, device=loader.device), torch.zeros(1)
    if most > own:
        with world.report_lost_peers():
            compute_logits(model, repeat(blank, most - own), dtype)


def describe_predictions(
    source: Source,
    fingerprint: str,
    splits: Mapping[Split, SplitPredictions],
    temperature: float | None,
) -> dict[str, Any]:
    """The metadata of the file: which data and which images the predictions belong to."""
    return {
        "classes": list(source.classes),
        "data": {"name": source.name, "fingerprint": fingerprint},
        "images": {split: len(split_indices(source, split)) for split in SPLITS},
        "checksums": {
            split: checksum_split(source, one) for split, one in splits.items() if split != "train"
        },
        "temperature": temperature,
    }


def describe_environment() -> dict[str, Any]:
    """Versions, machine and time of the run."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return {"vitrail": __version__, **describe_machine(), "finished": now}


def checksum_split(source: Source, predictions: SplitPredictions) -> str:
    """A checksum of a split's images, labels and classes: equal for runs that can be compared."""
    checksum = hashlib.sha256()
    items: list[int] = predictions.items.tolist()
    for text in (*source.classes, "", *(source.ids[item] for item in items)):
        checksum.update(text.encode("utf-8", "surrogateescape") + b"\0")
    for numbers in (source.labels[items], source.sizes[items]):
        checksum.update(np.ascontiguousarray(numbers, "<i8").tobytes())
    return checksum.hexdigest()


def save_predictions(folder: Path, predictions: Predictions) -> None:
    tensors: dict[str, Tensor] = {}
    for split, one in predictions.splits.items():
        for name in FIELDS:
            tensor: Tensor = getattr(one, name)
            compact = tensor.float() if tensor.is_floating_point() else tensor.int()
            tensors[f"{split}.{name}"] = compact.contiguous()
    header = {"format": FORMAT, "sha256": _checksum_tensors(tensors), **predictions.metadata}
    files.write_file(folder / FILE, save(tensors, {KEY: json.dumps(header)}))


def load_predictions(folder: Path) -> Predictions | None:
    """The predictions of a run; None if it has none, `UserError` if the file is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            # copies: Windows cannot replace a file that is mapped into memory
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            header = dict(json.loads((file.metadata() or {})[KEY]))
        valid = header["format"] == FORMAT and header.pop("sha256") == _checksum_tensors(tensors)
        splits = {
            split: _unpack_split(tensors, split) for split in SPLITS if f"{split}.items" in tensors
        }
        _check_metadata(header, splits)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError, OSError) as error:
        raise _damaged_file_error(folder, repr(error)) from error
    if not valid:
        raise _damaged_file_error(folder, "its checksum differs")
    return Predictions(splits=splits, metadata=header)


def _check_metadata(header: Mapping[str, Any], splits: Mapping[Split, SplitPredictions]) -> None:
    """Raises TypeError or KeyError if an entry that the report needs is missing or malformed."""
    texts = [*header["classes"], header["data"]["name"], header["data"]["fingerprint"]]
    texts += [header["checksums"][split] for split in splits if split != "train"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a name is not a string")
    numbers = [header["images"][split] for split in SPLITS]
    numbers += [] if header["temperature"] is None else [header["temperature"]]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("a count or the temperature is not a number")
    if not isinstance(header.get("environment", {}), dict):
        raise TypeError("the environment is not a table")


def _unpack_split(tensors: Mapping[str, Tensor], split: Split) -> SplitPredictions:
    fields = {name: tensors[f"{split}.{name}"] for name in FIELDS}
    return SplitPredictions(
        **{name: one if one.is_floating_point() else one.long() for name, one in fields.items()}
    )


def _checksum_tensors(tensors: Mapping[str, Tensor]) -> str:
    """safetensors does not detect a flipped byte."""
    checksum = hashlib.sha256()
    for name in sorted(tensors):
        checksum.update(name.encode() + tensors[name].numpy().tobytes())
    return checksum.hexdigest()


def _damaged_file_error(folder: Path, reason: str) -> UserError:
    return UserError(
        f"{folder / FILE} is damaged ({reason:.80}); "
        f"delete it, then `vitrail report {folder}` writes it again"
    )
