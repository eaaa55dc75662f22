"""Heatmaps: the known property of each method, and the class that it explains."""

import pytest
import torch
from torch.nn import functional as F

from tests.insight.samples import KINDS, pictures, small, spelled_out
from vitrail.errors import UserError
from vitrail.insight import explain as module
from vitrail.insight.explain import (
    FUNCTIONS,
    attention_rollout,
    explain,
    gradient_rollout,
    gradient_times_attention,
    occlusion,
    record_attention,
    relevance,
    rollout,
    window_masks,
    window_starts,
)
from vitrail.insight.maps import attention, pool_attention
from vitrail.insight.methods import CLASS_AGNOSTIC, FAST, METHODS
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

ONE = torch.ones(())


def same(found, wanted, most=1e-6):
    torch.testing.assert_close(found, wanted, rtol=0, atol=most)


def test_every_method_has_a_function():
    assert list(FUNCTIONS) == list(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_explains_every_kind_of_model(kind, method):
    model = small(kind)
    heatmap = explain(model, pictures(model), method)
    assert heatmap.shape == (2, *model.config.grid)
    assert (heatmap >= 0).all() and heatmap.std() > 0


# --- rollout -------------------------------------------------------------------------------------


def test_rollout_of_the_identity_is_the_identity():
    maps = [torch.eye(6).expand(2, 3, 6, 6)] * 4
    same(rollout(maps), torch.eye(6).expand(2, 6, 6))


def test_rollout_is_the_product_of_halves_in_the_order_of_layers():
    first, second = torch.rand(2, 1, 3, 5, 5).softmax(dim=-1)
    halves = [(maps.mean(0) + torch.eye(5)) / 2 for maps in (first, second)]
    same(rollout([first[None], second[None]])[0], halves[1] @ halves[0])


@pytest.mark.parametrize("head", ["mean", "max", "min"])
@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
def test_rows_of_rollout_sum_to_one(head, discard):
    model = small("registers")
    flow = rollout(attention(model, pictures(model), rows="all"), head, discard)
    same(flow.sum(dim=-1), ONE.expand(2, 19), most=1e-5)


def test_rows_without_attention_become_the_identity():
    maps = torch.eye(4)[[1, 2, 3, 0]], torch.eye(4)[[2, 3, 0, 1]]
    same(rollout([torch.stack(maps)[None]], head="min")[0], torch.eye(4))


def test_discard_zeroes_the_smallest_weights_of_each_row():
    maps = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).repeat(2, 1)[None, None]
    flow = rollout([maps], discard=0.5)[0]
    wanted = torch.tensor([[0.0, 0, 3, 4], [4, 3, 0, 0]]).repeat(2, 1) / 14 + torch.eye(4) / 2
    same(flow, wanted)


def test_rollout_of_a_model_is_the_row_of_cls():
    model = small("registers")
    x = pictures(model)
    flow = rollout(attention(model, x, rows="all"), head="max", discard=0.3)
    same(explain(model, x, "rollout", head="max", discard=0.3), flow[:, 0, 3:].view(2, 4, 4))


def test_rollout_of_an_averaging_model_is_the_mean_of_its_patches():
    model = small("avg after")
    x = pictures(model)
    flow = rollout(attention(model, x, rows="all"))
    same(attention_rollout(model, x), flow[:, 1:, 1:].mean(dim=1).view(2, 4, 4))


def test_rollout_of_attention_pooling_follows_its_weights():
    model = small("map")
    x = pictures(model)
    flow, weights = rollout(attention(model, x, rows="all")), pool_attention(model, x).mean(dim=1)
    same(attention_rollout(model, x), (weights @ flow[:, 1:, 1:])[:, 0].view(2, 4, 4))


def test_rollout_of_a_distilled_model_is_the_mean_of_both_tokens():
    model = small("distilled")
    x = pictures(model)
    flow = rollout(attention(model, x, rows="all"))
    same(attention_rollout(model, x), flow[:, :2, 2:].mean(dim=1).view(2, 4, 4))


def test_a_distilled_model_reads_both_tokens():
    model = small("distilled")
    x = pictures(model)
    last = attention(model, x, layers=-1, rows="all")[0].mean(dim=1)
    same(explain(model, x, "attention"), last[:, :2, 2:].mean(dim=1).view(2, 4, 4))


