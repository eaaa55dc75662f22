"""Against timm, transformers and torchvision where installed: their files here, ours there."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SHARED
from tests.zoo.arrays import google_arrays
from vitrail.data.image import load_image
from vitrail.data.preprocess import preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.architecture import infer_architecture
from vitrail.zoo.convert import convert
from vitrail.zoo.file import save_model
from vitrail.zoo.files.lazy import FileContents, LazyTensor
from vitrail.zoo.layouts.layout import CheckpointConfig
from vitrail.zoo.layouts.mapping import map_tensors
from vitrail.zoo.layouts.timm import PLAIN_MODELS, parse_timm_config
from vitrail.zoo.load import load_weights
from vitrail.zoo.weights import PUBLISHED

ROOT = Path(__file__).resolve().parents[2]
TI = SHARED / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
PHOTOS = SHARED / "data" / "imagenet-val-300"
REAL = pytest.mark.skipif(not TI.is_dir(), reason=f"needs the weights in {TI}")

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "image": 48,
    "patch": 16,
    "classes": 7,
    "width": 48,
    "depth": 2,
    "heads": 3,
    "mlp_ratio": 2.0,
}
# Models of ours, and the peers that can express them.
OURS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, {"timm", "huggingface", "torchvision"}),
    "hidden": ({"head": "mlp"}, {"torchvision"}),
    "wide": ({"image": (32, 64)}, {"timm", "huggingface"}),
    "grey": ({"channels": 1}, {"timm", "huggingface"}),
    "tanh": ({"mlp": "gelu_tanh"}, {"timm", "huggingface"}),
    "headless": ({"head": "none"}, {"timm", "huggingface"}),
    "exact": ({"eps": 1e-12}, {"huggingface"}),
    "distilled": ({"distilled": True}, {"timm", "huggingface"}),
    "dino2": ({"layer_scale": 1e-5, "mlp_ratio": 4.0}, {"timm", "huggingface"}),
    "registers": (
        {"layer_scale": 1e-5, "registers": 4, "mlp_ratio": 4.0},
        {"timm", "huggingface"},
    ),
    "gated": (
        {"layer_scale": 1e-5, "mlp": "swiglu", "mlp_ratio": 128 / 48},
        {"timm", "huggingface"},
    ),
    "bare registers": ({"registers": 2, "mlp_ratio": 4.0}, {"timm", "huggingface"}),
    "avg": ({"pool": "avg"}, {"timm"}),
    "cls and avg": ({"pool": "cls_avg", "registers": 2, "mlp_ratio": 4.0}, {"huggingface"}),
    "avg after": ({"pool": "avg", "norm_after_pool": True, "registers": 1}, {"timm"}),
    "map": ({"pool": "map"}, {"timm"}),
    "sincos": ({"positions": "sincos"}, {"timm", "huggingface", "torchvision"}),
    "no positions": ({"positions": "none"}, {"timm", "huggingface", "torchvision"}),
    "qk norm": ({"qk_norm": True}, {"timm"}),
    "clip": ({"pre_norm": True, "eps": 1e-5}, {"timm"}),
    "hybrid": ({"stem": "r26", "patch": 32, "image": 64}, {"timm"}),
    "rotary": (
        {"positions": "rotary", "registers": 4, "layer_scale": 1e-5, "eps": 1e-5},
        {"timm"},
    ),
}


CASES = [(name, target) for name, (_, targets) in OURS.items() for target in sorted(targets)]
LAYOUTS = ["original", "target", "big_vision", "img", "scan"]

# Our settings, timm's for the same, and by how much logits may differ: timm computes the inverse of
# a resized patch in float32, we in float64.
ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], float]] = {
    "160": ({"image": 160}, {"img_size": 160}, [1, 3, 160, 160], 1e-4),
    "288": ({"image": 288}, {"img_size": 288}, [1, 3, 288, 288], 1e-4),
    "224x320": ({"image": (224, 320)}, {"img_size": [224, 320]}, [1, 3, 224, 320], 1e-4),
    "grey": ({"channels": 1}, {"in_chans": 1}, [1, 1, 224, 224], 1e-4),
    "4 channels": ({"channels": 4}, {"in_chans": 4}, [1, 4, 224, 224], 1e-4),
    "13 channels": ({"channels": 13}, {"in_chans": 13}, [1, 13, 224, 224], 1e-4),
    "patch 32": (
        {"patch": 32, "image": 448},
        {"patch_size": 32, "img_size": 448},
        [1, 3, 448, 448],
        1e-3,
    ),
    "patch 8": (
        {"patch": 8, "image": 112},
        {"patch_size": 8, "img_size": 112},
        [1, 3, 112, 112],
        1e-3,
    ),
}
# timm's models that are in no table here, and differ in what no tensor shows, or in size
UNUSUAL = {
    "vit_base_patch16_gap_224",
    "vit_base_patch32_siglip_256",
    "vit_betwixt_patch16_reg4_gap_256",
    "vit_large_patch16_siglip_256",
    "vit_large_patch16_siglip_512",
    "vit_little_patch16_reg4_gap_256",
    "vit_mediumd_patch16_reg4_gap_256",
    "vit_so150m_patch16_reg4_map_256",
    "vit_so400m_patch16_siglip_256",
    "vit_xsmall_patch16_clip_224",
}
BUILD = {"image_size": 224, "patch_size": 16, "num_layers": 12, "num_heads": 3}
BUILD |= {"hidden_dim": 192, "mlp_dim": 768}


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Path:
    """A folder of our exports, the requests about them, and the responses of the peers."""
    own = ROOT / ".venv-bench" / "bin" / "python"
    python = os.environ.get("VITRAIL_PEERS") or (str(own) if own.exists() else "")
    if not python:
        pytest.skip("needs the peers: make .venv-bench/.installed, or set VITRAIL_PEERS")
    folder: Path = tmp_path_factory.mktemp("peers")
    for name in OURS:
        save_model(folder / f"{name}.safetensors", ours(name), {"classes": None})
    for name, target in CASES:
        request_exports(folder, name, target)
    for layout in LAYOUTS:
        request_google(folder, layout)
    if TI.is_dir():
        request_published(folder)
    rows = {row.hub.removeprefix("timm/").partition(".")[0] for row in PUBLISHED if row.hub}
    write_request(folder, "timm's", "timm_architectures", "", names=sorted(rows | UNUSUAL))
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tests.zoo.peers", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def write_request(folder: Path, name: str, kind: str, path: str, **details: Any) -> None:
    request = {"kind": kind, "path": path, **details}
    (folder / f"{name}.request.json").write_text(json.dumps(request))


def request_exports(folder: Path, name: str, target: Any) -> None:
    config, label = ViTConfig(**{**TINY, **OURS[name][0]}), f"{name}-{target}"
    shape = [2, config.channels, *config.size]
    if target != "torchvision":
        convert(folder / f"{name}.safetensors", target, folder / label)
        write_request(folder, label, f"{target}_folder", label, shape=shape)
        return
    convert(folder / f"{name}.safetensors", target, folder / f"{label}.pth")
    build = {
        "image_size": config.size[0],
        "patch_size": config.patch,
        "num_layers": config.depth,
        "num_heads": config.heads,
        "hidden_dim": config.width,
        "mlp_dim": config.hidden,
        "num_classes": config.classes,
        "representation_size": config.width if config.head == "mlp" else None,
    }
    write_request(folder, label, "torchvision_file", f"{label}.pth", shape=shape, build=build)


def request_google(folder: Path, layout: str) -> None:
    modern = layout not in ("original", "target")
    changes: dict[str, Any] = {"mlp": "gelu_tanh", "pool": "map" if modern else "cls"}
    model = randomise(ViTConfig(**{**TINY, **changes}))
    np.savez(folder / f"{layout}.npz", **google_arrays(model, layout))
    arguments: dict[str, Any] = {"img_size": 48, "embed_dim": 48, "depth": 2, "num_heads": 3}
    arguments |= {"mlp_ratio": 2.0, "num_classes": 7}
    arguments |= {"global_pool": "map", "class_token": False} if modern else {}
    details = {"architecture": "vit_base_patch16_224", "arguments": arguments}
    write_request(folder, layout, "timm_google", f"{layout}.npz", shape=[2, 3, 48, 48], **details)


def request_published(folder: Path) -> None:
    shape = [2, 3, 224, 224]
    convert(TI, "timm", folder / "ti-timm")
    convert(TI, "huggingface", folder / "ti-hf")
    convert(TI, "torchvision", folder / "ti-tv.pth")
    write_request(folder, "ti-timm", "timm_folder", "ti-timm", shape=shape)
    photo = str(photograph()) if PHOTOS.is_dir() else None
    write_request(folder, "ti-hf", "huggingface_folder", "ti-hf", shape=shape, photo=photo)
    write_request(folder, "ti-tv", "torchvision_file", "ti-tv.pth", shape=shape, build=BUILD)
    write_request(folder, "ti", "timm_adapted", str(TI), shape=shape, arguments={})
    for name, (_, arguments, other, _) in ADAPTED.items():
        write_request(folder, name, "timm_adapted", str(TI), shape=other, arguments=arguments)


def response_to(folder: Path, name: str) -> dict[str, Any]:
    response: dict[str, Any] = json.loads((folder / f"{name}.response.json").read_text())
    return response


def photograph() -> Path:
    return sorted(PHOTOS.glob("*.jpg"))[0]


def random_images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def ours(name: str) -> ViT:
    return randomise(ViTConfig(**{**TINY, **OURS[name][0]}))


def randomise(config: ViTConfig) -> ViT:
    """Weights that all matter. Where a peer has no parameter, ours stays at zero."""
    torch.manual_seed(0)
    model = ViT(config)
    for name, x in model.named_parameters():
        noise = torch.randn(x.shape)
        x.data = x.data + 0.1 * noise if x.ndim > 1 else 0.5 + 0.2 * noise
        if config.positions == "rotary" and name.endswith("qkv.bias"):
            x.data[config.width : 2 * config.width] = 0
        if config.pre_norm and name == "patch_embed.proj.bias":
            x.data.zero_()
    return model.eval()


@torch.no_grad()
def same(model: ViT, shape: list[int], published: list[list[float]], most: float = 1e-5) -> None:
    answer = model(random_images(*shape))
    torch.testing.assert_close(answer, torch.tensor(published), rtol=0, atol=most)


@pytest.mark.parametrize(("name", "target"), CASES)
def test_other_libraries_load_our_exports_strictly_with_equal_logits(peers, name, target):
    response, model = response_to(peers, f"{name}-{target}"), ours(name)
    shape = [2, model.config.channels, *model.config.size]
    same(model, shape, response["logits"])
    same(model, shape, response.get("strict", response["logits"]))
    assert not response.get("wrong")


def test_files_of_other_libraries_load_with_equal_logits(peers):
    files = sorted(peers.glob("*.expected.json"))
    assert len(files) == 12 + 2 * 7 + 1
    for file in files:
        response, name = json.loads(file.read_text()), file.name.removesuffix(".expected.json")
        path = peers / name if (peers / name).is_dir() else peers / f"{name}.pth"
        loaded = load_weights(path, vit={"heads": 3} if name == "torchvision" else {})
        same(loaded.model, response["shape"], response["logits"])
        if loaded.model.config.head != "none" and name != "torchvision":
            assert loaded.classes == tuple(f"class {i}" for i in range(7)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_google_arrays_give_timms_logits(peers, layout):
    loaded = load_weights(peers / f"{layout}.npz")
    same(loaded.model, [2, 3, 48, 48], response_to(peers, layout)["logits"])


@REAL
@pytest.mark.parametrize("name", ["ti", "ti-timm", "ti-hf", "ti-tv"])
def test_published_weights_give_equal_logits_in_every_library(peers, name):
    same(load_weights(TI).model, [2, 3, 224, 224], response_to(peers, name)["logits"], most=2e-5)


@REAL
def test_class_names_and_preprocessing_are_exported(peers):
    loaded, response = load_weights(TI), response_to(peers, "ti-hf")
    assert tuple(response["labels"][str(i)] for i in range(1000)) == loaded.classes
    stated = response_to(peers, "ti-timm")["preprocess"]
    assert (stated["crop_pct"], stated["mean"]) == (0.9, [0.5, 0.5, 0.5])
    assert response_to(peers, "ti-timm")["labels"] == list(loaded.classes)
    if PHOTOS.is_dir():
        theirs = load_file(peers / "ti-hf.pixels.safetensors")["pixels"][0]
        mine = preprocess(loaded.preprocess, load_image(photograph(), 3))
        assert (theirs - mine).abs().mean() < 0.01  # a grey level is 0.008


@REAL
@pytest.mark.parametrize("name", ADAPTED)
def test_adapted_weights_give_timms_logits(peers, name):
    flags, _, shape, most = ADAPTED[name]
    same(load_weights(TI, vit=flags).model, shape, response_to(peers, name)["logits"], most=most)


def test_settings_that_no_tensor_shows_follow_from_timms_name(peers, tmp_path):
    for name, response in response_to(peers, "timm's").items():
        assert PLAIN_MODELS.fullmatch(name)
        config: dict[str, Any] = {"architecture": name, "global_pool": response["pool"]}
        config["pretrained_cfg"] = {"input_size": [3, *response["size"]]}
        found = by_shapes(response["shapes"], parse_timm_config(config, tmp_path), tmp_path)
        assert (found.heads, found.eps) == (response["heads"], response["eps"]), name
        assert (found.mlp == "gelu_tanh") == response["tanh"], name
        assert {"cls": "token"}.get(found.pool, found.pool) == response["pool"], name


def test_published_rows_have_timms_architecture(peers, tmp_path):
    response = response_to(peers, "timm's")
    for row in PUBLISHED:
        name = row.hub.removeprefix("timm/").partition(".")[0]
        if not row.hub:
            continue
        shapes, config = response[name]["shapes"], row.vit
        stated = CheckpointConfig(vit={"heads": config.heads, "eps": config.eps, "mlp": config.mlp})
        stated.vit.update(positions="rotary", pool=config.pool, image=config.size)
        found = by_shapes(without_head(shapes, row), stated, tmp_path)
        for setting in ("width", "depth", "patch", "hidden", "registers", "pool", "stem", "head"):
            assert getattr(found, setting) == getattr(config, setting), (name, setting)


def without_head(shapes: dict[str, list[int]], row: Any) -> dict[str, list[int]]:
    """timm builds each model with a head by default."""
    if row.vit.head != "none":
        return shapes
    return {key: shape for key, shape in shapes.items() if not re.match(r"head\.", key)}


def by_shapes(shapes: dict[str, list[int]], stated: CheckpointConfig, path: Path) -> ViTConfig:
    """The architecture that names and shapes alone reveal, with nothing on the disk."""
    stored = {
        name: LazyTensor(
            file=path,
            offset=0,
            stored_shape=tuple(shape),
            shape=tuple(shape),
            dtype=torch.float32,
        )
        for name, shape in shapes.items()
    }
    mapped = map_tensors(FileContents(tensors=stored), "it")
    return infer_architecture(mapped, stated, None, {}, "it").vit
