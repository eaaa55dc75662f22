"""How far to trust an explanation: what the class loses when its hottest patches go first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.insight.explain import (
    BATCH,
    METHODS,
    Target,
    check_head,
    check_patches,
    cover,
    explain,
    pick,
)
from vitrail.insight.maps import resting, sound
from vitrail.model.vit import ViT

STEPS = 14  # points of a curve after its first


@dataclass(frozen=True, kw_only=True, eq=False)
class Faithfulness:
    """Probability of the class while patches go or come in the order of their heat.

    After Petsiuk et al. (2018), with one difference: both curves hide patches under the mean colour
    of the image, where the paper blurs for insertion. So an order that knows nothing scores 0.
    """

    shares: Tensor  # (points,), of the patches that went or came, from 0 to 1
    deletion: Tensor  # (B, points), the hottest patches go first: it should fall at once
    insertion: Tensor  # (B, points), the hottest patches come first: it should rise at once
    random: Tensor  # (B, points), patches go in random order: what any order reaches

    @property
    def deletion_area(self) -> Tensor:
        """Area under the curve, from 0 to 1 for each image: the lower, the better."""
        return torch.trapezoid(self.deletion, self.shares)

    @property
    def insertion_area(self) -> Tensor:
        """Area under the curve, from 0 to 1 for each image: the higher, the better."""
        return torch.trapezoid(self.insertion, self.shares)

    @property
    def random_area(self) -> Tensor:
        return torch.trapezoid(self.random, self.shares)

    @property
    def score(self) -> Tensor:
        """Insertion less deletion for each image: 0 is chance, 1 the most there can be."""
        return self.insertion_area - self.deletion_area


def faithfulness(
    model: ViT, x: Tensor, heat: Tensor, target: Target = None, steps: int = STEPS
) -> Faithfulness:
    """Judges one heat (B, rows, columns); `steps` times some patches go or come."""
    return compared(model, x, {"heat": heat}, target, steps)["heat"]


def judge(
    model: ViT,
    x: Tensor,
    methods: Sequence[str] = METHODS,
    target: Target = None,
    steps: int = STEPS,
) -> dict[str, Faithfulness]:
    """Explains by each method, and judges them on the same images: see `ranked`."""
    heats = {method: explain(model, x, method, target) for method in methods}
    return compared(model, x, heats, target, steps)


def ranked(judged: Mapping[str, Faithfulness]) -> list[tuple[str, float, float]]:
    """Methods with their mean score and its standard error, the one to trust first.

    The error is that of the images that were seen; of a single one there is none: infinity.
    """
    rows = []
    for method, one in judged.items():
        images = len(one.score)
        error = one.score.std().item() / images**0.5 if images > 1 else float("inf")
        rows.append((method, one.score.mean().item(), error))
    return sorted(rows, key=lambda row: -row[1])


def compared(
    model: ViT, x: Tensor, heats: Mapping[str, Tensor], target: Target = None, steps: int = STEPS
) -> dict[str, Faithfulness]:
    """Judges several heats of the same images, all against one random order."""
    rows, columns = check_patches(model, x)
    check_head(model)
    for name, heat in heats.items():
        if heat.shape != (len(x), rows, columns) or not heat.isfinite().all():
            raise UserError(
                f"{name} has shape {tuple(heat.shape)}, or is not all numbers; "
                f"give finite numbers of shape {(len(x), rows, columns)}"
            )
    if steps < 1:
        raise UserError(f"steps is {steps}; give a whole number of at least 1")
    patches = rows * columns
    counts = torch.linspace(0, patches, min(steps, patches) + 1).round().to(x.device)
    chance = shuffled(len(x), patches).to(x.device)
    hidden = [gone(chance, counts)]
    for heat in heats.values():
        places = order(heat.flatten(1), chance)
        hidden += [gone(places, counts), ~gone(places, counts)]
    with resting(model), torch.no_grad():
        logits = sound(model(x), model, x)
        random, *curves = falling(model, x, pick(logits, target), torch.stack(hidden))
    return {
        name: Faithfulness(
            shares=(counts / patches).cpu(), deletion=down, insertion=up, random=random
        )
        for name, down, up in zip(heats, curves[::2], curves[1::2], strict=True)
    }


def shuffled(images: int, patches: int) -> Tensor:
    """A random place in the order for every patch of every image, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(images, patches, generator=generator).argsort(dim=1).argsort(dim=1)


def order(heat: Tensor, chance: Tensor) -> Tensor:
    """The place of each patch from hot to cold; patches of equal heat are ordered by chance."""
    line = chance.argsort(dim=1)
    line = line.gather(1, heat.gather(1, line).argsort(dim=1, descending=True, stable=True))
    return line.argsort(dim=1)  # (B, P)


def gone(places: Tensor, counts: Tensor) -> Tensor:
    """Which patches are hidden when the first ones of an order are: (B, points, P)."""
    return places[:, None] < counts[:, None]


def falling(model: ViT, x: Tensor, classes: Tensor, hidden: Tensor) -> Tensor:
    """Probabilities of the classes for each image under each cover: (curves, B, points)."""
    image = torch.arange(len(x), device=x.device)[None, :, None].expand(hidden.shape[:3])
    covers = torch.cat([image[..., None].int(), hidden.int()], dim=-1)  # (curves, B, points, 1 + P)
    # the whole image and the empty one are in every curve, and looked at once
    distinct, back = covers.flatten(0, 2).unique(dim=0, return_inverse=True)
    found = []
    for part in distinct.split(BATCH):
        image = part[:, 0].long()
        logits = model(cover(model, x[image], part[:, 1:].bool()))
        found.append(logits.softmax(dim=1).gather(1, classes[image][:, None])[:, 0])
    return torch.cat(found)[back].view(hidden.shape[:3]).float().cpu()