def test_attention_of_a_pooling_model_is_that_of_the_pool():
    model = small("map")
    x = pictures(model)
    same(explain(model, x, "attention").flatten(1), pool_attention(model, x).mean(dim=1)[:, 0])


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_through_attention_written_out(kind):
    model = small(kind).double().eval()
    x = pictures(model).double().requires_grad_()
    logits, calls = record_attention(model, x)
    found = torch.autograd.grad(logits[:, 2].sum(), [one.mixed for one in calls])
    with spelled_out() as maps:
        wanted = torch.autograd.grad(model(x)[:, 2].sum(), maps)
    assert len(maps) == model.config.depth + (model.config.pool == "map")
    for one, gradient, written, theirs in zip(calls, found, maps, wanted, strict=True):
        part = torch.cat(list(gradient_times_attention(one, gradient)), dim=2)
        assert part.abs().max() > 1e-6 or theirs.abs().max() < 1e-6
        same(part, written * theirs, most=1e-10)


def test_relevance_is_the_rule_of_the_paper():
    model = small("registers").double().eval()
    x = pictures(model).double()
    with spelled_out() as maps:
        wanted = torch.autograd.grad(model(x)[:, 3].sum(), maps)
    flow = torch.eye(19, dtype=torch.float64).expand(2, 19, 19)
    for written, gradient in zip(maps, wanted, strict=True):
        flow = flow + (written * gradient).clamp(min=0).mean(dim=1) @ flow
    same(relevance(model, x, 3), flow[:, 0, 3:].view(2, 4, 4), most=1e-10)


def one_patch_matters():
    """Attention is uniform, and only patches that are not black change the logits."""
    torch.manual_seed(0)
    config = {"image": 16, "patch": 4, "classes": 2, "width": 12, "depth": 1, "heads": 2}
    model = ViT(ViTConfig(**config, positions="none"))
    block = model.blocks[0]
    with torch.no_grad():
        block.attn.qkv.weight[:24].zero_()
        block.mlp.fc2.weight.zero_()
        block.mlp.fc2.bias.zero_()
        model.cls_token.normal_()
        model.head.weight[0].normal_()
        model.head.weight[1] = -model.head.weight[0]
    x = torch.zeros(1, 3, 16, 16)
    x[:, :, 4:8, 8:12] = torch.rand(3, 4, 4)
    return model, x


