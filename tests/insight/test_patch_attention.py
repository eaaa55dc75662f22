"""Quantized attention of every patch: equal to the maps within half a quantization step."""

import numpy as np
import pytest
import torch

import vitrail
from tests.insight.samples import KINDS, pictures, small
from vitrail.insight import patch_attention as module
from vitrail.insight.explain import rollout
from vitrail.insight.patch_attention import (
    MEAN,
    ROLLOUT,
    choose_maps,
    quantize_attention,
    spaced_subset,
)


def quantized(kind="plain", **settings):
    model = small(kind)
    x = pictures(model, 1)
    return model, x, quantize_attention(model, x, range(3), range(3), **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_maps_are_the_attention_within_half_a_step(kind):
    model, x, found = quantized(kind)
    prefix = model.config.prefix
    for layer, exact in enumerate(vitrail.attention(model, x, rows="all")):
        for head in range(3):
            rows = exact[0, head, prefix:, prefix:].numpy()
            step = rows.max(axis=1, keepdims=True) / 255
            assert (np.abs(found.weights(layer, head)[1:] - rows) <= 0.501 * step).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_row_is_the_query_and_rows_sum_to_one(kind):
    model, x, found = quantized(kind)
    prefix = model.config.prefix
    query = vitrail.attention(model, x, layers=1)[0][0, :, 0]
    number = found.maps.index((1, 2))
    assert np.isclose(found.prefix[number, 0], query[2, :prefix].sum().item(), atol=1e-6)
    assert np.allclose(found.weights(1, 2)[0], query[2, prefix:].numpy(), atol=2e-3)
    total = found.prefix[number] + found.weights(1, 2).sum(axis=1)
    assert np.allclose(total, 1, atol=0.02)


def test_the_mean_map_is_the_mean_of_heads():
    model, x, found = quantized()
    exact = vitrail.attention(model, x, layers=2, rows="all")[0].mean(dim=1)[0, 1:, 1:].numpy()
    assert np.allclose(found.weights(2, MEAN)[1:], exact, atol=2e-3)


def test_the_map_through_all_layers_is_rollout():
    model, x, found = quantized()
    exact = rollout(vitrail.attention(model, x, rows="all"))[0].numpy()
    assert np.allclose(found.weights(ROLLOUT, MEAN)[1:], exact[1:, 1:], atol=2e-3)


def test_many_patches_are_merged_into_cells_without_losing_attention(monkeypatch):
    monkeypatch.setattr(module, "MAX_CELLS", 6)
    model, x, found = quantized("wide")  # 2 x 5 patches
    assert found.grid == (1, 3) and found.cell_side == 2
    exact = vitrail.attention(model, x, layers=0, rows="all")[0][0, 1, 1:, 1:].numpy()
    first, last = [0, 1, 5, 6], [4, 9]
    assert np.isclose(
        found.weights(0, 1)[1, 2], exact[first][:, last].sum(axis=1).mean(), atol=2e-3
    )


def test_maps_fit_into_the_given_bytes():
    one = 17 * 16  # bytes of a map of 16 patches
    _, _, found = quantized(max_bytes=8 * one)
    assert found.levels.nbytes <= 8 * one
    whole = {layer for layer, head in found.maps if head >= 0}
    assert whole == {2}  # rollout, three means, and the heads of the last layer


def test_the_last_layer_stays_when_others_do_not_fit():
    assert choose_maps(range(12), range(3), 4) == [
        (ROLLOUT, MEAN),
        (0, MEAN),
        (6, MEAN),
        (11, MEAN),
    ]
    assert spaced_subset(range(12), 1) == [11]
    assert spaced_subset(range(3), 9) == [0, 1, 2]


def test_quantizing_leaves_the_model_unchanged():
    model, _, _ = quantized()
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
