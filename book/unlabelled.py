"""The experiments of "Learning without labels", on the bundled digits.

    python -m book.unlabelled digits|clothes

`digits` writes book/results/unlabelled.json; an experiment that is stored there is not repeated.
`clothes` writes the pictures in book/results/rebuilt, and needs Fashion-MNIST.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from book import learning
from book.learning import SIZE, SIZES, Experiment, load_digits
from vitrail import ViT, ViTConfig, files, preset
from vitrail.data.open import open_data
from vitrail.data.source import Split, split_indices
from vitrail.display.page import encode_image
from vitrail.evaluation.features import effective_rank, neighbour_accuracy, relative_spread
from vitrail.heads.logistic import fit_logistic
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.masked import MaskedAutoencoder
from vitrail.pretraining.objective import PatchFeatures, Pretrainer
from vitrail.pretraining.views import AgreeingViews
from vitrail.run.quality import choose_fraction
from vitrail.run.rebuilt import join_strip
from vitrail.training.config import TrainConfig
from vitrail.training.optim import build_optimizer
from vitrail.training.schedule import learning_rate

FEW = SIZES[:3]  # labelled images to fine-tune on
REBUILT = learning.RESULTS / "rebuilt"  # strips of images
SHOWN = 12  # images of a strip
FRACTIONS = (0.01, 0.1, 1.0)  # of the training labels that a linear probe is fitted on


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """One way to learn from the digits without their labels, and what is then measured."""

    method: str = "none"  # "masked", "views", "agreement" without the Gaussian, or "none"
    mask: float = 0.75  # fraction of the patches that is hidden
    steps: int = 800
    batch: int = 128
    lr: float = 1e-3
    labels: tuple[int, ...] = ()  # numbers of labelled images to fine-tune on


EXPERIMENTS = {
    "random weights": Pretraining(),  # fine-tuned in "data hunger"
    "masked, 75%": Pretraining(method="masked", labels=FEW),
    "views": Pretraining(method="views", steps=400, batch=64),
    "agreement alone": Pretraining(method="agreement", steps=200, batch=64),
    "masked, 25%": Pretraining(method="masked", mask=0.25),
}


class AgreementAlone(AgreeingViews):
    """Views that must agree, and nothing that keeps different images apart."""

    def forward(self, images: Tensor) -> Tensor:
        views = self.draw_views(images, self.generator(images.device))
        x = torch.stack([self.projector(self.embed(view)) for view in views])  # (views, B, 16)
        return (x - x.mean(dim=0)).square().mean(dim=(0, 2))[:, None]


def build(experiment: Pretraining) -> Pretrainer:
    """The small ViT of "How it learns" with the part that is thrown away."""
    backbone = ViT(ViTConfig(**SIZE))
    if experiment.method == "masked":
        config = PretrainConfig(mask=experiment.mask, decoder_width=64)
        return MaskedAutoencoder(backbone, config)
    config = PretrainConfig(method="views", views=2, crop=0.5, flip=0.0, colour=0.0)
    objective = AgreeingViews if experiment.method == "views" else AgreementAlone
    return objective(backbone, config, torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1))


def pretrain(
    model: Pretrainer,
    images: Tensor,
    experiment: Pretraining,
    watch: Callable[[int, float], None],
) -> None:
    """The loop of "How it learns", without labels: the model computes its own loss."""
    schedule = TrainConfig(lr=experiment.lr, warmup=0.1)
    optimizer = build_optimizer(model, schedule)
    for step in range(experiment.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, experiment.steps, schedule)
        chosen = torch.randint(len(images), (experiment.batch,))
        loss = model(learning.shift(images[chosen])).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        watch(step + 1, loss.item())


@torch.no_grad()
def extract(backbone: ViT, part: str) -> tuple[Tensor, Tensor]:
    """The mean patch of each image of a part, and the labels."""
    images, labels = load_digits(part)
    backbone.eval()
    x = PatchFeatures(backbone)(images)
    backbone.train()
    return x, labels


def probe(backbone: ViT) -> dict[str, Any]:
    """Held-out accuracy of k-NN and of linear probes on frozen features, and their rank."""
    x, labels = extract(backbone, "train")
    held_out, truth = extract(backbone, "held out")
    linear = []
    for fraction in FRACTIONS:
        chosen = choose_fraction(labels, fraction)
        fit = fit_logistic(x[chosen], labels[chosen], classes=10)
        correct = (held_out @ fit.weight.T + fit.bias).argmax(dim=1) == truth
        linear.append(round(correct.float().mean().item(), 4))
    rank, knn = effective_rank(held_out), neighbour_accuracy(held_out, truth)
    return {"rank": round(rank, 2), "knn": round(knn, 4), "linear": linear}


def fine_tune(backbone: ViT, labelled: int, seed: int) -> float:
    """Held-out accuracy after training on this many labels, as "data hunger" trains."""
    torch.manual_seed(seed)
    images, labels = load_digits("train")
    chosen = torch.randperm(len(images))[:labelled]
    experiment = Experiment(images=labelled, steps=800)
    model = learning.build(experiment)
    learned = {k: v for k, v in backbone.state_dict().items() if not k.startswith("head.")}
    model.load_state_dict({**model.state_dict(), **learned})
    learning.fit(model, images[chosen], labels[chosen], experiment, lambda step, loss: None)
    return round(learning.measure(model, *load_digits("held out"))[1], 4)


def run(experiment: Pretraining, seed: int, every: int = 100) -> dict[str, Any]:
    """One pretraining with its measurements; the rank has one point for every `every` steps."""
    torch.manual_seed(seed)
    model = build(experiment)
    backbone = model.backbone
    curves: dict[str, list[float]] = {"step": [], "loss": [], "rank": [], "spread": []}
    losses: list[float] = []

    def watch(step: int, loss: float) -> None:
        losses.append(loss)
        if step % every == 0:
            x, _ = extract(backbone, "held out")
            mean = sum(losses[-every:]) / every
            values = (step, mean, effective_rank(x), relative_spread(x))
            for name, value in zip(curves, values, strict=True):
                curves[name].append(round(value, 4))

    if experiment.method != "none":
        pretrain(model, load_digits("train")[0], experiment, watch)
    tuned = {str(count): fine_tune(backbone, count, seed) for count in experiment.labels}
    return {"seed": seed, "curves": curves, **probe(backbone), "tuned": tuned}


def load_clothes(split: Split, count: int) -> Tensor:
    """The first images of a split of Fashion-MNIST, (count, 1, 28, 28), between -1 and 1."""
    source = open_data("fashion-mnist")
    indices = split_indices(source, split)[:count]
    pixels = np.stack([np.asarray(source[int(index)].content) for index in indices])
    return torch.tensor(pixels).reshape(-1, 1, 28, 28).float() / 127.5 - 1


def rebuild_clothes(moments: Sequence[int] = (30, 100, 300, 1000)) -> None:
    """Stores validation images with hidden patches, and their reconstructions at some steps."""
    torch.manual_seed(0)
    images, shown = load_clothes("train", 10_000), load_clothes("val", SHOWN)
    backbone = ViT(preset("Nano/4", image=28, channels=1, head="none"))
    model = MaskedAutoencoder(backbone, PretrainConfig())

    def watch(step: int, loss: float) -> None:
        if step in moments:
            model.eval()
            blanked, rebuilt = model.rebuild(shown)
            model.train()
            strips = {"true": shown, "hidden": blanked, f"step-{step:04}": rebuilt}
            for name, strip in strips.items():
                pixels = ((strip + 1) * 127.5).clamp(0, 255).byte().permute(0, 2, 3, 1)
                picture = join_strip(pixels.expand(-1, -1, -1, 3).numpy())
                files.write_file(REBUILT / f"{name}.png", encode_image(picture, "PNG"))
            print(step, loss, flush=True)

    pretrain(model, images, Pretraining(method="masked", steps=max(moments), batch=64), watch)


def run_digits() -> None:
    """Runs the experiments whose stored results have other settings, or all."""
    path = learning.RESULTS / "unlabelled.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    results: dict[str, Any] = {}
    for title, experiment in EXPERIMENTS.items():
        settings = json.loads(json.dumps(asdict(experiment)))
        results[title] = stored.get(title, {})
        if results[title].get("settings") != settings:
            results[title] = {"settings": settings, **run(experiment, seed=0)}
            learning.write_result("unlabelled", {**stored, **results})
        print(title, results[title], flush=True)
    learning.write_result("unlabelled", results)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    experiments: dict[str, Callable[[], None]] = {"digits": run_digits, "clothes": rebuild_clothes}
    parser.add_argument("name", choices=experiments)
    experiments[parser.parse_args(arguments).name]()


if __name__ == "__main__":
    main()
