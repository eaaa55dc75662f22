"""What Hugging Face's eager attention says: run where it is installed.

    PYTHON -m tests.insight.peers FOLDER

writes small models of theirs into FOLDER, and all attention maps of them and of the models that lie
there already.
"""
# ruff: noqa: E402

import sys
from pathlib import Path

import torch
from torch import nn

from bench.peers import mend_torchvision

mend_torchvision()

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
def look(place: Path) -> None:
    build = MODELS[place.name][0] if place.name in MODELS else MODELS["vit"][0]
    model: nn.Module = build.from_pretrained(place, attn_implementation="eager").eval()
    given = place.with_name(f"{place.name}.images.safetensors")
    side = model.config.image_size
    images = load_file(given)["images"] if given.exists() else torch.randn(2, 3, side, side)
    maps = model(images, output_attentions=True).attentions
    said = {str(number): x.contiguous() for number, x in enumerate(maps)} | {"images": images}
    save_file(said, place.with_name(f"{place.name}.maps.safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]))
    for place in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        look(place)
