"""A teacher: what it answers to the training images and their mirror images, computed once."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.arguments import check_fields
from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.loader import Batch, Loader
from vitrail.data.pixels import LUMA
from vitrail.data.source import Source, is_multi_label, split_indices
from vitrail.data.sources.places import cache_folder
from vitrail.data.split import hash_items
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.evaluation.metrics import fit_temperature
from vitrail.heads.features import hash_weights, read_feature_cache, write_feature_cache
from vitrail.model.vit import ViT
from vitrail.pretraining.config import TeacherConfig
from vitrail.pretraining.teacher import region_similarities
from vitrail.run.recipe import Recipe, locate_weights
from vitrail.training.distributed import World
from vitrail.zoo.load import load_weights

SOFTENING = 4.0  # temperature of the answers, times the one that calibrates them
CACHE_VERSION = 4  # part of every cache key
ROUNDING = 0.01  # of the standard deviation of the answers; more is not stored as float16
BATCH = 64
SLOW_DEVICES = ("cpu",)  # on which the teacher answers once for each image, not for each view
REGIONS = 4  # per side of an image, whose tokens are compared: 256 numbers, not all tokens, cached
TIMM = "timm:"  # in front of the name of a teacher from timm
CALLABLE = "callable:"  # in a recipe: a teacher that was given in Python, by the key of its answers
TEACHER_DATA = DataConfig(skip_broken=True, disk_gb=0)  # how it reads the images


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """Any model as a teacher, with the preprocessing that it expects.

    `model` maps normalised images (B, C, H, W) to logits, one for each of `classes`; or without
    classes to features (B, D), or to a pair of them and a feature map (B, D', rows, columns), whose
    similarities are learned too.

    >>> import torch
    >>> teacher = vitrail.Teacher(
    ...     model=lambda images: images.mean(dim=(1, 2, 3))[:, None].expand(-1, 10),
    ...     preprocess={"size": 8, "channels": 1},
    ...     classes=[str(digit) for digit in range(10)],
    ... )
    >>> run = vitrail.train("digits", teacher=teacher, epochs=1, report=False, quiet=True)
    >>> run.metrics["epochs"]
    1
    """

    model: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]
    preprocess: Preprocess | Mapping[str, Any]
    classes: Sequence[str] | None = None
    name: str = ""  # shown when the training starts

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def settings(self) -> Preprocess:
        """The preprocessing as `Preprocess`.

        >>> vitrail.Teacher(model=abs, preprocess={"size": 8}).settings.size
        8
        """
        if isinstance(self.preprocess, Preprocess):
            return self.preprocess
        return Preprocess.from_dict(self.preprocess)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedTeacher(Teacher):
    """A teacher that a resume can load again."""

    weights: str  # run, weight file or folder, or "timm:NAME"


def open_teacher(asked: str | Teacher | None, recipe: Recipe, source: Source) -> Teacher | None:
    """The teacher, checked before anything is computed.

    None if the recipe has none, or one that was given in Python, of which only the answers remain.
    """
    teacher, pretraining = None, recipe.pretrain is not None
    features = recipe.teacher is not None and recipe.teacher.features > 0
    if isinstance(asked, Teacher):
        teacher = asked
    elif asked is not None and not asked.startswith(CALLABLE):
        teacher = load_teacher(asked, source, pretraining)
    if teacher is not None:
        if pretraining:  # without labels its logits are features, too
            teacher = replace(teacher, classes=None)
        else:
            check_teacher(teacher, source)
        features = teacher.classes is None
    if asked is not None and features and recipe.train.frozen:
        raise UserError(
            "a teacher with other classes teaches features, which frozen blocks cannot learn; "
            "set `tune='all'`, or omit `teacher`"
        )
    return teacher


def load_teacher(path: str | Path, source: Source, features: bool = False) -> LoadedTeacher:
    """A run, weights that the zoo reads, or "timm:NAME".

    It answers if it has the classes of the data; else, or with `features`, those are learned.
    """
    if str(path).startswith(TIMM):
        return load_timm_teacher(str(path))
    loaded = load_weights(path)
    if loaded.preprocess is None:
        raise UserError(
            f"the teacher {path} does not say how its images were normalised; give it in Python as "
            f"`vitrail.Teacher`, with its preprocessing"
        )
    model, classes, weights = loaded.model.eval(), loaded.classes, locate_weights(str(path))
    if not features and classes is not None and set(classes) == set(source.classes):
        if loaded.metadata.labels == "multi":
            raise UserError(
                f"the teacher {path} predicts any number of labels for an image; give one that "
                f"was trained with one label for each"
            )
        return LoadedTeacher(
            model=model, preprocess=loaded.preprocess, classes=classes, weights=weights
        )
    return LoadedTeacher(model=PooledFeatures(model), preprocess=loaded.preprocess, weights=weights)


def load_timm_teacher(name: str) -> LoadedTeacher:
    """A pretrained model of timm, of any architecture; its features are learned."""
    try:
        timm, data = import_module("timm"), import_module("timm.data")
    except ImportError as error:
        raise UserError("timm is not installed; run pip install timm") from error
    try:
        model = timm.create_model(name.removeprefix(TIMM), pretrained=True, num_classes=0)
    except (RuntimeError, OSError, ValueError) as error:  # unknown, without weights, or offline
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"timm cannot load the teacher {name}: {reason}; check its name and the network, or "
            f"give a run or a weight file"
        ) from error
    config = data.resolve_data_config(model=model)
    bilinear = config["interpolation"] == "bilinear"
    preprocess = Preprocess(
        size=config["input_size"][1:],
        crop=config["crop_pct"],
        interpolation="bilinear" if bilinear else "bicubic",
        mean=config["mean"],
        std=config["std"],
        channels=config["input_size"][0],
    )
    return LoadedTeacher(model=TimmFeatures(model.eval()), preprocess=preprocess, weights=name)


class TimmFeatures(nn.Module):
    """What the head of a model of timm reads, and the feature map behind it, if it has one."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.model.forward_features(images)
        features: Tensor = self.model.forward_head(x, pre_logits=True)
        if x.ndim == 3:  # tokens of a square grid, as for all square images
            x = x[:, getattr(self.model, "num_prefix_tokens", 0) :].mT
            side = math.isqrt(x.shape[-1])
            return (features, x.unflatten(2, (side, side))) if side**2 == x.shape[-1] else features
        channels_last = x.ndim == 4 and getattr(self.model, "output_fmt", "") == "NHWC"
        return features, x.permute(0, 3, 1, 2) if channels_last else x


class PooledFeatures(nn.Module):
    """What the head of a ViT reads, and its patch tokens as a feature map."""

    def __init__(self, backbone: ViT):
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens, grid = self.backbone.encode(images), self.backbone.grid(images)
        patches = self.backbone.norm(tokens[:, self.backbone.config.prefix :])
        return self.backbone.pool(tokens), patches.mT.unflatten(2, grid)


def check_teacher(teacher: Teacher, source: Source) -> None:
    """Raises for a teacher that this data cannot be learned from."""
    if is_multi_label(source):
        raise UserError("a teacher needs images with one label each; omit `teacher`")
    classes = teacher.classes
    if classes is not None and set(classes) != set(source.classes):
        extra = sorted(set(source.classes) - set(classes))
        missing = f", without {extra[0]!r}" if extra else ""
        raise UserError(
            f"the teacher has {len(classes)} classes{missing}, the data {len(source.classes)}; "
            f"give one with the same classes, or without `classes` one that returns features"
        )


def describe_teacher(
    teacher: Teacher, recipe: Recipe, loader: Loader, temperature: float | None = None
) -> TeacherConfig:
    """The settings of a run with this teacher, at the `temperature` requested, if any.

    Computes and caches all answers, unless the teacher sees the views: then only those needed here.
    """
    source = loader.source
    weights = teacher.weights if isinstance(teacher, LoadedTeacher) else CALLABLE
    if watches(recipe, weights, loader.device):
        limit = BATCH if teacher.classes is None or temperature else None
        found = answer_validation(teacher, teacher_loader(teacher, loader), limit)
    else:
        key = answers_key(teacher, source)
        found = compute_answers(teacher, loader, key)
        if weights == CALLABLE:
            weights += key
    if teacher.classes is None:
        regions = int(found["regions"].item())  # the cache stores it with one axis
        features = found["val"].shape[1] - regions**4
        return TeacherConfig(weights=weights, features=features, regions=regions)
    if temperature is None:
        val = torch.from_numpy(found["val"])
        labels = torch.from_numpy(source.labels[found["val_items"]])
        temperature = round(SOFTENING * (fit_temperature(val, labels) if len(val) else 1.0), 3)
    return TeacherConfig(weights=weights, temperature=temperature)


def attach_teacher(recipe: Recipe, loader: Loader, world: World) -> None:
    """Lets the loader add the teacher's answers to the targets of its training batches."""
    config, source = recipe.teacher, loader.source
    assert config is not None
    if watches(recipe, config.weights, loader.device):
        teacher = load_teacher(config.weights, source, config.features > 0)
        loader.annotate = watch_views(teacher, loader)
        return
    found = world.leader_first(lambda: find_answers(config, loader), slow=True)
    loader.annotate = TeacherAnswers(found, len(source))


class TeacherAnswers:
    """The cached answers of a teacher, by item."""

    def __init__(self, found: Mapping[str, NDArray[Any]], images: int):
        self.rows, self.val_rows = np.full(images, -1), np.full(images, -1)
        self.rows[found["items"]] = np.arange(len(found["items"]))
        self.val_rows[found["val_items"]] = np.arange(len(found["val_items"]))
        self.answers, self.val = (torch.from_numpy(found[name]) for name in ("answers", "val"))

    def __call__(self, batch: Batch) -> Tensor:
        """What the teacher says to each image of a training batch, or to its mirror image."""
        assert batch.mirrored is not None
        chosen = torch.from_numpy(self.rows[batch.items])
        views = torch.from_numpy(batch.mirrored.astype(np.int64))
        return self.answers[chosen, views].float().to(batch.images.device)

    def validation(self, items: NDArray[np.int64]) -> Tensor:
        """What it says to validation images."""
        return self.val[torch.from_numpy(self.val_rows[items])].float()


def sees_views(weights: str, device: torch.device, frozen: int = 0) -> bool:
    """Whether the teacher is fast enough to see every augmented image, as on a GPU.

    With `frozen` blocks batches hold cached tokens of whole images, which it cannot see.
    """
    return device.type not in SLOW_DEVICES and not frozen and not weights.startswith(CALLABLE)


def watches(recipe: Recipe, weights: str, device: torch.device) -> bool:
    """Whether the teacher of this run sees every augmented image; else its answers are cached."""
    return recipe.pretrain is None and sees_views(weights, device, recipe.train.frozen)


def watch_views(teacher: Teacher, loader: Loader) -> Callable[[Batch], Tensor]:
    """Asks the teacher about the same augmented images that the student sees."""
    assert isinstance(teacher.model, nn.Module)
    teacher.model.to(loader.device)
    theirs, ours = teacher.settings, loader.preprocess

    def annotate(batch: Batch) -> Tensor:
        x = convert_images(batch.images, ours, theirs)
        return order_classes(ask(teacher, x)[0], teacher, loader.source)

    return annotate


def convert_images(images: Tensor, ours: Preprocess, theirs: Preprocess) -> Tensor:
    """Images normalised for one model, resized and normalised for another."""
    (mean, std), (new_mean, new_std) = (
        [torch.tensor(numbers, device=images.device)[:, None, None] for numbers in (p.mean, p.std)]
        for p in (ours, theirs)
    )
    x = images * std + mean
    if x.shape[1] != theirs.channels:
        if x.shape[1] == len(LUMA):  # as the loader converts colours to grey
            x = x * torch.tensor(LUMA, dtype=x.dtype, device=x.device)[:, None, None]
            x = x.sum(dim=1, keepdim=True)
        else:
            x = x.mean(dim=1, keepdim=True)
        x = x.expand(-1, theirs.channels, -1, -1)
    size = [theirs.height, theirs.width]
    if list(x.shape[-2:]) != size:
        x = F.interpolate(x, size, mode="bicubic", antialias=True, align_corners=False)
    return (x - new_mean) / new_std


def find_answers(config: TeacherConfig, loader: Loader) -> dict[str, NDArray[Any]]:
    """The answers from the cache, or computed again."""
    if config.weights.startswith(CALLABLE):
        return read_stored_answers(config)
    teacher = load_teacher(config.weights, loader.source, config.features > 0)
    return compute_answers(teacher, loader, answers_key(teacher, loader.source))


def read_stored_answers(config: TeacherConfig) -> dict[str, NDArray[Any]]:
    """The cached answers of a teacher that was given in Python."""
    found = read_feature_cache(answers_path(config.weights.removeprefix(CALLABLE)))
    if found is None:
        raise UserError(
            "the predictions of the teacher, given in Python, are not in the cache folder; start a "
            "new run in Python with `teacher`"
        )
    return found


def check_stored_answers(config: TeacherConfig, source: Source) -> None:
    """Raises unless the answers of a teacher that was given in Python are for these images."""
    images = read_stored_answers(config).get("images")
    if images is None or images.tobytes() != hash_images(source):
        raise UserError(
            "the teacher of the recipe was given in Python and has predicted other images; "
            "give it in Python as `teacher`"
        )


def hash_images(source: Source) -> bytes:
    """A checksum of the training and validation images, where they are, and the classes."""
    checksum = hashlib.sha256(json.dumps(list(source.classes)).encode())
    for split in ("train", "val"):
        items = split_indices(source, split)
        checksum.update(items.astype("<i8").tobytes())
        checksum.update(hash_items(source, items, progress=False).tobytes())
    return checksum.digest()


def answers_path(key: str) -> Path:
    return cache_folder() / "teachers" / f"{key}.features"


def answers_key(teacher: Teacher, source: Source) -> str:
    """A checksum of the weights, or of the answers to the first images, and of all images."""
    settings = {
        "version": CACHE_VERSION,
        "preprocess": teacher.settings.to_dict(),
        "classes": list(teacher.classes or ()),
    }
    checksum = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    network = getattr(teacher.model, "backbone", teacher.model)
    if isinstance(network, ViT):
        checksum.update(hash_weights(network).encode())
        if teacher.classes:
            for name, tensor in sorted(network.state_dict().items()):
                if name.startswith("head"):
                    checksum.update(tensor.cpu().numpy().tobytes())
    else:
        loader = Loader(source, teacher.settings, TEACHER_DATA, batch=BATCH, progress=False)
        first = next(loader.evaluation("train", BATCH, limit=BATCH)).images
        checksum.update(ask(teacher, first)[0].numpy().tobytes())
    checksum.update(hash_images(source))
    return checksum.hexdigest()


def teacher_loader(teacher: Teacher, loader: Loader) -> Loader:
    """The images as the teacher expects them, on the device that it is moved to.

    A callable that was given in Python gets them on the CPU.
    """
    device = torch.device("cpu")
    if isinstance(teacher, LoadedTeacher) and isinstance(teacher.model, nn.Module):
        device = loader.device
        teacher.model.to(device)
    return Loader(
        loader.source,
        teacher.settings,
        TEACHER_DATA,
        batch=BATCH,
        device=device,
        progress=loader.progress,
    )


def compute_answers(teacher: Teacher, student: Loader, key: str) -> dict[str, NDArray[Any]]:
    """Answers to each training image and its mirror image, and to the validation images."""
    if (stored := read_feature_cache(answers_path(key))) is not None:
        return stored
    source, loader = student.source, teacher_loader(teacher, student)
    loader.prepare("train", "val", training=False)
    rows: list[Tensor] = []
    items: list[NDArray[np.int64]] = []
    count = len(loader.rank_items("train"))
    with progress_bar("predictions of the teacher", count, show=loader.progress) as advance:
        for batch in loader.evaluation("train", BATCH):
            views = [ask(teacher, x)[0].cpu() for x in (batch.images, batch.images.flip(-1))]
            rows.append(order_classes(torch.stack(views, dim=1), teacher, source))
            items.append(batch.items)
            advance(len(batch.items))
    found: dict[str, NDArray[Any]] = {
        "answers": compact(torch.cat(rows)).numpy(),
        "items": np.concatenate(items),
        "images": np.frombuffer(hash_images(source), np.uint8),
        **answer_validation(teacher, loader),
    }
    write_feature_cache(answers_path(key), found)
    return found


def compact(answers: Tensor) -> Tensor:
    """As float16, unless that rounds too much: large answers may differ by little, or overflow."""
    half = answers.half()
    change = (half.float() - answers).abs().amax()
    return half if change <= ROUNDING * answers.std() else answers


def answer_validation(
    teacher: Teacher, loader: Loader, limit: int | None = None
) -> dict[str, NDArray[Any]]:
    """Answers to the validation images, up to a limit, and the regions that they compare."""
    batches = [
        (batch.items, *ask(teacher, batch.images))
        for batch in loader.evaluation("val", BATCH, limit)
    ]
    if not batches:  # without validation images, the width of the answers alone
        answers, regions = ask(teacher, next(loader.evaluation("train", 1, limit=1)).images)
        batches = [(np.zeros(0, np.int64), answers[:0], regions)]
    items, rows, counts = zip(*batches, strict=True)
    return {
        "val": order_classes(torch.cat(rows), teacher, loader.source).cpu().numpy(),
        "val_items": np.concatenate(items),
        "regions": np.array(counts[0]),
    }


def order_classes(answers: Tensor, teacher: Teacher, source: Source) -> Tensor:
    """Logits in the order of the classes of the data; features as they are."""
    if teacher.classes is None:
        return answers
    names = list(teacher.classes)
    return answers[..., [names.index(name) for name in source.classes]]


@torch.inference_mode()
def ask(teacher: Teacher, images: Tensor) -> tuple[Tensor, int]:
    """What the teacher says to a batch, checked, and the regions per side that it compares.

    Logits; or features and behind them, with a feature map, the similarities of its regions.
    """
    mode: AbstractContextManager[None] = nullcontext()
    if isinstance(teacher.model, nn.Module):
        mode = eval_mode(teacher.model)
    with mode:
        answers, maps = teacher.model(images), None
    if isinstance(answers, tuple) and len(answers) == 2 and teacher.classes is None:
        answers, maps = answers
    wanted = len(teacher.classes) if teacher.classes is not None else None
    if (
        not isinstance(answers, Tensor)
        or answers.ndim != 2
        or len(answers) != len(images)
        or wanted not in (None, answers.shape[1])
    ):
        came = tuple(answers.shape) if isinstance(answers, Tensor) else type(answers).__name__
        raise UserError(
            f"the teacher returned {came} for {len(images)} images; it must return a tensor of "
            f"logits for its {wanted} classes"
            if wanted
            else f"the teacher returned {came} for {len(images)} images; it must return features, "
            f"one row for each image"
        )
    answers = answers.float()
    if maps is not None:
        answers = torch.cat([answers, compare_regions(maps, len(images))], dim=1)
    if not answers.isfinite().all():
        raise UserError("the teacher returned NaN or infinity; use another one")
    return answers, 0 if maps is None else REGIONS


def compare_regions(maps: Any, images: int) -> Tensor:
    """The similarities of the regions in feature maps (B, D, rows, columns), one row each."""
    if not isinstance(maps, Tensor) or maps.ndim != 4 or len(maps) != images:
        came = tuple(maps.shape) if isinstance(maps, Tensor) else type(maps).__name__
        raise UserError(
            f"the teacher returned {came} as feature maps of {images} images; it must return "
            f"(images, channels, rows, columns)"
        )
    grid = maps.shape[2], maps.shape[3]
    return region_similarities(maps.float().flatten(2).mT, grid, REGIONS)
