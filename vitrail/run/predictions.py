"""What a run's model says of the images that judge it: kept beside the model, small and checked."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from vitrail.data.source import Source, Split, indices
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.evaluation.loop import logits
from vitrail.training.checkpoint import machine
from vitrail.training.distributed import Together

FILE = "predictions.safetensors"
FORMAT = 1
KEY = "predictions"  # the one key of the metadata; its value is JSON
FIELDS = ("items", "labels", "predicted", "probability", "calibrated")
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """The answers to images of one split, in the order of the data set."""

    items: Tensor  # positions of the images in the data set
    labels: Tensor
    predicted: Tensor
    probability: Tensor  # of the predicted class, plain softmax
    calibrated: Tensor  # the same with temperature

    @property
    def right(self) -> Tensor:
        return self.predicted == self.labels

    @property
    def accuracy(self) -> float:
        return float(self.right.double().mean())

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    splits: dict[Split, Seen]
    facts: dict[str, Any]  # classes, counts, fingerprints, temperature, what made them

    @property
    def classes(self) -> list[str]:
        classes: list[str] = self.facts["classes"]
        return classes

    def confusion(self, split: Split) -> Tensor:
        seen = self.splits[split]
        return metrics.confusion(seen.predicted, seen.labels, len(self.classes))


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    logits: Tensor
    labels: Tensor
    items: NDArray[np.int64]

    def judged(self, temperature: float | None) -> Seen:
        """What is kept of them: the likeliest class, and how likely it is."""
        sure, predicted = self.logits.double().softmax(dim=1).max(dim=1)
        cooled = (self.logits.double() / (temperature or 1.0)).softmax(dim=1).amax(dim=1)
        return Seen(
            items=torch.from_numpy(self.items),
            labels=self.labels,
            predicted=predicted,
            probability=sure.float(),
            calibrated=cooled.float(),
        )


def ask(
    model: nn.Module, loader: Loader, split: Split, dtype: torch.dtype, most: int | None = None
) -> Answers:
    """What the model says of a split, or of so many of its images, evenly chosen."""
    items: list[NDArray[np.int64]] = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in loader.evaluation(split, most=most):
            items.append(batch.items)
            yield batch.images, batch.labels

    outputs, labels = logits(model, batches(), dtype)
    return Answers(logits=outputs, labels=labels, items=np.concatenate(items))


def ask_together(
    model: nn.Module, loader: Loader, split: Split, dtype: torch.dtype, together: Together
) -> Answers | None:
    """What the model says of a split that all processes share; the first one has all answers."""
    if together.world == 1 or len(loader.share(split)):
        mine = ask(model, loader, split, dtype)
    else:
        classes = len(loader.source.classes)
        mine = Answers(
            logits=torch.zeros(0, classes),
            labels=torch.zeros(0, dtype=torch.int64),
            items=np.zeros(0, np.int64),
        )
    outputs = together.gather(mine.logits)
    labels = together.gather(mine.labels)
    items = together.gather(torch.from_numpy(mine.items))
    if outputs is None or labels is None or items is None:
        return None
    return Answers(logits=outputs, labels=labels, items=items.numpy())


def about(
    source: Source, checksum: str, seen: Mapping[Split, Seen], temperature: float | None
) -> dict[str, Any]:
    """What the answers belong to; `checksum` is the fingerprint of the data."""
    return {
        "classes": list(source.classes),
        "data": {"name": source.name, "fingerprint": checksum},
        "images": {split: len(indices(source, split)) for split in SPLITS},
        "same": {split: same(source, seen[split]) for split in seen if split != "train"},
        "temperature": temperature,
    }


def made() -> dict[str, Any]:
    """What a run ends with, and when."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return {"vitrail": __version__, **machine(), "finished": now}


def same(source: Source, seen: Seen) -> str:
    """A checksum of the images and classes of a split: what two runs must share to be compared."""
    checksum = hashlib.sha256()
    items: list[int] = seen.items.tolist()
    for text in (*source.classes, "", *(source.ids[item] for item in items)):
        checksum.update(text.encode("utf-8", "surrogateescape") + b"\0")
    for numbers in (source.labels[items], source.sizes[items]):
        checksum.update(np.ascontiguousarray(numbers, "<i8").tobytes())
    return checksum.hexdigest()


def keep(folder: Path, predictions: Predictions) -> None:
    tensors: dict[str, Tensor] = {}
    for split, seen in predictions.splits.items():
        for name in FIELDS:
            tensor: Tensor = getattr(seen, name)
            small = tensor.float() if tensor.is_floating_point() else tensor.int()
            tensors[f"{split}.{name}"] = small.contiguous()
    head = {"format": FORMAT, "sha256": checksum(tensors), **predictions.facts}
    files.write(folder / FILE, save(tensors, {KEY: json.dumps(head)}))


def read(folder: Path) -> Predictions | None:
    """None where none were kept; what is damaged is said to be so."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = dict(json.loads((file.metadata() or {})[KEY]))
        fine = facts["format"] == FORMAT and facts.pop("sha256") == checksum(tensors)
        splits = {split: seen_of(tensors, split) for split in SPLITS if f"{split}.items" in tensors}
        check_facts(facts, splits)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError, OSError) as error:
        raise damaged(folder, repr(error)) from error
    if not fine:
        raise damaged(folder, "its checksum differs")
    return Predictions(splits=splits, facts=facts)


def check_facts(facts: Mapping[str, Any], splits: Mapping[Split, Seen]) -> None:
    """Fails, in whatever way, where something is missing that pages are made of."""
    texts = [*facts["classes"], facts["data"]["name"], facts["data"]["fingerprint"]]
    texts += [facts["same"][split] for split in splits if split != "train"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a name is no text")
    numbers = [facts["images"][split] for split in SPLITS]
    numbers += [] if facts["temperature"] is None else [facts["temperature"]]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("a number is none")
    if not isinstance(facts.get("made", {}), dict):
        raise TypeError("what made them is no table")


def seen_of(tensors: Mapping[str, Tensor], split: Split) -> Seen:
    fields = {name: tensors[f"{split}.{name}"] for name in FIELDS}
    return Seen(**{n: t if t.is_floating_point() else t.long() for n, t in fields.items()})


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Neither safetensors nor the disk notices a flipped byte."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].numpy().tobytes())
    return found.hexdigest()


def damaged(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder / FILE} is damaged ({why:.80}); "
        f"remove it, and `vitrail report {folder}` makes it again"
    )
