"""The experiments of "How it learns", each a few short runs of the small ViT.

    python -m book.learning tricks|data|positions

writes book/results/NAME.json. `positions` needs CIFAR-10, the others use the bundled digits.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from book.small_vit import SmallViT
from vitrail import ViT, ViTConfig, files
from vitrail.data.open import open_data
from vitrail.data.source import split_indices
from vitrail.run.build import count_stacked_matrices
from vitrail.training.config import TrainConfig
from vitrail.training.optim import build_optimizer
from vitrail.training.schedule import learning_rate

RESULTS = Path(__file__).parent / "results"
SEEDS = (0,)
SIZE = {"image": 8, "patch": 2, "channels": 1, "classes": 10, "width": 64, "depth": 4, "heads": 2}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One way to train on digits; each trick can be removed."""

    steps: int = 1500
    batch: int = 64
    optimizer: str = "adamw"  # or "muon", "sgd" with momentum
    lr: float = 1e-3  # peak learning rate
    weight_decay: float = 0.05
    clip: float = 1.0  # maximum gradient norm; 0 disables clipping
    warmup: float = 0.1  # fraction of the steps
    decay: bool = True  # cosine decay after the warm-up; else constant
    augment: bool = True  # shift half of the images by up to one pixel
    positions: bool = True  # else the position embeddings stay zero
    model: str = "vit"  # or "convnet"
    images: int = 0  # training images; 0: all of them


ALL = Experiment()
TRICKS = {
    "all tricks": ALL,
    "no augmentation": replace(ALL, augment=False),
    "no positions": replace(ALL, positions=False),
    "no cosine decay": replace(ALL, decay=False),
    "no warm-up": replace(ALL, warmup=0.0),
    "learning rate x 10": replace(ALL, lr=1e-2),
    "x 10, no warm-up": replace(ALL, lr=1e-2, warmup=0.0),
    "no clipping": replace(ALL, clip=0.0),
    "no weight decay": replace(ALL, weight_decay=0.0),
    "SGD": replace(ALL, optimizer="sgd", lr=0.05, weight_decay=0.0),
    "Muon": replace(ALL, optimizer="muon", lr=5e-3),
}
POSITIONS = replace(ALL, steps=4000, augment=False, optimizer="muon", lr=5e-3)  # on CIFAR-10
SIZES = (30, 100, 300, 1000)
HUNGER = {
    f"{model}, {size}": replace(ALL, model=model, images=size, steps=800)
    for model in ("vit", "convnet")
    for size in SIZES
}


@cache
def load_digits(part: str) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 8, 8) between -1 and 1, and labels; "held out" is val and test."""
    source = open_data("digits")
    splits = ("train",) if part == "train" else ("val", "test")
    indices = np.concatenate([split_indices(source, split) for split in splits])
    pixels = np.stack([np.asarray(source[int(index)].content) for index in indices])
    images = torch.tensor(pixels).float().flatten(1).unflatten(1, (1, 8, 8))
    return images / images.max() * 2 - 1, torch.tensor(source.labels[indices])


def build_convnet() -> nn.Module:
    """A plain ConvNet with about as many parameters as the small ViT."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(96, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def build(experiment: Experiment) -> nn.Module:
    if experiment.model == "convnet":
        return build_convnet()
    model = SmallViT(**SIZE)
    model.load_state_dict(ViT(ViTConfig(**SIZE)).state_dict())  # the package's initial weights
    if not experiment.positions:
        nn.init.zeros_(model.pos_embed)
        model.pos_embed.requires_grad_(False)
    return model


def choose_optimizer(model: nn.Module, experiment: Experiment) -> torch.optim.Optimizer:
    lr, weight_decay = experiment.lr, experiment.weight_decay
    if experiment.optimizer == "sgd":
        parameters = model.parameters()
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)
    config = TrainConfig(optimizer=experiment.optimizer, lr=lr, weight_decay=weight_decay)
    names = [name for name, _ in model.named_parameters()]
    counts = {name: count_stacked_matrices(name, ViTConfig(**SIZE)) for name in names}
    return build_optimizer(
        model, config, matrices={name: count for name, count in counts.items() if count}
    )


