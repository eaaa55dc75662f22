"""Faithfulness: curves that begin and end where they must, and a score whose zero is chance."""

import pytest
import torch
from torch.nn import functional as F

from tests.insight.samples import pictures, small
from vitrail.errors import UserError
from vitrail.insight.explain import METHODS, cover, explain
from vitrail.insight.faithfulness import Faithfulness, compared, faithfulness, judge, order, ranked
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
    """Says class 1 the louder, the more of the patches 5 and 10 it sees."""

    def forward(self, x, keep=None):
        seen = F.avg_pool2d((x - x.mean(dim=(2, 3), keepdim=True)).abs(), 4).mean(dim=1)
        loud = 20 * (seen[:, 1, 1] + seen[:, 2, 2]) - 5
        return torch.stack([torch.zeros(len(x)), loud], dim=1)


def counting():
    return Counting(ViTConfig(image=16, patch=4, classes=2, width=8, depth=1, heads=1))


def test_curves_begin_and_end_with_the_whole_image_and_the_empty_one(model, x):
    found = faithfulness(model, x, torch.rand(2, 4, 4), target=3)
    with torch.no_grad():
        full = model(x).softmax(dim=1)[:, 3]
        empty = model(x.mean(dim=(2, 3), keepdim=True).expand_as(x)).softmax(dim=1)[:, 3]
    for curve in (found.deletion, found.random, found.insertion.flip(1)):
        same(curve[:, 0], full)
        same(curve[:, -1], empty)


def test_the_hottest_patches_go_first_and_come_first(model, x):
    heat = torch.arange(16.0).view(1, 4, 4).expand(2, 4, 4)
    found = faithfulness(model, x, heat, target=1, steps=4)
    hidden = torch.arange(16).expand(2, 16) >= 12
    with torch.no_grad():
        gone = model(cover(model, x, hidden)).softmax(dim=1)[:, 1]
        come = model(cover(model, x, ~hidden)).softmax(dim=1)[:, 1]
    same(found.deletion[:, 1], gone)
    same(found.insertion[:, 1], come)
    same(found.shares, torch.tensor([0, 0.25, 0.5, 0.75, 1]))


def test_hidden_patches_have_the_mean_colour_of_their_image(model, x):
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    hidden[0, 6] = True
    covered = cover(model, x, hidden)
    same(covered[0, :, 4:8, 8:12], x[0].mean(dim=(1, 2))[:, None, None].expand(3, 4, 4))
    changed = (covered != x).any(dim=1)
    assert changed[0].sum() == 16 and not changed[1].any()


def test_the_opposite_order_has_the_opposite_score(model, x):
    heat = torch.rand(2, 4, 4)
    there, back = (faithfulness(model, x, h, steps=4).score for h in (heat, -heat))
    same(there, -back)


def test_the_patches_that_matter_make_the_best_score():
    model, x = counting(), torch.randn(1, 3, 16, 16)
    right, wrong = torch.zeros(1, 4, 4), torch.rand(1, 4, 4)
    right[0, 1, 1], right[0, 2, 2] = 1, 1
    wrong[0, 1, 1], wrong[0, 2, 2] = 0, 0
    judged = compared(model, x, {"right": right, "wrong": wrong}, target=1, steps=16)
    assert judged["right"].score > 0.5
    assert judged["wrong"].score < -0.5
    assert judged["right"].deletion_area < judged["right"].random_area
    assert [row[0] for row in ranked(judged)] == ["right", "wrong"]


def test_chance_scores_nothing():
    model, x = counting(), torch.randn(1, 3, 16, 16).expand(400, -1, -1, -1)
    judged = {"random": faithfulness(model, x, torch.rand(400, 4, 4), target=1, steps=4)}
    ((_, score, error),) = ranked(judged)
    assert error < 0.04
    assert abs(score) < 4 * error


def test_patches_of_equal_heat_are_ordered_by_chance():
    chance = torch.tensor([[2, 0, 3, 1]])
    assert order(torch.zeros(1, 4), chance).tolist() == [[2, 0, 3, 1]]
    assert order(torch.tensor([[0.0, 0, 1, 0]]), chance).tolist() == [[3, 1, 0, 2]]


def test_areas_are_those_under_the_curves():
    line = torch.linspace(1, 0, 5)[None]
    judged = Faithfulness(
        shares=torch.linspace(0, 1, 5), deletion=line**2, insertion=1 - line, random=line
    )
    same(judged.random_area, torch.tensor([0.5]))
    same(judged.insertion_area, torch.tensor([0.5]))
    same(judged.score, 0.5 - judged.deletion_area)


def test_more_steps_than_patches_are_one_for_each(model, x):
    assert faithfulness(model, x, torch.rand(2, 4, 4), steps=100).deletion.shape == (2, 17)


def test_judging_explains_by_each_method(model, x):
    judged = judge(model, x, steps=3, target=2)
    assert tuple(judged) == METHODS
    for method, one in judged.items():
        alone = faithfulness(model, x, explain(model, x, method, 2), 2, steps=3)
        same(one.score, alone.score, most=1e-5)


def test_the_predicted_class_is_judged_by_default(model, x):
    with torch.no_grad():
        likely = model(x).softmax(dim=1).amax(dim=1)
    same(faithfulness(model, x, torch.rand(2, 4, 4)).deletion[:, 0], likely)


def test_of_one_image_there_is_no_error(model, x):
    assert ranked(judge(model, x[:1], ["attention"], steps=2))[0][2] == float("inf")


def test_the_mode_of_the_model_comes_back(x):
    model = small()
    faithfulness(model, x, torch.rand(2, 4, 4), steps=2)
    assert model.training


@pytest.mark.parametrize(
    ("heat", "steps", "words"),
    [
        (torch.rand(2, 3, 4), 4, "heat has shape (2, 3, 4)"),
        (torch.full((2, 4, 4), float("nan")), 4, "is not all numbers"),
        (torch.rand(2, 4, 4), 0, "steps is 0; give a whole number of at least 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(model, x, heat, steps, words):
    with pytest.raises(UserError) as error:
        faithfulness(model, x, heat, steps=steps)
    assert words in str(error.value)


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(UserError, match="one patch"):
        faithfulness(small(image=4), torch.zeros(1, 3, 4, 4), torch.zeros(1, 1, 1))
    with pytest.raises(UserError, match="no head"):
        faithfulness(small(head="none"), torch.zeros(1, 3, 16, 16), torch.zeros(1, 4, 4))
    with pytest.raises(UserError, match="method 'magic' is unknown"):
        judge(small(), torch.zeros(1, 3, 16, 16), ["magic"])


def test_nan_in_the_weights_is_named(x):
    broken = small()
    broken.head.bias.data[0] = float("nan")
    with pytest.raises(UserError, match=r"NaN or infinity in head.bias; load other weights"):
        faithfulness(broken, x, torch.rand(2, 4, 4))