@pytest.mark.parametrize("function", [relevance, gradient_rollout])
def test_where_one_patch_matters_the_heatmap_is_that_patch(function):
    model, x = one_patch_matters()
    heatmap = (
        function(model, x, 0)[0] + function(model, x, 1)[0]
    )  # it is evidence for one of two classes
    assert heatmap[1, 2] > 0
    heatmap[1, 2] = 0
    same(heatmap, torch.zeros(4, 4), most=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_only_class_specific_methods_differ_between_classes(method):
    model = small()
    x = pictures(model)
    first, second = (explain(model, x, method, target) for target in (0, 1))
    assert torch.equal(first, second) == (method in CLASS_AGNOSTIC)


@pytest.mark.parametrize("method", ["relevance", "gradient-rollout", "occlusion"])
def test_without_a_target_the_predicted_class_is_explained(method):
    model = small().eval()
    x = pictures(model)
    predicted = model(x).argmax(dim=1)
    same(explain(model, x, method), explain(model, x, method, predicted))


@pytest.mark.parametrize("method", METHODS)
def test_images_of_a_batch_are_independent(method):
    model = small("distilled")
    x = pictures(model)
    both = explain(model, x, method, torch.tensor([3, 1]))
    same(both[1:], explain(model, x[1:], method, 1), most=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_there_are_no_side_effects(method):
    model = small()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    frozen = [p.requires_grad for p in model.parameters()]
    x = pictures(model)
    explain(model, x, method)
    assert model.training and not x.requires_grad
    assert [p.requires_grad for p in model.parameters()] == frozen
    assert all(p.grad is None for p in model.parameters())
    assert not [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]


def test_hooks_are_removed_when_the_forward_fails():
    model = small()
    model.head.forward = None
    with pytest.raises(TypeError):
        relevance(model, pictures(model))
    assert not [m for m in model.modules() if m._forward_pre_hooks]


@pytest.mark.parametrize("method", METHODS)
def test_it_works_under_inference_mode_and_with_frozen_weights(method):
    model = small().requires_grad_(False)
    x = pictures(model)
    with torch.inference_mode():
        found = explain(model, x * 1, method, 2)
    same(found, explain(model, x, method, 2))


@pytest.mark.parametrize("method", FAST)
def test_chunks_of_rows_change_nothing(monkeypatch, method):
    model = small("rotary")
    x = pictures(model)
    wanted = explain(model, x, method)
    monkeypatch.setattr("vitrail.insight.maps.CHUNK", 500)
    same(explain(model, x, method), wanted)


# --- occlusion -----------------------------------------------------------------------------------


class Linear(ViT):
    """A toy whose logits are sums over pixels."""

    def forward(self, x, keep=None):
        scale = torch.arange(x[0].numel()).view(x[0].shape).sin() / 10
        parts = (x * scale).flatten(1)
        return torch.stack([parts.sum(dim=1), torch.zeros(len(x))], dim=1)


def linear():
    return Linear(ViTConfig(image=(8, 12), patch=4, classes=2, width=8, depth=1, heads=1))


def test_occlusion_is_exact_on_a_linear_model():
    model, x = linear(), torch.randn(1, 3, 8, 12)
    heatmap = occlusion(model, x, 0)[0]
    scale = torch.arange(3 * 96).view(3, 8, 12).sin() / 10
    loss = ((x[0] - x[0].mean(dim=(1, 2), keepdim=True)) * scale).sum(dim=0)
    loss = loss.unfold(0, 4, 4).unfold(1, 4, 4).sum(dim=(2, 3))  # what the logit loses
    before = (x[0] * scale).sum()
    same(heatmap, F.logsigmoid(before) - F.logsigmoid(before - loss), most=1e-5)
    same(explain(model, x, "occlusion", 0)[0], heatmap.clamp(min=0))


def test_occlusion_by_drop_removes_the_patch():
    model = small("rotary").eval()
    x = pictures(model, 1)
    keep = torch.tensor([[n for n in range(16) if n != 6]])
    with torch.no_grad():
        change = model(x).log_softmax(1) - model(x, keep=keep).log_softmax(1)
    same(occlusion(model, x, 4, without="drop")[0, 1, 2], change[0, 4], most=1e-5)


def test_the_size_of_batches_changes_nothing():
    model = small()
    x = pictures(model, 3)
    same(occlusion(model, x, batch=5), occlusion(model, x, batch=100), most=1e-5)


def test_windows_cover_all_patches_and_stay_inside_the_image():
    assert window_starts(14, 1) == list(range(14))
    assert window_starts(5, 3) == [0, 1, 2]
    assert window_starts(9, 4) == [0, 2, 4, 5]
    assert window_starts(2, 4) == [0]
    hidden = window_masks(9, 7, 4)
    assert hidden.any(dim=0).all()
    assert (hidden.sum(dim=1) == 16).all()


def test_a_patch_has_the_mean_of_the_windows_that_hide_it():
    model, x = linear(), torch.randn(1, 3, 8, 12)
    heatmap = occlusion(model, x, 0, window=2)[0]  # two windows: columns 0 and 1, columns 1 and 2
    same(heatmap[:, 1], (heatmap[:, 0] + heatmap[:, 2]) / 2, most=1e-5)
    same(heatmap[0], heatmap[1])


def test_large_grids_get_a_window():
    assert module.smallest_window(14, 14) == 1
    assert module.smallest_window(16, 16) == 1
    for side in (24, 37, 64):
        window = module.smallest_window(side, side)
        assert len(window_masks(side, side, window)) <= 256
        assert len(window_masks(side, side, window - 1)) > 256


def test_occlusion_reports_progress():
    model, seen = linear(), []
    occlusion(model, torch.randn(2, 3, 8, 12), batch=5, progress=lambda *step: seen.append(step))
    assert seen == [(5, 12), (10, 12), (12, 12)]


# --- a model that had to find the object ---------------------------------------------------------


@pytest.fixture(scope="module")
def finder():
    """A model that learned the colour of a square, wherever in the noise it lies; and its data."""
    torch.manual_seed(0)
    config = {"image": 32, "patch": 8, "classes": 3, "width": 48, "depth": 2, "heads": 3}
    model = ViT(ViTConfig(**config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(150):
        x, labels, _ = squares(64)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), *squares(64)


def squares(count):
    """Noise with one bright square, a patch large: its colour is the class, its place is not."""
    labels, places = torch.randint(3, (count,)), torch.randint(16, (count,))
    x = 0.3 * torch.randn(count, 3, 4, 8, 4, 8)
    x[range(count), labels, places // 4, :, places % 4] += 2
    return x.flatten(2, 3).flatten(3), labels, places


@pytest.mark.slow
def test_the_model_finds_the_square(finder):
    model, x, labels, _ = finder
    assert (model(x).argmax(dim=1) == labels).float().mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("method", ["relevance", "gradient-rollout", "occlusion"])
def test_the_heatmap_is_highest_on_the_object(finder, method):
    model, x, labels, places = finder
    hottest = explain(model, x, method, labels).flatten(1).argmax(dim=1)
    assert (hottest == places).float().mean() > 0.9


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method 'magic' is unknown; choose one of relevance, gradient-"),
        ({"method": "rollout", "window": 2}, "rollout has no setting 'window'; its settings: head"),
        ({"method": "relevance", "head": "max"}, "relevance has no setting 'head'"),
        (
            {"method": "rollout", "head": "median"},
            "head is 'median'; fuse heads by mean, max or min",
        ),
        ({"method": "rollout", "discard": 1.0}, "discard is 1.0; give a fraction"),
        ({"method": "relevance", "target": 5}, "no such class: 5; give an index from 0 to 4"),
        ({"method": "relevance", "target": -1}, "no such class: -1"),
        ({"method": "occlusion", "target": torch.tensor([1, 2, 3])}, "one for each of 2 images"),
        ({"method": "relevance", "target": 1.5}, "give the index of a class"),
        ({"method": "occlusion", "window": 4}, "a window of 4 patches does not fit 4 x 4"),
        ({"method": "occlusion", "window": 0}, "a window of 0 patches"),
        (
            {"method": "occlusion", "without": "magic"},
            "without is 'magic'; hide patches by mean or drop",
        ),
    ],
)
def test_invalid_settings_are_rejected_in_one_line(settings, message):
    model = small()
    with pytest.raises(UserError) as error:
        explain(model, pictures(model), **settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_rollout_of_no_maps_is_rejected():
    with pytest.raises(UserError, match="rollout needs the attention maps of at least one layer"):
        rollout([])


@pytest.mark.parametrize("method", METHODS)
def test_an_image_of_one_patch_is_rejected(method):
    model = small(image=4)
    with pytest.raises(UserError, match="the whole image is one patch of 4 pixels"):
        explain(model, pictures(model), method)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_head_has_no_class_to_explain(method):
    model = small(head="none")
    if method in CLASS_AGNOSTIC:
        explain(model, pictures(model), method)
    else:
        with pytest.raises(UserError, match="no head and predicts no classes"):
            explain(model, pictures(model), method)


@pytest.mark.parametrize("method", METHODS)
def test_nan_in_the_weights_is_named(method):
    model = small()
    model.blocks[1].mlp.fc1.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"NaN or infinity in blocks.1.mlp.fc1.weight"):
        explain(model, pictures(model), method)


def test_grad_cam_is_the_formula_of_the_paper_above_its_mean():
    model = small().eval()
    x, seen = pictures(model), []
    hook = model.blocks[-1].attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    score = model(x.clone().requires_grad_())[:, 1].sum()
    hook.remove()
    (gradient,) = torch.autograd.grad(score, seen[0])
    patches = slice(model.config.prefix, None)
    weights = gradient[:, patches].mean(dim=1)
    cam = torch.einsum("bd,bpd->bp", weights, seen[0][:, patches]).detach()
    expected = (cam - cam.mean(dim=1, keepdim=True)).clamp(min=0)
    same(explain(model, x, "grad-cam", 1).flatten(1), expected)
