"""`vitrail convert`: writes weights in the format of another library."""

import json as as_json
import sys
from dataclasses import asdict
from typing import Annotated, Any, Literal

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
from vitrail.errors import UserError


def convert(
    file: Annotated[str, tyro.conf.Positional, unset(metavar="FILE")],
    *,
    to: Annotated[Literal["timm", "huggingface", "torchvision", "vitrail"] | None, unset()] = None,
    out: Annotated[str | None, unset(metavar="PATH")] = None,
    check: Annotated[Literal["timm", "transformers"] | None, unset()] = None,
    preprocess: Normalisation = None,
    json: Switch = False,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Convert weights to the format of another library, or compare them with it.

    Reports which tensors were loaded, resized, adapted and left out, and what had to be assumed
    because the file does not say it.

    Args:
        file: weight file, folder or run, or hf:owner/name
        to: target format
        out: new folder with weights and config, or a file ending in .safetensors or .pth
        check: compare outputs with this library, if it is installed, on a seeded batch
        json: print one JSON document
    """
    if check is not None:
        found = check_weights(file, check, given_settings(vit), preprocess)
        print(as_json.dumps(found) if json else describe_check(file, found))
        if to is None and out is None:
            return
    if to is None or out is None:
        raise UserError("give `to` and `out`, or `check`")
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


def check_weights(
    file: str, peer: Any, vit: dict[str, Any], preprocess: Normalisation
) -> dict[str, Any]:
    """What `--check --json` prints."""
    from vitrail.zoo.peer import check_with_peer

    return asdict(check_with_peer(file, peer, vit=vit, preprocess=preprocess))


def describe_check(file: str, found: dict[str, Any]) -> str:
    return (
        f"{file}: {found['output']} of {found['images']} images differ from {found['peer']} "
        f"{found['version']} by at most {found['largest_difference']:.2g} "
        f"(largest value {found['largest_output']:.3g})"
    )
