"""Runs timm, transformers and torchvision on weights, where they are installed; speaks JSON.

    PYTHON -m tests.zoo.peers FOLDER

answers every *.request.json in FOLDER, and writes small models of theirs with their logits.
"""
# ruff: noqa: E402

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.peers import patch_torchvision

patch_torchvision()

import timm
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models._hub import save_for_hf
from torchvision.models import VisionTransformer as TorchvisionViT

SEED = 0


def random_images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> list[list[float]]:
    output = model.eval()(x)
    if not isinstance(output, Tensor):
        output = output.logits if "logits" in output else output.last_hidden_state[:, 0]
    values: list[list[float]] = output.tolist()
    return values


def answer_requests(folder: Path) -> None:
    for file in sorted(folder.glob("*.request.json")):
        request = json.loads(file.read_text())
        response = globals()[request["kind"]](folder / request["path"], request)
        file.with_name(file.name.replace("request", "response")).write_text(json.dumps(response))


def timm_folder(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """timm's own loading of a folder, and its strict loading of the tensors."""
    model = timm.create_model(f"local-dir:{path}", pretrained=True)
    config = json.loads((path / "config.json").read_text())
    arguments = config["model_args"] | {"num_classes": config["num_classes"]}
    arguments["in_chans"] = config["pretrained_cfg"]["input_size"][0]
    again = timm.create_model(config["architecture"], **arguments)
    again.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    x = random_images(*request["shape"])
    preprocess = timm.data.resolve_model_data_config(model)
    return {
        "logits": logits(model, x),
        "strict": logits(again, x),
        "preprocess": {k: preprocess[k] for k in ("input_size", "mean", "std", "crop_pct")},
        "labels": model.pretrained_cfg.get("label_names"),
    }


def huggingface_folder(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    build = getattr(transformers, config["architectures"][0])
    extra = {}
    if build is transformers.ViTModel:
        extra = {
            "add_pooling_layer": any("pooler" in n for n in load_file(path / "model.safetensors"))
        }
    model, info = build.from_pretrained(path, output_loading_info=True, **extra)
    wrong = {name: sorted(map(str, info[name])) for name in info if info[name]}
    x = random_images(*request["shape"])
    response: dict[str, Any] = {"logits": logits(model, x), "wrong": wrong}
    response["labels"] = {str(number): label for number, label in model.config.id2label.items()}
    if request.get("photo"):
        processor = transformers.AutoImageProcessor.from_pretrained(path)
        with Image.open(request["photo"]) as photo:
            pixels = processor(photo.convert("RGB"), return_tensors="pt")["pixel_values"]
        save_file({"pixels": pixels.contiguous()}, path.parent / f"{path.name}.pixels.safetensors")
        response["photo"] = logits(model, pixels)
    return response


def torchvision_file(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    model = TorchvisionViT(**request["build"])
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state, strict=True)
    return {"logits": logits(model, random_images(*request["shape"]))}


def timm_adapted(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """timm's own adaptation of published weights: size, patch, channels."""
    model = timm.create_model(f"local-dir:{path}", pretrained=True, **request["arguments"])
    return {"logits": logits(model, random_images(*request["shape"]))}


def timm_google(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """timm's reading of Google's arrays, with the GELU of Google's code."""
    model = timm.create_model(
        request["architecture"], act_layer="gelu_tanh", **request["arguments"]
    )
    model.load_pretrained(str(path))
    return {"logits": logits(model, random_images(*request["shape"]))}


def timm_architectures(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Names and shapes of models that timm can build, with what no tensor shows."""
    found = {}
    for name in request["names"]:
        with torch.device("meta"):
            model = timm.create_model(name)
        block = model.blocks[0]
        act = getattr(block.mlp, "act", None)
        found[name] = {
            "shapes": {key: list(x.shape) for key, x in model.state_dict().items()},
            "heads": block.attn.num_heads,
            "eps": block.norm1.eps,
            "tanh": type(act).__name__ == "GELUTanh",
            "pool": model.global_pool,
            "size": list(model.patch_embed.img_size),
            "parameters": sum(x.numel() for x in model.parameters()),
        }
    return found


# --- models of other libraries -------------------------------------------------------------------

TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": {"img_size": 64},
    "deit3_small_patch16_224": {"img_size": 64},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56},
    "vit_base_patch16_clip_224": {"img_size": 64},
    "vit_base_patch16_siglip_224": {"img_size": 64},
    "vit_base_patch32_siglip_256": {"img_size": 64},
    "vit_base_patch16_siglip_gap_224": {"img_size": 64},
    "vit_medium_patch16_reg4_gap_256": {"img_size": 64},
    "vit_small_patch16_dinov3": {"img_size": 64},
    "vit_small_r26_s32_224": {"img_size": 64},
    "flexivit_small": {"img_size": 64},
}


def write_models(folder: Path) -> None:
    for name, build, x in timm_models():
        place = folder / name
        save_for_hf(
            randomise(build),
            place,
            model_config={"label_names": [f"class {i}" for i in range(7)]},
            model_args=build.arguments,
            safe_serialization=True,
        )
        write_logits(place, build, x)
    for name, build, x in hugging_face_models():
        randomise(build).save_pretrained(folder / name, max_shard_size="60KB")
        write_logits(folder / name, build, x)
        state = {key: x.clone() for key, x in build.state_dict().items()}  # names of version 5
        place = folder / f"{name}-5"
        place.mkdir()
        save_file(state, place / "model.safetensors", {"format": "pt"})
        config = (folder / name / "config.json").read_text()
        (place / "config.json").write_text(config)
        write_logits(place, build, x)
    build = TorchvisionViT(48, 16, 2, 3, 48, 96, num_classes=7)
    torch.save(randomise(build).state_dict(), folder / "torchvision.pth")
    write_logits(folder / "torchvision", build, random_images(2, 3, 48, 48))


def write_logits(place: Path, model: nn.Module, x: Tensor) -> None:
    expected = {"shape": list(x.shape), "logits": logits(model, x)}
    place.with_name(f"{place.name}.expected.json").write_text(json.dumps(expected))


def randomise(model: nn.Module) -> nn.Module:
    """Weights that all matter: norms, biases and layer scales are not left at their start."""
    generator = torch.Generator().manual_seed(SEED)
    for x in model.parameters():
        noise = torch.randn(x.shape, generator=generator)
        x.data = x.data + 0.1 * noise if x.ndim > 1 else 0.5 + 0.2 * noise
    return model


def timm_models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    for name, changes in TIMM.items():
        arguments = {**TINY, **changes}
        model = timm.create_model(name, **arguments)
        model.arguments = {k: v for k, v in arguments.items() if k != "num_classes"}
        model.pretrained_cfg["input_size"] = (3, changes["img_size"], changes["img_size"])
        model.pretrained_cfg["architecture"] = name
        yield f"timm-{name}", model, random_images(2, 3, changes["img_size"], changes["img_size"])


def hugging_face_models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    common: dict[str, Any] = {
        "image_size": 48,
        "patch_size": 16,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "id2label": {i: f"class {i}" for i in range(7)},
    }
    x = random_images(2, 3, 48, 48)
    vit = transformers.ViTConfig(**common, intermediate_size=96)
    deit = transformers.DeiTConfig(**common, intermediate_size=96)
    dino = transformers.Dinov2Config(**common)
    gated = transformers.Dinov2Config(**common, use_swiglu_ffn=True)
    registers = transformers.Dinov2WithRegistersConfig(**common)
    yield "hf-vit", transformers.ViTForImageClassification(vit), x
    yield "hf-deit", transformers.DeiTForImageClassification(deit), x
    yield "hf-teacher", transformers.DeiTForImageClassificationWithTeacher(deit), x
    yield "hf-dinov2", transformers.Dinov2Model(dino), x
    yield "hf-gated", transformers.Dinov2Model(gated), x
    yield "hf-registers", transformers.Dinov2WithRegistersModel(registers), x
    yield "hf-dinov2-head", transformers.Dinov2ForImageClassification(dino), x


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_requests(Path(sys.argv[1]))
    write_models(Path(sys.argv[1]))
