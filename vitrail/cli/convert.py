"""`vitrail convert`: writes weights in the format of another library."""

import json as as_json
import sys
from dataclasses import asdict
from typing import Annotated, Literal

import tyro

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    LoadedVit,
    Normalisation,
    Switch,
    given_settings,
    unset,
)


def convert(
    file: Annotated[str, tyro.conf.Positional, unset(metavar="FILE")],
    *,
    to: Literal["timm", "huggingface", "torchvision", "vitrail"],
    out: Annotated[str, tyro.conf.arg(metavar="PATH")],
    preprocess: Normalisation = None,
    json: Switch = False,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Convert weights to the format of another library.

    Reports which tensors were loaded, resized, adapted and left out, and what had to be assumed
    because the file does not say it.

    Args:
        file: weight file, folder or run, or hf:owner/name
        to: target format
        out: new folder with weights and config, or a file ending in .safetensors or .pth
        json: print one JSON document
    """
    conversion = vitrail.convert(file, to, out, vit=given_settings(vit), preprocess=preprocess)
    if json:
        print(as_json.dumps(asdict(conversion)))
    else:
        print(
            f"{conversion.loaded} tensors of {file} ({conversion.format}) -> "
            f"{conversion.target} ({to})"
        )
        for kind in ("resized", "adapted", "left_out"):
            for line in getattr(conversion, kind):
                print(f"  {kind.replace('_', ' ')}: {line}")
    for line in conversion.assumed:
        print(f"  assumed: {line}", file=sys.stderr)