def shift(images: Tensor, most: int = 1) -> Tensor:
    """Every second image moved by up to `most` pixels in both directions; the background is -1."""
    side = images.shape[-1]
    padded = F.pad(images, (most,) * 4, value=-1)
    corners = torch.randint(0, 2 * most + 1, (len(images), 2))
    corners[::2] = most  # the others stay where they are
    return torch.stack(
        [
            image[:, y : y + side, x : x + side]
            for image, (y, x) in zip(padded, corners.tolist(), strict=True)
        ]
    )


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    experiment: Experiment,
    watch: Callable[[int, float], None],
) -> None:
    """The training loop; `watch` gets every step and its loss."""
    optimizer = choose_optimizer(model, experiment)
    schedule = TrainConfig(lr=experiment.lr, warmup=experiment.warmup)
    warm = round(experiment.warmup * experiment.steps)
    for step in range(experiment.steps):
        lr = learning_rate(step, experiment.steps, schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr if experiment.decay or step < warm else experiment.lr
        chosen = torch.randint(len(images), (experiment.batch,))
        batch = shift(images[chosen]) if experiment.augment else images[chosen]
        loss = F.cross_entropy(model(batch), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        if experiment.clip:
            nn.utils.clip_grad_norm_(model.parameters(), experiment.clip)
        optimizer.step()
        watch(step + 1, loss.item())


@torch.no_grad()
def measure(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy in evaluation mode."""
    model.eval()
    logits = model(images)
    model.train()
    accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
    return F.cross_entropy(logits, labels).item(), accuracy


def run(experiment: Experiment, seed: int, every: int = 100) -> dict[str, Any]:
    """One run; the curves have one point for every `every` steps."""
    torch.manual_seed(seed)
    images, labels = load_digits("train")
    if experiment.images:
        chosen = torch.randperm(len(images))[: experiment.images]
        images, labels = images[chosen], labels[chosen]
    model, losses = build(experiment), []
    curves: dict[str, list[float]] = {"step": [], "train_loss": [], "loss": [], "accuracy": []}

    def watch(step: int, loss: float) -> None:
        losses.append(loss)
        if step % every == 0:
            held_out, accuracy = measure(model, *load_digits("held out"))
            mean = sum(losses[-every:]) / every
            for name, value in zip(curves, (step, mean, held_out, accuracy), strict=True):
                curves[name].append(round(value, 4))

    fit(model, images, labels, experiment, watch)
    return {"seed": seed, **curves}


def run_all(name: str, experiments: dict[str, Experiment], seeds: Sequence[int] = SEEDS) -> None:
    """Runs and stores all experiments, seed after seed."""
    results: dict[str, Any] = {
        title: {"settings": asdict(experiment), "runs": []}
        for title, experiment in experiments.items()
    }
    for seed in seeds:
        for title, experiment in experiments.items():
            results[title]["runs"].append(run(experiment, seed))
            print(seed, title, results[title]["runs"][-1]["accuracy"][-1], flush=True)
        write_result(name, results)


def write_result(name: str, result: dict[str, Any]) -> None:
    files.write_file(RESULTS / f"{name}.json", json.dumps(result) + "\n")


def load_cifar10() -> tuple[Tensor, Tensor]:
    """The training images of CIFAR-10, between -1 and 1."""
    source = open_data("cifar10")
    indices = split_indices(source, "train")
    pixels = np.stack([np.asarray(source[int(index)].content) for index in indices])
    images = torch.tensor(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    return images, torch.tensor(source.labels[indices])


def learn_positions(moments: Sequence[int] = (0, 100, 300, 1000, 4000)) -> None:
    """Stores the cosine similarity of all positions at some steps of one training on CIFAR-10.

    Muon, because it learns more in the eight minutes that this takes on one core.
    """
    torch.manual_seed(0)
    images, labels = load_cifar10()
    model = SmallViT(image=32, patch=4, channels=3, classes=10, width=64, depth=4, heads=2)
    snapshots: dict[int, Any] = {}

    def watch(step: int, loss: float) -> None:
        if step in moments:
            with torch.no_grad():
                positions = F.normalize(model.pos_embed[0, 1:], dim=-1)
                similarity = (positions @ positions.T).mul(100).round().int().tolist()
            snapshots[step] = {"loss": round(loss, 3), "similarity": similarity}
            print(step, loss, flush=True)

    watch(0, 2.303)
    fit(model, images, labels, POSITIONS, watch)
    settings = asdict(POSITIONS)
    write_result("positions", {"settings": settings, "grid": 8, "snapshots": snapshots})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    experiments: dict[str, Callable[[], None]] = {
        "tricks": lambda: run_all("tricks", TRICKS),
        "data": lambda: run_all("data", HUNGER),
        "positions": learn_positions,
    }
    parser.add_argument("name", choices=experiments)
    experiments[parser.parse_args(arguments).name]()


if __name__ == "__main__":
    main()
