"""Trains a prepared run to its end, then evaluates the best weights and writes the results."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import files
from vitrail.data.loader import Loader
from vitrail.data.source import Split, is_multi_label
from vitrail.evaluation.calibration import Calibration, measure_trust
from vitrail.evaluation.conformal import fit_label_sets
from vitrail.evaluation.metrics import accuracy, wilson_interval
from vitrail.evaluation.multi_label import PlattScaling
from vitrail.evaluation.odd import fit_neighbours
from vitrail.inference.calibrate import compute_outputs, count_reference_images, fit_outputs
from vitrail.inference.multi_label_evaluation import fit_labelling, score_multi_label
from vitrail.inference.torch_predictor import LogitsAndFeatures
from vitrail.model.vit import ViT
from vitrail.run.drive import Driver
from vitrail.run.progress import Progress
from vitrail.run.recipe import Recipe, recipe_digest, settings_to_dict
from vitrail.run.recorder import open_recorder
from vitrail.run.request import Options
from vitrail.run.result import Run
from vitrail.run.storage import predictions
from vitrail.run.storage.predictions import Predictions, SplitOutputs, predict_split_distributed
from vitrail.run.storage.record import METRICS, MODEL
from vitrail.run.terminal import Terminal
from vitrail.training.distributed import World
from vitrail.training.learner import Learner, compute_dtype
from vitrail.zoo.file import load_model, save_model
from vitrail.zoo.metadata import MultiLabel
from vitrail.zoo.reference import compute_reference, describe_reference

log = logging.getLogger(__name__)


def complete_run(
    folder: Path,
    recipe: Recipe,
    loader: Loader,
    learner: Learner,
    progress: Progress,
    options: Options,
    world: World,
) -> Run:
    """Trains from where `progress` is to the end, evaluates the best weights, makes the report."""
    metadata = describe_model(recipe, loader, progress.fingerprint)
    if recipe.pretrain is not None:
        from vitrail.run.finish_pretraining import complete_pretraining

        return complete_pretraining(
            folder, recipe, loader, learner, progress, metadata, options, world
        )
    with open_recorder(folder, recipe, progress, metadata, options, world) as recorder:
        Driver(folder, recipe, loader, learner, progress, recorder, world).drive()
        if progress.best is None:  # the model file was lost, and no evaluation followed
            recorder.save_best(learner.eval_model, None)
    metrics = evaluate_best(folder, recipe, loader, metadata, progress, options.splits, world)
    if options.report:
        make_report(folder, loader.as_single_process(), Terminal(quiet=options.quiet))
    return Run(folder=folder, metrics=metrics, is_leader=world.is_leader)


def describe_model(recipe: Recipe, loader: Loader, fingerprint: str) -> dict[str, Any]:
    """The metadata of the model file, besides the architecture."""
    source = loader.source
    return {
        "name": recipe.model,
        "classes": list(source.classes),
        "channels": recipe.preprocess.channels,
        "labels": "multi" if is_multi_label(source) else "single",
        "preprocess": recipe.preprocess.to_dict(),
        "data": {
            "name": source.name,
            "source": recipe.source,
            "columns": settings_to_dict(recipe.data.columns),
            "fingerprint": fingerprint,
        },
        "recipe": recipe_digest(recipe),
        "temperature": None,
        "metrics": {},
    }


def evaluate_best(
    folder: Path,
    recipe: Recipe,
    loader: Loader,
    metadata: Mapping[str, Any],
    progress: Progress,
    splits: tuple[Split, ...],
    world: World,
) -> dict[str, Any]:
    """The final evaluation: the best weights on the validation and test splits.

    Writes the model with its temperature, the predictions and the metrics, and returns the latter.
    """
    tensors, best = world.load_on_leader(lambda: load_best(folder))
    model = ViT(recipe.vit).eval()
    model.load_state_dict(tensors)
    del tensors  # they map the model file into memory, and Windows cannot replace a mapped file
    model.to(loader.device)
    dtype = compute_dtype(recipe.train.precision, loader.device)
    network, columns = LogitsAndFeatures(model), recipe.vit.classes + 2 * recipe.vit.width
    outputs = {
        split: predict_split_distributed(network, loader, split, dtype, world, columns)
        for split in splits
        if len(loader.as_single_process().rank_items(split))
    }
    metrics = {
        "run": str(folder),
        "model": recipe.model,
        "epochs": -(-progress.step // loader.steps),
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
    }
    if progress.expected is not None:
        metrics["expected"] = progress.expected
    return world.on_leader(
        lambda: write_results(folder, model, loader, {**metadata, "best": best}, metrics, outputs)
    )


def load_best(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The weights of the best evaluation, and its scores."""
    model, metadata = load_model(folder / MODEL)
    return model.state_dict(), asdict(metadata.best) if metadata.best else None


