"""`vitrail explain`: draws where a model attends and which patches decide its prediction."""

import json as as_json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    Device,
    LoadedVit,
    Model,
    Normalisation,
    OptionalImages,
    OptionalPath,
    Raw,
    Switch,
    given_settings,
    unset,
)
from vitrail.cli.predict import Result, find_images
from vitrail.errors import UserError
from vitrail.insight.methods import BEST, CLASS_AGNOSTIC, METHODS

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch import Tensor

    from vitrail.inference.backbone import Backbone
    from vitrail.inference.classifier import Classifier
    from vitrail.insight.backbone import BackboneExplanation
    from vitrail.insight.explanation import Explanation

    Method: TypeAlias = str
else:
    Method = Literal[(BEST, *METHODS)]

log = logging.getLogger(__name__)

PAGE = "index.html"
SAMPLE_SIZE = 32  # images that attention distances and token norms are averaged over
MAX_LABELS = 5  # of a multi-label prediction that are explained
NAME_LENGTH = 80  # characters of a folder's name

Numbers: TypeAlias = Annotated[tuple[int, ...] | None, unset(metavar="INT [INT ...]")]


def explain(
    model: Model,
    images: OptionalImages = (),
    *,
    out: OptionalPath = None,
    target: Annotated[str | None, unset(name="class", metavar="NAME|INDEX")] = None,
    method: Method = BEST,
    occlusion: Switch = False,
    layers: Numbers = None,
    heads: Numbers = None,
    patch: Numbers = None,
    raw: Raw = False,
    learned: Switch = False,
    npz: Switch = False,
    device: Device = "auto",
    preprocess: Normalisation = None,
    json: Switch = False,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Explain predictions with attention and relevance maps.

    Writes a folder of figures for each image and one interactive page for all. Without images,
    draws what the model learned: position embeddings, patch filters, attention distances, tokens.

    Args:
        out: new or empty folder to write to (default: explained/MODEL-1, explained/MODEL-2, ...)
        target: class to explain instead of the predicted one
        method: method of the main map; best is the most faithful fast one for the image
        occlusion: also compute occlusion, which is slow
        layers: layers to draw, counted from 0, or from the end as -1, -2 (default: a selection)
        heads: attention heads to draw, counted likewise (default: all)
        patch: row and column of the patch that others are compared with, if the model has no head
        learned: also draw what the model learned, measured on the given images
        npz: also write the arrays as .npz
        json: print one JSON line per image
    """
    from vitrail.files import create_output_folder

    unreadable: list[Result] = []
    paths = list(find_images(images, unreadable))
    if unreadable and not paths:
        raise UserError(f"{unreadable[0][0]}: {unreadable[0][1]}")
    settings: dict[str, Any] = {"device": device, "preprocess": preprocess}
    classifier = load_any(model, {**settings, "vit": given_settings(vit)})
    _ = classifier.model  # an exported file has none: say so before a folder is created
    options: dict[str, Any] = {"layers": layers, "heads": heads}
    if isinstance(classifier, vitrail.Backbone):
        if target is not None or occlusion or method not in ("best", *CLASS_AGNOSTIC):
            raise UserError(f"{model} has no head, so no class can be explained; omit `target`")
        options["patch"] = chosen_patch(patch)
    elif patch is not None:
        raise UserError("`patch` is for models without a head; omit it")
    else:
        options["target"] = None if target is None else classifier.index(target)
        options |= {"method": method, "occlusion": occlusion, "raw": raw}
    folder = create_output_folder(out, default_folder(model))
    lines = []
    if paths:
        lines += explain_images(classifier, paths, folder, options, npz)
        lines += [{"path": path, "error": str(error)} for path, error in unreadable]
    if learned or not paths:
        lines.append({"model": model, "files": draw_learned(classifier, paths, folder, npz)})
    for line in lines:
        print_line(line, json)
    if (page := folder / "index.html").is_file() and not json:
        print(f"page {page}")
    if any("error" in line for line in lines):
        sys.exit(1)


def load_any(model: str, settings: dict[str, Any]) -> "Classifier | Backbone":
    """A classifier, or a backbone if the weights have no head."""
    from vitrail.inference.classifier import NoHead

    try:
        return vitrail.load(model, **settings)
    except NoHead:
        return vitrail.load_backbone(model, **settings)


def chosen_patch(patch: Sequence[int] | None) -> tuple[int, int] | None:
    if patch is None:
        return None
    if len(patch) != 2:
        raise UserError(f"`patch` is {list(patch)}; give its row and its column, such as 3 5")
    return patch[0], patch[1]


def default_folder(model: str) -> Path:
    """The folder for the figures of a model, named after its run or file."""
    path = Path(model)
    name = path.parent.name if path.stem == "model" else path.name
    return Path("explained") / safe_name(name or "model")


def safe_name(name: str) -> str:
    """A name that is a valid folder name on every system."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._")[:NAME_LENGTH] or "image"


