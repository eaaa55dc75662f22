"""The report's pictures of where a model looked."""

import pytest
import torch

from vitrail.data.config import Preprocess
from vitrail.data.open import open_data
from vitrail.data.source import indices
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.run.predictions import Seen
from vitrail.run.report import why

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
    items = torch.from_numpy(indices(source, "test")[:30])
    labels = torch.from_numpy(source.labels[items])
    predicted = labels.clone()
    predicted[wrong] = (predicted[wrong] + 1) % 10
    sure = torch.linspace(0.5, 0.9, len(items))
    return Seen(items=items, labels=labels, predicted=predicted, probability=sure, calibrated=sure)


def test_right_answers_come_first_then_the_surest_mistakes(source, model):
    seen = seen_of(source, wrong=[1, 5, 9, 20, 25])
    found = why.reasons(model, VIEW, source, seen, tuple("abcdefghij"))
    assert [one["right"] for one in found] == [True] * why.EACH + [False] * why.EACH
    wrong = [one["path"] for one in found if not one["right"]]
    assert wrong == [source.ids[int(seen.items[place])] for place in (25, 20, 9, 5)]


def test_a_mistake_shows_what_spoke_for_the_truth_too(source, model):
    found = why.reasons(model, VIEW, source, seen_of(source, wrong=[3]), tuple("abcdefghij"))
    right, wrong = found[0], found[-1]
    assert right["truth"] is None and right["called"] != right["image"]
    assert wrong["truth"] != wrong["called"]  # the methods are asked for one class, then the other


def test_images_that_cannot_be_read_any_more_leave_the_section_out(source, model, monkeypatch):
    def gone(*_):
        raise UserError("not there")

    monkeypatch.setattr(why, "load_image", gone)
    assert why.reasons(model, VIEW, source, seen_of(source, wrong=[3]), tuple("abcdefghij")) == []
