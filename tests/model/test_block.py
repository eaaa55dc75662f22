"""The parts of a block, and what they are in training and in evaluation."""

import math

import pytest
import torch

from vitrail.model.block import Block, DropPath, LayerScale, Mlp
from vitrail.model.config import ViTConfig


def test_the_tanh_form_of_gelu_is_the_formula():
    mlp, x = Mlp(4, 8, "gelu_tanh"), torch.randn(3, 4)
    z = mlp.fc1(x)
    bent = z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    torch.testing.assert_close(mlp(x), mlp.fc2(bent))


def test_exact_gelu_is_x_times_the_normal_distribution():
    mlp, x = Mlp(4, 8, "gelu"), torch.randn(3, 4)
    z = mlp.fc1(x)
    torch.testing.assert_close(mlp(x), mlp.fc2(z * torch.distributions.Normal(0, 1).cdf(z)))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_without_gradients_the_bend_takes_no_memory_and_changes_no_bit(kind):
    mlp, x = Mlp(8, 16, kind), torch.randn(2, 3, 16)
    before = x.clone()
    bent = mlp.bend(x)
    assert torch.equal(x, before)
    with torch.no_grad():
        assert mlp.bend(x).data_ptr() == x.data_ptr()
    assert torch.equal(x, bent)


def test_swiglu_gates_one_half_by_the_other():
    mlp, x = Mlp(4, 8, "swiglu"), torch.randn(3, 4)
    gate, value = mlp.fc1(x).split(8, dim=-1)
    torch.testing.assert_close(mlp(x), mlp.fc2(gate * gate.sigmoid() * value))


def test_layer_scale_multiplies_each_number():
    scale, x = LayerScale(4, 0.1), torch.randn(3, 4)
    torch.testing.assert_close(scale(x), 0.1 * x)


def test_a_dropped_path_leaves_whole_images_out_and_keeps_the_mean():
    torch.manual_seed(0)
    dropped = DropPath(0.25).train()(torch.ones(4000, 2, 3))
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert (dropped == dropped[:, :1, :1]).all()
    assert dropped.mean() == pytest.approx(1, abs=0.05)


def test_no_path_is_dropped_in_evaluation():
    x = torch.randn(5, 2, 3)
    assert DropPath(0.9).eval()(x) is x


def test_a_block_without_branches_is_the_identity():
    block = Block(ViTConfig(width=8, heads=2, layer_scale=1.0), 0.0)
    for scale in (block.ls1, block.ls2):
        torch.nn.init.zeros_(scale.gamma)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(block(x), x)
