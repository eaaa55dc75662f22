"""What a model has learned, compared with closed forms where they exist."""

import math
from itertools import product

import pytest
import torch

from tests.insight.samples import KINDS, pictures, small
from vitrail.errors import UserError
from vitrail.insight.learned import (
    attention_distance,
    attention_entropy,
    dead_heads,
    feature_pca,
    head_contribution,
    patch_filters,
    position_similarity,
    token_norms,
)
from vitrail.insight.maps import attention
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT


def same(found, wanted, most=1e-5):
    torch.testing.assert_close(found, wanted, rtol=0, atol=most)


def uniform(kind="plain", **changes):
    """A model with uniform attention."""
    model = small(kind, **changes)
    width = model.config.width
    for block in model.blocks:
        block.attn.qkv.weight.data[:width] = 0
        block.attn.qkv.bias.data[:width] = 0
    return model


# --- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary"])
@pytest.mark.parametrize("kind", ["plain", "wide", "distilled", "registers", "avg"])
def test_a_position_is_most_like_itself(kind, positions):
    model = small(kind, positions=positions)
    rows, columns = model.config.grid
    alike = position_similarity(model)
    assert alike.shape == (rows, columns, rows, columns)
    for row, column in product(range(rows), range(columns)):
        assert alike[row, column].argmax() == row * columns + column
        same(alike[row, column, row, column], torch.ones(()))
    same(alike, alike.permute(2, 3, 0, 1))
    assert alike.min() >= -1 - 1e-6


def test_learned_positions_are_compared_by_their_cosine():
    model = small("distilled")
    alike = position_similarity(model)
    first, second = model.pos_embed[0, 2 + 1], model.pos_embed[0, 2 + 6]
    same(alike[0, 1, 1, 2], torch.cosine_similarity(first, second, dim=0))


def test_rotary_positions_are_compared_by_the_angles_between_them():
    model = small("wide", positions="rotary")
    period = torch.tensor([1.0, 100**0.5])  # head width 8: two periods in each direction
    down, right = 2 * math.pi * (1 / 2) * 2 / period, 2 * math.pi * (3 / 5) * 2 / period
    wanted = torch.cat([down, right]).cos().mean()
    same(position_similarity(model)[0, 0, 1, 3], wanted)


def test_sine_cosine_positions_fall_off_with_distance():
    line = position_similarity(small("sincos", width=48))[0, 0, 0]
    assert (line.diff() < 0).all()


def test_a_model_without_positions_is_rejected():
    with pytest.raises(UserError, match='this model has positions "none"'):
        position_similarity(small("no positions"))


def test_a_model_of_one_patch_is_rejected():
    with pytest.raises(UserError, match="this model has a single patch"):
        position_similarity(small(image=4))


# --- filters -------------------------------------------------------------------------------------


def test_filters_are_orthonormal():
    found = patch_filters(small(), 20)
    assert found.shape == (20, 3, 4, 4)
    same(found.flatten(1) @ found.flatten(1).T, torch.eye(20))


def test_filters_are_the_strongest_first():
    model = small()
    weight = model.patch_embed.proj.weight.detach().flatten(1)
    weight = weight - weight.mean(dim=0)
    strength = (weight @ patch_filters(model, 20).flatten(1).T).norm(dim=0)
    assert (strength.diff() < 0).all()


def test_a_matrix_of_one_pattern_has_that_pattern_as_its_filter():
    model = small()
    pattern = torch.randn(3, 4, 4)
    model.patch_embed.proj.weight.data = torch.randn(24, 1, 1, 1) * pattern + 0.7
    found = patch_filters(model, 1)[0]
    same(torch.cosine_similarity(found.flatten(), pattern.flatten(), dim=0).abs(), torch.ones(()))
    assert found.flatten()[found.abs().argmax()] > 0


def test_there_are_no_more_filters_than_pixels_or_numbers():
    assert len(patch_filters(small())) == 24
    assert len(patch_filters(small("grey", patch=2))) == 4


def test_filters_of_a_hybrid_are_rejected():
    with torch.device("meta"):
        model = ViT(ViTConfig(stem="r26", patch=32))
    with pytest.raises(UserError, match="stem r26 passes features"):
        patch_filters(model)


def test_a_count_of_zero_filters_is_rejected():
    with pytest.raises(UserError, match="count is 0"):
        patch_filters(small(), 0)


# --- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "registers", "wide", "avg"])
def test_the_distance_of_uniform_attention_is_that_of_all_pairs(kind):
    model = uniform(kind)
    rows, columns = model.config.grid
    places = list(product(range(rows), range(columns)))
    pairs = [math.dist(one, other) * 4 for one in places for other in places]
    wanted = torch.full((3, 3), sum(pairs) / len(pairs))
    same(attention_distance(model, pictures(model)), wanted, most=1e-4)


def test_a_head_that_attends_to_itself_has_no_distance_and_no_entropy():
    model = small("plain", width=24, heads=1, depth=1)
    block = model.blocks[0]
    with torch.no_grad():
        model.pos_embed[0, :17, :17] = 50 * torch.eye(17)
        block.norm1.weight.fill_(1)
        block.norm1.bias.zero_()
        block.attn.qkv.weight[:48] = 5 * torch.eye(24).repeat(2, 1)
        block.attn.qkv.bias.zero_()
    assert attention_distance(model, pictures(model)).item() < 0.01
    assert attention_entropy(model, pictures(model)).item() < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_distance_and_entropy_are_those_of_the_maps(kind):
    model = small(kind)
    x = pictures(model)
    maps = torch.stack(attention(model, x, rows="all"))
    entropy = -(maps * maps.log()).sum(dim=-1).mean(dim=(1, 3))
    same(attention_entropy(model, x), entropy)
    prefix, (rows, columns) = model.config.prefix, model.config.grid
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double() * 4
    maps = maps[..., prefix:, prefix:]
    far = (maps * torch.cdist(places, places)).sum(dim=-1) / maps.sum(dim=-1)
    same(attention_distance(model, x), far.mean(dim=(1, 3)).float(), most=1e-4)


