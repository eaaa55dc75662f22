"""Live against the peers, where they are installed: their files here, our files there."""

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
from vitrail.zoo.architecture import recognise
from vitrail.zoo.beside import PLAIN, Beside, timm
from vitrail.zoo.convert import convert
from vitrail.zoo.file import save_model
from vitrail.zoo.files.stored import Contents, Stored
from vitrail.zoo.layouts.layout import sort
from vitrail.zoo.load import load
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
def asked(tmp_path_factory) -> Path:
    """A folder of weights that we wrote, of questions, and of what the peers answered."""
    own = ROOT / ".venv-bench" / "bin" / "python"
    python = os.environ.get("VITRAIL_PEERS") or (str(own) if own.exists() else "")
    if not python:
        pytest.skip("needs the peers: make .venv-bench/.installed, or set VITRAIL_PEERS")
    folder: Path = tmp_path_factory.mktemp("peers")
    for name in OURS:
        save_model(folder / f"{name}.safetensors", ours(name), {"classes": None})
    for name, target in CASES:
        ask_about_ours(folder, name, target)
    for layout in LAYOUTS:
        ask_about_google(folder, layout)
    if TI.is_dir():
        ask_about_the_real_one(folder)
    rows = {row.hub.removeprefix("timm/").partition(".")[0] for row in PUBLISHED if row.hub}
    ask(folder, "timm's", "timm_architectures", "", names=sorted(rows | UNUSUAL))
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tests.zoo.peers", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def ask(folder: Path, name: str, kind: str, path: str, **details: Any) -> None:
    request = {"kind": kind, "path": path, **details}
    (folder / f"{name}.request.json").write_text(json.dumps(request))


def ask_about_ours(folder: Path, name: str, target: Any) -> None:
    config, label = ViTConfig(**{**TINY, **OURS[name][0]}), f"{name}-{target}"
    shape = [2, config.channels, *config.size]
    if target != "torchvision":
        convert(folder / f"{name}.safetensors", target, folder / label)
        ask(folder, label, f"{target}_folder", label, shape=shape)
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
    ask(folder, label, "torchvision_file", f"{label}.pth", shape=shape, build=build)


def ask_about_google(folder: Path, layout: str) -> None:
    modern = layout not in ("original", "target")
    changes: dict[str, Any] = {"mlp": "gelu_tanh", "pool": "map" if modern else "cls"}
    model = shaken(ViTConfig(**{**TINY, **changes}))
    np.savez(folder / f"{layout}.npz", **google_arrays(model, layout))
    arguments: dict[str, Any] = {"img_size": 48, "embed_dim": 48, "depth": 2, "num_heads": 3}
    arguments |= {"mlp_ratio": 2.0, "num_classes": 7}
    arguments |= {"global_pool": "map", "class_token": False} if modern else {}
    details = {"architecture": "vit_base_patch16_224", "arguments": arguments}
    ask(folder, layout, "timm_google", f"{layout}.npz", shape=[2, 3, 48, 48], **details)


def ask_about_the_real_one(folder: Path) -> None:
    shape = [2, 3, 224, 224]
    convert(TI, "timm", folder / "ti-timm")
    convert(TI, "huggingface", folder / "ti-hf")
    convert(TI, "torchvision", folder / "ti-tv.pth")
    ask(folder, "ti-timm", "timm_folder", "ti-timm", shape=shape)
    photo = str(photograph()) if PHOTOS.is_dir() else None
    ask(folder, "ti-hf", "huggingface_folder", "ti-hf", shape=shape, photo=photo)
    ask(folder, "ti-tv", "torchvision_file", "ti-tv.pth", shape=shape, build=BUILD)
    ask(folder, "ti", "timm_stretched", str(TI), shape=shape, arguments={})
    for name, (_, arguments, other, _) in ADAPTED.items():
        ask(folder, name, "timm_stretched", str(TI), shape=other, arguments=arguments)


