"""`vitrail models`: every named architecture with its size and cost; published weights."""

import json as as_json

from vitrail.model.config import ViTConfig
from vitrail.model.cost import macs, parameters
from vitrail.zoo.presets import PRESETS, preset
from vitrail.zoo.weights import PUBLISHED, Published


def models(weights: bool = False, json: bool = False) -> None:
    """List the named models with parameters, multiply-adds and tokens.

    Args:
        weights: list published weights instead: where they are, what they want, how good they are
        json: print one JSON document instead of a table
    """
    rows = [of(one) for one in PUBLISHED] if weights else [row(n, preset(n)) for n in PRESETS]
    if json:
        print(as_json.dumps(rows, indent=1))
    elif weights:
        show_weights(rows)
    else:
        show(rows)


def of(one: Published) -> dict[str, object]:
    """What the table of weights says, as JSON has it."""
    config = one.vit
    return {
        "name": one.name,
        "hub": one.hub or None,
        "files": list(one.files),
        "architecture": one.preset,
        "changes": one.changes,
        "image": config.image,
        "parameters": parameters(config),
        "preprocess": one.means,
        "crop": one.crop,
        "interpolation": one.interpolation,
        "accuracy": one.accuracy,
        "source": one.source or None,
        "licence": one.licence,
    }


def show_weights(rows: list[dict[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("name", "parameters", "image", "mean, std", "ImageNet", "licence", "where"):
        right = column in ("parameters", "image", "ImageNet")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for entry in rows:
        accuracy = entry["accuracy"]
        table.add_row(
            str(entry["name"]),
            f"{entry['parameters']:,}",
            str(entry["image"]),
            str(entry["preprocess"]),
            f"{accuracy:.1%}" if isinstance(accuracy, float) else "-",
            str(entry["licence"]),
            f"hf:{entry['hub']}" if entry["hub"] else str(entry["files"])[2:-2],
        )
    console = Console()
    console.width = max(console.width, 160)  # names are read or copied whole, or not at all
    console.print(table)


def row(name: str, config: ViTConfig) -> dict[str, object]:
    return {
        "name": name,
        "parameters": parameters(config),
        "gmacs": round(macs(config) / 1e9, 4),
        "tokens": config.tokens,
        "image": config.image,
        "patch": config.patch,
    }


def show(rows: list[dict[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("name", no_wrap=True)
    for column in ("parameters", "GMACs", "tokens", "image", "patch"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in rows:
        table.add_row(*(cell(key, value) for key, value in entry.items()))
    Console().print(table)


def cell(key: str, value: object) -> str:
    if key == "parameters":
        return f"{value:,}"
    if key == "gmacs" and isinstance(value, float):
        return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
    return str(value)