@pytest.mark.parametrize("kind", ["plain", "registers", "rotary"])
def test_the_entropy_of_uniform_attention_is_the_logarithm_of_the_tokens(kind):
    model = uniform(kind)
    wanted = torch.full((3, 3), math.log(model.config.tokens))
    same(attention_entropy(model, pictures(model)), wanted)


@pytest.mark.parametrize("measure", [attention_distance, attention_entropy])
def test_chunks_of_rows_change_nothing(monkeypatch, measure):
    model = small("registers")
    x = pictures(model)
    wanted = measure(model, x)
    monkeypatch.setattr("vitrail.insight.maps.CHUNK", 500)
    same(measure(model, x), wanted)


@pytest.mark.parametrize("kind", ["plain", "scaled", "rotary"])
def test_the_contribution_of_a_head_is_what_it_adds(kind):
    model = small(kind).eval()
    x = pictures(model)
    tokens, rope = model.embed(x)
    block = model.blocks[0]
    with torch.no_grad():
        given = block.norm1(tokens)
        full = block.ls1(block.attn(given, rope))
        block.attn.proj.weight[:, 8:16] = 0  # the second head's columns
        alone = full - block.ls1(block.attn(given, rope))
    wanted = (alone.norm(dim=-1) / tokens.norm(dim=-1)).mean()
    same(head_contribution(small(kind), x)[0, 1], wanted.detach(), most=1e-4)


def test_a_head_without_output_is_dead():
    model = small()
    model.blocks[1].attn.proj.weight.data[:, 16:] *= 1e-4
    wanted = torch.zeros(3, 3, dtype=torch.bool)
    wanted[1, 2] = True
    assert torch.equal(dead_heads(model, pictures(model)), wanted)


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "rotary", "wide"])
def test_norms_are_those_of_the_tokens_after_each_block(kind):
    model = small(kind).eval()
    x = pictures(model)
    found = token_norms(model, x)
    features = model.features(x, range(3), norm=False, maps=True)
    for lengths, block in zip(found, features, strict=True):
        same(lengths, block.detach().norm(dim=1), most=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_pca_colours_span_the_unit_range(kind):
    model = small(kind)
    found = feature_pca(model, pictures(model))
    assert found.shape == (2, *model.config.grid, 3)
    assert found.min() == 0 and found.max() == 1
    assert (found.flatten(0, 2).std(dim=0) > 0.1).all()


def test_equal_patches_have_equal_colours():
    model = small("no positions")
    x = pictures(model, 1)
    x[:, :, 12:, :] = x[:, :, :4, :]
    found = feature_pca(model, x)
    same(found[:, 3], found[:, 0], most=1e-3)
    assert (found[:, 1] - found[:, 0]).abs().max() > 0.1


def test_the_first_colour_is_the_direction_in_which_features_differ_most():
    model = small().eval()
    x = pictures(model, 4)
    found = feature_pca(model, x, block=1)[..., 0].flatten()
    flat = model.features(x, [1])[0].detach().flatten(0, 1)
    _, _, v = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    along = (flat - flat.mean(dim=0)) @ v[0]
    inside = (found > 0) & (found < 1)
    turn = torch.corrcoef(torch.stack([found[inside], along[inside]]))[0, 1].abs()
    assert turn > 0.999


def test_two_patches_still_have_colours():
    model = small(image=(4, 8))
    assert feature_pca(model, pictures(model, 1)).isfinite().all()


def test_components_can_ignore_what_all_images_share_at_a_position(monkeypatch):
    model, x = small(), pictures(small(), 4)
    before = feature_pca(model, x, positions=False)
    with torch.no_grad():
        features = model.eval().features(x)[0]
    offsets = 9 * torch.randn(features.shape[1:], generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(model, "features", lambda *_: [features + offsets])
    same(feature_pca(model, x, positions=False), before, 1e-3)
    assert (feature_pca(model, x) - before).abs().max() > 0.1


MEASURES = [attention_distance, attention_entropy, head_contribution, token_norms, feature_pca]


@pytest.mark.parametrize("measure", MEASURES)
def test_the_model_stays_unchanged(measure):
    model = small()
    with torch.inference_mode():
        measure(model, pictures(model))
    measure(model, pictures(model))
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("measure", [attention_distance, feature_pca])
def test_an_image_of_one_patch_is_rejected(measure):
    with pytest.raises(UserError, match="the whole image is one patch"):
        measure(small(image=4), torch.zeros(1, 3, 4, 4))


@pytest.mark.parametrize("measure", MEASURES)
def test_nan_in_the_weights_is_named(measure):
    model = small()
    model.blocks[0].mlp.fc2.bias.data[3] = float("nan")
    with pytest.raises(UserError, match=r"NaN or infinity in blocks.0.mlp.fc2.bias; load other"):
        measure(model, pictures(model))


@pytest.mark.parametrize("name", ["pos_embed", "patch_embed.proj.weight"])
def test_nan_in_what_needs_no_image_is_named_too(name):
    model = small()
    model.get_parameter(name).data[0, -1] = float("nan")
    with pytest.raises(UserError, match=f"NaN or infinity in {name}"):
        (position_similarity if name == "pos_embed" else patch_filters)(model)


def test_an_unknown_block_is_rejected():
    with pytest.raises(UserError, match="no such blocks"):
        feature_pca(small(), pictures(small()), block=3)
