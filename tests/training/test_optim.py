import copy

import pytest
import torch
from torch import nn

from tests.training.tiny import MATRICES, Tiny
from vitrail.errors import UserError
from vitrail.training.config import TrainConfig
from vitrail.training.learner import Learner
from vitrail.training.optim import EmaModel, Muon, build_optimizer, orthogonalize


def groups(model, optimizer):
    """Name -> (scale, weight decay, matrices stacked)."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["scale"], group["weight_decay"], group["matrices"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def step(model, optimizer, seed=0):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_vectors_and_named_parameters_feel_no_weight_decay():
    model = Tiny()
    found = groups(
        model, build_optimizer(model, TrainConfig(weight_decay=0.1), no_weight_decay=["token"])
    )
    decayed = {name for name, (_, decay, _) in found.items() if decay}
    assert decayed == {name for name, p in model.named_parameters() if p.ndim == 2}


def test_every_parameter_is_in_one_group():
    model = Tiny()
    optimizer = build_optimizer(model, TrainConfig())
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))


def test_the_rate_falls_from_layer_to_layer_below_the_top():
    model, layers = Tiny(), {"embed": 0, "token": 0, "head": 2}
    optimizer = build_optimizer(
        model,
        TrainConfig(layer_decay=0.5),
        layer_index=lambda name: layers.get(name.split(".")[0], 1),
    )
    found = groups(model, optimizer)
    names = ("embed.weight", "qkv.bias", "head.weight")
    assert [found[name][0] for name in names] == [0.25, 0.5, 1]


def test_frozen_parameters_are_left_alone():
    model = Tiny()
    model.embed.requires_grad_(False)
    assert not [
        name for name in groups(model, build_optimizer(model, TrainConfig())) if "embed" in name
    ]


def test_a_model_that_cannot_learn_is_refused():
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        build_optimizer(Tiny().requires_grad_(False), TrainConfig())


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match=r"has no parameters .*pos"):
        build_optimizer(Tiny(), TrainConfig(), no_weight_decay=["pos"])


def test_muon_turns_matrices_only():
    with pytest.raises(UserError, match="token"):
        build_optimizer(Tiny(), TrainConfig(optimizer="muon"), matrices={"token": 1})


def test_adamw_has_no_use_for_matrices():
    model = Tiny()
    found = groups(model, build_optimizer(model, TrainConfig(), matrices=MATRICES))
    assert not any(stacked for _, _, stacked in found.values())


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (32, 8)])
def test_newton_schulz_brings_all_singular_values_near_1(shape):
    torch.manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
    spread = torch.logspace(-1, 1, 8).diag()  # the largest a hundred times the smallest
    values = torch.linalg.svdvals(orthogonalize(u @ spread @ vt))
    assert 0.6 < values.min() < values.max() < 1.3


def test_newton_schulz_keeps_the_directions():
    torch.manual_seed(0)
    x = torch.randn(16, 16)
    u, _, vt = torch.linalg.svd(x)
    (turned,) = orthogonalize(x[None])
    values = (u.mT @ turned @ vt.mT).diag()
    torch.testing.assert_close(u @ values.diag() @ vt, turned, atol=1e-4, rtol=1e-4)


def test_matrices_in_a_stack_do_not_touch_each_other():
    torch.manual_seed(0)
    x = torch.randn(3, 8, 16)
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in x])
    torch.testing.assert_close(orthogonalize(x), alone)


@pytest.mark.parametrize(("side", "rounded"), [(127, False), (128, True)])
def test_large_matrices_are_orthogonalized_in_bfloat16(side, rounded):
    torch.manual_seed(0)
    x = torch.randn(1, 200, side)
    exact, fast = orthogonalize(x), orthogonalize(x, torch.bfloat16)
    assert fast.dtype == torch.float32
    assert torch.equal(exact, fast) != rounded
    assert (fast - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_computes_in_the_precision_of_the_training(precision):
    config = TrainConfig(optimizer="muon", precision=precision)
    learner = Learner(nn.Linear(4, 4), config)
    assert learner.optimizer.dtype == getattr(torch, precision)


def test_a_zero_gradient_stays_zero():
    assert orthogonalize(torch.zeros(2, 4, 4)).abs().max() == 0


def test_stacked_matrices_turn_as_if_they_were_alone():
    config = TrainConfig(optimizer="muon", lr=0.1)
    torch.manual_seed(0)
    fused = nn.Linear(8, 24, bias=False)
    alone = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    for part, layer in zip(fused.weight.detach().chunk(3), alone, strict=True):
        layer.weight.data = part.clone()
    for model, stacked in ((fused, 3), (alone, 1)):
        names = {name: stacked for name, _ in model.named_parameters()}
        optimizer = build_optimizer(model, config, matrices=names)
        gradient = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        count = len(list(model.parameters()))
        for parameter, part in zip(model.parameters(), gradient.chunk(count), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    together = torch.cat([layer.weight for layer in alone])
    torch.testing.assert_close(fused.weight, together)


def test_muon_steps_the_rest_as_adamw_does():
    one, other = Tiny(), Tiny()
    other.load_state_dict(one.state_dict())
    step(one, build_optimizer(one, TrainConfig(optimizer="muon"), matrices=MATRICES))
    step(other, build_optimizer(other, TrainConfig()))
    for name, parameter in one.named_parameters():
        same = torch.equal(parameter, other.get_parameter(name))
        assert same == (name not in MATRICES), name


def test_muon_moves_a_matrix_as_far_as_adamw_would():
    """The root mean square of the change is 0.2 times the learning rate for every shape."""
    torch.manual_seed(0)
    for shape in ((32, 32), (32, 128), (128, 32)):
        model = nn.Linear(shape[1], shape[0], bias=False)
        before = model.weight.detach().clone()
        config = TrainConfig(optimizer="muon", lr=0.01, weight_decay=0)
        step(model, build_optimizer(model, config, matrices={"weight": 1}))
        change = (model.weight - before).pow(2).mean().sqrt()
        assert 0.0013 < change < 0.0025, shape


def test_muon_pulls_matrices_towards_zero():
    torch.manual_seed(0)
    pulled, free = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    free.load_state_dict(pulled.state_dict())
    start = pulled.weight.detach().clone()
    for model, decay in ((pulled, 0.5), (free, 0.0)):
        config = TrainConfig(optimizer="muon", lr=0.1, weight_decay=decay)
        step(model, build_optimizer(model, config, matrices={"weight": 1}))
    torch.testing.assert_close(free.weight - pulled.weight, start * 0.1 * 0.5)


def test_muon_turns_a_convolution_kernel_as_a_matrix_of_its_output_channels():
    conv, linear = nn.Conv2d(4, 6, 3, bias=False), nn.Linear(36, 6, bias=False)
    linear.weight.data.copy_(conv.weight.data.flatten(1))
    config = TrainConfig(optimizer="muon", lr=0.1)
    gradient = torch.randn(6, 36)
    for model in (conv, linear):
        optimizer = build_optimizer(model, config, matrices={"weight": 1})
        model.weight.grad = gradient.view_as(model.weight).clone()
        optimizer.step()
    assert torch.equal(conv.weight.flatten(1), linear.weight)


def test_muon_remembers_gradients():
    model = nn.Linear(8, 8, bias=False)
    optimizer = build_optimizer(model, TrainConfig(optimizer="muon"), matrices={"weight": 1})
    step(model, optimizer, seed=1)
    fresh = copy.deepcopy(model)
    step(model, optimizer, seed=2)
    step(
        fresh, build_optimizer(fresh, TrainConfig(optimizer="muon"), matrices={"weight": 1}), seed=2
    )
    assert not torch.equal(model.weight, fresh.weight)


def test_muon_passes_over_parameters_without_gradient():
    model = Tiny()
    optimizer = build_optimizer(model, TrainConfig(optimizer="muon"), matrices=MATRICES)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert isinstance(optimizer, Muon)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_average_by_hand():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average = EmaModel(model, decay=0.15)
    nn.init.constant_(model.weight, 2.0)
    average.update(step=0)  # keeps (1 + 0) / (10 + 0)
    assert average.model.weight.item() == pytest.approx(0.1 * 1 + 0.9 * 2)
    average.update(step=50)  # keeps 0.15, less than 51 / 60
    assert average.model.weight.item() == pytest.approx(0.15 * 1.9 + 0.85 * 2)


def test_the_average_includes_the_statistics_of_batch_norms():
    model = nn.BatchNorm1d(2)
    average = EmaModel(model, decay=0.15)
    model.running_mean.fill_(3)
    model.num_batches_tracked.fill_(5)
    average.update(step=0)  # keeps (1 + 0) / (10 + 0)
    assert average.model.running_mean.tolist() == pytest.approx([2.7, 2.7])
    assert average.model.num_batches_tracked == 5


def test_the_average_is_apart_from_the_model_and_does_not_learn():
    model = Tiny()
    average = EmaModel(model, decay=0.9)
    model.head.weight.data.fill_(7)
    assert not (average.model.head.weight == 7).any()
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
