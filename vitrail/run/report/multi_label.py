"""What the report of a multi-label run shows instead of a confusion matrix."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from vitrail.data.loader import Loader
from vitrail.data.source import Source, Split, split_indices
from vitrail.display import figures
from vitrail.evaluation.multi_label import PlattScaling, predict_labels
from vitrail.inference.multi_label_evaluation import MultiLabelEvaluation, score_multi_label
from vitrail.model.vit import ViT
from vitrail.run.build import make_loader
from vitrail.run.report.explanations import explain_labels
from vitrail.run.storage.predictions import SplitOutputs, predict_split
from vitrail.run.storage.record import Record
from vitrail.training.device import pick_device
from vitrail.training.learner import compute_dtype
from vitrail.zoo.metadata import Metadata

MAX_NAMED = 40  # classes whose co-occurrence is drawn; the most frequent ones


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiLabelResults:
    """The final model on the test split, or on the validation split of a run without a test."""

    evaluation: MultiLabelEvaluation
    explanations: list[dict[str, Any]]

    def draw_cooccurrence(self) -> Figure:
        """Images with each label (row) that are predicted to have each label (column)."""
        matrix, classes = self.evaluation.cooccurrence, self.evaluation.classes
        counts = np.array([score.count for score in self.evaluation.per_class.values()])
        shown = np.sort(np.argsort(-counts, kind="stable")[:MAX_NAMED])
        names = [classes[index] for index in shown]
        return figures.draw_confusion_matrix(matrix[np.ix_(shown, shown)], names)

    def template_values(self) -> dict[str, Any]:
        """What the template shows."""
        one = self.evaluation
        return {
            "map": f"{one.map:.3f}",
            "images": f"{one.images:,}",
            "split": {"val": "validation"}.get(one.split, one.split),
            "summary": one.summary(),
            "rows": [{"name": name, **vars(score)} for name, score in one.per_class.items()],
        }


def evaluate_for_report(
    record: Record,
    trained: tuple[ViT, Metadata] | None,
    source: Source | None,
    loader: Loader | None,
) -> MultiLabelResults | None:
    """The results of a finished run; None if it is not finished or its data is missing."""
    if record.metrics is None or source is None or trained is None:
        return None
    split: Split = "test" if record.metrics["test"] else "val"
    if not len(split_indices(source, split)):
        return None
    loader = loader or make_loader(record.recipe, source, pick_device("auto"))
    model, metadata = copy.deepcopy(trained[0]).to(loader.device), trained[1]
    dtype = compute_dtype(record.recipe.train.precision, loader.device)
    outputs = predict_split(model, loader, split, dtype)
    classes = tuple(source.classes)
    labelling = metadata.labelling(len(classes))
    assert labelling is not None  # a multi-label run
    evaluation = score_multi_label(outputs.logits, outputs.labels, classes, labelling, split)
    return MultiLabelResults(
        evaluation=evaluation,
        explanations=explain_outputs(trained, record, source, outputs, classes),
    )


def explain_outputs(
    trained: tuple[ViT, Metadata],
    record: Record,
    source: Source,
    outputs: SplitOutputs,
    classes: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Heatmaps of the most likely label of a few images."""
    labelling = trained[1].labelling(len(classes))
    assert labelling is not None
    scaling = PlattScaling(slopes=labelling.slopes, intercepts=labelling.intercepts)
    probabilities = scaling.probabilities(outputs.logits)
    predicted = predict_labels(probabilities, labelling.thresholds)
    confidence, likely = torch.where(predicted, probabilities, probabilities - 1).max(dim=1)
    settings = record.recipe.preprocess
    return explain_labels(
        trained[0], settings, source, outputs.items, likely, confidence, outputs.labels, classes
    )
