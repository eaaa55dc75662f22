"""The joint loss: labelled images beside others without labels."""

import copy

import pytest
import torch
from torch.nn import functional as F

from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.pretraining.config import JointConfig
from vitrail.pretraining.joint import TEMPERATURE, JointClassifier, blank_square, joint_loss
from vitrail.pretraining.views import Draws
from vitrail.training.loop import cross_entropy


@pytest.fixture
def model():
    torch.manual_seed(0)
    vit = ViTConfig(image=8, patch=2, width=16, depth=1, heads=1, classes=3, stem="patch")
    backbone = ViT(vit)
    torch.nn.init.normal_(backbone.head.weight)
    zero, one = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    return JointClassifier(backbone, JointConfig(ratio=2), zero, one).eval()


def test_a_distorted_view_learns_the_sharpened_prediction(model, monkeypatch):
    monkeypatch.setattr(model, "distort", lambda images: images.flip(-1))
    images = torch.randn(4, 3, 3, 8, 8)
    outputs = model(images)
    torch.testing.assert_close(outputs[:, :3], model.backbone(images[:, 0]))
    others = images[:, 1:].flatten(0, 1)
    targets = model.backbone(others).div(TEMPERATURE).softmax(dim=1)
    losses = F.cross_entropy(model.backbone(others.flip(-1)), targets, reduction="none")
    torch.testing.assert_close(outputs[:, 3], losses.view(4, 2).mean(dim=1))


def test_the_teacher_gives_the_targets(model, monkeypatch):
    monkeypatch.setattr(model, "distort", torch.zeros_like)
    images, teacher = torch.randn(2, 3, 3, 8, 8), copy.deepcopy(model.backbone)
    before = model(images)
    with torch.no_grad():
        teacher.head.bias += torch.tensor([99.0, 0.0, 0.0])  # now it always answers the first class
    model.teacher = (teacher,)
    after, blank = model(images), model.backbone(torch.zeros(1, 3, 8, 8))
    assert torch.equal(before[:, :3], after[:, :3])
    expected = F.cross_entropy(blank, torch.tensor([0]))
    torch.testing.assert_close(after[:, 3], expected.expand(2))


def test_classes_that_are_predicted_too_often_lose_weight(model):
    logits = torch.tensor([[50.0, 0.0, 0.0], [0.0, 50.0, 0.0]])
    model.train()
    biased = torch.tensor([[0.8, 0.1, 0.1]]).expand(6, 3)
    for _ in range(2000):
        targets = model.align(biased, logits)  # labels are of the first two classes, evenly
    torch.testing.assert_close(
        model.label_distribution, torch.tensor([0.5, 0.5, 0.0]), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(model.prediction_distribution, biased[0], atol=1e-3, rtol=0)
    least = 0.1 / 3
    weights = torch.tensor([0.5, 0.5, 0.0]).add(least) / biased[0].add(least) * biased[0]
    expected = weights**2 / (weights**2).sum()
    torch.testing.assert_close(targets, expected.expand(6, 3), atol=1e-3, rtol=0)


def test_alignment_is_part_of_the_state_and_changes_in_training_alone(model):
    images = torch.randn(2, 3, 3, 8, 8)
    model.eval()(images)
    assert len(set(model.prediction_distribution.tolist())) == 1
    model.train()(images)
    assert len(set(model.prediction_distribution.tolist())) == 3
    assert {"label_distribution", "prediction_distribution"} <= model.state_dict().keys()


def test_in_training_every_second_labelled_image_is_distorted(model, monkeypatch):
    monkeypatch.setattr(model, "distort", torch.zeros_like)
    images = torch.randn(4, 3, 8, 8)
    seen = model.train().distort_half(images)
    assert torch.equal(seen[::2], images[::2]) and not seen[1::2].any()
    assert torch.equal(model.eval().distort_half(images), images)


def test_the_prediction_itself_gets_no_gradient(model, monkeypatch):
    monkeypatch.setattr(model, "distort", torch.zeros_like)
    images = torch.randn(2, 3, 3, 8, 8, requires_grad=True)
    model(images)[:, 3].sum().backward()
    assert not images.grad.any()


def test_labelled_images_alone_are_classified_as_by_the_backbone(model):
    images = torch.randn(4, 3, 8, 8)
    outputs = model(images)
    assert torch.equal(outputs[:, :3], model.backbone(images)) and not outputs[:, 3].any()


def test_the_loss_is_the_sum_of_both(model):
    outputs, labels = model(torch.randn(4, 3, 3, 8, 8)), torch.tensor([0, 1, 2, 0])
    both = joint_loss(3, cross_entropy)(outputs, labels, 0.1, None)
    own = cross_entropy(outputs[:, :3], labels, 0.1, None)
    torch.testing.assert_close(both, own + outputs[:, 3].sum())


def test_patch_dropout_drops_patches_of_labelled_images_only(model, monkeypatch):
    monkeypatch.setattr(model, "distort", lambda images: images)
    images, keep = torch.randn(2, 3, 3, 8, 8), torch.arange(8).expand(2, 8)
    outputs, whole = model(images, keep), model(images)
    torch.testing.assert_close(outputs[:, :3], model.backbone(images[:, 0], keep))
    torch.testing.assert_close(outputs[:, 3], whole[:, 3])


def test_a_blank_square_is_inside_the_image_and_in_one_piece():
    torch.manual_seed(0)
    blank = blank_square(torch.ones(64, 1, 16, 16), Draws(64, torch.device("cpu"), None)) == 0
    rows, columns = blank.any(dim=3).sum(dim=2), blank.any(dim=2).sum(dim=2)
    assert torch.equal(blank.sum(dim=(1, 2, 3)), (rows * columns)[:, 0])
    assert rows.min() >= 1 and rows.max() == 6 and columns.max() == 6


def test_without_flips_and_colours_a_view_is_only_a_crop(model, monkeypatch):
    monkeypatch.setattr("vitrail.pretraining.joint.blank_square", lambda images, draws: images)
    ramp = torch.arange(8.0).expand(16, 3, 8, 8)
    model.config = JointConfig(flip=0.0, colour=0.0)
    views = model.distort(ramp)
    assert (views.diff(dim=-1) >= -1e-5).all() and views.max() <= 7 and views.min() >= 0
    model.config = JointConfig(flip=1.0, colour=0.0)
    assert (model.distort(ramp).diff(dim=-1) <= 1e-5).all()
