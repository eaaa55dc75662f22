"""From a recipe to the objects that run it: device, loader, model and optimizer."""

import logging
import math
import re
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.loader import Loader
from vitrail.data.source import Source
from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig, check_image_size
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.joint import JointClassifier, joint_loss
from vitrail.pretraining.masked import MaskedAutoencoder
from vitrail.pretraining.objective import Pretrainer, backbone_of, count_nothing, sum_losses
from vitrail.pretraining.teacher import (
    FeatureStudent,
    count_taught,
    distillation,
    feature_copying,
    feature_distillation,
)
from vitrail.pretraining.views import AgreeingViews
from vitrail.run.auto import DataSummary
from vitrail.run.recipe import Recipe, settings_to_dict
from vitrail.training import loop
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import SINGLE, World
from vitrail.training.learner import Learner, compute_dtype
from vitrail.training.sharding import (
    fill_shards,
    rank_rows,
    recompute_activations,
    shard_model,
)
from vitrail.zoo import load as zoo
from vitrail.zoo.adapters import freeze

log = logging.getLogger(__name__)

NEED_LABELS = (  # settings that a pretraining refuses
    *("train.drop_patches", "train.frozen", "train.probe", "train.class_weights"),
    *("train.smoothing", "train.patience", "data.balanced", "data.labelled"),
    *("data.augment.mixup", "data.augment.cutmix"),
)
MIN_SIDE = 4  # pixels of an image without labels: two of the smallest patches that are chosen
MIN_PATCHES = 9  # with fewer, attention has too little to compare
USUAL_GRID = 8  # patches per side that an error message proposes
NO_WEIGHT_DECAY = (
    *("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent", "mask_token"),
)
WRAPPED = re.compile(r"^(backbone|decoder)\.")  # parts of a model that learns without labels


def check_recipe(recipe: Recipe, summary: DataSummary, processes: int = 1) -> None:
    """Raises if the recipe cannot train on this data, and says which setting to change."""
    vit, preprocess = recipe.vit, recipe.preprocess
    if recipe.pretrain is not None:
        check_pretraining(recipe, recipe.pretrain)
        check_pretraining_images(summary)
        check_batch(recipe.train, processes)
    elif vit.head == "none":
        raise UserError("a model with vit.head none cannot classify; set `vit.head='linear'`")
    if recipe.joint is not None:
        check_joint(recipe)
    check_image_size(preprocess.height, preprocess.width, vit.patch)
    if recipe.patches < MIN_PATCHES:
        raise UserError(
            f"an image of {preprocess.height} x {preprocess.width} has only "
            f"{format_count(recipe.patches, 'patch')} of {vit.patch} x {vit.patch} pixels, and at "
            f"least {MIN_PATCHES} are needed; try {propose_patches(recipe)}"
        )
    if vit.classes != summary.classes:
        raise UserError(
            f"the model has {vit.classes} classes, the data {summary.classes}; omit vit.classes"
        )
    if preprocess.channels != vit.channels:
        raise UserError(
            f"the model expects {vit.channels} channels, preprocessing gives "
            f"{preprocess.channels}; set vit.channels and preprocess.channels to the same number"
        )
    if recipe.train.batch > summary.images:
        raise UserError(
            f"{summary.images} training images are fewer than one batch of {recipe.train.batch}; "
            f"lower train.batch to {2 ** int(math.log2(summary.images))} or less"
        )


def check_joint(recipe: Recipe) -> None:
    """Raises for a training that has no use for images without labels."""
    if recipe.data.labelled == 1 and recipe.data.labels != "partial":
        raise UserError(
            "[joint] needs images without labels, and all images have labels; give `labels_only`, "
            "or a table with empty labels and `data.labels='partial'`"
        )
    if recipe.pretrain is not None or recipe.teacher is not None:
        raise UserError("[joint] belongs to a training with labels and without teacher; omit it")
    if recipe.tune != "all" or recipe.train.frozen:
        raise UserError(
            "frozen blocks cannot learn from images without labels; set `tune='all'` and "
            "`train.frozen=0`, or omit [joint]"
        )


