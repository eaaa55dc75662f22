"""`vitrail convert`: weights from one library's layout into another's, with a report."""

import json as as_json
import sys
from dataclasses import asdict
from typing import Annotated, Literal

import tyro

Setting = tyro.conf.arg


def convert(
    file: Annotated[str, tyro.conf.Positional],
    *,
    to: Literal["timm", "huggingface", "torchvision", "vitrail"],
    out: str,
    image: Annotated[tuple[int, ...] | None, Setting(name="vit.image")] = None,
    patch: Annotated[int | None, Setting(name="vit.patch")] = None,
    channels: Annotated[int | None, Setting(name="vit.channels")] = None,
    classes: Annotated[int | None, Setting(name="vit.classes")] = None,
    depth: Annotated[int | None, Setting(name="vit.depth")] = None,
    heads: Annotated[int | None, Setting(name="vit.heads")] = None,
    mlp: Annotated[Literal["gelu", "gelu_tanh"] | None, Setting(name="vit.mlp")] = None,
    eps: Annotated[float | None, Setting(name="vit.eps")] = None,
    positions: Annotated[
        Literal["sincos", "rotary", "none"] | None, Setting(name="vit.positions")
    ] = None,
    head: Annotated[Literal["linear", "none"] | None, Setting(name="vit.head")] = None,
    preprocess: Literal["half", "imagenet", "clip"] | None = None,
    json: bool = False,
) -> None:
    """Write weights as another library's own loader reads them.

    Says what was loaded, resized, adapted and left out, and what the file could not tell.

    Args:
        file: weight file, folder, run, or hf:owner/name
        to: whose layout to write
        out: new folder with config; or a file, ending in .safetensors or .pth, without one
        image: fit to another size: one number, or height and width
        patch: fit to another patch size
        channels: fit to another number of channels
        classes: new head of zeros for so many classes
        depth: keep only the first blocks
        heads: attention heads, where the file does not tell
        mlp: kind of GELU, where the file does not tell
        eps: of the layer norms, where the file does not tell
        positions: kind of positions, where the file has none
        head: none leaves the classifier out
        preprocess: mean and deviation that the weights expect, where the file does not tell
        json: print one JSON document
    """
    from vitrail.errors import UserError
    from vitrail.zoo.convert import convert as write

    if image is not None and len(image) > 2:
        raise UserError(f"image {image} is no size; give one number, or height and width")
    asked = {
        "image": image[0] if image is not None and len(image) == 1 else image,
        "patch": patch,
        "channels": channels,
        "classes": classes,
        "depth": depth,
        "heads": heads,
        "mlp": mlp,
        "eps": eps,
        "positions": positions,
        "head": head,
    }
    vit = {name: value for name, value in asked.items() if value is not None}
    done = write(file, to, out, vit=vit, preprocess=preprocess)
    report = asdict(done.report)
    if json:
        print(as_json.dumps({"source": report.pop("source"), "target": done.target, **report}))
    else:
        print(
            f"{done.report.loaded} tensors of {file} ({done.report.format}) -> {done.target} ({to})"
        )
        for what in ("resized", "adapted", "left_out"):
            for line in report[what]:
                print(f"  {what.replace('_', ' ')}: {line}")
    for line in done.report.told:
        print(f"  not in the weights: {line}", file=sys.stderr)
