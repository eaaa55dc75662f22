"""Where every patch looks, packed: the same as the maps, to the last bit that fits."""

import numpy as np
import pytest
import torch

import vitrail
from tests.insight.samples import KINDS, pictures, small
from vitrail.insight import looks as module
from vitrail.insight.explain import rollout
from vitrail.insight.looks import FLOW, MEAN, choose, looks, spread


def packed(kind="plain", **settings):
    model = small(kind)
    x = pictures(model, 1)
    return model, x, looks(model, x, range(3), range(3), **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_maps_are_the_attention_to_half_a_step(kind):
    model, x, found = packed(kind)
    prefix = model.config.prefix
    for layer, exact in enumerate(vitrail.attention(model, x, rows="all")):
        for head in range(3):
            rows = exact[0, head, prefix:, prefix:].numpy()
            step = rows.max(axis=1, keepdims=True) / 255
            assert (np.abs(found.share(layer, head)[1:] - rows) <= 0.501 * step).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_row_is_the_reader_and_all_shares_sum_to_one(kind):
    model, x, found = packed(kind)
    prefix = model.config.prefix
    reader = vitrail.attention(model, x, layers=1)[0][0, :, 0]
    number = found.maps.index((1, 2))
    assert np.isclose(found.front[number, 0], reader[2, :prefix].sum().item(), atol=1e-6)
    assert np.allclose(found.share(1, 2)[0], reader[2, prefix:].numpy(), atol=2e-3)
    total = found.front[number] + found.share(1, 2).sum(axis=1)
    assert np.allclose(total, 1, atol=0.02)


def test_the_mean_map_is_the_mean_of_heads():
    model, x, found = packed()
    exact = vitrail.attention(model, x, layers=2, rows="all")[0].mean(dim=1)[0, 1:, 1:].numpy()
    assert np.allclose(found.share(2, MEAN)[1:], exact, atol=2e-3)


def test_the_flow_through_all_layers_is_rollout():
    model, x, found = packed()
    exact = rollout(vitrail.attention(model, x, rows="all"))[0].numpy()
    assert np.allclose(found.share(FLOW, MEAN)[1:], exact[1:, 1:], atol=2e-3)


def test_many_patches_are_gathered_into_cells_and_no_attention_is_lost(monkeypatch):
    monkeypatch.setattr(module, "CELLS", 6)
    model, x, found = packed("wide")  # 2 x 5 patches
    assert found.cells == (1, 3) and found.gathered == 2
    exact = vitrail.attention(model, x, layers=0, rows="all")[0][0, 1, 1:, 1:].numpy()
    first, last = [0, 1, 5, 6], [4, 9]
    assert np.isclose(found.share(0, 1)[1, 2], exact[first][:, last].sum(axis=1).mean(), atol=2e-3)


def test_maps_stay_in_the_room_they_are_given():
    one = 17 * 16  # bytes of a map of 16 patches
    _, _, found = packed(room=8 * one)
    assert found.shares.nbytes <= 8 * one
    whole = {layer for layer, head in found.maps if head >= 0}
    assert whole == {2}  # rollout, three means, and the heads of the last layer


def test_the_last_layer_stays_when_others_go():
    assert choose(range(12), range(3), 4) == [(FLOW, MEAN), (0, MEAN), (6, MEAN), (11, MEAN)]
    assert spread(range(12), 1) == [11]
    assert spread(range(3), 9) == [0, 1, 2]


def test_looking_leaves_the_model_as_it_was():
    model, _, _ = packed()
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
