"""The heatmaps of the report."""

import pytest
import torch

from vitrail.data.config import Preprocess
from vitrail.data.open import open_data
from vitrail.data.source import split_indices
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.run.report import explanations
from vitrail.run.storage.predictions import SplitPredictions

VIEW = Preprocess(size=8, channels=1, mean=(0.5,), std=(0.5,))


@pytest.fixture
def source():
    return open_data("digits")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = ViTConfig(image=8, patch=2, channels=1, classes=10, width=32, depth=2, heads=2)
    made = ViT(config)
    torch.nn.init.normal_(made.head.weight)
    return made.eval()


def seen_of(source, wrong):
    items = torch.from_numpy(split_indices(source, "test")[:30])
    labels = torch.from_numpy(source.labels[items])
    predicted = labels.clone()
    predicted[wrong] = (predicted[wrong] + 1) % 10
    sure = torch.linspace(0.5, 0.9, len(items))
    return SplitPredictions(
        items=items, labels=labels, predicted=predicted, probability=sure, calibrated=sure
    )


def test_correct_predictions_come_first_then_the_most_confident_errors(source, model):
    seen = seen_of(source, wrong=[1, 5, 9, 20, 25])
    found = explanations.explain_samples(model, VIEW, source, seen, tuple("abcdefghij"))
    assert [one["correct"] for one in found] == [True] * explanations.SAMPLES + [
        False
    ] * explanations.SAMPLES
    wrong = [one["path"] for one in found if not one["correct"]]
    assert wrong == [source.ids[int(seen.items[place])] for place in (25, 20, 9, 5)]


def test_an_error_is_explained_for_the_true_class_too(source, model):
    found = explanations.explain_samples(
        model, VIEW, source, seen_of(source, wrong=[3]), tuple("abcdefghij")
    )
    right, wrong = found[0], found[-1]
    assert right["for_label"] is None and right["for_predicted"] != right["image"]
    assert (
        wrong["for_label"] != wrong["for_predicted"]
    )  # the methods are asked for one class, then the other


def test_without_readable_images_there_is_no_section(source, model, monkeypatch):
    def gone(*_):
        raise UserError("not there")

    monkeypatch.setattr(explanations, "load_image", gone)
    assert (
        explanations.explain_samples(
            model, VIEW, source, seen_of(source, wrong=[3]), tuple("abcdefghij")
        )
        == []
    )
