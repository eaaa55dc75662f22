"""The parts of a block, in training and in evaluation."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.model.block import Block, DropPath, LayerScale
from vitrail.model.config import ViTConfig
from vitrail.model.inplace import InplaceMlp
from vitrail.model.mlp import Mlp


def test_gelu_tanh_is_the_published_approximation():
    mlp, x = Mlp(4, 8, "gelu_tanh"), torch.randn(3, 4)
    z = mlp.fc1(x)
    activated = z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    torch.testing.assert_close(mlp(x), mlp.fc2(activated))


def test_exact_gelu_is_x_times_the_normal_distribution():
    mlp, x = Mlp(4, 8, "gelu"), torch.randn(3, 4)
    z = mlp.fc1(x)
    torch.testing.assert_close(mlp(x), mlp.fc2(z * torch.distributions.Normal(0, 1).cdf(z)))


class Operators(TorchDispatchMode):
    """Records the name of every operator that runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def operators(mlp):
    with Operators() as recorded:
        mlp(torch.randn(2, 3, 8))
    return recorded.names


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu", "swiglu"])
def test_an_mlp_in_place_equals_the_mlp_to_the_bit(kind):
    inplace, mlp, x = InplaceMlp(8, 16, kind), Mlp(8, 16, kind), torch.randn(2, 3, 8)
    mlp.load_state_dict(inplace.state_dict())
    with torch.no_grad():
        assert torch.equal(inplace(x), mlp(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_hooks_gelu_runs_in_place(mode):
    with mode():
        assert "gelu_" in operators(InplaceMlp(8, 16, "gelu"))


def test_with_gradients_gelu_does_not_run_in_place():
    assert "gelu_" not in operators(InplaceMlp(8, 16, "gelu"))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("hooked", ["fc1", "everything"])
def test_a_forward_hook_keeps_the_output_of_fc1_as_it_was(kind, mode, hooked):
    mlp, x, outputs = InplaceMlp(8, 16, kind), torch.randn(2, 3, 8), []

    def keep(module, inputs, output):
        if module is mlp.fc1:
            outputs.append(output)

    register = mlp.fc1.register_forward_hook if hooked == "fc1" else register_module_forward_hook
    handle = register(keep)
    try:
        with mode():
            mlp(x)
    finally:
        handle.remove()
    with torch.no_grad():
        assert torch.equal(outputs[0], F.linear(x, mlp.fc1.weight, mlp.fc1.bias))


def test_a_forward_hook_on_the_mlp_prevents_gelu_in_place():
    mlp = InplaceMlp(8, 16, "gelu")
    mlp.register_forward_hook(lambda module, inputs, output: None)
    with torch.no_grad():
        assert "gelu_" not in operators(mlp)


def test_a_replaced_first_layer_keeps_its_output():
    mlp, x = InplaceMlp(8, 8, "gelu"), torch.randn(2, 3, 8)
    mlp.fc1 = torch.nn.Identity()  # returns its input, which belongs to the caller
    before = x.clone()
    with torch.no_grad():
        mlp(x)
    assert torch.equal(x, before)


def test_swiglu_gates_one_half_by_the_other():
    mlp, x = Mlp(4, 8, "swiglu"), torch.randn(3, 4)
    gate, value = mlp.fc1(x).split(8, dim=-1)
    torch.testing.assert_close(mlp(x), mlp.fc2(gate * gate.sigmoid() * value))


def test_layer_scale_multiplies_each_channel():
    scale, x = LayerScale(4, 0.1), torch.randn(3, 4)
    torch.testing.assert_close(scale(x), 0.1 * x)


def test_drop_path_drops_whole_images_and_keeps_the_mean():
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
