"""Faithfulness of heatmaps: insertion and deletion AUC (Petsiuk et al., 2018)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.insight.explain import (
    BATCH,
    Target,
    check_head,
    check_patches,
    explain,
    mask_patches,
    target_classes,
)
from vitrail.insight.maps import check_finite
from vitrail.insight.methods import METHODS
from vitrail.model.vit import ViT

STEPS = 14  # points of a curve after its first


@dataclass(frozen=True, kw_only=True, eq=False)
class Faithfulness:
    """Probability of the class while patches are deleted or inserted, the hottest first.

    The paper inserts into a blurred image; here both curves mask patches with the mean colour of
    the image. So the insertion curve of an order mirrors the deletion curve of its reverse, and a
    random order scores 0 on average.
    """

    fractions: Tensor  # (points,), of patches deleted or inserted, from 0 to 1
    deletion: Tensor  # (B, points), starts at the whole image: should fall early
    insertion: Tensor  # (B, points), starts at the empty image: should rise early
    random: Tensor  # (B, points), deletion in random order, the baseline

    @property
    def deletion_auc(self) -> Tensor:
        """Area under the deletion curve of each image, from 0 to 1: lower is better."""
        return torch.trapezoid(self.deletion, self.fractions)

    @property
    def insertion_auc(self) -> Tensor:
        """Area under the insertion curve of each image, from 0 to 1: higher is better."""
        return torch.trapezoid(self.insertion, self.fractions)

    @property
    def random_auc(self) -> Tensor:
        """Area under the curve of a random order."""
        return torch.trapezoid(self.random, self.fractions)

    @property
    def score(self) -> Tensor:
        """Insertion AUC minus deletion AUC of each image: 0 for a random order, 1 at most."""
        return self.insertion_auc - self.deletion_auc


def measure_faithfulness(
    model: ViT, x: Tensor, heatmap: Tensor, target: Target = None, steps: int = STEPS
) -> Faithfulness:
    """The faithfulness of one heatmap per image, (B, rows, columns), in `steps` steps."""
    return compare_heatmaps(model, x, {"heatmap": heatmap}, target, steps)["heatmap"]


def compare_methods(
    model: ViT,
    x: Tensor,
    methods: Sequence[str] = tuple(METHODS),
    target: Target = None,
    steps: int = STEPS,
) -> dict[str, Faithfulness]:
    """The faithfulness of several methods on the same images; `rank_methods` sorts them."""
    heatmaps = {method: explain(model, x, method, target) for method in methods}
    return compare_heatmaps(model, x, heatmaps, target, steps)


def rank_methods(results: Mapping[str, Faithfulness]) -> list[tuple[str, float, float]]:
    """Methods with their mean score and its standard error, the most faithful first.

    The standard error is over images; for a single image it is infinite.
    """
    rows = []
    for method, result in results.items():
        images = len(result.score)
        error = result.score.std().item() / images**0.5 if images > 1 else float("inf")
        rows.append((method, result.score.mean().item(), error))
    return sorted(rows, key=lambda row: -row[1])


def compare_heatmaps(
    model: ViT,
    x: Tensor,
    heatmaps: Mapping[str, Tensor],
    target: Target = None,
    steps: int = STEPS,
    multi_label: bool = False,
) -> dict[str, Faithfulness]:
    """The faithfulness of several heatmaps of the same images, with one random order for all.

    With `multi_label` each class has a probability of its own.
    """
    rows, columns = check_patches(model, x)
    check_head(model)
    for name, heatmap in heatmaps.items():
        if heatmap.shape != (len(x), rows, columns) or not heatmap.isfinite().all():
            raise UserError(
                f"{name} has shape {tuple(heatmap.shape)}, or contains NaN or infinity; "
                f"give finite numbers of shape {(len(x), rows, columns)}"
            )
    if steps < 1:
        raise UserError(f"steps is {steps}; give a whole number of at least 1")
    patches = rows * columns
    counts = torch.linspace(0, patches, min(steps, patches) + 1).round().to(x.device)  # (points)
    random_ranks = draw_random_ranks(len(x), patches).to(x.device)  # (B, P)
    masks = [mask_first(random_ranks, counts)]
    for heatmap in heatmaps.values():
        deleted = mask_first(rank_patches(heatmap.flatten(1), random_ranks), counts)
        masks += [deleted, ~deleted]
    with eval_mode(model), torch.no_grad():
        logits = check_finite(model(x), model, x)  # (B, K)
        classes = target_classes(logits, target)  # (B)
        random, *curves = masked_probabilities(model, x, classes, torch.stack(masks), multi_label)
    return {
        name: Faithfulness(
            fractions=(counts / patches).cpu(),
            deletion=deletion,
            insertion=insertion,
            random=random,
        )
        for name, deletion, insertion in zip(heatmaps, curves[::2], curves[1::2], strict=True)
    }


def draw_random_ranks(images: int, patches: int) -> Tensor:
    """A random rank for every patch of every image, always with the same seed."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(images, patches, generator=generator)
    return noise.argsort(dim=1).argsort(dim=1)  # (B, P)


def rank_patches(heatmap: Tensor, random_ranks: Tensor) -> Tensor:  # (B, P)
    """The rank of each patch, the hottest first; ties are broken at random."""
    order = random_ranks.argsort(dim=1)
    order = order.gather(1, heatmap.gather(1, order).argsort(dim=1, descending=True, stable=True))
    return order.argsort(dim=1)  # (B, P)


def mask_first(ranks: Tensor, counts: Tensor) -> Tensor:  # (B, P)
    """A mask of the first patches by rank, for each count."""
    return ranks[:, None] < counts[:, None]  # (B, points, P)


def masked_probabilities(
    model: ViT, x: Tensor, classes: Tensor, masks: Tensor, multi_label: bool
) -> Tensor:
    """The class probability of each image under each mask (curves, B, points, P)."""
    image = torch.arange(len(x), device=x.device)[None, :, None].expand(masks.shape[:3])
    keys = torch.cat([image[..., None].int(), masks.int()], dim=-1)  # (curves, B, points, 1 + P)
    # every curve contains the whole image and the empty one: each distinct mask runs once
    distinct, inverse = keys.flatten(0, 2).unique(dim=0, return_inverse=True)
    probabilities = []
    for part in distinct.split(BATCH):
        image = part[:, 0].long()  # (images)
        logits = model(mask_patches(model, x[image], part[:, 1:].bool()))  # (images, K)
        values = logits.sigmoid() if multi_label else logits.softmax(dim=1)
        probabilities.append(values.gather(1, classes[image][:, None])[:, 0])
    return torch.cat(probabilities)[inverse].view(masks.shape[:3]).float().cpu()
