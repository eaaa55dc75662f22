"""Faithfulness: insertion and deletion curves, their AUC, and a score of 0 for random orders."""

import pytest
import torch
from torch.nn import functional as F

from tests.insight.samples import pictures, small
from vitrail.errors import UserError
from vitrail.insight.explain import explain, mask_patches
from vitrail.insight.faithfulness import (
    Faithfulness,
    compare_heatmaps,
    compare_methods,
    measure_faithfulness,
    rank_methods,
    rank_patches,
)
from vitrail.insight.methods import METHODS
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT


def same(found, wanted, most=1e-6):
    torch.testing.assert_close(found, wanted, rtol=0, atol=most)


@pytest.fixture
def model():
    return small().eval()


@pytest.fixture
def x(model):
    return pictures(model)


class Counting(ViT):
    """The logit of class 1 grows with what is visible of the patches 5 and 10."""

    def forward(self, x, keep=None):
        seen = F.avg_pool2d((x - x.mean(dim=(2, 3), keepdim=True)).abs(), 4).mean(dim=1)
        loud = 20 * (seen[:, 1, 1] + seen[:, 2, 2]) - 5
        return torch.stack([torch.zeros(len(x)), loud], dim=1)


def counting():
    return Counting(ViTConfig(image=16, patch=4, classes=2, width=8, depth=1, heads=1))


def test_curves_start_and_end_at_the_whole_and_the_empty_image(model, x):
    found = measure_faithfulness(model, x, torch.rand(2, 4, 4), target=3)
    with torch.no_grad():
        full = model(x).softmax(dim=1)[:, 3]
        empty = model(x.mean(dim=(2, 3), keepdim=True).expand_as(x)).softmax(dim=1)[:, 3]
    for curve in (found.deletion, found.random, found.insertion.flip(1)):
        same(curve[:, 0], full)
        same(curve[:, -1], empty)


def test_the_hottest_patches_are_deleted_and_inserted_first(model, x):
    heatmap = torch.arange(16.0).view(1, 4, 4).expand(2, 4, 4)
    found = measure_faithfulness(model, x, heatmap, target=1, steps=4)
    hidden = torch.arange(16).expand(2, 16) >= 12
    with torch.no_grad():
        gone = model(mask_patches(model, x, hidden)).softmax(dim=1)[:, 1]
        come = model(mask_patches(model, x, ~hidden)).softmax(dim=1)[:, 1]
    same(found.deletion[:, 1], gone)
    same(found.insertion[:, 1], come)
    same(found.fractions, torch.tensor([0, 0.25, 0.5, 0.75, 1]))


def test_hidden_patches_have_the_mean_colour_of_their_image(model, x):
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    hidden[0, 6] = True
    covered = mask_patches(model, x, hidden)
    same(covered[0, :, 4:8, 8:12], x[0].mean(dim=(1, 2))[:, None, None].expand(3, 4, 4))
    changed = (covered != x).any(dim=1)
    assert changed[0].sum() == 16 and not changed[1].any()


def test_the_opposite_order_has_the_opposite_score(model, x):
    heatmap = torch.rand(2, 4, 4)
    there, back = (measure_faithfulness(model, x, h, steps=4).score for h in (heatmap, -heatmap))
    same(there, -back)


def test_the_patches_that_matter_make_the_best_score():
    model, x = counting(), torch.randn(1, 3, 16, 16)
    right, wrong = torch.zeros(1, 4, 4), torch.rand(1, 4, 4)
    right[0, 1, 1], right[0, 2, 2] = 1, 1
    wrong[0, 1, 1], wrong[0, 2, 2] = 0, 0
    results = compare_heatmaps(model, x, {"right": right, "wrong": wrong}, target=1, steps=16)
    assert results["right"].score > 0.5
    assert results["wrong"].score < -0.5
    assert results["right"].deletion_auc < results["right"].random_auc
    assert [row[0] for row in rank_methods(results)] == ["right", "wrong"]


def test_a_random_heatmap_scores_zero_on_average():
    model, x = counting(), torch.randn(1, 3, 16, 16).expand(400, -1, -1, -1)
    results = {"random": measure_faithfulness(model, x, torch.rand(400, 4, 4), target=1, steps=4)}
    ((_, score, error),) = rank_methods(results)
    assert error < 0.04
    assert abs(score) < 4 * error


def test_ties_are_broken_at_random():
    ranks = torch.tensor([[2, 0, 3, 1]])
    assert rank_patches(torch.zeros(1, 4), ranks).tolist() == [[2, 0, 3, 1]]
    assert rank_patches(torch.tensor([[0.0, 0, 1, 0]]), ranks).tolist() == [[3, 1, 0, 2]]


def test_auc_is_the_area_under_the_curve():
    line = torch.linspace(1, 0, 5)[None]
    results = Faithfulness(
        fractions=torch.linspace(0, 1, 5), deletion=line**2, insertion=1 - line, random=line
    )
    same(results.random_auc, torch.tensor([0.5]))
    same(results.insertion_auc, torch.tensor([0.5]))
    same(results.score, 0.5 - results.deletion_auc)


def test_more_steps_than_patches_are_one_for_each(model, x):
    assert measure_faithfulness(model, x, torch.rand(2, 4, 4), steps=100).deletion.shape == (2, 17)


def test_comparing_methods_explains_by_each(model, x):
    results = compare_methods(model, x, steps=3, target=2)
    assert list(results) == list(METHODS)
    for method, one in results.items():
        alone = measure_faithfulness(model, x, explain(model, x, method, 2), 2, steps=3)
        same(one.score, alone.score, most=1e-5)


def test_the_predicted_class_is_the_default(model, x):
    with torch.no_grad():
        likely = model(x).softmax(dim=1).amax(dim=1)
    same(measure_faithfulness(model, x, torch.rand(2, 4, 4)).deletion[:, 0], likely)


def test_the_standard_error_of_one_image_is_infinite(model, x):
    assert rank_methods(compare_methods(model, x[:1], ["attention"], steps=2))[0][2] == float("inf")


def test_the_training_mode_is_restored(x):
    model = small()
    measure_faithfulness(model, x, torch.rand(2, 4, 4), steps=2)
    assert model.training


@pytest.mark.parametrize(
    ("heatmap", "steps", "words"),
    [
        (torch.rand(2, 3, 4), 4, "heatmap has shape (2, 3, 4)"),
        (torch.full((2, 4, 4), float("nan")), 4, "contains NaN or infinity"),
        (torch.rand(2, 4, 4), 0, "steps is 0; give a whole number of at least 1"),
    ],
)
def test_bad_input_is_rejected_in_one_line(model, x, heatmap, steps, words):
    with pytest.raises(UserError) as error:
        measure_faithfulness(model, x, heatmap, steps=steps)
    assert words in str(error.value)


def test_unusable_models_and_methods_are_rejected():
    with pytest.raises(UserError, match="one patch"):
        measure_faithfulness(small(image=4), torch.zeros(1, 3, 4, 4), torch.zeros(1, 1, 1))
    with pytest.raises(UserError, match="no head"):
        measure_faithfulness(small(head="none"), torch.zeros(1, 3, 16, 16), torch.zeros(1, 4, 4))
    with pytest.raises(UserError, match="method 'magic' is unknown"):
        compare_methods(small(), torch.zeros(1, 3, 16, 16), ["magic"])


def test_nan_in_the_weights_is_named(x):
    broken = small()
    broken.head.bias.data[0] = float("nan")
    with pytest.raises(UserError, match=r"NaN or infinity in head.bias; load other weights"):
        measure_faithfulness(broken, x, torch.rand(2, 4, 4))
