"""The whole model: its properties, its calls, and its errors for images that do not fit."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

TINY = {"image": (12, 20), "patch": 4, "width": 24, "depth": 3, "heads": 3, "classes": 7}
KINDS = {
    "cls": {},
    "avg": {"pool": "avg", "positions": "sincos"},
    "avg, then norm": {"pool": "avg", "norm_after_pool": True, "registers": 1},
    "map": {"pool": "map", "mlp": "gelu_tanh"},
    "registers": {"registers": 4, "layer_scale": 0.5, "pool": "cls_avg"},
    "distilled": {"distilled": True},
    "rotary": {"positions": "rotary", "registers": 2, "qk_norm": True},
    "no positions": {"positions": "none", "mlp": "swiglu"},
    "clip": {"pre_norm": True, "head": "none"},
    "pretraining": {"head": "mlp"},
    "conv": {"stem": "conv"},
    "r9": {"stem": "r9", "pool": "avg"},
}
STEMS = [{"stem": "conv"}, {"stem": "r9"}]  # convolutions must not see the dropped patches
HYBRID = {"stem": "r26", "patch": 32, "image": 64}


def random(model):
    """Weights of no special form: a zero head would make every model equal."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.normal_(parameter, mean=1, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tiny(**settings):
    return random(ViT(ViTConfig(**{**TINY, **settings}))).eval()


def images(model, count=2):
    return torch.randn(count, model.config.channels, *model.config.size)


@pytest.fixture(params=KINDS, ids=lambda kind: kind)
def model(request):
    return tiny(**KINDS[request.param])


def test_a_batch_equals_its_images_one_by_one(model):
    x = images(model, 3)
    one_by_one = torch.cat([model(image[None]) for image in x])
    torch.testing.assert_close(model(x), one_by_one, atol=2e-5, rtol=1e-4)


def test_evaluation_is_deterministic_with_dropout_and_drop_path(model):
    config = dict(vars(model.config)) | {"dropout": 0.5, "drop_path": 0.5}
    dropping = ViT(ViTConfig(**config)).eval()
    dropping.load_state_dict(model.state_dict())
    x = images(model)
    assert torch.equal(dropping(x), model(x))
    assert not torch.equal(dropping.train()(x), model(x))


def test_a_hybrid_treats_images_independently_and_accepts_other_sizes():
    model = tiny(**HYBRID)
    x = torch.randn(2, 3, 64, 96)
    one_by_one = torch.cat([model(image[None]) for image in x])
    torch.testing.assert_close(model(x), one_by_one, atol=1e-4, rtol=1e-4)


def test_keeping_all_patches_in_order_changes_nothing(model):
    x = images(model)
    keep = torch.arange(model.config.patches).expand(2, -1)
    torch.testing.assert_close(model(x, keep=keep), model(x), atol=2e-5, rtol=1e-4)


def test_the_order_of_kept_patches_does_not_matter(model):
    x, order = images(model), torch.randperm(model.config.patches)
    torch.testing.assert_close(model(x, keep=order.expand(2, -1)), model(x), atol=2e-5, rtol=1e-4)


def test_patches_outside_keep_do_not_change_the_logits():
    for settings in ({}, {"positions": "rotary"}, {"positions": "sincos", "pool": "avg"}, *STEMS):
        model = tiny(**settings)
        x = images(model)
        keep = torch.tensor([[0, 7, 14], [3, 1, 2]])
        changed = x.clone()
        changed[0, :, 4:8, 0:4] += 9.0  # patch 5 of the first image
        changed[1, :, 0:4, 0:4] += 9.0  # patch 0 of the second
        assert torch.equal(model(changed, keep=keep), model(x, keep=keep))
        assert not torch.allclose(model(changed), model(x))


