import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.training.tiny import PATCHES, Tiny, batches, learner, run
from vitrail.errors import UserError
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import World
from vitrail.training.learner import Learner
from vitrail.training.loop import (
    Diverged,
    balanced_class_weights,
    count_correct,
    cross_entropy,
    first_loss_hint,
    step_seed,
    train_steps,
)

CONFIG = TrainConfig(lr=0.01, batch=8)


class Recorder(nn.Module):
    """Notes how it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(24, 3), []

    def forward(self, x, keep=None):
        self.calls.append((len(x), keep, torch.rand(1).item()))
        return self.layer(x.flatten(1))


def gradients(**changes):
    """Of the first step, in double precision and before any clipping."""
    config = TrainConfig(batch=8, clip=0, **changes)
    torch.manual_seed(0)
    model = Tiny().double()
    model.mlp[2].p = 0.0
    images, labels = next(batches())
    list(train_steps(Learner(model, config), [(images.double(), labels)], config, 1))
    return [parameter.grad for parameter in model.parameters()]


def test_it_learns():
    config = TrainConfig(lr=0.02, batch=8, ema=0.9)
    steps = run(learner(config), config, total=120)
    assert sum(step.loss for step in steps[-20:]) < 0.5 * sum(step.loss for step in steps[:20])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_overfits_one_batch(optimizer):
    config = TrainConfig(lr=0.02, batch=8, optimizer=optimizer)
    model, batch = learner(config), next(batches())
    steps = list(train_steps(model, [batch] * 100, config, 100))
    assert steps[-1].loss < 0.1


def test_a_step_tells_its_number_loss_rate_and_images():
    config = TrainConfig(lr=1.0, warmup=0.5, batch=8)
    steps = run(learner(config), config, total=4, start=1)
    assert [step.number for step in steps] == [2, 3, 4]
    assert [step.lr for step in steps] == [1, 1, 0.5 * (1 + math.cos(math.pi / 2))]
    assert steps[0].images == 8
    assert math.isfinite(steps[0].loss) and steps[0].gradient_norm > 0


def test_it_asks_for_no_batch_beyond_the_last_step():
    asked = batches()
    list(train_steps(learner(CONFIG), asked, CONFIG, 3))
    assert torch.equal(next(asked)[0], next(batches(3))[0])


def test_it_ends_with_the_batches():
    assert len(list(train_steps(learner(CONFIG), [next(batches())] * 2, CONFIG, 10))) == 2


def test_groups_learn_at_their_part_of_the_rate():
    config = TrainConfig(lr=0.1, layer_decay=0.5, warmup=0)
    model = Learner(Tiny(), config, layer_index=lambda name: int("head" in name))
    list(train_steps(model, batches(), config, 1))
    assert sorted(group["lr"] for group in model.optimizer.param_groups) == [0.05, 0.05, 0.1, 0.1]


def test_parts_of_a_batch_add_up_to_the_whole():
    for whole, parts in zip(gradients(), gradients(accumulate=3), strict=True):
        torch.testing.assert_close(whole, parts)


def test_a_batch_is_computed_in_as_many_parts_as_asked():
    config = TrainConfig(accumulate=3, batch=8)
    model = Recorder()
    step = next(train_steps(Learner(model, config), batches(), config, 1))
    assert [call[0] for call in model.calls] == [3, 3, 2]
    assert step.images == 8


def test_the_loss_of_parts_is_the_loss_of_the_whole():
    one, parts = TrainConfig(batch=8), TrainConfig(batch=8, accumulate=4)
    losses = []
    for config in (one, parts):
        torch.manual_seed(0)
        losses.append(next(train_steps(Learner(Recorder(), config), batches(), config, 1)).loss)
    assert losses[0] == pytest.approx(losses[1])


def test_smoothing_spreads_a_label_over_all_classes():
    logits, labels = torch.tensor([[2.0, 0, 1]]), torch.tensor([0])
    surprise = -logits.log_softmax(dim=1)[0]
    by_hand = 0.7 * surprise[0] + 0.3 * surprise.mean()
    torch.testing.assert_close(cross_entropy(logits, labels, 0.3, None), by_hand)


def test_class_weights_multiply_the_loss_of_their_images():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    each = F.cross_entropy(logits, labels, reduction="none")
    found = cross_entropy(logits, labels, 0.0, torch.tensor([1.0, 2, 3]))
    torch.testing.assert_close(found, each @ torch.tensor([1.0, 2, 3, 3]))


def test_targets_may_say_how_much_there_is_of_each_class():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    sure = F.one_hot(labels, 3).float()
    weights = torch.tensor([1.0, 2, 3])
    torch.testing.assert_close(
        cross_entropy(logits, labels, 0.1, weights), cross_entropy(logits, sure, 0.1, weights)
    )
    mixed = 0.3 * sure + 0.7 * sure.flip(0)
    by_hand = 0.3 * cross_entropy(logits, labels, 0, None)
    by_hand = by_hand + 0.7 * cross_entropy(logits, labels.flip(0), 0, None)
    torch.testing.assert_close(cross_entropy(logits, mixed, 0, None), by_hand)


def test_class_weights_reach_the_loss():
    plain, weighted = learner(CONFIG), learner(CONFIG)
    run(plain, CONFIG, total=2)
    run(weighted, CONFIG, total=2, class_weights=torch.tensor([1.0, 2, 3]))
    assert not torch.equal(plain.model.head.weight, weighted.model.head.weight)


def test_balanced_classes_count_alike_and_an_image_1_on_average():
    counts = torch.tensor([10, 30, 60])
    weights = balanced_class_weights(counts)
    torch.testing.assert_close(weights * counts, torch.full((3,), 100 / 3))


def test_each_step_has_its_own_gradient():
    config, batch = TrainConfig(lr=1e-9, batch=8), next(batches())
    steps = list(train_steps(Learner(Recorder(), config), [batch] * 3, config, 3))
    assert steps[2].gradient_norm == pytest.approx(steps[0].gradient_norm)


def test_gradients_above_the_maximum_norm_are_clipped():
    config = TrainConfig(batch=8, clip=0.01)
    model = learner(config)
    step = run(model, config, total=1)[0]
    left = torch.stack([p.grad.norm() for p in model.model.parameters()]).norm()
    assert step.gradient_norm > 0.01
    assert float(left) == pytest.approx(0.01, rel=1e-3)


def test_gradients_below_the_maximum_norm_stay_as_they_are():
    free, limited = TrainConfig(batch=8, clip=0), TrainConfig(batch=8, clip=1e6)
    one, other = learner(free), learner(limited)
    run(one, free)
    run(other, limited)
    assert torch.equal(one.model.head.weight, other.model.head.weight)


def test_chance_in_a_step_depends_on_seed_step_and_rank_only():
    def drawn(seed=0, start=0, rank=0):
        config, model = TrainConfig(seed=seed, batch=8), Recorder()
        options = {"start": start, "world": World(rank=rank)}
        for _ in train_steps(Learner(model, config), batches(), config, 4, **options):
            torch.rand(3)  # what a driver draws in between changes nothing
        return [call[2] for call in model.calls]

    every = drawn()
    assert drawn(start=2) == every[2:]
    assert len({*every, *drawn(seed=1), *drawn(rank=1)}) == 12


def test_step_seeds_differ_in_the_bits_a_cpu_generator_uses():
    seeds = {step_seed(0, step, rank) % 2**32 for step in range(2000) for rank in range(2)}
    assert len(seeds) == 4000


def test_patches_are_left_out_at_random_in_the_first_steps_only():
    config = TrainConfig(drop_patches=0.5, drop_until=0.5, batch=8)
    model = Recorder()
    list(train_steps(Learner(model, config), batches(), config, 4, patches=PATCHES))
    kept = [keep for _, keep, _ in model.calls]
    assert kept[2:] == [None, None]
    assert kept[0].shape == (8, 3) and not torch.equal(kept[0], kept[1])
    assert all(len(set(row)) == 3 and max(row) < PATCHES for row in kept[0].tolist())
    assert len({tuple(sorted(row)) for row in kept[0].tolist()}) > 1


def test_patch_dropout_needs_the_number_of_patches():
    config = TrainConfig(drop_patches=0.5, batch=8)
    with pytest.raises(UserError, match="needs `patches`"):
        run(learner(config), config)


def test_models_without_patches_are_called_without_keep():
    model = Recorder()
    list(train_steps(Learner(model, CONFIG), batches(), CONFIG, 2, patches=PATCHES))
    assert [keep for _, keep, _ in model.calls] == [None, None]


def test_a_driver_may_evaluate_between_steps():
    straight, paused = learner(CONFIG), learner(CONFIG)
    run(straight, CONFIG)
    for _ in train_steps(paused, batches(), CONFIG, 20):
        paused.model.eval()
    assert torch.equal(straight.model.head.weight, paused.model.head.weight)


def broken(number, what):
    """Batches of which one holds NaN."""
    for step, (images, labels) in enumerate(batches()):
        images[0, 0, 0, 0] = what if step == number else 0
        yield images, labels


def test_nan_in_the_data_stops_before_the_step_and_is_named():
    model, before = (learner(TrainConfig(batch=8, ema=0.9)) for _ in range(2))
    steps = train_steps(before, broken(99, 0), CONFIG, 10)
    next(steps), next(steps)
    with pytest.raises(Diverged, match=r"step 3 .*its images contain NaN"):
        list(train_steps(model, broken(2, float("nan")), CONFIG, 10))
    for name, tensor in before.tensors().items():
        assert torch.equal(tensor, model.tensors()[name]), name


def test_nan_in_the_weights_is_named():
    model = learner(CONFIG)
    model.model.head.bias.data[0] = float("nan")
    with pytest.raises(Diverged, match=r"step 1 .*weights already contained NaN"):
        run(model, CONFIG)


def test_too_high_a_rate_is_named():
    config = TrainConfig(lr=10, batch=8, clip=0, warmup=0)
    model = Learner(nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), config)
    huge = ((images * 1e37, labels) for images, labels in batches())
    with pytest.raises(Diverged, match=r"step \d+ .*the learning rate, .*, is probably too high"):
        list(train_steps(model, huge, config, 50))


@pytest.mark.parametrize(
    ("shift", "slope"), [(0.0, math.inf), (0.0, math.nan), (math.inf, 0.0), (math.nan, 0.0)]
)
def test_one_of_loss_and_gradient_that_is_not_finite_is_enough_to_stop(shift, slope):
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + shift

        @staticmethod
        def backward(ctx, gradient):
            return torch.zeros_like(gradient) if slope == 0 else gradient * slope

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 3)

        def forward(self, x):
            return Spoil.apply(self.layer(x.flatten(1)))

    model = Learner(Model(), CONFIG)
    before = model.model.layer.weight.detach().clone()
    with pytest.raises(Diverged, match="step 1 has loss"):
        run(model, CONFIG)
    assert torch.equal(before, model.model.layer.weight)


def test_bfloat16_keeps_the_weights_in_float32():
    config = TrainConfig(precision="bfloat16", batch=8)
    model = learner(config)
    rough = run(model, config, total=2)
    exact_config = replace(CONFIG, precision="float32")
    exact = run(learner(exact_config), exact_config, total=2)
    assert model.model.head.weight.dtype == torch.float32
    assert 0 < abs(rough[0].loss - exact[0].loss) < 0.05


def test_float16_skips_overflowing_steps_and_lowers_its_scale():
    config = TrainConfig(precision="float16", batch=8)
    model = learner(config)
    model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    before = model.model.head.weight.detach().clone()
    step = run(model, config, total=1)[0]
    assert math.isinf(step.gradient_norm) or math.isnan(step.gradient_norm)
    assert torch.equal(before, model.model.head.weight)
    assert model.scaler.get_scale() == 2.0**29


def test_float16_that_overflows_at_every_scale_is_named():
    config = TrainConfig(precision="float16", batch=8)
    model = learner(config)
    model.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    model.model.head.weight.data *= 1e6
    with pytest.raises(Diverged, match=r"set train.precision to bfloat16 or float32"):
        run(model, config)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_says_which_setting_to_change(error):
    class Hungry(Recorder):
        def forward(self, x, keep=None):
            raise error

    config = TrainConfig(batch=8, accumulate=2)
    with pytest.raises(UserError, match=r"micro-batches of 4 images; raise train.accumulate to 4"):
        run(Learner(Hungry(), config), config)


def test_other_errors_of_the_model_are_not_hidden():
    class Wrong(Recorder):
        def forward(self, x, keep=None):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        run(Learner(Wrong(), CONFIG), CONFIG)


def test_compile_is_used_when_asked_for(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    run(learner(CONFIG), CONFIG, total=1)
    assert not compiled
    config = TrainConfig(compile=True, batch=8)
    run(learner(config), config, total=1)
    assert len(compiled) == 1


def test_a_first_loss_near_ln_classes_gets_no_hint():
    assert first_loss_hint(2.31, 10) is None
    assert first_loss_hint(6.95, 1000) is None


def test_a_high_first_loss_gets_a_hint():
    assert "confident and wrong" in first_loss_hint(5.0, 10)


def test_a_low_first_loss_gets_a_hint():
    assert "already knows the labels" in first_loss_hint(0.3, 10)


def test_a_step_counts_correct_predictions():
    config = TrainConfig(batch=8, accumulate=3, clip=0)
    images, labels = next(batches())
    model = learner(config)
    model.model.mlp[2].p = 0.0
    with torch.no_grad():
        wanted = int((model.model(images).argmax(dim=1) == labels).sum())
    step = next(train_steps(model, [(images, labels)], config, 1))
    assert step.correct == wanted


def test_the_label_of_a_mixed_image_is_the_stronger_class():
    logits = torch.tensor([[3.0, 1, 2], [0, 5, 1], [0, 1, 2]])
    shares = torch.tensor([[0.6, 0.4, 0], [0.6, 0.4, 0], [0, 0.3, 0.7]])
    assert int(count_correct(logits, shares)) == 2
    assert int(count_correct(logits, torch.tensor([0, 1, 1]))) == 2
