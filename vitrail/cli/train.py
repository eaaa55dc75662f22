"""`vitrail train`: trains a classifier on labelled images."""

import json as as_json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

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
    Weights,
    given_sections,
    section_flags,
    unset,
)
from vitrail.data.config import DataConfig, Preprocess
from vitrail.pretraining.config import JointConfig
from vitrail.run.recipe import Tune
from vitrail.training.config import TrainConfig

TunedPart: TypeAlias = Annotated[
    Literal["auto"] | Tune,
    tyro.conf.arg(
        help="what fine-tuning changes: all weights, the head on cached features, attention "
        "projections and head (APLA), or low-rank factors that are merged at the end (LoRA)"
    ),
]
_TrainFlags = section_flags(TrainConfig, "train")
_DataFlags = section_flags(DataConfig, "data")
_PreprocessFlags = section_flags(Preprocess, "preprocess")
_JointFlags = section_flags(JointConfig, "joint")
NO_TRAIN, NO_DATA, NO_PREPROCESS = _TrainFlags(), _DataFlags(), _PreprocessFlags()
NO_JOINT = _JointFlags()

if TYPE_CHECKING:
    TrainSettings: TypeAlias = Any
    DataSettings: TypeAlias = Any
    PreprocessSettings: TypeAlias = Any
    JointSettings: TypeAlias = Any
else:
    TrainSettings = Annotated[_TrainFlags, tyro.conf.arg(help="optimisation")]
    DataSettings = Annotated[_DataFlags, tyro.conf.arg(help="data loading")]
    PreprocessSettings = Annotated[
        _PreprocessFlags,
        tyro.conf.arg(help="preprocessing (default: chosen from the data, or as --from expects)"),
    ]
    JointSettings = Annotated[
        _JointFlags, tyro.conf.arg(help="images without labels (default: chosen from the data)")
    ]


def train(
    source: Annotated[
        str | None,
        tyro.conf.Positional,
        unset(
            metavar="DATA",
            help="folder of class folders, table of paths and labels, tar shards, or a built-in "
            "name (default: that of --recipe)",
        ),
    ] = None,
    *,
    model: Architecture = None,
    weights: Weights = "auto",
    tune: TunedPart = "auto",
    teacher: Annotated[str | None, unset(metavar="MODEL")] = None,
    labels_only: OptionalFloat = None,
    minutes: OptionalFloat = None,
    epochs: OptionalInt = None,
    recipe: RecipeFile = None,
    seed: OptionalInt = None,
    out: OptionalPath = None,
    device: Device = "auto",
    timeout: Timeout = 1800,
    tensorboard: Switch = False,
    json: Switch = False,
    vit: Vit = NO_VIT,
    train: TrainSettings = NO_TRAIN,
    data: DataSettings = NO_DATA,
    preprocess: PreprocessSettings = NO_PREPROCESS,
    joint: JointSettings = NO_JOINT,
) -> None:
    """Train a classifier on labelled images.

    Chooses a recipe from the data and explains it, trains, and writes a run folder with a report.

    Args:
        teacher: run, weights or timm:NAME to distil: its predictions, or features if classes differ
        labels_only: fraction of labels to use; small images also learn from the unlabelled rest
        minutes: total time, including evaluation and report; sets the number of steps
        epochs: passes over the training images, instead of --minutes
        seed: random seed of initialisation, data order, augmentation and dropout (default: 0)
        out: run folder (default: runs/DATA-1, runs/DATA-2, ...)
        tensorboard: also write TensorBoard event files into the run folder
        json: print the results as one JSON document
    """
    from vitrail.cli.main import STARTED

    run = vitrail.train(
        source,
        model=model,
        weights=weights,
        tune=tune,
        teacher=teacher,
        labels_only=labels_only,
        minutes=minutes,
        epochs=epochs,
        recipe=recipe,
        settings=given_sections(
            vit=vit, train=train, data=data, preprocess=preprocess, joint=joint
        ),
        seed=seed,
        out=out,
        device=device,
        timeout=timeout,
        tensorboard=tensorboard,
        started=STARTED,
    )
    if run.is_leader:
        print_results(run.metrics, json)


def print_results(metrics: dict[str, Any], json: bool) -> None:
    """The results of a finished run."""
    if json:
        print(as_json.dumps(metrics, indent=1))
        return
    for line in describe_accuracies(metrics):
        print(line)
    print(f"{metrics['steps']} steps in {metrics['seconds']:.0f} seconds")
    print(f"run {metrics['run']}")
    if (page := Path(metrics["run"]) / "report.html").is_file():
        print(f"report {page}")


def describe_accuracies(metrics: dict[str, Any]) -> Iterator[str]:
    """A line for each evaluated split."""
    for split, name in (("val", "validation"), ("test", "test")):
        if score := metrics[split]:
            low, high = score["interval"]
            interval = f"95 % interval {low:.1%} to {high:.1%}"
            if "map" in score:
                yield (
                    f"{name} mAP {score['map']:.3f}, micro F1 {score['micro_f1']:.3f}, "
                    f"exact match {score['accuracy']:.1%} ({interval})"
                )
            else:
                yield f"{name} accuracy {score['accuracy']:.1%} ({interval})"