def test_patches_have_no_order_without_positions():
    model = tiny(positions="none", patch=4, image=(4, 20))
    x = images(model)
    shuffled = x.unflatten(-1, (5, 4))[..., [3, 1, 4, 0, 2], :].flatten(-2)
    torch.testing.assert_close(model(shuffled), model(x), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary"])
def test_patches_have_an_order_with_positions(positions):
    model = tiny(positions=positions, patch=4, image=(4, 20))
    x = images(model)
    shuffled = x.unflatten(-1, (5, 4))[..., [3, 1, 4, 0, 2], :].flatten(-2)
    assert not torch.allclose(model(shuffled), model(x), atol=1e-3)


@pytest.mark.parametrize("size", [(4, 4), (24, 8), (40, 40)])
@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "none"])
def test_any_multiple_of_the_patch_is_a_valid_image_size(size, positions):
    model = tiny(positions=positions)
    assert model(torch.randn(2, 3, *size)).shape == (2, 7)


def test_another_image_size_interpolates_the_positions():
    model = tiny()
    larger = tiny(image=(24, 40))
    state = model.state_dict()
    grid = state["pos_embed"][:, 1:].unflatten(1, (3, 5)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (6, 10), mode="bicubic", antialias=True).flatten(2).mT
    state["pos_embed"] = torch.cat([state["pos_embed"][:, :1], grid], dim=1)
    larger.load_state_dict(state)
    x = torch.randn(2, 3, 24, 40)
    torch.testing.assert_close(model(x), larger(x))


def test_features_are_the_outputs_of_the_blocks(model):
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    x = images(model)
    features = model.features(x, blocks=[-1, 0], norm=False, prefix=True)
    assert len(outputs) == 3
    assert torch.equal(features[0], outputs[2])
    assert torch.equal(features[1], outputs[0])


def test_blocks_after_the_last_requested_one_do_not_run():
    model, outputs = tiny(), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    model.features(images(model), blocks=[0, 1])
    assert len(outputs) == 2


def test_feature_maps_keep_the_layout_of_the_patches(model):
    x = images(model)
    (flat,) = model.features(x)
    (maps,) = model.features(x, maps=True)
    rows, columns = model.config.grid
    assert flat.shape == (2, model.config.patches, 24)
    assert maps.shape == (2, 24, rows, columns)
    assert torch.equal(maps[:, :, rows - 1, 0], flat[:, (rows - 1) * columns])


def test_pooled_features_lead_to_the_logits(model):
    if model.config.distilled:
        pytest.skip("two tokens are read by two heads")
    x = images(model)
    torch.testing.assert_close(model.head(model.pre_logits(model.pool(model.encode(x)))), model(x))


def test_a_distilled_model_averages_the_logits_of_both_heads():
    model = tiny(distilled=True)
    x = images(model)
    tokens = model.norm(model.encode(x))
    both = torch.stack([model.head(tokens[:, 0]), model.head_dist(tokens[:, 1])])
    torch.testing.assert_close(model(x), both.mean(dim=0))


def test_the_head_does_not_read_registers():
    model = tiny(pool="avg", registers=2, depth=1)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight.zero_()  # attention passes nothing between tokens
    x = images(model)
    before = model(x)
    torch.nn.init.normal_(model.reg_token)
    assert torch.equal(model(x), before)


def test_the_first_loss_is_ln_of_the_classes():
    model = ViT(ViTConfig(**TINY))
    loss = F.cross_entropy(model(torch.randn(8, 3, 12, 20)), torch.arange(8) % 7)
    assert loss.item() == pytest.approx(math.log(7), abs=1e-5)


def test_initial_weights_are_as_published():
    torch.manual_seed(0)
    settings = {"registers": 99, "distilled": True, "width": 192, "heads": 3, "depth": 1}
    model = ViT(ViTConfig(**{**TINY, **settings})).requires_grad_(False)
    attention, mlp = model.blocks[0].attn, model.blocks[0].mlp
    bound = math.sqrt(
        6 / (192 + 192)
    )  # Xavier of queries, keys and values as matrices of their own
    for part in attention.qkv.weight.chunk(3):
        assert 0.98 * bound < part.abs().max() <= bound
    assert mlp.fc1.weight.abs().max() <= math.sqrt(6 / (192 + 768))
    assert 0 < mlp.fc1.bias.abs().max() < 1e-5
    assert model.patch_embed.proj.weight.std() == pytest.approx(math.sqrt(1 / 48), rel=0.05)
    assert model.pos_embed.std() == pytest.approx(0.02, rel=0.05)
    assert model.dist_token.std() == pytest.approx(0.02, rel=0.3)
    assert model.reg_token.std() == pytest.approx(1e-6, rel=0.05)
    assert not model.cls_token.any()
    assert not model.head.weight.any() and not model.head_dist.weight.any()


