"""Writes the fixtures: tiny models of other libraries with their logits, without weights.

Run it where those libraries are installed, from the root of the repository:

    make .venv-bench/.installed
    .venv-bench/bin/python -m tests.parity.make_fixtures

SimpleViT and ViT of vit-pytorch are those of release 0.40.2, unmodified, which pip installs into a
temporary folder: since 1.0.0 they have two layer norms around the patch projection that no paper
has. Its SimpleViT normalises after the average, not before it as Beyer et al. do; timm's models
cover both.
"""
# ruff: noqa: E402

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.weights import random_image, random_weight

# torchvision registers operators at import, and its compiled library does not load with a CPU-only
# torch. A ViT calls none of them, so declaring their names is enough.
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

import transformers
from safetensors.torch import load_file, save_file
from timm.layers import LayerNorm, SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2
from torchvision.models import VisionTransformer as TorchvisionViT

FOLDER = Path(__file__).parent / "fixtures"
SEED = 0  # of the random images
OLD_VIT_PYTORCH = "0.40.2"

Settings = dict[str, Any]
Size = tuple[int, int]

TINY: Settings = {  # Vitrail's names; height and width differ, so that swapping them fails
    "image": (24, 30),
    "patch": 6,
    "channels": 3,
    "classes": 7,
    "width": 36,
    "depth": 2,
    "heads": 3,
    "mlp_ratio": 2.5,
}
HIDDEN = 90  # width times mlp_ratio

# Settings of ViTConfig, and timm's arguments for the same model.
TIMM: dict[str, tuple[Settings, Settings]] = {
    "cls": ({}, {}),
    "grey": ({"channels": 1, "image": 18, "mlp_ratio": 4.0}, {}),
    "no-positions": ({"positions": "none"}, {"pos_embed": "none"}),
    "avg": (
        {"pool": "avg", "norm_after_pool": True},
        {"global_pool": "avg", "class_token": False},
    ),
    "avg-beside-cls": (  # MAE, fine-tuned: the head does not read its class token
        {"pool": "avg", "norm_after_pool": True, "registers": 1},
        {"global_pool": "avg"},
    ),
    "avg-of-normed": (
        {"pool": "avg"},
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
    ),
    "avg-of-normed-beside-cls": (
        {"pool": "avg", "registers": 1},
        {"global_pool": "avg", "fc_norm": False},
    ),
    "map": ({"pool": "map"}, {"global_pool": "map", "class_token": False}),
    "map-beside-cls": ({"pool": "map", "registers": 1}, {"global_pool": "map"}),
    "map-tanh": (  # SigLIP
        {"pool": "map", "mlp": "gelu_tanh"},
        {"global_pool": "map", "class_token": False, "act_layer": "gelu_tanh"},
    ),
    "registers": (  # DINOv2
        {"registers": 4, "layer_scale": 1e-5},
        {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5},
    ),
    "layer-scale": ({"layer_scale": 1e-6}, {"init_values": 1e-6}),
    "qk-norm": ({"qk_norm": True}, {"qk_norm": True}),
    "swiglu": (  # DINOv2 giant; timm counts both halves of the gate
        {"mlp": "swiglu", "mlp_ratio": 2.5},
        {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 5.0},
    ),
    "gelu-tanh": ({"mlp": "gelu_tanh"}, {"act_layer": "gelu_tanh"}),
    "quick-gelu": ({"mlp": "quick_gelu"}, {"act_layer": "quick_gelu"}),  # OpenAI's CLIP
    "attention-dropout": ({"attention_dropout": 0.1}, {"attn_drop_rate": 0.1}),
    "pre-norm": (  # CLIP
        {"pre_norm": True, "eps": 1e-5},
        {"pre_norm": True, "norm_layer": partial(LayerNorm, eps=1e-5)},
    ),
    "headless": ({"head": "none"}, {"num_classes": 0}),
}

