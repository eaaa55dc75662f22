"""The loop over batches: modes, precision and errors."""

import pytest
import torch
from torch import nn

from vitrail.errors import UserError
from vitrail.evaluation.loop import compute_logits


@pytest.fixture
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Dropout(0.5))


def batches(*sizes):
    torch.manual_seed(0)
    return [(torch.randn(size, 1, 2, 2), torch.arange(size)) for size in sizes]


def test_a_smaller_last_batch_is_included(model):
    outputs, labels = compute_logits(model, batches(4, 4, 1))
    assert (outputs.shape, labels.tolist()) == ((9, 3), [0, 1, 2, 3, 0, 1, 2, 3, 0])


def test_dropout_is_off(model):
    images = batches(4)
    assert torch.equal(compute_logits(model, images)[0], compute_logits(model, images)[0])


def test_the_mode_of_every_module_is_restored(model):
    model.train()
    model[2].eval()
    compute_logits(model, batches(2))
    assert [module.training for module in model.modules()] == [True, True, True, False]


def test_the_mode_is_restored_after_an_error(model):
    model.train()
    with pytest.raises(RuntimeError):
        compute_logits(model, [(torch.randn(2, 9), torch.zeros(2))])
    assert model.training


def test_logits_are_not_inference_tensors(model):
    outputs, _ = compute_logits(model, batches(2))
    outputs += 1
    assert not outputs.is_inference()


def test_progress_is_called_for_every_batch(model):
    sizes = []
    compute_logits(model, batches(4, 4, 1), progress=sizes.append)
    assert sizes == [4, 4, 1]


def test_bfloat16_gives_similar_float32_logits(model):
    full, _ = compute_logits(model, batches(8))
    rough, _ = compute_logits(model, batches(8), precision=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert 0 < (full - rough).abs().max() < 0.05


def test_float64_models_give_float64_logits(model):
    images = [(images.double(), labels) for images, labels in batches(2)]
    assert compute_logits(model.double(), images)[0].dtype == torch.float64


def test_no_images_is_an_error(model):
    with pytest.raises(UserError, match="no images"):
        compute_logits(model, [])


def test_nan_logits_are_an_error(model):
    model[1].bias.data[0] = float("nan")
    with pytest.raises(UserError, match="3 of 3 images are NaN"):
        compute_logits(model, batches(3))
