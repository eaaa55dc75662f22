"""The data set of a run: the same on every rank, and the same when the run is resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail import files
from vitrail.data.config import Columns, LabelKind
from vitrail.data.open import open_data
from vitrail.data.source import NO_LABEL, Source, fingerprint
from vitrail.data.split import keep_labels
from vitrail.errors import UserError
from vitrail.run.recipe import Recipe
from vitrail.run.storage.folder import DATA
from vitrail.training.distributed import World


def open_on_all_ranks(
    data: str,
    columns: Columns,
    labels: LabelKind | None,
    world: World,
    labelled: float = 1.0,
    pretraining: bool = False,
) -> Source:
    """Opens the data set on every rank; on the leader first, which may download it.

    `labelled` is the fraction of the training images that are used, because they have a label.
    """
    opened = world.leader_first(
        lambda: open_run_data(data, columns, labels, pretraining, world.is_leader)
    )
    return opened if pretraining else keep_labels(opened, labelled)


def open_run_data(
    data: str,
    columns: Columns,
    labels: LabelKind | None,
    pretraining: bool,
    progress: bool = True,
) -> Source:
    """Opens a data set; for a pretraining, `labels` "partial" opens all rows of a table.

    Those with a label have the splits that a training on them gives them.
    """
    opened = open_data(data, columns=columns, labels=labels, progress=progress)
    if not pretraining or labels != "partial":
        return opened
    whole: Any = open_data(data, columns=columns, labels="none", progress=progress)
    rows = {name: row for row, name in enumerate(whole.ids)}
    chosen = [rows[name] for name in opened.ids]
    splits, numbers = whole.splits.copy(), np.full(len(whole), NO_LABEL)
    splits[chosen], numbers[chosen] = opened.splits, opened.labels
    everything: Source = replace(whole, classes=opened.classes, labels=numbers, splits=splits)
    return everything


def shared_fingerprint(source: Source, world: World) -> str:
    """The checksum of the data; raises if a machine has other files than the leader."""
    checksum = fingerprint(source)
    if world.broadcast(checksum) != checksum:
        raise UserError(
            f"{source.name} on rank {world.rank} differs from that on rank 0; "
            f"copy the same files to all machines"
        )
    return checksum


def store_fingerprint(folder: Path, source: Source, checksum: str) -> None:
    """Stores two checksums in a run folder: without and with the modification times."""
    files.write_file(folder / DATA, f"{checksum}\n{fingerprint(source, mtimes=True)}")


def check_unchanged(
    folder: Path, recipe: Recipe, source: Source, checksum: str, saved: str | None
) -> str:
    """Raises if the data differs from what the run was started with; returns a warning, or "".

    `saved` is the checksum in the newest checkpoint. An edit that keeps the size of a file changes
    only its modification time, but so does a copy, so that is only a warning.
    """
    stored, dated = checksum, ""
    if (folder / DATA).is_file():
        stored, _, dated = (
            (folder / DATA).read_text(encoding="utf-8", errors="replace").partition("\n")
        )
    if saved is not None:
        stored = saved
    if stored != checksum or len(source.classes) != recipe.vit.classes:
        raise UserError(
            f"{recipe.source} is not the data this run was started with: images were added, "
            f"removed, renamed or changed; restore them, or start a new run"
        )
    if dated and dated != fingerprint(source, mtimes=True):
        return (
            f"files of {recipe.source} were modified or copied since this run was started; "
            f"if images were edited, the resumed run differs from an uninterrupted one"
        )
    return ""
