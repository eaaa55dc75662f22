"""`vitrail explain`: where a model looks, why it says what it says, and what it learned."""

import json as as_json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail.cli.flags import Vit, changes
from vitrail.cli.predict import Result, paths
from vitrail.errors import UserError
from vitrail.files import fresh_folder

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch import Tensor

    from vitrail.insight.explanation import Explanation
    from vitrail.run.classifier import Classifier

log = logging.getLogger(__name__)

PAGE = "index.html"
SAMPLE = 32  # images that tell what a model learned

Method = Literal["best", "relevance", "gradient-rollout", "rollout", "attention", "occlusion"]


def explain(
    model: Annotated[str, tyro.conf.Positional],
    images: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    out: Path | None = None,
    target: Annotated[str | None, tyro.conf.arg(name="class", metavar="NAME|INDEX")] = None,
    method: Method = "best",
    occlusion: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    layers: tuple[int, ...] | None = None,
    heads: tuple[int, ...] | None = None,
    learned: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    npz: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    device: str = "auto",
    preprocess: Literal["half", "imagenet", "clip"] | None = None,
    vit: Vit = Vit(),  # noqa: B008
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Draw where a model looks and why, or, without images, what it learned.

    For each image a folder with its overview and single pictures, and one page for all to move
    about in. Without images: positions, filters, how far and how widely heads look, tokens.

    Args:
        model: run folder, model file, or any weights that can be read
        images: files, folders (with all images below them), or - for paths on stdin, one a line
        out: folder to write to, new or empty; by default explained/<model>-1, -2, ...
        target: class to explain instead of the most likely one: why not this?
        method: large in the overview; best is the most faithful quick one on the image
        occlusion: judge occlusion too, the slow method
        layers: that are drawn, counted from 0, or from -1 down
        heads: that are drawn, counted from 0, or from -1 down
        learned: draw what the model learned too, by these images
        npz: write the arrays too
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        preprocess: mean and deviation that foreign weights expect, if their file does not say
        vit: the model at another image size, or what foreign weights do not say of themselves
        json: print one JSON line for each image
    """
    from vitrail.run.classifier import load

    refused: list[Result] = []
    files = list(paths(images, refused))
    if refused and not files:
        raise UserError(f"{refused[0][0]}: {refused[0][1]}")
    classifier = load(model, device=device, preprocess=preprocess, vit=changes(vit))
    wishes: dict[str, Any] = {"target": None if target is None else classifier.index(target)}
    wishes |= {"method": method, "occlusion": occlusion, "layers": layers, "heads": heads}
    folder = fresh_folder(out, usual_folder(model))
    lines = []
    if files:
        lines += explain_all(classifier, files, folder, wishes, npz)
        lines += [{"path": path, "error": str(error)} for path, error in refused]
    if learned or not files:
        lines.append({"model": model, "files": draw_learned(classifier, files, folder, npz)})
    for line in lines:
        tell(line, json)
    if any("error" in line for line in lines):
        sys.exit(1)


def usual_folder(model: str) -> Path:
    """Where the pictures go if nobody says; for a run, under its name."""
    path = Path(model)
    name = path.parent.name if path.stem == "model" else path.name
    return Path("explained") / plain(name or "model")


def plain(name: str) -> str:
    """A name that is safe for a folder anywhere."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._")[:80] or "image"