def check_pretraining(recipe: Recipe, config: PretrainConfig) -> None:
    """Raises for an architecture that the method leaves partly untrained, and for settings of a
    training with labels.
    """
    plain = Recipe()
    for name in NEED_LABELS:
        if attrgetter(name)(recipe) != attrgetter(name)(plain):
            raise UserError(f"{name} is for training with labels; omit it")
    if recipe.vit.head != "none":
        raise UserError("pretraining needs no head; omit `vit.head`")
    if recipe.vit.pool == "map" and config.method != "teacher":
        raise UserError(
            f"attention pooling learns nothing with method {config.method}, which compares "
            f"patches; set `vit.pool='avg'`"
        )


def check_pretraining_images(summary: DataSummary) -> None:
    """Raises for images that a pretraining cannot learn from."""
    if summary.images < 2:
        raise UserError("a pretraining needs two training images or more; add images")
    if summary.side < MIN_SIDE:
        raise UserError(
            f"the training images have {format_count(summary.side, 'pixel')} on the short side, "
            f"and a pretraining needs at least {MIN_SIDE}: two patches; give larger images"
        )


def check_batch(train: TrainConfig, processes: int) -> None:
    """Raises if a forward pass of a pretraining would have a single image."""
    if train.batch // processes // train.accumulate < 2:
        where = f" of each of the {processes} processes" if processes > 1 else ""
        lower = " or lower `train.accumulate`" if train.accumulate > 1 else ""
        raise UserError(
            f"a pretraining needs two images or more in each forward pass{where}; raise "
            f"`train.batch` to at least {2 * processes * train.accumulate}{lower}"
        )


