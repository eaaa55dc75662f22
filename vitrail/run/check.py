"""A data set checked before training: its problems, and what `train` would do with it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.audit.audit import Audit, BrokenImage, audit_data
from vitrail.audit.findings import Finding
from vitrail.audit.page import render_audit
from vitrail.data.config import MAX_WORKERS, LabelKind
from vitrail.data.open import open_data
from vitrail.data.preview import choose_per_class, preview_augmentation
from vitrail.data.source import Source
from vitrail.data.sources.places import check_output_path
from vitrail.display.sheet import draw_sheet
from vitrail.display.text import format_count, printable
from vitrail.errors import UserError
from vitrail.run.design import Design, design_recipe
from vitrail.run.request import Request
from vitrail.training.device import pick_device


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataCheck:
    """The problems of a data set, and the recipe that `vitrail.train` would choose for it.

    >>> found = vitrail.check("photos")
    >>> found.error is None
    True
    >>> [finding.name for finding in found.findings if finding.severity == "error"]
    []
    """

    audit: Audit
    plan: Design | None  # what `train` would do; None if it would fail
    plan_error: str | None  # why `train` would fail; None if it would start

    @property
    def source(self) -> Source:
        """The data set.

        >>> len(vitrail.check("photos").source)
        24
        """
        return self.audit.source

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The problems, the most serious first.

        >>> all(finding.title for finding in vitrail.check("photos").findings)
        True
        """
        return self.audit.findings

    @property
    def images(self) -> int:
        """The number of images.

        >>> vitrail.check("photos").images
        24
        """
        return self.audit.images

    @property
    def split(self) -> dict[str, int]:
        """The number of images in each split.

        >>> list(vitrail.check("photos").split)
        ['train', 'val', 'test']
        """
        return self.audit.split

    @property
    def classes(self) -> dict[str, int]:
        """The number of images of each class.

        >>> vitrail.check("photos").classes
        {'dark': 12, 'light': 12}
        """
        return self.audit.classes

    @property
    def broken(self) -> tuple[BrokenImage, ...]:
        """Images that cannot be read, and why.

        >>> vitrail.check("photos").broken
        ()
        """
        return self.audit.broken

    @property
    def duplicates(self) -> list[list[str]]:
        """Groups of paths with the same content in the same split.

        >>> vitrail.check("photos").duplicates
        []
        """
        return self.audit.duplicates

    @property
    def leaks(self) -> list[list[str]]:
        """Groups of paths with the same content in several splits.

        >>> vitrail.check("photos").leaks
        []
        """
        return self.audit.leaks

    @property
    def near_duplicates(self) -> list[list[str]]:
        """Groups of paths of similar images, in any split.

        >>> isinstance(vitrail.check("photos").near_duplicates, list)
        True
        """
        return self.audit.near_duplicates

    @property
    def error(self) -> str | None:
        """Why training would fail, in one line; None if it would start.

        >>> vitrail.check("digits").error
        """
        errors = self.audit.errors
        if not errors:
            return None
        reasons = "; ".join(f"{finding.title}; {finding.advice}" for finding in errors)
        return printable(f"training on {self.source.name} would fail: {reasons}")

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail check --json` prints.

        >>> vitrail.check("photos").to_dict()["classes"]
        {'dark': 12, 'light': 12}
        """
        return {**self.audit.to_dict(), "plan": self._plan_document()}

    @check_arguments
    def write_page(self, path: str | Path) -> None:
        """Writes an HTML page with pictures of the findings.

        >>> vitrail.check("photos").write_page("check.html")
        """
        target = check_target(self.source, path, "out")
        files.write_file(target, render_audit(self.audit, self._plan_document(), self._sheet))

    @check_arguments
    def write_sheet(self, path: str | Path) -> None:
        """Writes a PNG with some training images as augmentation shows them to the model.

        >>> vitrail.check("photos").write_sheet("augmented.png")
        """
        target = check_target(self.source, path, "augmented")
        if self._sheet is not None:
            files.write_file(target, self._sheet)

    @cached_property
    def _sheet(self) -> bytes | None:
        return None if self.plan is None else draw_augmented_images(self.audit, self.plan)

    def _plan_document(self) -> dict[str, Any]:
        if self.plan is None:
            return {"error": self.plan_error}
        return {"settings": self.plan.settings, "reasons": self.plan.reasons}

    def __repr__(self) -> str:
        source = self.source
        counts = f"{format_count(len(source), 'image')} of {len(source.classes)} classes"
        lines = [f"DataCheck of {source.name}: {counts}"]
        lines += [f"  {one.severity:<8} {one.title}; {one.advice}" for one in self.findings]
        lines += [] if self.findings else ["  no problems found"]
        reasons = self.plan.reasons if self.plan else [f"none: {self.plan_error}"]
        return "\n".join([*lines, "plan:", *(f"  {reason}" for reason in reasons)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{one.severity}</td><td>{escape(one.title)}</td>"
            f"<td>{escape(one.advice)}</td></tr>"
            for one in self.findings
        )
        reasons = self.plan.reasons if self.plan else [f"none: {self.plan_error}"]
        items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        head = f"{escape(self.source.name)}: {format_count(len(self.source), 'image')}"
        return f"<p>{head}</p><table>{rows}</table><p>What training would do:</p><ul>{items}</ul>"


@check_arguments
def check(
    data: str | Path | Source,
    *,
    out: str | Path | None = None,
    augmented: str | Path | None = None,
    skip_broken: bool = False,
    workers: int | None = None,
    device: str = "auto",
    columns: Mapping[str, str] | None = None,
    labels: LabelKind | None = None,
) -> DataCheck:
    """Examines every image of a data set, and plans a training on it.

    Finds broken files, duplicates within and across splits, class imbalance and unusual images.
    Never changes the data.

    Args:
        data: folder of class folders, table of paths and labels, tar shards, built-in name, or
            what `vitrail.open_data` returned
        out: write an HTML page with pictures of the findings
        augmented: write a PNG with some augmented training images
        skip_broken: whether training would skip images that cannot be read
        workers: processes that decode images; by default one per core, at most 8
        device: that training would use; "auto" picks a GPU if there is one
        columns: the columns of a table, such as {"label": "species"}
        labels: "multi" if images have any number of labels, "single" if names contain separators

    >>> vitrail.check("photos").to_dict()["images"]
    24
    """
    if workers is not None and not 0 <= workers <= MAX_WORKERS:
        raise UserError(f"`workers` is {workers}; give a number from 0 to {MAX_WORKERS}")
    chosen = pick_device(device)
    if augmented is not None and Path(augmented).suffix.lower() != ".png":
        raise UserError(f"`augmented` is {augmented}; give a file name that ends in .png")
    source = (
        open_data(data, columns=columns, labels=labels) if isinstance(data, str | Path) else data
    )
    for path, name in ((out, "out"), (augmented, "augmented")):
        if path is not None:
            check_target(source, path, name)  # before the images are read, which may take minutes
    audit = audit_data(source, skip_broken=skip_broken, workers=workers)
    found = plan_training(audit, Request(data=name_source(data), device=device), chosen)
    if augmented is not None:
        found.write_sheet(augmented)
    if out is not None:
        found.write_page(out)
    return found


def plan_training(audit: Audit, request: Request, device: torch.device) -> DataCheck:
    """Adds the recipe that `train` would choose, or the error that it would raise."""
    try:
        plan = design_recipe(audit.source, request, device, download=False)
    except UserError as error:
        failure = Finding("No recipe", "error", "training cannot start", str(error))
        audit = replace(audit, findings=(failure, *audit.findings))
        return DataCheck(audit=audit, plan=None, plan_error=str(error))
    return DataCheck(audit=audit, plan=plan, plan_error=None)


def name_source(data: str | Path | Source) -> str:
    """What a recipe says of the data."""
    return str(data) if isinstance(data, str | Path) else data.name


def check_target(source: Source, path: str | Path, name: str) -> Path:
    """Refuses to write a file over a folder, or among the images."""
    target = files.expand_user(path)
    if target.is_dir():
        raise UserError(f"{target} is a folder; give `{name}` a file name")
    check_output_path(source, target, name)
    return target


def draw_augmented_images(audit: Audit, plan: Design) -> bytes:
    """A contact sheet of some training images, from as many classes as possible."""
    source, recipe = audit.source, plan.recipe
    usable = np.ones(len(source), bool)
    usable[list(audit.scan.broken)] = False
    items = choose_per_class(source, usable)
    batch = preview_augmentation(source, items, recipe.preprocess, recipe.data)
    return draw_sheet(
        batch.images,
        batch.targets,
        [printable(name) for name in source.classes],
        mean=recipe.preprocess.mean,
        std=recipe.preprocess.std,
        stretch=recipe.preprocess.pixels != "uint8",
    )
