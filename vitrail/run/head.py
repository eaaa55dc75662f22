"""Any classifier on the features of a frozen model: fitted, compared, kept and used."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import files
from vitrail.data.config import Columns, Preprocess
from vitrail.data.open import USUAL, address, open_data
from vitrail.data.source import Source, Split, fingerprint
from vitrail.data.sources.places import keep_out
from vitrail.errors import UserError
from vitrail.evaluation.metrics import interval
from vitrail.heads import keep, kinds, shots
from vitrail.heads.features import Examples, Extractor, Features, What, weights_digest
from vitrail.heads.head import Head, has_probabilities, heat
from vitrail.model.vit import ViT
from vitrail.run.build import pick_device, told
from vitrail.run.classifier import Classifier
from vitrail.run.recipe import plain
from vitrail.zoo import load as zoo

DEFAULT = ("logistic",)
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Answers(nn.Module):
    """Images in, a head's logits out: what stands in the place of a model with its own head."""

    def __init__(self, extractor: Extractor, head: Head):
        super().__init__()
        self.model, self.extractor, self.head = extractor.model, extractor, head

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.head.scores(self.extractor(x)))


class Headed(Classifier):
    """A frozen model with a head of its own choice; it predicts once `fit` has been called."""

    def __init__(
        self,
        model: ViT,
        view: Preprocess,
        device: torch.device,
        features: Features,
        *,
        estimator: Any = None,
        head: Head | None = None,
    ):
        # not through Classifier's own: the model may have no head, and other classes
        self.device, self.model, self.view = device, model.eval().to(device), view
        self.extractor = Extractor(model=self.model, view=view, features=features)
        self.estimator, self.head = estimator, head
        self.facts, self.classes = {}, ()
        if head is not None:
            self.use(head)

    def use(self, head: Head) -> None:
        self.head, self.classes = head, head.classes
        # margins have theirs already
        temperature = head.temperature if has_probabilities(head.estimator) else 1.0
        self.facts = {"data": dict(head.data), "temperature": temperature}

    @property
    def answers(self) -> nn.Module:
        if self.head is None:
            raise UserError("this head has learned nothing yet; call .fit(data) first")
        return Answers(self.extractor, self.head)

    def fit(self, data: str | Path | Source, *, columns: Columns = USUAL) -> "Headed":
        """Learns from the training images of `data`, whose classes become the head's."""
        from sklearn.base import clone

        source = open_data(data, columns=columns) if isinstance(data, str | Path) else data
        train, val = (self.extractor.examples(source, split) for split in SPLITS[:2])
        with kinds.patient():
            fitted = clone(self.estimator).fit(train.x, train.y)
        name = type(fitted).__name__
        self.use(self.made(name, fitted, source, str(data), val, columns))
        return self

    def made(
        self,
        kind: str,
        fitted: Any,
        source: Source,
        data: str,
        held_out: Examples,
        columns: Columns,
    ) -> Head:
        return Head(
            kind=kind,
            estimator=fitted,
            classes=tuple(source.classes),
            features=self.extractor.features,
            width=self.extractor.width,
            weights=weights_digest(self.model),
            view=self.view.plain(),
            data={
                "name": source.name,
                "source": address(data),
                "columns": plain(columns),
                "fingerprint": fingerprint(source),
            },
            temperature=heat(fitted, len(source.classes), held_out),
        )

    def score(self, data: str | Path) -> float:
        """Accuracy on the images that `vitrail evaluate` would take: test images, or all."""
        from vitrail.run.scores import evaluate, open_for

        return float(evaluate(self, *open_for(self, data, None))["accuracy"])

    def save(self, path: str | Path) -> None:
        """For `--head` of predict and evaluate."""
        if self.head is None:
            raise UserError("this head has learned nothing yet; call .fit(data) first")
        keep.save(path, self.head)

    def explain(self, *asked: Any, **wishes: Any) -> Any:
        raise UserError(
            "maps show what the model's own head looks at, not a fitted one; explain the model"
        )


def head(
    classifier: Classifier | str | Path,
    estimator: Any,
    *,
    features: What = "pooled",
    layers: Sequence[int] = (),
    device: str = "cpu",
) -> Headed:
    """Any scikit-learn classifier on the features of a classifier, or of weights without a head.

    The model stays as it is. `.fit(data)` learns, `.predict(images)` and `.score(data)` use it.
    """
    kinds.needed()
    wanted = Features(what=features, layers=tuple(layers))
    if isinstance(classifier, Classifier):
        model, view, place = classifier.model, classifier.view, classifier.device
    else:
        model, view, place = frozen(classifier, device)
    model.chosen(wanted.layers or None)
    return Headed(model, view, place, wanted, estimator=estimator)