def propose_patches(recipe: Recipe) -> str:
    """A setting that gives about eight patches per side, where the image size is divisible."""
    vit, preprocess = recipe.vit, recipe.preprocess
    sides = (*vit.size, preprocess.height, preprocess.width)
    side, common = min(sides), math.gcd(*sides)
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    fitting = [n for n in divisors if (side // n) ** 2 >= MIN_PATCHES]
    if vit.small_stem:
        fitting = [n for n in fitting if n > 1 and n.bit_count() == 1 and vit.width % n == 0]
    if not fitting or (vit.stem != "patch" and not vit.small_stem):  # whose patch size is fixed
        same = vit.size == (preprocess.height, preprocess.width)
        setting = "vit.image" if same else "preprocess.size"
        return f"`{setting}={USUAL_GRID * vit.patch}`"
    return f"`vit.patch={min(fitting, key=lambda n: abs(n - side / USUAL_GRID))}`"


def make_loader(
    recipe: Recipe, source: Source, device: torch.device, world: World = SINGLE
) -> Loader:
    return Loader(
        source,
        recipe.preprocess,
        recipe.data,
        batch=recipe.train.batch,
        seed=recipe.train.seed,
        rank=world.rank,
        world_size=world.size,
        device=device,
        progress=world.is_leader,
    )


def make_learner(recipe: Recipe, device: torch.device, world: World = SINGLE) -> Learner:
    """The model with its initial weights, a function of the seed, and its optimizer."""
    if recipe.train.shard == "full" and world.size > 1:
        return make_sharded_learner(recipe, device, world)
    model = make_model(recipe).to(device)
    if recipe.tune != "all" or recipe.train.frozen:
        freeze(model, recipe.tune, recipe.train.rank, recipe.train.frozen)
    whole = wrap_backbone(model, recipe).to(device)
    if recipe.vit.positions != "rotary" and not recipe.vit.qk_norm:
        freeze_key_biases(whole)
    if recipe.train.recompute:
        recompute_activations(model.blocks)
    return assemble_learner(whole, recipe)


def make_model(recipe: Recipe) -> ViT:
    """The whole model with its initial weights."""
    torch.manual_seed(recipe.train.seed)
    model = ViT(recipe.vit)
    if recipe.weights:
        load_backbone_weights(recipe.weights, model)
    return model


def make_sharded_learner(recipe: Recipe, device: torch.device, world: World) -> Learner:
    """The same with rows of the weights on each rank; only the leader's host holds all of them."""
    if recipe.teacher is not None and recipe.teacher.features:
        raise UserError(
            "a teacher with other classes teaches features, which needs the whole model; set "
            "`train.shard` off, or omit `teacher`"
        )
    initial: dict[str, Tensor] = {}

    def make_initial() -> None:
        whole = make_model(recipe)
        initial.update([*whole.named_parameters(), *whole.named_buffers()])

    world.on_leader(make_initial)
    models = []
    for _ in range(2 if recipe.train.ema else 1):
        with torch.device("meta"):  # shapes without values
            model = ViT(recipe.vit)
        if recipe.train.recompute:
            recompute_activations(model.blocks)
        dtype = compute_dtype(recipe.train.precision, device)
        shard_model(model, model.blocks, device, dtype)
        fill_shards(model, initial, world)
        models.append(model)
    learner = assemble_learner(models[0], recipe, models[-1] if recipe.train.ema else None, world)
    if recipe.vit.positions != "rotary" and not recipe.vit.qk_norm:
        for name, module in models[0].named_modules():
            if isinstance(module, Attention):
                mask = key_bias_mask(module.qkv.bias.shape[0], device)
                rows = rank_rows(len(mask), world.rank, world.size)
                learner.gradient_masks[f"{name}.qkv.bias"] = mask[rows]
    return learner


def assemble_learner(
    model: nn.Module, recipe: Recipe, twin: nn.Module | None = None, world: World = SINGLE
) -> Learner:
    """The learner of a model that is on its device, with the optimizer and loss of the recipe."""
    names = {name: WRAPPED.sub("", name) for name, _ in model.named_parameters()}
    counts = {name: count_stacked_matrices(plain, recipe.vit) for name, plain in names.items()}
    learner = Learner(
        model,
        recipe.train,
        layer_index=lambda name: layer_index(name.removeprefix("backbone."), recipe.vit.depth),
        no_weight_decay=[name for name, plain in names.items() if plain in NO_WEIGHT_DECAY],
        matrices={name: count for name, count in counts.items() if count},
        twin=twin,
        world=world,
    )
    if isinstance(model, JointClassifier) and learner.ema is not None:
        model.teacher = (backbone_of(learner.ema.model),)
    set_criterion(learner, recipe)
    return learner


def set_criterion(learner: Learner, recipe: Recipe) -> None:
    """The loss of a run that does not learn from labels alone."""
    classes, width = recipe.vit.classes, recipe.vit.feature_width
    if recipe.pretrain is not None:
        learner.criterion, learner.count_correct = sum_losses, count_nothing
        if recipe.pretrain.method == "teacher":
            assert recipe.teacher is not None
            learner.criterion = feature_copying(classes, width, recipe.teacher.features)
    elif recipe.uses_unlabelled:
        learner.criterion = joint_loss(classes, loop.cross_entropy)
        learner.count_correct = partial(count_labelled, classes=classes)
    elif recipe.teacher is not None:
        learner.count_correct = partial(count_taught, classes=classes)
        learner.criterion = distillation(classes, recipe.teacher.temperature)
        if recipe.teacher.features:
            learner.criterion = feature_distillation(classes, recipe.teacher.features)


def count_labelled(outputs: Tensor, targets: Tensor, *, classes: int) -> Tensor:
    """Labelled images whose top class is the label."""
    return loop.count_correct(outputs[:, :classes], targets)


def wrap_backbone(model: ViT, recipe: Recipe) -> nn.Module:
    """The model, with the part that is thrown away at the end, if there is one."""
    if recipe.pretrain is not None and recipe.pretrain.method != "teacher":
        return make_pretrainer(model, recipe)
    if recipe.joint is not None and recipe.uses_unlabelled:
        return JointClassifier(model, recipe.joint, *normalisation(recipe))
    if recipe.teacher is not None and recipe.teacher.features:
        return FeatureStudent(model, recipe.teacher.features, recipe.teacher.regions)
    return model


def make_pretrainer(backbone: ViT, recipe: Recipe) -> Pretrainer:
    """The backbone with the part that only its pretraining needs."""
    assert recipe.pretrain is not None
    if recipe.pretrain.method == "masked":
        return MaskedAutoencoder(backbone, recipe.pretrain)
    return AgreeingViews(backbone, recipe.pretrain, *normalisation(recipe))


def normalisation(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Mean and std of each channel, (C, 1, 1)."""
    mean, std = recipe.preprocess.mean, recipe.preprocess.std
    return torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]


def freeze_key_biases(model: nn.Module) -> None:
    """Zeroes the gradients of the key biases.

    A key bias adds the same number to all attention logits of a query, which softmax ignores. Its
    gradient is only rounding noise, which Adam would scale up to a full update.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            mask = key_bias_mask(len(module.qkv.bias), module.qkv.bias.device)
            if module.qkv.bias.requires_grad:
                module.qkv.bias.register_hook(mask.mul)


def key_bias_mask(length: int, device: torch.device) -> Tensor:
    """0 for the key biases in a fused bias of queries, keys and values, 1 for the others."""
    mask = torch.ones(length, device=device)
    mask.chunk(3)[1].zero_()
    return mask


def load_for_fine_tuning(
    summary: DataSummary, weights: str, settings: Mapping[str, Any]
) -> zoo.LoadedModel:
    """The weights to start from, with the changes to the model that `settings` requests."""
    loaded = zoo.load_weights(weights, vit={"classes": summary.classes, **settings.get("vit", {})})
    if loaded.preprocess is None and not {"mean", "std"} <= settings.get("preprocess", {}).keys():
        raise UserError(
            f"{weights} does not say how its images were normalised; set preprocess.mean and "
            f"preprocess.std: both to 0.5, or to ImageNet's 0.485 0.456 0.406 and "
            f"0.229 0.224 0.225"
        )
    expected, found = loaded.model.config.channels, summary.channels
    if expected != found and not {expected, found} <= {1, 3}:
        raise UserError(
            f"{weights} expects {expected} channels, the data has {found}; "
            f"adapt the weights with `vit.channels={found}`"
        )
    return zoo.log_weight_changes(loaded)


def load_backbone_weights(weights: str, model: ViT) -> None:
    """Loads everything but the head, which starts at zero because the classes differ."""
    loaded = zoo.load_weights(weights, vit=settings_to_dict(model.config))
    model.load_state_dict(loaded.model.state_dict())
    for head in (model.head, model.head_dist):
        if isinstance(head, nn.Linear):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)


def layer_index(name: str, depth: int) -> int:
    """0 for the embedding, 1 to `depth` for the blocks, then the final norm and the head."""
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1])
    embedding = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
    return 0 if name.startswith(embedding) else depth + 1


def count_stacked_matrices(name: str, config: ViTConfig) -> int:
    """How many matrices Muon should update in this parameter; 0 for AdamW."""
    if config.small_stem and re.fullmatch(r"patch_embed\..*(conv|proj)\.weight", name):
        return 1
    if not (name.startswith(("blocks.", "attn_pool.")) and name.endswith(".weight")):
        return 0
    counts = {
        "qkv": 3,
        "kv": 2,
        "q": 1,
        "proj": 1,
        "fc1": 2 if config.mlp == "swiglu" else 1,
        "fc2": 1,
    }
    return counts.get(name.split(".")[-2], 0)