def write_results(
    folder: Path,
    model: ViT,
    loader: Loader,
    metadata: dict[str, Any],
    metrics: dict[str, Any],
    outputs: Mapping[Split, SplitOutputs | None],
) -> dict[str, Any]:
    """Writes model, predictions and metrics; the metrics come last, as they mark the end."""
    scores: dict[str, Any] = {"val": None, "test": None}
    if is_multi_label(loader.source):
        return write_multi_label_results(folder, model, loader, metadata, metrics, outputs)
    temperature, calibration, splits = None, None, {}
    for split, joined in outputs.items():
        assert joined is not None  # the leader has them
        found = joined.drop_features(len(loader.source.classes))
        rate = accuracy(found.logits, found.labels)
        interval = wilson_interval(rate, len(found.labels))
        scores[split] = {"accuracy": rate, "interval": list(interval)}
        if split == "val":
            calibration, temperature = calibrate_run(model, loader, joined)
        splits[split] = found.to_predictions(temperature)
        trust = measure_trust(
            calibration,
            joined.logits.numpy(),
            found.labels.numpy(),
            temperature,
            loader.source.classes,
        )
        scores["trust"] = {"split": split, **trust.to_dict()}  # of the test split, if there is one
    environment = {"environment": predictions.describe_environment()}
    reference = describe_reference(compute_reference(model, loader.preprocess))
    results = {"temperature": temperature, "metrics": scores, "reference": reference}
    results["calibration"] = calibration.to_dict() if calibration else None
    save_model(folder / MODEL, model, {**metadata, **results, **environment})
    checksum = metadata["data"]["fingerprint"]
    origin = predictions.describe_predictions(loader.source, checksum, splits, temperature)
    stored = Predictions(splits=splits, metadata=origin | environment)
    predictions.save_predictions(folder, stored)
    metrics = {**metrics, **scores}
    document = json.dumps(metrics, indent=1)
    files.write_file(folder / METRICS, document + "\n")
    stored_metrics: dict[str, Any] = json.loads(document)  # as a resume will read them
    return stored_metrics


def write_multi_label_results(
    folder: Path,
    model: ViT,
    loader: Loader,
    metadata: dict[str, Any],
    metrics: dict[str, Any],
    outputs: Mapping[Split, SplitOutputs | None],
) -> dict[str, Any]:
    """The same for images with any number of labels."""
    scores: dict[str, Any] = {"val": None, "test": None}
    classes = tuple(loader.source.classes)
    labelling, calibration, splits = MultiLabel.plain(len(classes)), None, {}
    for split, joined in outputs.items():
        assert joined is not None  # the leader has them
        found = joined.drop_features(len(classes))
        if split == "val":
            labelling = fit_labelling(found.logits, found.labels)
            calibration = calibrate_labels(model, loader, joined, labelling)
        result = score_multi_label(found.logits, found.labels, classes, labelling, split)
        scaling = PlattScaling(slopes=labelling.slopes, intercepts=labelling.intercepts)
        probabilities = scaling.probabilities(found.logits)
        splits[split] = found.to_label_predictions(probabilities, labelling.thresholds)
        names = ("map", "micro_f1", "macro_f1", "accuracy", "interval")
        scores[split] = {name: result.to_dict()[name] for name in names}
    reference = describe_reference(compute_reference(model, loader.preprocess))
    results = {"multi_label": asdict(labelling), "metrics": scores, "reference": reference}
    if calibration is not None:
        results["calibration"] = calibration.to_dict()
    environment = {"environment": predictions.describe_environment()}
    save_model(folder / MODEL, model, {**metadata, **results, **environment})
    checksum = metadata["data"]["fingerprint"]
    origin = predictions.describe_predictions(loader.source, checksum, splits, None)
    predictions.save_predictions(folder, Predictions(splits=splits, metadata=origin | environment))
    metrics = {**metrics, **scores}
    files.write_file(folder / METRICS, json.dumps(metrics, indent=1) + "\n")
    return metrics


def calibrate_run(model: ViT, loader: Loader, val: SplitOutputs) -> tuple[Calibration, float]:
    """The calibration and the temperature of a run, from its validation and training images."""
    source, train = loader.source, compute_training_outputs(model, loader)
    return fit_outputs(val.logits, val.labels, len(source.classes), source.name, train)


def calibrate_labels(
    model: ViT, loader: Loader, val: SplitOutputs, labelling: MultiLabel
) -> Calibration:
    """The same for images with any number of labels."""
    source, train = loader.source, compute_training_outputs(model, loader)
    count = len(source.classes)
    logits = val.logits[:, :count].double() * torch.tensor(labelling.slopes)
    probabilities = (logits + torch.tensor(labelling.intercepts)).sigmoid().numpy()
    return Calibration(
        images=len(val.labels),
        data=source.name,
        sets=fit_label_sets(probabilities, val.labels.numpy()),
        neighbours=fit_neighbours(train.numpy(), val.logits.numpy(), count),
    )


def compute_training_outputs(model: ViT, loader: Loader) -> Tensor:
    """Logits and features of evenly spaced training images, without augmentation."""
    limit = count_reference_images(model.config)
    network = LogitsAndFeatures(model)
    return compute_outputs(network, loader.as_single_process(), "train", limit, quiet=True)[0]


def make_report(folder: Path, loader: Loader | None, terminal: Terminal) -> None:
    """Makes the report of a finished run; if that fails, the run is still finished."""
    from vitrail.run.report.make import write_report

    terminal.print("making the report")
    try:
        write_report(folder, loader)
    except Exception as error:
        retry = f"`vitrail report {folder}` tries again"
        log.warning(f"the run is finished, but its report could not be made: {error}; {retry}")
