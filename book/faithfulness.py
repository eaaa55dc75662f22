"""Compares explanation methods: `python -m book.faithfulness WEIGHTS PHOTOS [--every 30]`."""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import vitrail
from vitrail.errors import UserError
from vitrail.inference.classifier import Classifier
from vitrail.inference.torch_predictor import load_input
from vitrail.insight.explain import explain
from vitrail.insight.faithfulness import Faithfulness, compare_heatmaps
from vitrail.insight.methods import METHODS

EVERY = 30  # a fixed interval, so that nobody picks the best-looking photos


@dataclass(frozen=True, kw_only=True, eq=False)
class ExplainedPhotos:
    """Photos, with the heatmaps and the faithfulness of every method."""

    paths: list[Path]
    classifier: Classifier
    x: Tensor  # (B, C, H, W)
    heatmaps: dict[str, Tensor]  # for each method (B, rows, columns)
    faithfulness: dict[str, Faithfulness]


def choose_photos(folder: Path, every: int = EVERY, without: Sequence[str] = ()) -> list[Path]:
    """Every Nth photo of a folder in order of their names, not counting those in `without`."""
    paths = [path for path in sorted(folder.glob("*.jpg")) if path.name not in without][::every]
    if not paths:
        raise UserError(f"{folder} contains no .jpg files; choose a folder of photos")
    return paths


def explain_photos(weights: str | Path, paths: list[Path]) -> ExplainedPhotos:
    """Explains the predicted class of each photo; occlusion takes most of the time."""
    classifier = vitrail.load(weights)
    x = torch.stack([load_input(path, classifier.preprocess) for path in paths])
    heatmaps = {method: explain(classifier.model, x, method) for method in METHODS}
    faithfulness = compare_heatmaps(classifier.model, x, heatmaps)
    return ExplainedPhotos(
        paths=paths, classifier=classifier, x=x, heatmaps=heatmaps, faithfulness=faithfulness
    )


def format_scores(faithfulness: dict[str, Faithfulness]) -> str:
    """AUCs, score, its standard error, and on how many photos the method is the best."""
    scores = torch.stack([one.score for one in faithfulness.values()])  # (methods, B)
    wins = torch.bincount(scores.argmax(dim=0), minlength=len(faithfulness)).tolist()
    lines = [f"{'':16} deletion insertion  score     +-  best"]
    order = scores.mean(dim=1).argsort(descending=True).tolist()
    names = list(faithfulness)
    for number in order:
        one = faithfulness[names[number]]
        aucs = f"{one.deletion_auc.mean():8.3f} {one.insertion_auc.mean():9.3f}"
        score = f"{one.score.mean():6.3f} {standard_error(one.score):6.3f}"
        lines.append(f"{names[number]:16} {aucs} {score} {wins[number]:5}")
    random = next(iter(faithfulness.values())).random_auc.mean()
    lines.append(f"{'random order':16} {random:8.3f} {'':9} {0:6.3f}")
    return "\n".join(lines)


def format_pairs(faithfulness: dict[str, Faithfulness]) -> str:
    """The mean difference of every pair of methods, and on how many photos the better one leads."""
    lines = [f"{'better':16} {'worse':16}  ahead     +-  photos"]
    order = sorted(faithfulness, key=lambda method: -faithfulness[method].score.mean().item())
    for better, worse in itertools.combinations(order, 2):
        ahead = faithfulness[better].score - faithfulness[worse].score
        numbers = f"{ahead.mean():6.3f} {standard_error(ahead):6.3f} {int((ahead > 0).sum()):7}"
        lines.append(f"{better:16} {worse:16} {numbers}")
    return "\n".join(lines)


def standard_error(values: Tensor) -> float:
    """Of the mean."""
    return values.std().item() / len(values) ** 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="any model that Vitrail loads")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--every", type=int, default=EVERY, help="use every Nth photo", metavar="N")
    options = parser.parse_args(arguments)
    paths = choose_photos(options.photos, options.every)
    faithfulness = explain_photos(options.weights, paths).faithfulness
    print(f"{format_scores(faithfulness)}\n\n{format_pairs(faithfulness)}")


if __name__ == "__main__":
    main()