# DINOv3. With average pooling, the head does not read timm's class token: a register to us.
DINO3: Settings = {"positions": "rotary", "registers": 4, "layer_scale": 1e-5, "eps": 1e-5}
TIMM_DINO3: Settings = {
    "global_pool": "token",
    "rope_type": "dinov3",
    "rope_temperature": 100,
    "rope_rotate_half": True,
    "use_rot_pos_emb": True,
    "use_abs_pos_emb": False,
    "num_reg_tokens": 4,
    "use_fc_norm": False,
    "init_values": 1e-5,
    "norm_layer": partial(LayerNorm, eps=1e-5),
    "dynamic_img_size": True,
}
ROTARY: dict[str, tuple[Settings, Settings, Size | None]] = {
    "square": ({"image": 24}, {"qkv_bias": False}, None),
    "wide": ({}, {}, None),
    "tall": ({}, {}, (42, 12)),
    "avg": ({"registers": 5, "pool": "avg"}, {"global_pool": "avg"}, None),
    "qk-norm": ({"qk_norm": True}, {"qk_norm": True}, None),
}

# Blocks in each stage, as in timm's vit_small_r26_s32, vit_base_r50_s16 and vit_large_r50_s32.
HYBRID: dict[str, tuple[Settings, tuple[int, ...]]] = {
    "r26-32": ({"stem": "r26", "patch": 32, "image": (64, 96)}, (2, 2, 2, 2)),
    "r50-16": ({"stem": "r50", "patch": 16, "image": (64, 48)}, (3, 4, 9)),
    "r50-32": ({"stem": "r50", "patch": 32, "image": 64}, (3, 4, 6, 3)),
}


@dataclass(kw_only=True)
class Case:
    name: str  # of the fixture
    peer: str  # the other library and its version
    ours: Settings  # arguments of ViTConfig
    model: nn.Module  # the other library's, with generated weights
    shapes: dict[str, list[int]]  # of its parameters
    size: Size | None = None  # of the image, if it differs from the model's
    double: bool = True  # whether the whole model computes in float64 if its weights are float64


def main() -> None:
    torch.set_num_threads(1)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder)):
            (FOLDER / f"{case.name}.json").write_text(format_json(make_fixture(case)))
            print(case.name)
        make_towers(Path(folder) / "towers")


def cases(folder: Path) -> Iterator[Case]:
    yield from timm_cases()
    yield from timm_rotary_cases()
    yield from timm_hybrid_cases()
    yield from hugging_face_cases(folder)
    yield from torchvision_cases()
    yield from vit_pytorch_cases(folder)


def timm_cases() -> Iterator[Case]:
    for name, (ours, theirs) in TIMM.items():
        yield timm_case(name, ours, theirs)
    distilled, deit = {"distilled": True}, VisionTransformerDistilled
    yield timm_case("distilled", distilled, {}, deit)
    other: Settings = {"dynamic_img_size": True}  # timm interpolates positions in float32
    yield timm_case("stretched-up", {}, other, size=(36, 54), double=False)
    yield timm_case("stretched-down", {}, other, size=(18, 12), double=False)
    yield timm_case("stretched-distilled", distilled, other, deit, size=(18, 42), double=False)


def timm_rotary_cases() -> Iterator[Case]:
    for name, (ours, theirs, size) in ROTARY.items():
        ours, theirs = {**DINO3, **ours}, {**TIMM_DINO3, **theirs}
        # timm computes the angles in float32
        yield timm_case(f"rotary-{name}", ours, theirs, Eva, size=size, double=False)


def timm_hybrid_cases() -> Iterator[Case]:
    for name, (ours, layers) in HYBRID.items():
        embed = partial(HybridEmbed, backbone=_resnetv2(layers))
        yield timm_case(f"hybrid-{name}", ours, {"embed_layer": embed, "patch_size": 1})


def timm_case(
    name: str,
    ours: Settings,
    theirs: Settings,
    build: Callable[..., nn.Module] = VisionTransformer,
    size: Size | None = None,
    double: bool = True,
) -> Case:
    ours = {**TINY, **ours}
    settings = {
        "img_size": ours["image"],
        "patch_size": ours["patch"],
        "in_chans": ours["channels"],
        "num_classes": ours["classes"],
        "embed_dim": ours["width"],
        "depth": ours["depth"],
        "num_heads": ours["heads"],
        "mlp_ratio": ours["mlp_ratio"],
        **theirs,
    }
    case = case_with_weights(f"timm-{name}", f"timm {version('timm')}", ours, build(**settings))
    case.size, case.double = size, double
    return case


