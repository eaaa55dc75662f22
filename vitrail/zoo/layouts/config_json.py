"""Values that config.json files of several libraries have in common, checked and translated."""

import math
from collections.abc import Mapping
from typing import Any

from vitrail.errors import UserError

ACTIVATIONS = {  # the activation of the MLP by its name in timm and Hugging Face
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "swiglu",
}


def parse_size(size: Any) -> tuple[int, int]:
    """Height and width, from a pair or from one number for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def parse_floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def translate_value(setting: str, value: Any, table: Mapping[str, str]) -> str:
    """Vitrail's name for a foreign value."""
    if value not in table:
        raise UserError(f"{setting} {value!r} is not supported; supported are {', '.join(table)}")
    return table[value]


def parse_interpolation(name: str, assumed: list[str]) -> str:
    if name in ("bilinear", "bicubic"):
        return name
    assumed.append(f"interpolation {name}: not supported, bicubic is used instead")
    return "bicubic"


def parse_class_names(labels: Any, assumed: list[str]) -> tuple[str, ...] | None:
    """Names in the order of the head's outputs; a repeated name gets its class index appended."""
    if not labels:
        return None
    if isinstance(labels, dict):
        by_index = {int(index): str(name) for index, name in labels.items()}
        if sorted(by_index) != list(range(len(by_index))):
            raise UserError("config.json skips class indices among its labels; name every class")
        labels = [by_index[index] for index in range(len(by_index))]
    seen: set[str] = set()
    unique: list[str] = []
    for index, name in enumerate(str(label) for label in labels):
        unique.append(f"{name} ({index})" if name in seen else name)
        seen.add(name)
    if repeated := [name for name, label in zip(unique, labels, strict=True) if name != str(label)]:
        assumed.append(f"repeated class names got their index appended: {', '.join(repeated)}")
    return tuple(unique)


def crop_fraction(cropped: int, resized: int) -> float:
    """The crop for which floor(cropped / crop) is exactly `resized`."""
    crop = min(1.0, cropped / resized)
    while math.floor(cropped / crop) < resized:
        crop = math.nextafter(crop, 0)
    return crop
