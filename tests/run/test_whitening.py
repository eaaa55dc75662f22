"""A fresh stem starts from filters of the training images; trained weights stay as they are."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import vitrail
from vitrail.model.config import ViTConfig
from vitrail.pretraining.config import PretrainConfig
from vitrail.run.build import make_learner
from vitrail.run.drive import Driver
from vitrail.run.recipe import Recipe
from vitrail.run.whitening import patch_covariance, whiten, whiten_stem

VIT = {"stem": "r9", "patch": 2, "width": 16, "depth": 1, "heads": 1}


@pytest.fixture
def kernels(monkeypatch):
    """The first kernel of every run, which ends before its first step."""
    found = []

    def kill(driver):
        model = driver.learner.model
        found.append(next(m.weight for m in model.modules() if isinstance(m, nn.Conv2d)).clone())
        raise KeyboardInterrupt

    monkeypatch.setattr(Driver, "drive", kill)
    return found


def test_a_run_resumed_before_its_first_checkpoint_starts_from_the_same_filters(kernels, tmp_path):
    settings = {"vit": VIT, "train": {"steps": 2}}
    with pytest.raises(KeyboardInterrupt):
        vitrail.train("digits", out=tmp_path / "run", settings=settings, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        vitrail.resume(tmp_path / "run", quiet=True)
    assert torch.equal(*kernels)
    filters = kernels[0][:4].flatten(1)
    torch.testing.assert_close(kernels[0][4:8], -kernels[0][:4])
    products = filters @ filters.T
    torch.testing.assert_close(products, products.diag().mean() * torch.eye(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change",
    [{"weights": "runs/earlier"}, {"pretrain": PretrainConfig()}],
    ids=["weights", "masked"],
)
def test_other_weights_stay_as_they_are(change):
    recipe = Recipe(vit=ViTConfig(image=8, classes=10, positions="sincos", **VIT))
    learner = make_learner(recipe, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    whiten_stem(replace(recipe, **change), learner, loader=None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.tensors().items())


def test_whitening_filters_have_uncorrelated_responses_and_the_old_norm():
    torch.manual_seed(0)
    kernel = torch.randn(8, 3, 3, 3)
    norm = kernel.norm()
    images = torch.randn(4, 1, 12, 12).expand(-1, 3, -1, -1) + 0.3 * torch.randn(4, 3, 12, 12)
    whiten(kernel, patch_covariance([images[:1], images[1:]]))
    torch.testing.assert_close(kernel.norm(), norm)
    torch.testing.assert_close(kernel[:4], -kernel[4:])
    responses = nn.functional.conv2d(images, kernel[:4]).transpose(0, 1).flatten(1)
    assert (responses.corrcoef() - torch.eye(4)).abs().max() < 1e-3
    assert responses[0].std() > responses[3].std()  # the largest components, not the smallest


def test_more_filters_than_components_leave_the_others_as_they_are():
    kernel = torch.randn(20, 1, 3, 3)
    before = kernel.clone()
    whiten(kernel, patch_covariance([torch.randn(4, 1, 8, 8)]))
    assert torch.equal(kernel[18:], before[18:]) and not torch.equal(kernel[:18], before[:18])
