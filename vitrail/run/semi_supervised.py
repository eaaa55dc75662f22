"""Training with few labels: pretrains on all images first, then trains on those with labels."""

import time
from dataclasses import replace
from pathlib import Path

from vitrail.data.open import open_data
from vitrail.data.source import Source
from vitrail.run import auto
from vitrail.run.design import starts_from_published
from vitrail.run.pretrain import pretrain
from vitrail.run.request import AUTO, Options, Request
from vitrail.run.terminal import Terminal

SHARE = 0.5  # of the minutes for the pretraining
SHARED = ("vit", "train", "preprocess")  # sections that both runs use
LABELLED_ONLY = ("smoothing", "class_weights", "layer_decay", "lr", "patience")


def pretrain_first(
    request: Request,
    options: Options,
    out: Path | None,
    started: float,
    timeout: float,
    source: Source | None,
) -> Request:
    """The request with the weights of a pretraining on all images, with or without labels.

    Photos keep published weights, which know more than a few images can teach.
    """
    opened = source
    if opened is None:
        opened = open_data(request.data, columns=request.columns, labels=request.labels)
    if request.start_from == AUTO and starts_from_published(auto.summarise(opened)):
        return request
    data = dict(request.settings.get("data", {}))
    if data.get("labels") == "partial":
        data["labels"] = "none"
    train = {
        name: value
        for name, value in request.settings.get("train", {}).items()
        if name not in LABELLED_ONLY
    }
    settings = {name: request.settings[name] for name in SHARED if name in request.settings}
    data.pop("augment", None)
    minutes = None
    if request.minutes is not None:
        spent = (time.monotonic() - started) / 60
        minutes = max(request.minutes * SHARE - spent, request.minutes / 10)
    Terminal(quiet=options.quiet).print(
        "few labels: first a pretraining on all images, then training on those with labels"
    )
    run = pretrain(
        source if source is not None else request.data,
        model=request.model or request.settings.get("model"),
        minutes=minutes,
        epochs=request.epochs,
        settings={**settings, "train": train, "data": data, "pretrain": {"comparison": 0.0}},
        seed=request.seed,
        out=None if out is None else out.with_name(f"{out.name}-pre"),
        device=request.device,
        report=options.report,
        tensorboard=options.tensorboard,
        quiet=options.quiet,
        timeout=timeout,
    )
    return replace(request, model=None, weights=str(run.folder))