def torchvision_cases() -> Iterator[Case]:
    for name, head, hidden in (("cls", "linear", None), ("mlp-head", "mlp", TINY["width"])):
        ours = {**TINY, "image": 24, "head": head}
        model = TorchvisionViT(
            image_size=ours["image"],
            patch_size=ours["patch"],
            num_classes=ours["classes"],
            hidden_dim=ours["width"],
            num_layers=ours["depth"],
            num_heads=ours["heads"],
            mlp_dim=HIDDEN,
            representation_size=hidden,
        )
        yield case_with_weights(
            f"torchvision-{name}", f"torchvision {version('torchvision')}", ours, model
        )


def vit_pytorch_cases(folder: Path) -> Iterator[Case]:
    wanted = ["--no-deps", "--target", str(folder), f"vit-pytorch=={OLD_VIT_PYTORCH}"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    sys.path.insert(0, str(folder))
    from vit_pytorch import SimpleViT, ViT

    simple = {"positions": "sincos", "pool": "avg", "norm_after_pool": True}
    for name, build, changes in (("simple", SimpleViT, simple), ("cls", ViT, {})):
        ours = {**TINY, "eps": 1e-5, **changes}
        model = build(
            image_size=ours["image"],
            patch_size=ours["patch"],
            num_classes=ours["classes"],
            dim=ours["width"],
            depth=ours["depth"],
            heads=ours["heads"],
            dim_head=ours["width"] // ours["heads"],
            mlp_dim=HIDDEN,
        )
        yield case_with_weights(
            f"vit-pytorch-{name}", f"vit-pytorch {OLD_VIT_PYTORCH}", ours, model
        )


def hugging_face_cases(folder: Path) -> Iterator[Case]:
    common = {
        "image_size": TINY["image"],
        "patch_size": TINY["patch"],
        "num_labels": TINY["classes"],
        "hidden_size": TINY["width"],
        "num_hidden_layers": TINY["depth"],
        "num_attention_heads": TINY["heads"],
    }
    vit = transformers.ViTConfig(**common, intermediate_size=HIDDEN)
    ours = {**TINY, "eps": 1e-12}
    yield hugging_face_case("cls", ours, transformers.ViTForImageClassification(vit), folder)
    # its pooler is the hidden layer of Vitrail's MLP head
    pooler = {**ours, "head": "mlp", "classes": TINY["width"]}
    yield hugging_face_case("pooler", pooler, transformers.ViTModel(vit), folder)
    square = {
        **common,
        "image_size": 24,
        "mlp_ratio": 4,
    }  # it interpolates positions for other grids
    dino2 = transformers.Dinov2Config(**square, use_swiglu_ffn=True)
    swiglu = {"mlp": "swiglu", "mlp_ratio": 96 / 36, "layer_scale": 1.0, "head": "none"}
    ours = {**TINY, "image": 24, **swiglu}
    yield hugging_face_case("dinov2-swiglu", ours, transformers.Dinov2Model(dino2), folder)
    both = {"mlp_ratio": 4.0, "layer_scale": 1.0, "pool": "cls_avg"}
    ours = {**TINY, "image": 24, **both}
    dino2 = transformers.Dinov2Config(**square)
    model = transformers.Dinov2ForImageClassification(dino2)
    yield hugging_face_case("dinov2-head", ours, model, folder)
    dino2 = transformers.Dinov2WithRegistersConfig(**square, num_register_tokens=2)
    model = transformers.Dinov2WithRegistersForImageClassification(dino2)
    yield hugging_face_case("dinov2-registers-head", {**ours, "registers": 2}, model, folder)


def make_towers(folder: Path) -> None:
    """Backbones whose files `vitrail.load_backbone` reads, each with its config.json."""
    common: Settings = {
        "image_size": 24,
        "patch_size": TINY["patch"],
        "hidden_size": TINY["width"],
        "num_hidden_layers": TINY["depth"],
        "num_attention_heads": TINY["heads"],
        "intermediate_size": HIDDEN,
    }
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 20}
    text |= {"num_attention_heads": 1, "max_position_embeddings": 8}
    clip = transformers.CLIPConfig(text_config=text, vision_config=common)
    models = {
        "clip": transformers.CLIPModel(clip),
        "clip-vision": transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**common)),
        "siglip-vision": transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**common)),
        "dinov3": transformers.DINOv3ViTModel(
            transformers.DINOv3ViTConfig(**common, num_register_tokens=2)
        ),
        "ijepa": transformers.IJepaModel(transformers.IJepaConfig(**common)),
    }
    for name, model in models.items():
        case = hugging_face_case(name, {**TINY, "image": 24}, model, folder)
        stated = json.loads((folder / name / "config.json").read_text())
        write_tower(f"transformers-{name}", case, stated)
    from open_clip.transformer import QuickGELU
    from open_clip.transformer import VisionTransformer as OpenClip

    for name, activation in (("gelu", nn.GELU), ("quick-gelu", QuickGELU)):
        tower = OpenClip(
            24, TINY["patch"], TINY["width"], TINY["depth"], TINY["heads"], TINY["mlp_ratio"],
            output_dim=16, act_layer=activation,
        )  # fmt: skip
        tower.proj = None  # features before the projection
        peer = f"open_clip {version('open_clip_torch')}"
        case = case_with_weights(f"open-clip-{name}", peer, {**TINY, "image": 24}, tower)
        write_tower(case.name, case, {})