def frozen(path: str | Path, device: str, **hints: Any) -> tuple[ViT, Preprocess, torch.device]:
    """Any weights, with or without a head."""
    loaded = told(zoo.load(path, **hints))
    if loaded.view is None:
        raise UserError(
            f"{path} does not say how its images were normalised; say --preprocess half or imagenet"
        )
    return loaded.model, loaded.view, pick_device(device)


def load_with_head(path: str | Path, file: str | Path, *, device: str, **hints: Any) -> Headed:
    """The model with a head that was fitted on its features, and on no other's."""
    found = keep.load(file)
    model, view, place = frozen(path, device, **hints)
    if view.plain() != dict(found.view):
        raise UserError(
            f"the head {file} knows images preprocessed otherwise; "
            f"ask for the same size, or fit it again with `vitrail head`"
        )
    if weights_digest(model) != found.weights:
        raise UserError(
            f"the head {file} was fitted on features of other weights than {path}; "
            f"fit it again with `vitrail head {path} DATA`"
        )
    return Headed(model, view, place, found.features, head=found)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of head, judged."""

    head: Head
    fitted: kinds.Fitted
    accuracy: float  # on the images of `split`
    interval: tuple[float, float]
    validation: float | None  # accuracy on validation images; None if there are none
    predict_seconds: float  # for all images of `split`
    size: int  # bytes of its file
    shots: tuple[shots.Shots, ...]

    @property
    def merit(self) -> float:
        """What the best head is chosen by; test images have no say."""
        found = self.validation if self.validation is not None else self.fitted.cross_validation
        return -1.0 if found is None else found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    rows: list[Row]
    best: Row
    images: dict[str, int]  # of each split
    split: str  # whose images give the accuracies


def compare(
    headed: Headed,
    data: str,
    names: Sequence[str] = DEFAULT,
    few: Sequence[int] = (),
    say: Callable[[str], None] = lambda words: None,
    *,
    columns: Columns = USUAL,
    out: Path | None = None,
) -> Comparison:
    """Fits each kind on training images, and judges it on test images.

    The best one is that with the highest accuracy on validation images. Nothing is done if it
    may not be kept in the file `out`.
    """
    for name in names:
        kinds.find(name)
    shots.check(few)
    kinds.needed()
    headed.model.chosen(headed.extractor.features.layers or None)
    source = open_data(data, columns=columns)
    if out is not None:
        keep_out(source, out, "--out")
        check_place(out, headed.model)
    train, val, test = (headed.extractor.examples(source, one) for one in SPLITS)
    split = "test" if len(test) else "val"
    judging = test if len(test) else val
    if not len(judging):
        raise UserError(f"{source.name} has no test and no validation images to judge heads on")
    for number in few:
        shots.draw(train.y, number, source.classes, 0)
    rows = []
    for name in names:
        say(name)
        fitted = kinds.fit(name, train.x, train.y, source.classes)
        made = headed.made(name, fitted.estimator, source, data, val, columns)
        start = time.perf_counter()
        rate = made.accuracy(judging)
        seconds = time.perf_counter() - start
        rows.append(
            Row(
                head=made,
                fitted=fitted,
                accuracy=rate,
                interval=interval(rate, len(judging)),
                validation=made.accuracy(val) if len(val) else None,
                predict_seconds=seconds,
                size=len(keep.pack(made)),
                shots=tuple(shots.judge(name, train, judging, n, source.classes) for n in few),
            )
        )
    best = max(rows, key=lambda row: row.merit)
    images = {"train": len(train), "val": len(val), "test": len(test)}
    headed.use(best.head)
    return Comparison(rows=rows, best=best, images=images, split=split)


def beside(model: str | Path) -> Path:
    """Where a head is kept: in the folder of its model, or here if that cannot be written to."""
    path = files.expanded(model)
    folder = path if path.is_dir() else path.parent
    fine = path.exists() and os.access(folder, os.W_OK)
    return folder / keep.FILE if fine else Path(keep.FILE)


def check_place(path: Path, model: ViT) -> None:
    """Refuses to write over anything but an earlier head of the same weights."""
    if not path.exists():
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file")
    try:
        weights = keep.load(path).weights
    except UserError as error:
        raise UserError(
            f"{path} exists and is no readable head; remove it, or give another --out"
        ) from error
    if weights != weights_digest(model):
        raise UserError(f"{path} is a head of other weights; remove it, or give another --out")
