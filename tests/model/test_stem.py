"""Convolutional stems: what they compute, and their batch norms."""

import pytest
import torch
from torch.nn import functional as F

from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_statistics
from vitrail.model.stem import ConvStem, ResNet9
from vitrail.model.vit import ViT

SMALL = {"image": (8, 16), "patch": 4, "width": 16, "depth": 1, "heads": 2, "classes": 5}


def convolve(x, layer, **how):
    """A layer of a stem, written out, with the statistics of the batch."""
    x = F.conv2d(x, layer.conv.weight, padding=1, **how)
    x = F.max_pool2d(x, 2) if layer.pool else x
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), False, keepdim=True)
    return ((x - mean) / (variance + 1e-5).sqrt()).relu()


def test_a_conv_stem_is_convolutions_of_stride_2():
    stem, x = ConvStem(3, 32, 8), torch.randn(2, 3, 16, 24)
    expected = x
    for layer in stem.layers:
        expected = convolve(expected, layer, stride=2)
    assert [layer.conv.out_channels for layer in stem.layers] == [8, 16, 32]
    torch.testing.assert_close(stem(x), expected, atol=1e-5, rtol=1e-4)
    assert stem(x).shape == (2, 32, 2, 3)


def test_a_resnet9_is_convolutions_with_pooling_and_one_residual():
    stem, x = ResNet9(3, 32, 8), torch.randn(2, 3, 16, 24)
    first, halving, residual, *others = stem.layers
    expected = convolve(convolve(x, first), halving)
    expected = expected + convolve(convolve(expected, residual.conv1), residual.conv2)
    for layer in others:
        expected = convolve(expected, layer)
    assert first.conv.out_channels == 4 and len(others) == 2
    torch.testing.assert_close(stem(x), expected, atol=1e-5, rtol=1e-4)
    assert stem(x).shape == (2, 32, 2, 3)


@pytest.mark.parametrize("stem", ["conv", "r9"])
def test_training_updates_the_statistics_that_evaluation_uses(stem):
    model = ViT(ViTConfig(**SMALL, stem=stem))
    x = 3 + 2 * torch.randn(4, 3, 8, 16)
    target, before = model.train().encode(x), model.eval().encode(x)
    for _ in range(100):
        model.train().encode(x)
    statistics = dict(model.named_buffers())
    assert sum(tensor.numel() for tensor in statistics.values()) == count_statistics(model.config)
    after = model.eval().encode(x)
    assert (after - target).norm() < 0.2 * (before - target).norm()


def test_all_tensors_of_a_stem_are_floating_point_and_load_again():
    model, other = ViT(ViTConfig(**SMALL, stem="r9")), ViT(ViTConfig(**SMALL, stem="r9"))
    state = dict(model.state_dict())
    assert all(tensor.is_floating_point() for tensor in state.values())
    other.load_state_dict(state)
    assert count_statistics(ViTConfig()) == 0


@pytest.mark.parametrize("channels", [1, 3])
def test_training_keeps_channels_last(channels):
    stem, layouts = ResNet9(channels, 16, 4), []
    for module in stem.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda m, given, out: layouts.append(out.stride(1)))
    x = torch.randn(4, channels, 8, 8)
    out = stem.train()(x)
    assert layouts == [1] * len(layouts) and len(layouts) == 5
    assert out.shape == (4, 16, 2, 2)
