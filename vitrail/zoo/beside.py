"""What the files beside the weights say: timm's and Hugging Face's config.json."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.data.config import Preprocess
from vitrail.errors import UserError

LONGEST = 16 << 20  # bytes of JSON; 21,843 class names take 2 MB

# timm's plain ViTs. Others share names of parameters, and compute something else: rope, rpn, xp.
PLAIN = re.compile(
    r"(vit|deit3?|flexivit)_[a-z]+\d*m?2?(_plus)?(_distilled)?(_patch\d+|_r\d+_s\d+)?"
    r"(_plus|_reg\d+|_gap|_map|_clip|_siglip|_dinov[23]|_qkvb)*(_\d+)?(_in21k|_miil)*"
)
# Where timm's models differ in what no tensor shows; the last line that fits counts.
DIFFERENT: dict[str, dict[str, Any]] = {
    r".*_clip_.*": {"eps": 1e-5},
    r".*_dinov3.*": {"eps": 1e-5, "positions": "rotary", "pool": "avg"},
    r"vit_huge_plus_patch16_dinov3.*": {"heads": 20},
    r"vit_base_patch16_gap_224": {"heads": 16},
    r"vit_giantopt_.*": {"heads": 16, "mlp": "gelu_tanh"},
    r"vit_(base_patch32|so400m_patch16|large_patch16)_siglip.*": {"mlp": "gelu_tanh"},
    r"vit_large_patch16_siglip(_gap)?_(256|384)": {"mlp": "gelu"},
}
POOLS = {"token": "cls", "cls": "cls", "avg": "avg", "map": "map"}  # timm's words and ours
MLPS = {  # everybody's words and ours
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "swiglu",
}
# Arguments of timm's models that tensors show, or that matter in training only.
SHOWN = {
    "num_classes", "in_chans", "patch_size", "embed_dim", "depth", "mlp_ratio", "qkv_bias",
    "qk_norm", "init_values", "class_token", "reg_tokens", "no_embed_class", "pre_norm", "fc_norm",
    "pos_embed", "dynamic_img_size", "drop_rate", "pos_drop_rate", "patch_drop_rate",
    "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "weight_init", "fix_init",
    "num_reg_tokens", "use_fc_norm",
}  # fmt: skip
FAMILIES = ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn")
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # as Pillow counts


@dataclass(frozen=True, kw_only=True)
class Beside:
    vit: dict[str, Any] = field(default_factory=dict)  # settings that tensors do not show
    classes: tuple[str, ...] | None = None
    view: dict[str, Any] | None = None  # of Preprocess; its size may be missing
    names: tuple[str, ...] = ()  # that the table of published weights may know
    told: tuple[str, ...] = ()


def look_beside(folder: Path) -> Beside:
    """What is known of the weights in this folder: nothing, where no known config lies."""
    config = read_json(folder / "config.json")
    try:
        if "architecture" in config:
            return timm(config)
        if "model_type" in config:
            return hugging_face(config, read_json(folder / "preprocessor_config.json"))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / 'config.json'} is odd: {error!r}; mend or remove it") from error
    return Beside()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file."""
    try:
        if path.stat().st_size > LONGEST:
            raise UserError(f"{path} is longer than {LONGEST:,} bytes; that is no config")
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read: {error}; mend or remove it") from error
    if not isinstance(read, dict):
        raise UserError(f"{path} holds no object; mend or remove it")
    return read


def timm(config: Mapping[str, Any]) -> Beside:
    """Newer files nest the settings of pretraining, older ones are flat."""
    name = str(config["architecture"])
    inner = config.get("pretrained_cfg", config)
    arguments = dict(config.get("model_args") or {})
    if not PLAIN.fullmatch(name) or "quickgelu" in name:
        raise UserError(f"timm's {name} is no plain ViT and cannot be loaded; choose another model")
    vit: dict[str, Any] = {}
    for pattern, difference in DIFFERENT.items():
        if re.fullmatch(pattern, name):
            vit |= difference
    if inner.get("input_size"):
        vit["image"] = pair(inner["input_size"][-2:])
    if pool := config.get("global_pool") or inner.get("global_pool"):
        vit["pool"] = pool
    vit |= timm_arguments(name, arguments)
    if "pool" in vit:
        vit["pool"] = known("global_pool", vit["pool"], POOLS)
    tag = inner.get("tag")
    labels = config.get("label_names") or inner.get("label_names") or inner.get("labels")
    told: list[str] = []
    return Beside(
        vit=vit,
        classes=class_names(labels, told),
        view=timm_view(inner, told) if inner.get("mean") else None,
        names=(f"{name}.{tag}",) if tag else (name,),
        told=tuple(told),
    )


