"""`vitrail models`: every named architecture with its size and cost."""

import json as as_json

from vitrail.model.config import ViTConfig
from vitrail.model.cost import macs, parameters
from vitrail.zoo.presets import PRESETS, preset


def models(json: bool = False) -> None:
    """List the named models with parameters, multiply-adds and tokens.

    Args:
        json: print one JSON document instead of a table
    """
    rows = [row(name, preset(name)) for name in PRESETS]
    if json:
        print(as_json.dumps(rows, indent=1))
    else:
        show(rows)


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
