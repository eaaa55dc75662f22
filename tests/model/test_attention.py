"""Attention: `weights` returns what `forward` applies."""

import pytest
import torch
from torch.nn import functional as F

from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.model.embed import rotary_positions
from vitrail.model.pool import AttentionPool

ROPE = rotary_positions((2, 2), 8, 3, torch.zeros(()))


def random(module):
    """Random weights, so that no two results are equal by accident."""
    torch.manual_seed(0)  # the same in any order of the tests
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def spelled_out(attention, x, rope=None):
    _, _, v = attention.split(x, rope)
    mixed = attention.weights(x, rope=rope) @ v
    return attention.proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rope", [None, ROPE], ids=["plain", "rotary"])
def test_weights_are_what_forward_uses(qk_norm, rope):
    attention, x = random(Attention(24, 3, qk_norm=qk_norm)), torch.randn(2, 7, 24)
    torch.testing.assert_close(attention(x, rope), spelled_out(attention, x, rope))


def test_every_row_sums_to_one():
    weights = random(Attention(24, 3)).weights(torch.randn(2, 7, 24))
    assert weights.shape == (2, 3, 7, 7)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 3, 7))


@pytest.mark.parametrize("heads", [None, [2], [1, 0], slice(1, 3)])
@pytest.mark.parametrize("rows", [None, [0], [6, 2], slice(3, None), []])
def test_selected_heads_and_rows_are_a_slice_of_all_weights(heads, rows):
    attention, x = random(Attention(24, 3, qk_norm=True)), torch.randn(2, 7, 24)
    whole = attention.weights(x, rope=ROPE)
    part = whole[:, slice(None) if heads is None else heads]
    part = part[:, :, slice(None) if rows is None else rows]
    torch.testing.assert_close(attention.weights(x, heads, rows, rope=ROPE), part)


def test_the_scale_is_the_head_width():
    attention = Attention(8, 2)
    torch.nn.init.eye_(attention.qkv.weight[:8].data)
    torch.nn.init.eye_(attention.qkv.weight[8:16].data)
    torch.nn.init.zeros_(attention.qkv.bias)
    x = torch.randn(1, 2, 8)
    scores = x[0, :, :4] @ x[0, :, :4].T / 4**0.5
    torch.testing.assert_close(attention.weights(x)[0, 0], scores.softmax(dim=-1))


def test_the_order_of_heads_changes_nothing():
    attention, x = random(Attention(24, 3)), torch.randn(2, 7, 24)
    before = attention(x)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        for tensor in (attention.qkv.weight, attention.qkv.bias):
            tensor.copy_(tensor.unflatten(0, (3, 3, 8))[:, order].flatten(0, 2))
        columns = attention.proj.weight.unflatten(1, (3, 8))[:, order].flatten(1)
        attention.proj.weight.copy_(columns)
    torch.testing.assert_close(attention(x), before)


def test_tokens_without_positions_have_no_order():
    attention, x = random(Attention(24, 3)), torch.randn(2, 7, 24)
    order = torch.randperm(7)
    torch.testing.assert_close(attention(x[:, order]), attention(x)[:, order])


def test_pooling_weights_are_what_pooling_uses():
    pool = random(AttentionPool(ViTConfig(width=24, heads=3, pool="map")))
    x = torch.randn(2, 7, 24)
    _, _, v = pool.split(x)
    answer = pool.proj((pool.weights(x) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(pool(x), (answer + pool.mlp(pool.norm(answer)))[:, 0])


def test_weights_are_close_to_forward_in_bfloat16():
    attention, x = random(Attention(24, 3)), torch.randn(2, 7, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(attention(x), spelled_out(attention, x), atol=0.3, rtol=0.1)


def test_attention_in_bfloat16_is_computed_in_float32_on_a_cpu(monkeypatch):
    fused, dtypes = F.scaled_dot_product_attention, []

    def record(q, k, v, **settings):
        dtypes.append(q.dtype)
        out = fused(q, k, v, **settings)
        dtypes.append(out.dtype)
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    attention, x = random(Attention(24, 3)), torch.randn(2, 7, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(x).dtype == torch.bfloat16
    assert dtypes == [torch.float32, torch.float32]


def test_attention_dropout_acts_on_the_weights_in_training_only():
    torch.manual_seed(0)
    attention, x = Attention(width=12, heads=3, attention_dropout=0.5), torch.randn(2, 9, 12)
    plain = Attention(width=12, heads=3)
    plain.load_state_dict(attention.state_dict())
    torch.testing.assert_close(attention.eval()(x), plain.eval()(x), rtol=0, atol=0)
    first, second = attention.train()(x), attention(x)
    assert not torch.equal(first, second)
    torch.testing.assert_close(attention.weights(x), plain.weights(x))  # exact, also in training
    many = torch.stack([attention(x) for _ in range(4000)]).mean(dim=0)
    torch.testing.assert_close(many, plain(x), rtol=0, atol=0.05)  # the expected value stays