def explain_all(
    classifier: "Classifier", paths: Sequence[str], out: Path, wishes: dict[str, Any], npz: bool
) -> list[dict[str, Any]]:
    """A folder for each image and a page for all; one line for each image, errors among them."""
    from vitrail import files
    from vitrail.display.progress import bar
    from vitrail.insight.looks import ROOM as FOR_ONE
    from vitrail.insight.page import IMAGES, ROOM, page

    room = min(FOR_ONE, ROOM // min(len(paths), IMAGES))
    shown: list[Explanation] = []
    lines: list[dict[str, Any]] = []
    names: set[str] = set()
    with bar("explaining", len(paths)) as advance:
        for path in paths:
            read = classifier.attempt(path)
            if isinstance(read, UserError):
                lines.append({"path": path, "error": str(read)})
            else:
                one = classifier.explain(path, room=room, **wishes)
                written = write(one, out / unused(plain(Path(path).stem), names), wishes, npz)
                label, probability = one.top[0]
                lines.append({"path": path, "label": label, "probability": probability})
                lines[-1]["files"] = list(map(str, written))
                if len(shown) < IMAGES:
                    shown.append(one)
            advance(1)
    if shown:
        files.write(out / PAGE, page(shown))
        if sum("files" in line for line in lines) > len(shown):
            log.info(f"{out / PAGE} shows the first {len(shown)} images")
    for line in [line for line in lines if "files" in line][: len(shown)]:
        line["files"].append(str(out / PAGE))
    return lines


def unused(name: str, names: set[str]) -> str:
    """The name, with a number where two images share it."""
    number, free = 1, name
    while free.casefold() in names:
        number += 1
        free = f"{name}-{number}"
    names.add(free.casefold())
    return free


def write(one: "Explanation", folder: Path, wishes: dict[str, Any], npz: bool) -> list[Path]:
    """The pictures of one image: all of them or none."""
    from vitrail import files
    from vitrail.insight.draw import png

    written = {"overview.png": one.overview}
    written |= {f"{name}.png": png(figure) for name, figure in singles(one, wishes["layers"])}
    if npz:
        written["arrays.npz"] = one.npz()
    try:
        with files.replacing(folder) as temporary:
            temporary.mkdir()
            for name, content in written.items():
                (temporary / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another --out") from error
    return [folder / name for name in written]


def singles(one: "Explanation", layers: Sequence[int] | None) -> Iterator[tuple[str, "Figure"]]:
    from vitrail.insight.draw import heads, overlay

    for method in one.heats:
        yield method, overlay(one, method)
    yield "heads", heads(one, one.layers)
    if layers is not None and len(one.layers) > 1:
        for layer in one.layers:
            yield f"layer-{layer}", heads(one, [layer])


def draw_learned(classifier: "Classifier", paths: Sequence[str], out: Path, npz: bool) -> list[str]:
    """What the model learned, by these images or by those that it was validated on."""
    from vitrail import files
    from vitrail.insight.draw import png
    from vitrail.insight.explanation import packed
    from vitrail.insight.gallery import gallery

    x, pixels = sample(classifier, paths)
    arrays, written = {}, []
    for picture in gallery(classifier.model, x, pixels, log.info):
        files.write(out / f"{picture.name}.png", png(picture.figure))
        arrays[picture.name] = picture.array
        written.append(str(out / f"{picture.name}.png"))
    if npz:
        files.write(out / "learned.npz", packed(arrays))
        written.append(str(out / "learned.npz"))
    return written


def sample(
    classifier: "Classifier", paths: Sequence[str]
) -> tuple["Tensor | None", list["NDArray[np.uint8]"]]:
    """Some images as the model takes them, and as people see them."""
    import torch

    from vitrail.data.image import load_image
    from vitrail.data.preprocess import fit, preprocess

    view, x, pixels = classifier.view, [], []
    for content in paths or own(classifier):
        try:
            image = load_image(content, view.channels)
        except UserError:  # was told when it was to be explained
            continue
        x.append(preprocess(view, image))
        pixels.append(fit(view, image))
        if len(x) == SAMPLE:
            break
    return (torch.stack(x).to(classifier.device) if x else None), pixels


def own(classifier: "Classifier") -> Iterator[Any]:
    """Images that the run was validated on, where they still are."""
    from vitrail.data.source import indices
    from vitrail.display.page import evenly
    from vitrail.run.scores import open_for

    data = classifier.facts.get("data", {}).get("source")
    if not data:
        return
    try:
        source, _ = open_for(classifier, data, "val")
    except UserError as error:
        log.info(f"the data of this run cannot be read: {error}")
        return
    for item in evenly(indices(source, "val"), SAMPLE):
        yield source[item].content


def tell(line: dict[str, Any], json: bool) -> None:
    """One line of JSON, or the same in words."""
    from vitrail.display.text import printable

    if json:
        print(as_json.dumps(line), flush=True)
    elif "error" in line:
        print(printable(f"error: {line['path']}: {line['error']}"), file=sys.stderr)
    elif "path" in line:
        folder = Path(line["files"][0]).parent
        told = f"{line['path']}  {line['label']} {line['probability']:.1%}  {folder}"
        print(printable(told))
    else:
        for name in line["files"]:
            print(name)