def timm_arguments(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    vit: dict[str, Any] = {}
    if "img_size" in arguments:
        vit["image"] = pair(arguments["img_size"])
    if "num_heads" in arguments:
        vit["heads"] = arguments["num_heads"]
    if "act_layer" in arguments:
        vit["mlp"] = known("act_layer", arguments["act_layer"], MLPS)
    if "global_pool" in arguments:
        vit["pool"] = arguments["global_pool"]
    if arguments.get("pos_embed") in ("", "none"):
        vit["positions"] = "none"
    strange = arguments.keys() - SHOWN - {"img_size", "num_heads", "act_layer", "global_pool"}
    if strange:
        raise UserError(f"timm's {name} was built with {sorted(strange)}, which is not known here")
    return vit


def timm_view(inner: Mapping[str, Any], told: list[str]) -> dict[str, Any]:
    if inner.get("crop_mode", "center") != "center":
        told.append(f"crop mode {inner['crop_mode']}: here the centre is cut out")
    return {
        "crop": float(inner.get("crop_pct") or 1.0),
        "interpolation": smoothing(inner.get("interpolation", "bicubic"), told),
        "mean": numbers(inner["mean"]),
        "std": numbers(inner["std"]),
    }


def hugging_face(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Beside:
    family = config["model_type"]
    if family not in FAMILIES:
        raise UserError(
            f"Hugging Face's {family} cannot be loaded; known are {', '.join(FAMILIES)}"
        )
    if config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"a pooler with {config['pooler_act']} is not known here, only tanh")
    vit = {
        "image": pair(config.get("image_size", 224)),
        "width": config.get("hidden_size", 768),
        "depth": config.get("num_hidden_layers", 12),
        "heads": config.get("num_attention_heads", 12),
        "mlp": known("hidden_act", config.get("hidden_act", "gelu"), MLPS),
        "eps": float(config.get("layer_norm_eps", 1e-6 if family.startswith("dinov2") else 1e-12)),
        "layer_scale": float(config.get("layerscale_value", 1.0)),
    }
    labels = config.get("id2label") or {}
    if all(re.fullmatch(r"LABEL_\d+", str(label)) for label in labels.values()):
        labels = {}  # written where nobody gave names
    told: list[str] = []
    return Beside(
        vit=vit,
        classes=class_names(labels, told),
        view=hugging_face_view(processor, told) if processor else None,
        names=(str(config.get("_name_or_path", "")),),
        told=tuple(told),
    )


def hugging_face_view(processor: Mapping[str, Any], told: list[str]) -> dict[str, Any]:
    """Its processors resize to a size and may cut a smaller one out; ours always cuts."""
    factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    if abs(factor * 255 - 1) > 1e-6:
        raise UserError(f"preprocessor_config.json scales pixels by {factor}; give 1/255")
    view: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "crop": 1.0}
    if processor.get("do_normalize", True):
        view["mean"] = numbers(processor.get("image_mean", (0.5, 0.5, 0.5)))
        view["std"] = numbers(processor.get("image_std", (0.5, 0.5, 0.5)))
    size, squeezed = side(processor.get("size", 224))
    if processor.get("do_center_crop", "crop_size" in processor):
        view["crop"] = share(side(processor.get("crop_size", size))[0], size)
    if squeezed and processor.get("do_resize", True):
        told.append(
            "resizing: Hugging Face squeezes a picture into a square, here its centre is cut out"
        )
    resample = RESAMPLING.get(processor.get("resample", 2), str(processor.get("resample")))
    return {**view, "interpolation": smoothing(resample, told)}


def side(size: Any) -> tuple[int, bool]:
    """The shortest side in pixels, and whether the other one is forced to a size of its own."""
    if isinstance(size, int):
        return size, True
    if "shortest_edge" in size:
        return int(size["shortest_edge"]), False
    return min(int(size["height"]), int(size["width"])), True


def share(inner: int, outer: int) -> float:
    """A crop that, divided into `inner` and rounded down, gives `outer` again."""
    crop = min(1.0, inner / outer)
    while math.floor(inner / crop) < outer:
        crop = math.nextafter(crop, 0)
    return crop


def smoothing(name: str, told: list[str]) -> str:
    if name in ("bilinear", "bicubic"):
        return name
    told.append(f"interpolation {name}: here bicubic")
    return "bicubic"


def class_names(labels: Any, told: list[str]) -> tuple[str, ...] | None:
    """In the order of the head; a name that occurs again gets its number."""
    if not labels:
        return None
    if isinstance(labels, dict):
        order = {int(number): str(name) for number, name in labels.items()}
        if sorted(order) != list(range(len(order))):
            raise UserError("config.json leaves numbers out among its labels; name every class")
        labels = [order[number] for number in range(len(order))]
    seen: set[str] = set()
    unique: list[str] = []
    for number, name in enumerate(str(label) for label in labels):
        unique.append(f"{name} ({number})" if name in seen else name)
        seen.add(name)
    if again := [name for name, label in zip(unique, labels, strict=True) if name != str(label)]:
        told.append(f"names of classes that occur twice got their number: {', '.join(again)}")
    return tuple(unique)


def pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def numbers(those: Any) -> tuple[float, ...]:
    return tuple(float(one) for one in those)


def known(what: str, word: Any, words: Mapping[str, str]) -> str:
    if word not in words:
        raise UserError(f"{what} {word!r} is not known here; known are {', '.join(words)}")
    return words[word]


def preprocess(view: Mapping[str, Any], size: tuple[int, int], channels: int) -> Preprocess:
    """The settings for images of this size, whose channels repeat those of the weights."""
    mean, std = (spread(tuple(view[name]), channels) for name in ("mean", "std"))
    plain = size[0] if size[0] == size[1] else size
    return Preprocess(**{**view, "size": plain, "mean": mean, "std": std, "channels": channels})


def spread(those: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(those) in (1, channels):
        return those
    if channels == 1:
        return (those[0] if len(set(those)) == 1 else sum(those) / len(those),)
    return (those * channels)[:channels]
