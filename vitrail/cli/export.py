"""`vitrail export`: writes a model for other runtimes, proved equal to PyTorch."""

import json as as_json
from typing import Annotated, Literal

import tyro

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    LoadedVit,
    Model,
    Normalisation,
    Switch,
    given_settings,
    unset,
)


def export(
    model: Model,
    folder: Annotated[str | None, tyro.conf.Positional, unset(metavar="[OUT]")] = None,
    *,
    to: Annotated[Literal["onnx", "openvino", "torch", "triton"] | None, unset()] = None,
    out: Annotated[str | None, unset(metavar="FILE")] = None,
    int8: Switch = False,
    attention: Switch = False,
    features: Switch = False,
    odd: Switch = False,
    pixels: Literal["float32", "uint8"] = "float32",
    any_size: Switch = False,
    data: Annotated[str | None, unset(metavar="DATA")] = None,
    most: Annotated[float, tyro.conf.arg(metavar="POINTS")] = 0.5,
    force: Switch = False,
    overwrite: Switch = False,
    name: Annotated[str | None, unset(metavar="NAME")] = None,
    preprocess: Normalisation = None,
    json: Switch = False,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Export a model for other runtimes.

    The same images go through PyTorch and the exported model before the file is written; above the
    tolerance nothing is written. A proof card (.proof.json, .proof.html) is written beside it.

    Args:
        folder: the same as --out
        to: format (default: what the suffix of --out says, else onnx)
        out: file to write, for triton a folder (default: the name of the model, in this folder)
        int8: quantise to 8 bits; refused if it loses more accuracy than --most
        attention: also return the attention weights of every block
        features: also return the pooled features
        odd: also return the features by which predictions flag odd images; not with --int8
        pixels: input of the model: normalised float32, or uint8 that the model normalises itself
        any_size: accept images of any size that patches tile; not for learned positions
        data: images to compare on, labelled for --int8 (default: validation images of the run)
        most: percentage points of accuracy that --int8 may lose
        force: write the int8 model even if it loses more
        overwrite: replace an existing file
        name: name of the model in a Triton repository
        json: print one JSON document
    """
    exported = vitrail.export(
        model,
        out or folder,
        to=to,
        int8=int8,
        attention=attention,
        features=features,
        odd=odd,
        pixels=pixels,
        any_size=any_size,
        data=data,
        most=most,
        force=force,
        overwrite=overwrite,
        name=name,
        preprocess=preprocess,
        vit=given_settings(vit),
    )
    if json:
        print(as_json.dumps(exported.to_dict(), indent=1))
    else:
        print_export(exported)


def print_export(exported: "vitrail.Export") -> None:
    """What was written, how it compares with PyTorch, and where the proof is."""
    from vitrail.display.text import format_bytes, format_count, format_percent, printable

    kind = "generated images" if exported.proof.generated else "images"
    print(printable(f"{exported.target}  {format_bytes(exported.bytes)}, {exported.format}"))
    proof = f"{exported.images:,} {kind}, largest difference {exported.largest_difference:.2g}"
    if exported.agreement is not None:
        proof += f", {format_percent(exported.agreement)} of the predictions agree"
    print(f"proof: {proof}")
    if exported.accuracy is not None:
        before, after = (format_percent(exported.accuracy[key]) for key in ("before", "after"))
        low, high = (100 * bound for bound in exported.accuracy["interval"])
        count = format_count(exported.images, "labelled image")
        print(f"accuracy: {before} -> {after} on {count} (change {low:+.1f} to {high:+.1f} points)")
    print(f"speed: {exported.speedup:.2f} x PyTorch for one image")
    print(printable(f"proof card: {exported.proof_page}"))
