"""`vitrail predict`: classifies images."""

import json as as_json
import os
import sys
from collections.abc import Iterator
from csv import writer
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    CalibrationData,
    Device,
    Engine,
    HeadFile,
    Images,
    LoadedVit,
    Model,
    Normalisation,
    On,
    OptionalFloat,
    OptionalInt,
    OptionalOut,
    Raw,
    Switch,
    Views,
    given_settings,
)
from vitrail.cli.output import print_result
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.inference.classifier import Classifier
    from vitrail.inference.head import FeatureClassifier
    from vitrail.inference.prediction import Prediction

Result = tuple[Any, Any]  # path; a `Prediction` or a `UserError`
TOP, TOP_JSON = 1, 5  # classes listed per image


def predict(
    model: Model,
    images: Images = (),
    *,
    top: OptionalInt = None,
    raw: Raw = False,
    views: Views = 1,
    coverage: OptionalFloat = None,
    abstain: OptionalFloat = None,
    data: CalibrationData = None,
    head: HeadFile = None,
    device: Device = "auto",
    engine: Engine = None,
    preprocess: Normalisation = None,
    out: OptionalOut = None,
    on: On = "local",
    part: OptionalInt = None,
    json: Switch = False,
    csv: Switch = False,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Predict the class of images.

    Images that cannot be read are reported and skipped; the exit code is then 1. With --out, which
    is for any number of images, their rows have an error, and the exit code is 0.

    Args:
        top: number of classes listed per image (default: 1, with --json 5)
        coverage: also list the classes that contain the true one in this fraction of cases, such
            as 0.95
        abstain: do not answer where more than this fraction of the answers would be wrong, such as
            0.01
        data: labelled images to calibrate --coverage, --abstain and odd images with, for weights of
            other libraries
        part: images per part of --out (default: 256 to 4096, from their number)
        json: print one JSON line per image; with --out one document
        csv: print a table: path, label, probability, error, answered, odd, set
    """
    if top is not None and top < 1:
        raise UserError(f"`top` is {top}; give a whole number of at least 1")
    if not images:
        raise UserError("no images were given; give files or folders, or - for paths on stdin")
    if json and csv:
        raise UserError("`json` and `csv` exclude each other; give one of them")
    if out is not None:
        check_batch_flags(images, head=head, data=data, csv=csv)
        result = vitrail.batch_predict(
            model,
            images[0],
            out=out,
            on=on,
            top=top or TOP_JSON,
            raw=raw,
            views=views,
            coverage=coverage,
            abstain=abstain,
            part=part,
            device=device,
            engine=engine,
            preprocess=preprocess,
            vit=given_settings(vit),
        )
        print_result(result, json)
        return
    if on != "local" or part is not None:
        raise UserError(f"`{'part' if on == 'local' else 'on'}` needs `out`; give a folder or URL")
    if data is not None and views != 1:
        raise UserError(
            "`views` are calibrated with the validation images of the training data; omit `views` "
            "or `data`"
        )
    classifier = load_classifier(model, head, device, engine, preprocess, vit, views)
    promises = check_promises(classifier, coverage, abstain, data)
    if data is not None and isinstance(classifier, vitrail.Classifier):
        from vitrail.inference.calibrate import calibrate_classifier

        classifier = calibrate_classifier(classifier, data)
    unreadable: list[Result] = []  # filled while folders are searched, printed at the end
    count = top or (TOP_JSON if json else TOP)
    predictions = classifier.predict_each(
        find_images(images, unreadable), top=count, raw=raw, **promises
    )
    print_as = print_json if json else print_csv if csv else print_table
    if not print_as(show_progress(chain(predictions, unreadable), images)):
        sys.exit(1)


def check_batch_flags(images: tuple[str, ...], **flags: object) -> None:
    """Refuses what a job does not do."""
    if len(images) != 1 or images[0] == "-":
        raise UserError("`out` is for one data set; give one folder, table or other DATA")
    for name, value in flags.items():
        if value:
            raise UserError(f"`out` and `{name}` exclude each other; omit one of them")


def load_classifier(
    model: str,
    head: Path | None,
    device: str,
    engine: Engine,
    preprocess: Normalisation,
    vit: Any,
    views: int = 1,
) -> "Classifier | FeatureClassifier":
    """The model with its own head, or with one that `vitrail head` fitted."""
    settings: dict[str, Any] = {"preprocess": preprocess, "vit": given_settings(vit)}
    if head is None:
        return vitrail.load(model, device=device, engine=engine, **settings).with_views(views)
    if views != 1:
        raise UserError("`views` needs the model's own head; omit `views` or `head`")
    if engine not in (None, "torch"):
        raise UserError(f"a head of scikit-learn needs `engine='torch'`, not {engine}")
    from vitrail.inference.head import load_with_head

    return load_with_head(model, head, device=device, **settings)


def check_promises(
    classifier: "Classifier | FeatureClassifier",
    coverage: float | None,
    abstain: float | None,
    data: str | None,
) -> dict[str, float]:
    """The promises that were asked for; heads of `vitrail head` make none."""
    asked = {"coverage": coverage, "abstain": abstain}
    given = {name: value for name, value in asked.items() if value is not None}
    if (given or data) and not isinstance(classifier, vitrail.Classifier):
        name = next(iter(given), "data")
        raise UserError(f"`{name}` needs the head of the model itself; leave out `head`")
    return given


def find_images(names: tuple[str, ...], unreadable: list[Result]) -> Iterator[str]:
    """Every image file, folders searched in order; names without images go to `unreadable`."""
    for name in read_names(names, unreadable):
        if os.path.isdir(name):  # false also where access is denied
            known = len(unreadable)
            paths = search_folder(name, unreadable)
            if not paths and len(unreadable) == known:
                unreadable.append((name, UserError("this folder contains no images")))
            yield from paths
        else:
            yield name


def read_names(names: tuple[str, ...], unreadable: list[Result]) -> Iterator[str]:
    """The names given, with - replaced by the lines of stdin."""
    for name in names:
        if name != "-":
            yield name
        elif sys.stdin is None:
            unreadable.append((name, UserError("stdin is closed; give paths on it, one per line")))
        else:
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())


def search_folder(folder: str, unreadable: list[Result]) -> list[str]:
    """The images of a folder and its subfolders, sorted by path."""
    from vitrail.data.image import SUFFIXES

    def report(error: OSError) -> None:
        unreadable.append((error.filename, UserError(f"cannot be read: {error.strerror}")))

    paths = [
        Path(parent, name)
        for parent, _, names in os.walk(folder, onerror=report)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES
    ]
    return [str(path) for path in sorted(paths)]


def show_progress(results: Iterator[Result], images: tuple[str, ...]) -> Iterator[Result]:
    """The results, counted on a terminal if there may be more than one image."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    several = len(images) > 1 or images == ("-",) or os.path.isdir(images[0])
    columns = (SpinnerColumn(), TextColumn("{task.completed} images"))
    hidden = not (console.is_terminal and several)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=None)
        for result in results:
            progress.advance(task)
            yield result


