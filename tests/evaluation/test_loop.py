import pytest
import torch
from torch import nn

from vitrail.errors import UserError
from vitrail.evaluation.loop import logits


@pytest.fixture
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Dropout(0.5))


def batches(*sizes):
    torch.manual_seed(0)
    return [(torch.randn(size, 1, 2, 2), torch.arange(size)) for size in sizes]


def test_every_image_counts_once_also_in_an_uneven_last_batch(model):
    outputs, labels = logits(model, batches(4, 4, 1))
    assert (outputs.shape, labels.tolist()) == ((9, 3), [0, 1, 2, 3, 0, 1, 2, 3, 0])


def test_dropout_is_off(model):
    images = batches(4)
    assert torch.equal(logits(model, images)[0], logits(model, images)[0])


def test_every_module_is_back_in_its_mode_afterwards(model):
    model.train()
    model[2].eval()
    logits(model, batches(2))
    assert [module.training for module in model.modules()] == [True, True, True, False]


def test_the_mode_is_back_after_a_failure_too(model):
    model.train()
    with pytest.raises(RuntimeError):
        logits(model, [(torch.randn(2, 9), torch.zeros(2))])
    assert model.training


def test_logits_can_be_computed_on_afterwards(model):
    outputs, _ = logits(model, batches(2))
    outputs += 1
    assert not outputs.is_inference()


def test_progress_hears_of_every_batch(model):
    told = []
    logits(model, batches(4, 4, 1), progress=told.append)
    assert told == [4, 4, 1]


def test_bfloat16_gives_float32_logits_close_by(model):
    full, _ = logits(model, batches(8))
    rough, _ = logits(model, batches(8), precision=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert 0 < (full - rough).abs().max() < 0.05


def test_float64_models_keep_their_digits(model):
    images = [(images.double(), labels) for images, labels in batches(2)]
    assert logits(model.double(), images)[0].dtype == torch.float64


def test_no_images_is_an_error(model):
    with pytest.raises(UserError, match="no images"):
        logits(model, [])


def test_a_model_that_answers_nan_is_an_error(model):
    model[1].bias.data[0] = float("nan")
    with pytest.raises(UserError, match="3 of 3 images with NaN"):
        logits(model, batches(3))