def write_tower(name: str, case: Case, stated: Settings) -> None:
    x = torch.from_numpy(random_image(SEED, [2, 3, 24, 24]))
    with torch.no_grad():
        model = case.model.eval()
        if isinstance(model, transformers.CLIPModel):
            output = model.vision_model(x).pooler_output
        else:
            output = model(x)
    if not isinstance(output, Tensor):
        if output.get("pooler_output") is not None:
            output = output.pooler_output
        else:
            output = output.last_hidden_state.mean(dim=1)
    fixture = {"peer": case.peer, "config_json": stated, "shapes": case.shapes}
    fixture |= {"image": {"seed": SEED, "shape": [2, 3, 24, 24]}, "output": output.tolist()}
    (FOLDER / "towers").mkdir(exist_ok=True)
    (FOLDER / "towers" / f"{name}.json").write_text(format_json(fixture))
    print(name)


def hugging_face_case(
    name: str, ours: Settings, model: transformers.PreTrainedModel, folder: Path
) -> Case:
    """A case with the parameter names of the saved file, which differ from those in memory."""
    folder = folder / name
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {name: list(tensor.shape) for name, tensor in load_file(file).items()}
    save_file(generate_weights(shapes), file, metadata={"format": "pt"})
    peer = f"transformers {version('transformers')}"
    model = type(model).from_pretrained(folder)
    return Case(name=f"transformers-{name}", peer=peer, ours=ours, model=model, shapes=shapes)


def case_with_weights(name: str, peer: str, ours: Settings, model: nn.Module) -> Case:
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(generate_weights(shapes))
    return Case(name=name, peer=peer, ours=ours, model=model, shapes=shapes)


def generate_weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(random_weight(name, shape)) for name, shape in shapes.items()}


def make_fixture(case: Case) -> dict[str, Any]:
    size = case.size or case.ours["image"]
    shape = [2, case.ours["channels"], *((size, size) if isinstance(size, int) else size)]
    x = torch.from_numpy(random_image(SEED, shape))
    outputs = {"float32": compute_logits(case.model, x, torch.float32)}
    if case.double:
        outputs["float64"] = compute_logits(case.model, x, torch.float64)
    return {
        "peer": case.peer,
        "config": case.ours,
        "image": {"seed": SEED, "shape": shape},
        "shapes": case.shapes,
        "outputs": outputs,
    }


@torch.no_grad()
def compute_logits(model: nn.Module, x: Tensor, dtype: torch.dtype) -> list[list[float]]:
    torch.set_default_dtype(dtype)  # the precision of vit-pytorch's sine-cosine positions
    output = model.eval().to(dtype)(x.to(dtype))
    torch.set_default_dtype(torch.float32)
    if not isinstance(output, Tensor):
        output = output.logits if "logits" in output else output.pooler_output
    logits: list[list[float]] = output.tolist()
    return logits


def format_json(fixture: dict[str, Any]) -> str:
    """JSON with each list of numbers on one line."""
    indented = json.dumps(fixture, indent=1)
    return (
        re.sub(r"\[[^\[\]{}]*\]", lambda found: json.dumps(json.loads(found[0])), indented) + "\n"
    )


if __name__ == "__main__":
    main()
