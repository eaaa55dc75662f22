"""`vitrail train`: a classifier from a folder of images."""

import json as as_json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import tyro

from vitrail.cli.flags import Vit, optional, sections
from vitrail.data.config import DataConfig, Preprocess
from vitrail.training.config import TrainConfig

if TYPE_CHECKING:
    Train: TypeAlias = Any
    Data: TypeAlias = Any
    View: TypeAlias = Any
else:
    Train, Data, View = map(optional, (TrainConfig, DataConfig, Preprocess))


def train(
    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None,
    *,
    model: str | None = None,
    weights: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    minutes: float | None = None,
    epochs: int | None = None,
    recipe: Path | None = None,
    seed: int | None = None,
    out: Path | None = None,
    device: str = "auto",
    timeout: float = 1800,
    tensorboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    vit: Vit = Vit(),  # noqa: B008
    train: Train = Train(),  # noqa: B008
    data: Data = Data(),  # noqa: B008
    view: View = View(),  # noqa: B008
) -> None:
    """Train a classifier on your images.

    Chooses a recipe from the data, says why, trains, and leaves a run folder with a report.

    Args:
        source: folder of class folders, table of paths and labels, tar shards, or a built-in name
        model: architecture by name, such as Nano/4 or S/16 (see `vitrail models`)
        weights: run, weight file or folder to fine-tune from
        minutes: time until the results are written; the steps are planned to fit
        epochs: passes over the training images, instead of minutes
        recipe: TOML file with any of the settings below
        seed: of weights, order, augmentation and dropout
        out: run folder, by default runs/DATA-1, -2, ...
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        timeout: seconds that processes started by torchrun wait for each other
        tensorboard: also write TensorBoard events into the run folder
        json: print the final numbers as one JSON document
        vit: the model
        train: the training
        data: reading and augmentation
        view: preprocessing
    """
    from vitrail.cli.main import STARTED
    from vitrail.run import run

    done = run.train(
        source,
        out=out,
        recipe=recipe,
        changes=sections(vit=vit, train=train, data=data, view=view),
        tensorboard=tensorboard,
        began=STARTED,
        model=model,
        weights=weights,
        minutes=minutes,
        epochs=epochs,
        seed=seed,
        device=device,
        timeout=timeout,
    )
    if done.first:
        tell(done.metrics, json)


def tell(metrics: dict[str, Any], json: bool) -> None:
    """The numbers of a finished run."""
    if json:
        print(as_json.dumps(metrics, indent=1))
        return
    for line in accuracies(metrics):
        print(line)
    print(f"{metrics['steps']} steps, {metrics['seconds']:.0f} seconds; run {metrics['run']}")
    if (page := Path(metrics["run"]) / "report.html").is_file():
        print(f"report {page}")


def accuracies(metrics: dict[str, Any]) -> Iterator[str]:
    """A line for each split that was judged."""
    for split, words in (("val", "validation"), ("test", "test")):
        if score := metrics[split]:
            low, high = score["interval"]
            sure = f"95 % interval {low:.1%} to {high:.1%}"
            yield f"{words} accuracy {score['accuracy']:.1%} ({sure})"