def print_json(results: Iterator[Result]) -> bool:
    """One JSON line per image; whether all images could be read."""
    complete = True
    for path, result in results:
        complete &= not isinstance(result, UserError)
        entry = {"error": str(result)} if isinstance(result, UserError) else result.to_dict()
        print(as_json.dumps({"path": path, **entry}), flush=True)
    return complete


def print_csv(results: Iterator[Result]) -> bool:
    """One CSV row per image; whether all images could be read."""
    table = writer(sys.stdout, lineterminator="\n")
    columns = ["path", "label", "probability", "error", "answered", "odd", "set"]
    table.writerow(columns)
    complete = True
    for path, result in results:
        if isinstance(result, UserError):
            complete = False
            table.writerow([path, "", "", str(result), "", "", ""])
        else:
            labels = ";".join(one.label for one in result.listed[: None if result.labels else 1])
            answer = [path, labels, f"{result.probability:.6f}", ""]
            table.writerow([*answer, *csv_remarks(result)])
    return complete


def csv_remarks(prediction: "Prediction") -> list[str]:
    """Whether the image was answered and is odd, and the classes of its set."""
    flags = {True: "yes", False: "no", None: ""}
    return [flags[prediction.answered], flags[prediction.odd], ";".join(prediction.set or ())]


def print_table(results: Iterator[Result]) -> bool:
    """One line per image, errors on stderr; whether all images could be read."""
    from vitrail.display.text import printable

    complete = True
    for path, result in results:
        if isinstance(result, UserError):
            complete = False
            print(printable(f"error: {path}: {result}"), file=sys.stderr)
        else:
            guesses = "  ".join(f"{one.label} {one.probability:.1%}" for one in result.listed)
            remarks = "".join(f"  ({remark})" for remark in result.remarks())
            print(printable(f"{path}  {guesses or 'no label'}{remarks}"), flush=True)
    return complete
