"""The attention maps of Hugging Face's eager attention; runs where transformers is installed.

    PYTHON -m tests.insight.peers FOLDER

writes small models of theirs into FOLDER, and all attention maps of those models and of the models
that FOLDER already contains.
"""
# ruff: noqa: E402

import sys
from pathlib import Path

import torch
from torch import nn

from bench.peers import patch_torchvision

patch_torchvision()

import transformers
from safetensors.torch import load_file, save_file

COMMON = {
    "image_size": 48,
    "patch_size": 16,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
MODELS = {
    "vit": (transformers.ViTForImageClassification, transformers.ViTConfig),
    "teacher": (transformers.DeiTForImageClassificationWithTeacher, transformers.DeiTConfig),
    "registers": (transformers.Dinov2WithRegistersModel, transformers.Dinov2WithRegistersConfig),
}


def make(folder: Path) -> None:
    for name, (build, config) in MODELS.items():
        torch.manual_seed(0)
        model = build(config(**COMMON))
        for x in model.parameters():
            noise = torch.randn(x.shape)
            x.data = x.data + 0.3 * noise if x.ndim > 1 else 0.5 + 0.2 * noise
        model.save_pretrained(folder / name)


@torch.no_grad()
def store_attention(folder: Path) -> None:
    build = MODELS[folder.name][0] if folder.name in MODELS else MODELS["vit"][0]
    model: nn.Module = build.from_pretrained(folder, attn_implementation="eager").eval()
    given = folder.with_name(f"{folder.name}.images.safetensors")
    side = model.config.image_size
    images = load_file(given)["images"] if given.exists() else torch.randn(2, 3, side, side)
    maps = model(images, output_attentions=True).attentions
    tensors = {str(number): x.contiguous() for number, x in enumerate(maps)} | {"images": images}
    save_file(tensors, folder.with_name(f"{folder.name}.maps.safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]))
    for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        store_attention(folder)
