"""From a recipe to the things that run it: device, loader, model and optimizer."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vitrail.data.loader import Loader
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig, check_divides
from vitrail.model.vit import ViT
from vitrail.run.auto import Facts
from vitrail.run.recipe import Recipe, plain
from vitrail.training.distributed import ALONE, Together
from vitrail.training.learner import Learner
from vitrail.zoo import load as zoo

log = logging.getLogger(__name__)

FEWEST = 9  # patches below which attention has nothing to look at
TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent")


def check_sense(recipe: Recipe, facts: Facts) -> None:
    """Refuses what cannot work, and says what would."""
    vit, view = recipe.vit, recipe.view
    if vit.head == "none":
        raise UserError("a model with vit.head none tells no classes apart; take --vit.head linear")
    check_divides(view.height, view.width, vit.patch)
    if recipe.patches < FEWEST:
        raise UserError(
            f"patches of {vit.patch} pixels leave {recipe.patches} of an image of "
            f"{view.height} x {view.width}, too few to learn from; take {more_patches(recipe)}"
        )
    if vit.classes != facts.classes:
        raise UserError(
            f"the model has {vit.classes} classes, the data {facts.classes}; leave vit.classes out"
        )
    if view.channels != vit.channels:
        raise UserError(
            f"the model wants {vit.channels} channels and gets {view.channels}; "
            f"set vit.channels and view.channels alike"
        )
    if recipe.train.batch > facts.images:
        raise UserError(
            f"{facts.images} training images fill no batch of {recipe.train.batch}; "
            f"take --train.batch {2 ** int(math.log2(facts.images))} or less"
        )


def more_patches(recipe: Recipe) -> str:
    """A flag that leaves patches enough: about eight a side, where the pixels can be so divided."""
    vit, view = recipe.vit, recipe.view
    sides = (*vit.size, view.height, view.width)
    side, common = min(sides), math.gcd(*sides)
    if vit.stem != "patch" or side**2 < FEWEST:  # a ResNet has its patch, a speck has no patches
        flag = "--vit.image" if vit.size == (view.height, view.width) else "--view.size"
        return f"{flag} {8 * vit.patch}"
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    return f"--vit.patch {min(divisors, key=lambda n: abs(n - side / 8))}"


def pick_device(name: str, number: int = 0) -> torch.device:
    """By name; auto takes the GPU of this number, which counts the processes of a machine."""
    if name == "auto":
        gpus = torch.cuda.device_count()
        if gpus and number >= gpus:
            raise UserError(f"process {number} has no GPU among {gpus}; start {gpus} processes")
        return torch.device("cuda", number) if gpus else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # "meta" has shapes, and no numbers to give back
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name} cannot be used: {reason}; try --device cpu") from error
    return device


def make_loader(
    recipe: Recipe, source: Source, place: torch.device, together: Together = ALONE
) -> Loader:
    return Loader(
        source,
        recipe.view,
        recipe.data,
        batch=recipe.train.batch,
        seed=recipe.train.seed,
        rank=together.rank,
        world=together.world,
        device=place,
        progress=together.first,
    )


def make_learner(recipe: Recipe, place: torch.device) -> Learner:
    """A model with its first weights, a function of the seed, and all that trains it."""
    torch.manual_seed(recipe.train.seed)
    model = ViT(recipe.vit)
    if recipe.weights:
        begin_from(recipe.weights, model)
    model.to(place)
    if recipe.vit.positions != "rotary" and not recipe.vit.qk_norm:
        still_key_biases(model)
    names = dict(model.named_parameters())
    return Learner(
        model,
        recipe.train,
        layer=lambda name: layer_of(name, recipe.vit.depth),
        undecayed=[name for name in TOKENS if name in names],
        matrices={name: count for name in names if (count := stacked(name, recipe.vit))},
    )


def still_key_biases(model: ViT) -> None:
    """A key bias adds the same to all that a token asks, and softmax forgets it: its gradient is
    rounding noise, which Adam would make as large as any other."""
    for module in model.modules():
        if isinstance(module, Attention):
            matters = torch.ones_like(module.qkv.bias)
            matters.chunk(3)[1].zero_()
            module.qkv.bias.register_hook(matters.mul)


def told(loaded: zoo.Loaded) -> zoo.Loaded:
    """Says what became of foreign weights, and who told what their file does not."""
    report = loaded.report
    for kind in ("resized", "adapted", "left_out", "told"):
        for fact in getattr(report, kind):
            log.info(f"{report.source}: {kind.replace('_', ' ')}: {fact}")
    return loaded


def weights_for(facts: Facts, weights: str, asked: Mapping[str, Any]) -> zoo.Loaded:
    """What a fine-tuning starts from, with what was asked for of its model."""
    loaded = zoo.load(weights, vit={"classes": facts.classes, **asked.get("vit", {})})
    if loaded.view is None and not {"mean", "std"} <= asked.get("view", {}).keys():
        raise UserError(
            f"{weights} does not say how its images were normalised; say --view.mean 0.5 "
            f"--view.std 0.5, or ImageNet's 0.485 0.456 0.406 and 0.229 0.224 0.225"
        )
    return told(loaded)


def begin_from(weights: str, model: ViT) -> None:
    """Everything but the head, which begins anew: the classes are others."""
    loaded = zoo.load(weights, vit=plain(model.config))
    model.load_state_dict(loaded.model.state_dict())
    for head in (model.head, model.head_dist):
        if isinstance(head, nn.Linear):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)


def layer_of(name: str, depth: int) -> int:
    """0 for what turns pixels into tokens, then the blocks, then the head."""
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1])
    early = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
    return 0 if name.startswith(early) else depth + 1


def stacked(name: str, config: ViTConfig) -> int:
    """How many matrices lie in this parameter that Muon should turn; 0 if it should not."""
    if not (name.startswith(("blocks.", "attn_pool.")) and name.endswith(".weight")):
        return 0
    kinds = {
        "qkv": 3,
        "kv": 2,
        "q": 1,
        "proj": 1,
        "fc1": 2 if config.mlp == "swiglu" else 1,
        "fc2": 1,
    }
    return kinds.get(name.split(".")[-2], 0)