def test_dropout_follows_embedding_attention_and_both_mlp_layers():
    model = ViT(ViTConfig(**TINY | {"depth": 1}, dropout=0.5)).train()
    counts = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda m, given, out: counts.append(given[0].shape[-1]))
    model(images(model))
    assert counts == [24, 24, 96, 24]  # positions, attention, inside the MLP, after it


def test_the_drop_path_rate_rises_linearly_with_depth():
    model = ViT(ViTConfig(**TINY, drop_path=0.2))
    assert [block.drop_path.rate for block in model.blocks] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 12, 21), "image 12 x 21 is not a multiple of patch 4; resize it to 12 x 20"),
        ((2, 1, 12, 20), "give floats of shape (batch, 3, height, width)"),
        ((3, 12, 20), "images are torch.float32 of shape (3, 12, 20)"),
        ((2, 3, 2, 20), "resize it to 12 x 20"),
    ],
)
def test_an_image_that_does_not_fit_raises_a_user_error(shape, message):
    with pytest.raises(UserError) as error:
        tiny()(torch.zeros(shape))
    assert message in str(error.value)


def test_integer_images_are_rejected():
    with pytest.raises(UserError, match=r"images are torch.uint8"):
        tiny()(torch.zeros(2, 3, 12, 20, dtype=torch.uint8))


@pytest.mark.parametrize(
    "keep", [torch.zeros(3, 2).long(), torch.zeros(2).long(), torch.zeros(2, 2)]
)
def test_wrong_patch_indices_are_rejected(keep):
    with pytest.raises(UserError, match="give int64 patch indices"):
        tiny()(torch.zeros(2, 3, 12, 20), keep=keep)


@pytest.mark.parametrize("blocks", [[3], [-4], []])
def test_an_unknown_block_is_rejected(blocks):
    with pytest.raises(UserError, match="give indices from 0 to 2"):
        tiny().features(torch.zeros(2, 3, 12, 20), blocks=blocks)


def test_maps_and_prefix_exclude_each_other():
    with pytest.raises(UserError, match="set prefix or maps, not both"):
        tiny().features(torch.zeros(2, 3, 12, 20), prefix=True, maps=True)


def test_gradients_are_right_in_double_precision():
    settings = {
        "image": 4,
        "patch": 2,
        "width": 4,
        "heads": 1,
        "depth": 1,
        "classes": 2,
        "channels": 1,
    }
    for kind in ({"qk_norm": True}, {"positions": "rotary", "mlp": "swiglu"}, {"pool": "map"}):
        model = random(ViT(ViTConfig(**settings, **kind))).double()
        x = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(model, (x,))


def test_activation_checkpointing_gives_the_same_gradients(model):
    x, twin = images(model), copy.deepcopy(model)
    model(x).square().sum().backward()
    for block in twin.blocks:
        forward = block.forward
        block.forward = lambda *given, forward=forward: checkpoint(
            forward, *given, use_reentrant=False
        )
    twin(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_bfloat16_autocast_is_close(model):
    x = images(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    exact = model(x)
    assert not torch.equal(logits.float(), exact)
    assert (logits - exact).norm() < 0.05 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cls", "rotary", "map", "r9"])
def test_an_exported_model_takes_any_batch(kind):
    model = tiny(**KINDS[kind])
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images(model, 2),), dynamic_shapes={"x": {0: batch}})
    x = images(model, 5)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rotary", "map", "distilled"])
def test_the_whole_model_is_one_graph(kind):
    torch.compiler.reset()
    model = tiny(**KINDS[kind], depth=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = images(model)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own import
def test_a_compiled_model_gives_the_same_logits(need):
    need("g++")
    torch.compiler.reset()
    model = tiny(depth=1)
    x = images(model)
    torch.testing.assert_close(torch.compile(model)(x), model(x), atol=1e-4, rtol=1e-4)


def test_it_overfits_one_batch():
    torch.manual_seed(0)
    model = ViT(ViTConfig(**TINY)).train()
    x, labels = images(model, 14), torch.arange(14) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
