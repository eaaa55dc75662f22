"""Attention maps: exact on every architecture, only the requested rows, no side effects."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from tests.conftest import SHARED
from tests.insight.samples import KINDS, pictures, small, spelled_out
from vitrail.data.image import load_image
from vitrail.data.preprocess import preprocess
from vitrail.errors import UserError
from vitrail.insight import maps
from vitrail.insight.maps import attention, patch_grid, pool_attention
from vitrail.zoo.convert import convert
from vitrail.zoo.load import load_weights

ROOT = Path(__file__).resolve().parents[2]
TI = SHARED / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
PHOTOS = SHARED / "data" / "imagenet-val-300"


def whole(model, x):
    """All maps, written out."""
    with spelled_out() as written, torch.no_grad():
        model.eval()(x)
    return written


def same(found, wanted, **how):
    torch.testing.assert_close(found, wanted, **{"rtol": 0, "atol": 1e-6, **how})


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_the_softmax_written_out(kind):
    model = small(kind)
    x = pictures(model)
    for found, wanted in zip(
        attention(model, x, rows="all"), whole(model, x)[: model.config.depth], strict=True
    ):
        same(found, wanted)


@pytest.mark.parametrize("rows", ["mean", "all", [3, 0, -1], None])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_sums_to_one(kind, rows):
    model = small(kind)
    for found in attention(model, pictures(model), rows=rows):
        assert found.shape[-1] == model.config.tokens
        same(found.sum(dim=-1), torch.ones(found.shape[:-1]))


def test_numbers_of_patches_do_not_count_the_tokens_in_front():
    model = small("rotary")
    x = pictures(model)
    found, wanted = attention(model, x, rows=[5, -1])[1], whole(model, x)[1]
    same(found, wanted[:, :, [3 + 5, 3 + 15]])


def test_one_number_is_one_row():
    model = small()
    x = pictures(model)
    same(attention(model, x, layers=-1, heads=1, rows=2), attention(model, x, [2], [1], [2]))


def test_cls_and_dist_select_their_rows():
    model = small("distilled")
    x = pictures(model)
    wanted = whole(model, x)[0]
    same(attention(model, x, rows="cls")[0], wanted[:, :, :1])
    same(attention(model, x, rows="dist")[0], wanted[:, :, 1:2])


def test_the_mean_row_is_that_of_all_patches_and_of_nothing_else():
    model = small("registers")
    x = pictures(model)
    same(attention(model, x, rows="mean")[2], whole(model, x)[2][:, :, 3:].mean(2, keepdim=True))


@pytest.mark.parametrize(("kind", "rows"), [("plain", "cls"), ("avg", "mean"), ("map", "mean")])
def test_by_default_the_query_is_cls_or_the_average_patch(kind, rows):
    model = small(kind)
    x = pictures(model)
    same(attention(model, x), attention(model, x, rows=rows))


def test_layers_and_heads_come_in_the_requested_order():
    model = small()
    x = pictures(model)
    wanted = whole(model, x)
    found = attention(model, x, layers=[-1, 0], heads=[2, -3], rows="all")
    assert len(found) == 2
    same(found[0], wanted[2][:, [2, 0]])
    same(found[1], wanted[0][:, [2, 0]])


def test_blocks_after_the_last_layer_do_not_run():
    model = small()
    model.blocks[1].forward = None
    assert len(attention(model, pictures(model), layers=[0, 1])) == 2


@pytest.mark.parametrize("rows", ["all", "mean", [4, 9, 2]])
def test_chunks_of_rows_give_the_same_maps(monkeypatch, rows):
    model = small("rotary")
    x = pictures(model)
    wanted = attention(model, x, rows=rows)
    monkeypatch.setattr(maps, "CHUNK", 2 * 3 * 19 * 2)
    same(attention(model, x, rows=rows), wanted)


def test_another_image_size_has_its_own_grid():
    model = small("registers")
    x = torch.randn(1, 3, 8, 24)
    found = attention(model, x, rows=[11])[0]
    same(found, whole(model, x)[0][:, :, [3 + 11]])
    assert patch_grid(model, found, model.grid(x)).shape == (1, 3, 1, 2, 6)


def test_patch_grid_restores_the_layout_of_the_patches():
    model = small("wide", registers=2)
    found = attention(model, pictures(model))[0]
    square = patch_grid(model, found)
    assert square.shape == (2, 3, 1, 2, 5)
    same(square[..., 1, 3], found[..., 3 + 5 + 3])


def test_pool_attention_is_the_softmax_written_out():
    model = small("map")
    x = pictures(model)
    same(pool_attention(model, x), whole(model, x)[-1])
    assert patch_grid(model, pool_attention(model, x)).shape == (2, 3, 1, 4, 4)


def test_the_model_stays_unchanged():
    model = small()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    attention(model, pictures(model))
    assert [module.training for module in model.modules()] == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


def test_the_mode_comes_back_after_an_error():
    model = small()
    model.blocks[1].forward = None
    with pytest.raises(TypeError):
        attention(model, pictures(model))
    assert model.training


def test_maps_come_without_a_graph_and_under_inference_mode():
    model = small()
    x = pictures(model)
    assert not attention(model, x)[0].requires_grad
    with torch.inference_mode():
        found = attention(model, x)
    same(found, attention(model, x))


def test_attention_is_public():
    assert vitrail.attention is attention


def test_numpy_integers_are_valid_indices():
    model = small()
    assert attention(model, pictures(model), layers=np.array([0, 2]))[0].shape == (2, 3, 1, 17)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("plain", {"layers": [3]}, "no such layers: [3]; give indices from 0 to 2"),
        ("plain", {"layers": []}, "no such layers"),
        ("plain", {"heads": [-4]}, "no such heads: [-4]; give indices from 0 to 2"),
        ("plain", {"rows": [16]}, "no such patches: [16]; give indices from 0 to 15"),
        ("plain", {"rows": "dist"}, 'no rows "dist"; give cls, mean, all or patch indices'),
        ("avg", {"rows": "cls"}, 'no rows "cls"; give mean, all or patch indices'),
        ("plain", {"rows": "clss"}, 'no rows "clss"'),
    ],
)
def test_unknown_layers_heads_and_rows_are_rejected_in_one_line(kind, settings, message):
    model = small(kind)
    with pytest.raises(UserError) as error:
        attention(model, pictures(model), **settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_nan_in_the_weights_is_named():
    model = small()
    model.blocks[0].attn.qkv.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"NaN or infinity in blocks.0.attn.qkv.weight; load other"):
        attention(model, pictures(model))


def test_nan_in_the_images_is_named():
    model = small()
    with pytest.raises(UserError, match="the images contain NaN or infinity"):
        attention(model, torch.full((1, 3, 16, 16), float("nan")))


def test_only_attention_pooling_has_pooling_weights():
    with pytest.raises(UserError, match='has pool "cls", not "map"'):
        pool_attention(small(), pictures(small()))


def test_maps_of_another_grid_are_rejected():
    with pytest.raises(UserError, match=r"21 tokens do not fit a grid of 4 x 4 patches"):
        patch_grid(small(), torch.rand(1, 3, 1, 21))


@pytest.mark.slow
def test_large_images_take_little_memory():
    words = """