def heard(folder: Path, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((folder / f"{name}.answer.json").read_text())
    return answer


def photograph() -> Path:
    return sorted(PHOTOS.glob("*.jpg"))[0]


def picture(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def ours(name: str) -> ViT:
    return shaken(ViTConfig(**{**TINY, **OURS[name][0]}))


def shaken(config: ViTConfig) -> ViT:
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
    answer = model(picture(*shape))
    torch.testing.assert_close(answer, torch.tensor(published), rtol=0, atol=most)


@pytest.mark.parametrize(("name", "target"), CASES)
def test_what_we_write_a_peer_loads_strictly_with_equal_logits(asked, name, target):
    said, model = heard(asked, f"{name}-{target}"), ours(name)
    shape = [2, model.config.channels, *model.config.size]
    same(model, shape, said["logits"])
    same(model, shape, said.get("strict", said["logits"]))
    assert not said.get("wrong")


def test_what_the_peers_write_we_load_with_equal_logits(asked):
    told = sorted(asked.glob("*.said.json"))
    assert len(told) == 12 + 2 * 6 + 1
    for file in told:
        said, name = json.loads(file.read_text()), file.name.removesuffix(".said.json")
        path = asked / name if (asked / name).is_dir() else asked / f"{name}.pth"
        loaded = load(path, vit={"heads": 3} if name == "torchvision" else {})
        same(loaded.model, said["shape"], said["logits"])
        if loaded.model.config.head != "none" and name != "torchvision":
            assert loaded.classes == tuple(f"class {i}" for i in range(7)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_google_arrays_give_the_logits_that_timm_gives(asked, layout):
    loaded = load(asked / f"{layout}.npz")
    same(loaded.model, [2, 3, 48, 48], heard(asked, layout)["logits"])


@REAL
@pytest.mark.parametrize("name", ["ti", "ti-timm", "ti-hf", "ti-tv"])
def test_the_real_weights_say_the_same_everywhere(asked, name):
    same(load(TI).model, [2, 3, 224, 224], heard(asked, name)["logits"], most=2e-5)


@REAL
def test_labels_and_preprocessing_come_along(asked):
    loaded, said = load(TI), heard(asked, "ti-hf")
    assert tuple(said["labels"][str(i)] for i in range(1000)) == loaded.classes
    view = heard(asked, "ti-timm")["view"]
    assert (view["crop_pct"], view["mean"]) == (0.9, [0.5, 0.5, 0.5])
    assert heard(asked, "ti-timm")["labels"] == list(loaded.classes)
    if PHOTOS.is_dir():
        theirs = load_file(asked / "ti-hf.pixels.safetensors")["pixels"][0]
        mine = preprocess(loaded.view, load_image(photograph(), 3))
        assert (theirs - mine).abs().mean() < 0.01  # a grey level is 0.008


@REAL
@pytest.mark.parametrize("name", ADAPTED)
def test_adapted_weights_answer_as_timms_do(asked, name):
    flags, _, shape, most = ADAPTED[name]
    same(load(TI, vit=flags).model, shape, heard(asked, name)["logits"], most=most)


def test_what_no_tensor_shows_is_known_by_timms_name(asked, tmp_path):
    for name, said in heard(asked, "timm's").items():
        assert PLAIN.fullmatch(name)
        config: dict[str, Any] = {"architecture": name, "global_pool": said["pool"]}
        config["pretrained_cfg"] = {"input_size": [3, *said["size"]]}
        found = by_shapes(said["shapes"], timm(config), tmp_path)
        assert (found.heads, found.eps) == (said["heads"], said["eps"]), name
        assert (found.mlp == "gelu_tanh") == said["tanh"], name
        assert {"cls": "token"}.get(found.pool, found.pool) == said["pool"], name


def test_the_table_has_the_architectures_that_timm_builds(asked, tmp_path):
    said = heard(asked, "timm's")
    for row in PUBLISHED:
        name = row.hub.removeprefix("timm/").partition(".")[0]
        if not row.hub:
            continue
        shapes, config = said[name]["shapes"], row.vit
        beside = Beside(vit={"heads": config.heads, "eps": config.eps, "mlp": config.mlp})
        beside.vit.update(positions="rotary", pool=config.pool, image=config.size)
        found = by_shapes(without_head(shapes, row), beside, tmp_path)
        for setting in ("width", "depth", "patch", "hidden", "registers", "pool", "stem", "head"):
            assert getattr(found, setting) == getattr(config, setting), (name, setting)


def without_head(shapes: dict[str, list[int]], row: Any) -> dict[str, list[int]]:
    """timm builds each model with a head unless told otherwise."""
    if row.vit.head != "none":
        return shapes
    return {key: shape for key, shape in shapes.items() if not re.match(r"head\.", key)}


def by_shapes(shapes: dict[str, list[int]], beside: Beside, path: Path) -> ViTConfig:
    """The architecture that names and shapes alone reveal, with nothing on the disk."""
    stored = {
        name: Stored(file=path, start=0, lies=tuple(shape), shape=tuple(shape), dtype=torch.float32)
        for name, shape in shapes.items()
    }
    parts = sort(Contents(tensors=stored), "it")
    return recognise(parts, beside, None, {}, "it").vit
