"""Fine-tunes published weights with timm and the usual recipe, in its own process.

AdamW, random resized crops and flips, linear decay by the clock. The test comes after the clock has
stopped, so that the peer trains for all of its minutes. Splits are Vitrail's.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.peers import patch_torchvision
from vitrail.data.image import load_image
from vitrail.data.open import open_data
from vitrail.data.source import Source, split_indices
from vitrail.files import write_file

BATCH = 32
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class TimmJob:
    data: str
    weights: str  # folder as on timm's hub
    minutes: float  # 0: `steps` decide
    lr: float
    seed: int = 0
    steps: int = 0


class Photos(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The images of a split with a transform of torchvision."""

    def __init__(self, source: Source, split: Any, transform: Any):
        self.source, self.items, self.transform = source, split_indices(source, split), transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        item = self.source[int(self.items[index])]
        image = Image.fromarray(load_image(item.content, 3))
        return self.transform(image), item.label


def build(job: TimmJob, classes: int) -> tuple[nn.Module, dict[str, Any]]:
    patch_torchvision()
    import timm

    folder = Path(job.weights)
    config = json.loads((folder / "config.json").read_text())
    overlay = {"file": str(folder / "model.safetensors"), "custom_load": False}
    model = timm.create_model(
        config["architecture"],
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        num_classes=classes,
    )
    return model, timm.data.resolve_model_data_config(model)


def transforms(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The usual ones: of training, and of evaluation with the crop of the weights."""
    from torchvision.transforms import v2

    size, bicubic = settings["input_size"][-1], v2.InterpolationMode.BICUBIC
    end = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(settings["mean"], settings["std"]),
    ]
    crop = v2.RandomResizedCrop(size, interpolation=bicubic)
    shrink = v2.Resize(int(size / settings["crop_pct"]), interpolation=bicubic)
    return (
        v2.Compose([crop, v2.RandomHorizontalFlip(), *end]),
        v2.Compose([shrink, v2.CenterCrop(size), *end]),
    )


def fine_tune(job: TimmJob) -> dict[str, Any]:
    start = time.monotonic()
    torch.manual_seed(job.seed)
    source = open_data(job.data, progress=False)
    model, settings = build(job, len(source.classes))
    augmented, plain = transforms(settings)
    loader = torch.utils.data.DataLoader(
        Photos(source, "train", augmented),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=0.05)
    model.train()
    step, done = 0, 0.0
    while done < 1:
        for images, labels in loader:
            done = step / job.steps if job.steps else (time.monotonic() - start) / job.minutes / 60
            if done >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = job.lr * (1 - done)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            step += 1
    seconds = time.monotonic() - start
    scores = {split: evaluate(model, Photos(source, split, plain)) for split in ("val", "test")}
    return {"steps": step, "seconds": round(seconds, 1), **scores}


@torch.inference_mode()
def evaluate(model: nn.Module, photos: Photos) -> float:
    model.eval()
    correct = 0
    for images, labels in torch.utils.data.DataLoader(photos, BATCH, num_workers=WORKERS):
        correct += int((model(images).argmax(dim=1) == labels).sum())
    return correct / len(photos)


if __name__ == "__main__":
    job = TimmJob(**json.loads(sys.argv[1]))
    write_file(Path(sys.argv[2]), json.dumps(fine_tune(job), indent=1) + "\n")
