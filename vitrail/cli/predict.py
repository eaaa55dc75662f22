"""`vitrail predict`: what a model sees in images."""

import json as as_json
import os
import sys
from collections.abc import Iterator
from csv import writer
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.cli.flags import Vit, changes
from vitrail.errors import UserError

Result = tuple[Any, Any]  # path; a `Prediction`, or the error in its place


def predict(
    model: Annotated[str, tyro.conf.Positional],
    images: Annotated[tuple[str, ...], tyro.conf.Positional],
    *,
    top: int | None = None,
    head: Path | None = None,
    device: str = "auto",
    preprocess: Literal["half", "imagenet", "clip"] | None = None,
    vit: Vit = Vit(),  # noqa: B008
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    csv: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Name what is in images.

    Args:
        model: run folder, model file, or any weights that can be read
        images: files, folders (with all images below them), or - for paths on stdin, one a line
        top: how many of the most likely classes to tell, by default 1, in JSON 5
        head: file that `vitrail head` made for this model, or the folder that holds it
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        preprocess: mean and deviation that foreign weights expect, if their file does not say
        vit: the model at another image size, or what foreign weights do not say of themselves
        json: print one JSON line for each image
        csv: print a table of path, label, probability, error
    """
    if top is not None and top < 1:
        raise UserError(f"top is {top}; give a whole number of at least 1")
    if not images:
        raise UserError("no images were given; give files or folders, or - for paths on stdin")
    if json and csv:
        raise UserError("json and csv are two forms of the same; give one of them")
    from vitrail.run.classifier import load
    from vitrail.run.head import load_with_head

    hints = {"preprocess": preprocess, "vit": changes(vit)}
    if head is None:
        classifier = load(model, device=device, **hints)
    else:
        classifier = load_with_head(model, head, device=device, **hints)
    refused: list[Result] = []  # filled while images are looked for, and told at the end
    found = classifier.each(paths(images, refused), top or (5 if json else 1))
    print_as = as_lines if json else as_csv if csv else as_table
    if not print_as(watched(chain(found, refused), images)):
        sys.exit(1)


def paths(given: tuple[str, ...], refused: list[Result]) -> Iterator[str]:
    """All images, with those of folders in order; folders that give none are `refused`."""
    for name in told(given, refused):
        if os.path.isdir(name):  # false also where the system refuses to look
            known = len(refused)
            found = below(name, refused)
            if not found and len(refused) == known:
                refused.append((name, UserError("there is no image in this folder")))
            yield from found
        else:
            yield name


def told(given: tuple[str, ...], refused: list[Result]) -> Iterator[str]:
    """The names given, with those on stdin in the place of -."""
    for name in given:
        if name != "-":
            yield name
        elif sys.stdin is None:
            refused.append((name, UserError("stdin is closed; give paths on it, one a line")))
        else:
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())


def below(folder: str, refused: list[Result]) -> list[str]:
    """The images of a folder and of those in it, by name."""
    from vitrail.data.image import SUFFIXES

    def refuse(error: OSError) -> None:
        refused.append((error.filename, UserError(f"cannot be read: {error.strerror}")))

    found = [
        Path(place, name)
        for place, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES
    ]
    return [str(path) for path in sorted(found)]


def watched(results: Iterator[Result], images: tuple[str, ...]) -> Iterator[Result]:
    """A bar on a terminal while there is more than one image."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    many = len(images) > 1 or images == ("-",) or os.path.isdir(images[0])
    columns = (SpinnerColumn(), TextColumn("{task.completed} images"))
    watching = console.is_terminal and many
    with Progress(*columns, console=console, transient=True, disable=not watching) as bar:
        task = bar.add_task("", total=None)
        for result in results:
            bar.advance(task)
            yield result


def as_lines(results: Iterator[Result]) -> bool:
    """One JSON line for each image; whether all could be read."""
    fine = True
    for path, found in results:
        fine &= not isinstance(found, UserError)
        told = {"error": str(found)} if isinstance(found, UserError) else asdict(found)
        print(as_json.dumps({"path": path, **told}), flush=True)
    return fine


def as_csv(results: Iterator[Result]) -> bool:
    table = writer(sys.stdout, lineterminator="\n")
    table.writerow(["path", "label", "probability", "error"])
    fine = True
    for path, found in results:
        if isinstance(found, UserError):
            fine = False
            table.writerow([path, "", "", str(found)])
        else:
            table.writerow([path, found.label, f"{found.probability:.6f}", ""])
    return fine


def as_table(results: Iterator[Result]) -> bool:
    from vitrail.display.text import printable

    fine = True
    for path, found in results:
        if isinstance(found, UserError):
            fine = False
            print(printable(f"error: {path}: {found}"), file=sys.stderr)
        else:
            guesses = "  ".join(f"{guess.label} {guess.probability:.1%}" for guess in found.top)
            print(printable(f"{path}  {guesses}"), flush=True)
    return fine
