"""Which explanation to trust: `python -m book.faithfulness WEIGHTS PHOTOS [--every 30]`."""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import vitrail
from vitrail.errors import UserError
from vitrail.insight.explain import explain
from vitrail.insight.faithfulness import Faithfulness, compare_heatmaps
from vitrail.insight.methods import METHODS
from vitrail.run.classifier import Classifier

EVERY = 30  # so that nobody chooses the nicest ones


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """Some photos, explained by every method, and each method judged on them."""

    paths: list[Path]
    classifier: Classifier
    x: Tensor  # (B, C, H, W)
    heats: dict[str, Tensor]  # of each method (B, rows, columns)
    judged: dict[str, Faithfulness]


def some(folder: Path, every: int = EVERY, without: Sequence[str] = ()) -> list[Path]:
    """Each so-many-th photo of a folder, by name; those left out are not counted."""
    found = [path for path in sorted(folder.glob("*.jpg")) if path.name not in without][::every]
    if not found:
        raise UserError(f"{folder} holds no .jpg files; give a folder of photos")
    return found


def tried(weights: str | Path, paths: list[Path]) -> Trial:
    """The predicted class of each photo, explained and judged; occlusion takes most of the time."""
    classifier = vitrail.load(weights)
    x = torch.stack([classifier.tensor(path) for path in paths])
    heats = {method: explain(classifier.model, x, method) for method in METHODS}
    judged = compare_heatmaps(classifier.model, x, heats)
    return Trial(paths=paths, classifier=classifier, x=x, heats=heats, judged=judged)


def table(judged: dict[str, Faithfulness]) -> str:
    """Areas, score and its standard error, how often the method is the best one."""
    scores = torch.stack([one.score for one in judged.values()])  # (methods, B)
    wins = torch.bincount(scores.argmax(dim=0), minlength=len(judged)).tolist()
    lines = [f"{'':16} deletion insertion  score     +-  best"]
    order = scores.mean(dim=1).argsort(descending=True).tolist()
    names = list(judged)
    for number in order:
        one = judged[names[number]]
        areas = f"{one.deletion_auc.mean():8.3f} {one.insertion_auc.mean():9.3f}"
        score = f"{one.score.mean():6.3f} {error(one.score):6.3f}"
        lines.append(f"{names[number]:16} {areas} {score} {wins[number]:5}")
    chance = next(iter(judged.values())).random_auc.mean()
    lines.append(f"{'random order':16} {chance:8.3f} {'':9} {0:6.3f}")
    return "\n".join(lines)


def pairs(judged: dict[str, Faithfulness]) -> str:
    """By how much each method beats each below it, photo by photo, and on how many photos."""
    lines = [f"{'better':16} {'worse':16}  ahead     +-  photos"]
    order = sorted(judged, key=lambda method: -judged[method].score.mean().item())
    for better, worse in itertools.combinations(order, 2):
        ahead = judged[better].score - judged[worse].score
        told = f"{ahead.mean():6.3f} {error(ahead):6.3f} {int((ahead > 0).sum()):7}"
        lines.append(f"{better:16} {worse:16} {told}")
    return "\n".join(lines)


def error(values: Tensor) -> float:
    """Standard error of the mean."""
    return values.std().item() / len(values) ** 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="any model that vitrail loads")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--every", type=int, default=EVERY, help="take each so-many-th photo")
    choice = parser.parse_args(arguments)
    judged = tried(choice.weights, some(choice.photos, choice.every)).judged
    print(f"{table(judged)}\n\n{pairs(judged)}")


if __name__ == "__main__":
    main()
