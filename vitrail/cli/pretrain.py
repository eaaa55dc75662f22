"""`vitrail pretrain`: pretrains a backbone on images without labels."""

import json as as_json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import tyro

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    Architecture,
    Device,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    RecipeFile,
    Switch,
    Timeout,
    Vit,
    given_sections,
    section_flags,
    unset,
)
from vitrail.cli.train import (
    NO_DATA,
    NO_PREPROCESS,
    NO_TRAIN,
    DataSettings,
    PreprocessSettings,
    TrainSettings,
)
from vitrail.pretraining import config

_PretrainFlags = section_flags(config.PretrainConfig, "pretrain")
NO_PRETRAIN = _PretrainFlags()

if TYPE_CHECKING:
    PretrainSettings: TypeAlias = Any
else:
    PretrainSettings = Annotated[
        _PretrainFlags, tyro.conf.arg(help="the method (default: chosen from the data)")
    ]


def pretrain(
    source: Annotated[
        str | None,
        tyro.conf.Positional,
        unset(
            metavar="DATA",
            help="any tree of images, table of paths, tar shards, or a built-in name; labels are "
            "not needed (default: that of --recipe)",
        ),
    ] = None,
    *,
    method: Annotated[config.Method | None, unset()] = None,
    model: Architecture = None,
    weights: Annotated[
        str,
        tyro.conf.arg(
            name="from",
            metavar="WEIGHTS",
            help="start from this run, weight file or folder, or hf:owner/name; auto and none: "
            "from random weights",
        ),
    ] = "auto",
    teacher: Annotated[str | None, unset(metavar="MODEL")] = None,
    minutes: OptionalFloat = None,
    epochs: OptionalInt = None,
    recipe: RecipeFile = None,
    seed: OptionalInt = None,
    out: OptionalPath = None,
    device: Device = "auto",
    timeout: Timeout = 1800,
    tensorboard: Switch = False,
    json: Switch = False,
    pretrain: PretrainSettings = NO_PRETRAIN,
    vit: Vit = NO_VIT,
    train: TrainSettings = NO_TRAIN,
    data: DataSettings = NO_DATA,
    preprocess: PreprocessSettings = NO_PREPROCESS,
) -> None:
    """Pretrain a backbone on images without labels.

    Writes a run folder with a report of what was learned; `vitrail train DATA --from RUN` then
    trains a classifier from it. Test images are never read.

    Args:
        method: reconstruct masked patches (masked), or map crops of an image to equal features
            (views) (default: masked)
        teacher: run, weights or timm:NAME whose features are distilled (method teacher)
        minutes: total time, including the final measurements; sets the number of steps
        epochs: passes over the training images, instead of --minutes
        seed: random seed of initialisation, data order, augmentation and masks (default: 0)
        out: run folder (default: runs/DATA-pre-1, runs/DATA-pre-2, ...)
        tensorboard: also write TensorBoard event files into the run folder
        json: print the results as one JSON document
    """
    from vitrail.cli.main import STARTED

    run = vitrail.pretrain(
        source,
        method=method,
        model=model,
        weights=weights,
        teacher=teacher,
        minutes=minutes,
        epochs=epochs,
        recipe=recipe,
        settings=given_sections(
            pretrain=pretrain, vit=vit, train=train, data=data, preprocess=preprocess
        ),
        seed=seed,
        out=out,
        device=device,
        timeout=timeout,
        tensorboard=tensorboard,
        started=STARTED,
    )
    if run.is_leader:
        print_quality(run.metrics, json)


def print_quality(metrics: dict[str, Any], json: bool) -> None:
    """The results of a finished pretraining."""
    if json:
        print(as_json.dumps(metrics, indent=1))
        return
    print(f"held-out loss {metrics['loss']:.4f}, effective rank {metrics['rank']:.1f}")
    if (probe := metrics["probe"]) is not None:
        random = probe["random"]
        for name, key, bounds in (
            ("linear probe", "linear", "interval"),
            ("k-NN", "knn", "knn_interval"),
        ):
            ours, zero = (describe_score(one[key], one.get(bounds)) for one in (probe, random))
            print(f"{name} {ours}; random weights {zero}")
        for row in probe["trained"]:
            learned = describe_score(row["accuracy"], row["interval"])
            scratch = describe_score(row["scratch"], row["scratch_interval"])
            print(
                f"{row['fraction']:.0%} of the labels, {probe['steps']} steps: {learned}; "
                f"from scratch {scratch}"
            )
        print("in parentheses: 95% confidence intervals")
    if metrics["collapsed"]:
        print(f"warning: {metrics['collapsed']}")
    print(f"{metrics['steps']} steps in {metrics['seconds']:.0f} seconds")
    print(f"run {metrics['run']}")
    if (page := Path(metrics["run"]) / "report.html").is_file():
        print(f"report {page}")
    print(f"next: `vitrail train DATA --from {metrics['run']}`")


def describe_score(accuracy: float, interval: Sequence[float] | None) -> str:
    """An accuracy with its interval, if it has one: "91.3% (90.1% to 92.4%)"."""
    if interval is None:
        return f"{accuracy:.1%}"
    low, high = interval
    return f"{accuracy:.1%} ({low:.1%} to {high:.1%})"