def explain_each(
    classifier: "Classifier | Backbone", path: str, options: dict[str, Any]
) -> "Iterator[tuple[Explanation | BackboneExplanation, dict[str, Any]]]":
    """The explanations of one image, each with what its JSON line says of the prediction.

    A multi-label model explains every predicted label, up to MAX_LABELS.
    """
    if isinstance(classifier, vitrail.Backbone):
        yield classifier.explain(path, **options), {}
        return
    targets: list[int | None] = [options["target"]]
    if options["target"] is None and classifier.predictor.multi_label is not None:
        labels = classifier.predict(path).labels or ()
        targets = [one.index for one in labels[:MAX_LABELS]] or [None]
    for target in targets:
        found = classifier.explain(path, **{**options, "target": target})
        label, probability = found.top[0]
        if target is not None and classifier.predictor.multi_label is not None:
            label, probability = found.target, found.probability
        yield found, {"label": label, "probability": probability}


def explain_images(
    classifier: "Classifier | Backbone",
    paths: Sequence[str],
    out: Path,
    options: dict[str, Any],
    npz: bool,
) -> list[dict[str, Any]]:
    """Writes a folder for each image and a page for all; returns one JSON line per explanation."""
    from vitrail import files
    from vitrail.display.progress import progress_bar
    from vitrail.inference.torch_predictor import load_input
    from vitrail.insight.page import MAX_BYTES_PER_PAGE, MAX_IMAGES, render_page
    from vitrail.insight.patch_attention import MAX_BYTES

    max_bytes = min(MAX_BYTES, MAX_BYTES_PER_PAGE // min(len(paths), MAX_IMAGES))
    on_page: list[Explanation | BackboneExplanation] = []
    lines: list[dict[str, Any]] = []
    names: set[str] = set()
    with progress_bar("explaining", len(paths)) as advance:
        for path in paths:
            try:
                load_input(path, classifier.preprocess)
            except UserError as error:
                lines.append({"path": path, "error": str(error)})
                advance(1)
                continue
            for found, prediction in explain_each(
                classifier, path, {**options, "max_bytes": max_bytes}
            ):
                folder = out / unused_name(safe_name(Path(path).stem), names)
                written = write_figures(found, folder, options["layers"], npz)
                lines.append({"path": path, **prediction, "files": list(map(str, written))})
                if len(on_page) < MAX_IMAGES:
                    on_page.append(found)
            advance(1)
    if on_page:
        page = render_page(on_page, [one.overview for one in on_page], "Explanations")
        files.write_file(out / PAGE, page)
        if sum("files" in line for line in lines) > len(on_page):
            log.info(f"{out / PAGE} shows the first {len(on_page)} images")
    for line in [line for line in lines if "files" in line][: len(on_page)]:
        line["files"].append(str(out / PAGE))
    return lines


def unused_name(name: str, names: set[str]) -> str:
    """The name, with a number appended if another image has it already."""
    number, unused = 1, name
    while unused.casefold() in names:
        number += 1
        unused = f"{name}-{number}"
    names.add(unused.casefold())
    return unused


def write_figures(
    explanation: "Explanation | BackboneExplanation",
    folder: Path,
    layers: Sequence[int] | None,
    npz: bool,
) -> list[Path]:
    """Writes all figures of one image, or none of them."""
    from vitrail import files
    from vitrail.insight.canvas import render_png

    contents = {"overview.png": explanation.overview}
    contents |= {
        f"{name}.png": render_png(figure) for name, figure in draw_maps(explanation, layers)
    }
    if npz:
        contents["arrays.npz"] = explanation.npz()
    try:
        with files.atomic_write(folder) as temporary:
            temporary.mkdir()
            for name, content in contents.items():
                (temporary / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another `out`") from error
    return [folder / name for name in contents]


def draw_maps(
    explanation: "Explanation | BackboneExplanation", layers: Sequence[int] | None
) -> Iterator[tuple[str, "Figure"]]:
    """One figure for each method, one for all attention heads, one for each layer in `layers`."""
    from vitrail.insight.overview import draw_heads, draw_overlay

    for method in explanation.heatmaps:
        yield method, draw_overlay(explanation, method)
    yield "heads", draw_heads(explanation, explanation.layers)
    if layers is not None and len(explanation.layers) > 1:
        for layer in explanation.layers:
            yield f"layer-{layer}", draw_heads(explanation, [layer])


def draw_learned(
    classifier: "Classifier | Backbone", paths: Sequence[str], out: Path, npz: bool
) -> list[str]:
    """Draws what the model learned, measured on these images or on its validation images."""
    from vitrail import files
    from vitrail.insight.arrays import pack_npz
    from vitrail.insight.canvas import render_png
    from vitrail.insight.gallery import draw_gallery

    x, pixels = load_sample(classifier, paths)
    arrays, written = {}, []
    for picture in draw_gallery(classifier.model, x, pixels, log.info):
        files.write_file(out / f"{picture.name}.png", render_png(picture.figure))
        arrays[picture.name] = picture.array
        written.append(str(out / f"{picture.name}.png"))
    if npz:
        files.write_file(out / "learned.npz", pack_npz(arrays))
        written.append(str(out / "learned.npz"))
    return written


def load_sample(
    classifier: "Classifier | Backbone", paths: Sequence[str]
) -> tuple["Tensor | None", list["NDArray[np.uint8]"]]:
    """Some images as the model receives them, and as pixels to draw."""
    import torch

    from vitrail.data.image import load_image
    from vitrail.data.preprocess import preprocess, resize_and_crop
    from vitrail.display.page import stretch_to_uint8

    settings, x, pixels = classifier.preprocess, [], []
    for content in paths or validation_images(classifier):
        try:
            image = load_image(content, settings.channels, settings.pixels)
        except UserError:  # `explain_images` reports it
            continue
        x.append(preprocess(settings, image))
        pixels.append(stretch_to_uint8(resize_and_crop(settings, image)))
        if len(x) == SAMPLE_SIZE:
            break
    return (torch.stack(x).to(classifier.device) if x else None), pixels


def validation_images(classifier: "Classifier | Backbone") -> Iterator[Any]:
    """Validation images of the run that trained the model, if they are still there."""
    from vitrail.data.source import split_indices
    from vitrail.display.page import pick_evenly
    from vitrail.inference.labelled_data import open_evaluation_data

    data = classifier.metadata.data.source
    if not data or isinstance(classifier, vitrail.Backbone):
        return
    try:
        source, _ = open_evaluation_data(classifier.predictor, data, "val")
    except UserError as error:
        log.info(f"cannot read the training data of this model: {error}")
        return
    for item in pick_evenly(split_indices(source, "val"), SAMPLE_SIZE):
        yield source[item].content


def print_line(line: dict[str, Any], json: bool) -> None:
    """The result for one image, as JSON or as text."""
    from vitrail.display.text import printable

    if json:
        print(as_json.dumps(line), flush=True)
    elif "error" in line:
        print(printable(f"error: {line['path']}: {line['error']}"), file=sys.stderr)
    elif "path" in line:
        folder = Path(line["files"][0]).parent
        label = f"{line['label']} {line['probability']:.1%}  " if "label" in line else ""
        print(printable(f"{line['path']}  {label}{folder}"))
    else:
        for name in line["files"]:
            print(name)
