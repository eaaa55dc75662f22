"""`vitrail models`: lists architectures and published weights."""

import json as as_json
from dataclasses import asdict
from typing import TYPE_CHECKING

import vitrail
from vitrail.cli.flags import Switch

if TYPE_CHECKING:
    from vitrail.zoo.models import ModelInfo, WeightsInfo

WEIGHTS_WIDTH = 160  # columns; names are never cut off, so that they can be copied


def models(*, weights: Switch = False, json: Switch = False) -> None:
    """List architectures and published weights.

    Args:
        weights: list published weights with their source, normalisation, accuracy and licence
        json: print one JSON document
    """
    if json:
        infos = vitrail.models(weights=True) if weights else vitrail.models()
        print(as_json.dumps([asdict(info) for info in infos], indent=1))
    elif weights:
        print_weights(vitrail.models(weights=True))
    else:
        print_models(vitrail.models())


def print_weights(infos: "list[WeightsInfo]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("name", "parameters", "image", "mean, std", "ImageNet", "licence", "source"):
        right = column in ("parameters", "image", "ImageNet")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for info in infos:
        table.add_row(
            info.name,
            f"{info.parameters:,}",
            str(info.image),
            info.preprocess,
            "-" if info.accuracy is None else f"{info.accuracy:.1%}",
            info.licence,
            f"hf:{info.hub}" if info.hub else ", ".join(info.files),
        )
    console = Console()
    console.width = max(console.width, WEIGHTS_WIDTH)
    console.print(table)


def print_models(infos: "list[ModelInfo]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("name", no_wrap=True)
    for column in ("parameters", "GMACs", "tokens", "image", "patch"):
        table.add_column(column, justify="right", no_wrap=True)
    for info in infos:
        table.add_row(
            info.name,
            f"{info.parameters:,}",
            f"{info.gmacs:.1f}" if info.gmacs >= 1 else f"{info.gmacs:.2g}",
            *(str(number) for number in (info.tokens, info.image, info.patch)),
        )
    Console().print(table)