import resource, torch, vitrail
x = torch.zeros(1, 3, 1024, 1024)
model = vitrail.ViT(vitrail.preset("B/16", depth=2))
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
vitrail.attention(model, x)
vitrail.attention(model, x, layers=[0], rows="mean")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1_000_000  # kB; the maps of one layer spelled out are 800 MB alone


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> Path:
    """A folder of models with the maps of Hugging Face's eager attention."""
    own = ROOT / ".venv-bench" / "bin" / "python"
    python = os.environ.get("VITRAIL_PEERS") or (str(own) if own.exists() else "")
    if not python:
        pytest.skip("needs the peers: make .venv-bench/.installed, or set VITRAIL_PEERS")
    folder: Path = tmp_path_factory.mktemp("peers")
    if TI.is_dir() and PHOTOS.is_dir():
        convert(TI, to="huggingface", out=folder / "ti")
        view, photos = load_weights(TI).preprocess, sorted(PHOTOS.glob("*.jpg"))[:2]
        images = torch.stack([preprocess(view, load_image(photo, 3)) for photo in photos])
        save_file({"images": images}, folder / "ti.images.safetensors")
    command = [python, "-m", "tests.insight.peers", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "teacher", "registers", "ti"])
def test_maps_equal_eager_attention_on_the_same_weights(eager, name):
    if not (eager / name).is_dir():
        pytest.skip(f"needs the weights in {TI}")
    expected, model = (
        load_file(eager / f"{name}.maps.safetensors"),
        load_weights(eager / name).model,
    )
    found = attention(model, expected["images"], rows="all")
    assert len(found) == len(expected) - 1
    for number, layer in enumerate(found):
        same(layer, expected[str(number)], atol=1e-5)
