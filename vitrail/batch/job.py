"""Predictions and features of whole data sets: computes the parts of a job that are missing."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.batch.folder import PartFolder, open_part_folder
from vitrail.batch.manifest import (
    NAME,
    Kind,
    Manifest,
    check_same_job,
    choose_part,
    finished_parts,
    part_name,
    read_manifest,
)
from vitrail.batch.parts import PartWriter, count_errors
from vitrail.batch.rows import FeatureRows, PredictionRows, RowMaker, load_model_rows
from vitrail.data.open import open_data, resolve_data
from vitrail.data.source import Source, fingerprint
from vitrail.data.sources.parquet import import_parquet
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.exporting.engine import EngineName, thread_count
from vitrail.inference.weight_files import collect_model_files, hash_files, is_exported
from vitrail.zoo.weights import Normalisation

Where = Literal["local", "ray"]
FeatureType = Literal["float32", "float16"]


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchOutput:
    """What a job wrote; its fields are the keys of `--json`.

    >>> vitrail.features("runs/digits-1", "photos", out="features").images
    24
    """

    out: str
    kind: Kind
    images: int
    errors: int  # images without a result; their column `error` says why
    parts: int
    computed: int  # parts that this call computed; the others existed
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints.

        >>> vitrail.features("runs/digits-1", "photos", out="features").to_dict()["errors"]
        0
        """
        return asdict(self)

    def __repr__(self) -> str:
        errors = f", {self.errors:,} without a result (column `error`)" if self.errors else ""
        existed = self.parts - self.computed
        return (
            f"{self.out}: {self.kind} of {format_count(self.images, 'image')} in "
            f"{format_count(self.parts, 'part')}"
            f"{f', {existed:,} of which existed' if existed else ''}{errors}"
        )


@check_arguments
def batch_predict(
    model: str | Path,
    data: "str | Path | Source",
    *,
    out: str | Path,
    on: "Where" = "local",
    top: int = 5,
    raw: bool = False,
    views: int = 1,
    coverage: float | None = None,
    abstain: float | None = None,
    part: int | None = None,
    device: str = "auto",
    engine: "EngineName | None" = None,
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> BatchOutput:
    """Predicts a whole data set, of any size, into Parquet parts.

    A killed job continues where it stopped when it is called again: finished parts stay as they
    are. An image that cannot be read has a row with an error.

    Args:
        model: run folder, weight file or folder, name of published weights, or an exported file
        data: any tree of images, table, zip, tar shards or built-in name; labels are not used
        out: folder or URL for the parts
        on: local: in this process; ray: on the Ray cluster of RAY_ADDRESS, else on all cores or
            GPUs of this machine
        top: number of most likely classes in the column `top`
        raw: plain softmax instead of calibrated probabilities
        views: 1 is the image, 2 adds its mirror image, up to 10 add shifts by a few pixels
        coverage: also the set of classes that contains the true one with this probability
        abstain: do not answer where more than this fraction of the answers would be wrong
        part: images per part; by default 256 to 4096, from the number of images
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        engine: torch, onnxruntime or openvino; "auto" picks the fastest
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, or to adapt the model to

    >>> vitrail.batch_predict("runs/digits-1", "photos", out="answers", part=10)
    answers: predictions of 24 images in 3 parts
    """
    if top < 1:
        raise UserError(f"`top` is {top}; give a whole number of at least 1")
    options: dict[str, Any] = {
        "top": top,
        "raw": raw,
        "views": views,
        "coverage": coverage,
        "abstain": abstain,
    }
    options |= {"engine": engine, "preprocess": preprocess, "vit": dict(vit or {})}
    return run_job("predictions", model, data, out, on, part, device, options)


@check_arguments
def features(
    model: str | Path,
    data: "str | Path | Source",
    *,
    out: str | Path,
    on: "Where" = "local",
    dtype: "FeatureType" = "float32",
    part: int | None = None,
    device: str = "auto",
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> BatchOutput:
    """Extracts the features of a whole data set, of any size, into Parquet parts.

    The features are the input of the model's head: what `Classifier.features` returns. A killed job
    continues where it stopped when it is called again: finished parts stay as they are. An image
    that cannot be read has a row with an error. `vitrail.similar` searches the result.

    Args:
        model: run folder, weight file or folder, name of published weights, or a file that was
            exported with `features`
        data: any tree of images, table, zip, tar shards or built-in name; labels are not used
        out: folder or URL for the parts
        on: local: in this process; ray: on the Ray cluster of RAY_ADDRESS, else on all cores or
            GPUs of this machine
        dtype: float32, or float16 for half the size
        part: images per part; by default 256 to 4096, from the number of images
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, or to adapt the model to

    >>> vitrail.features("runs/digits-1", "photos", out="features", part=10)
    features: features of 24 images in 3 parts
    """
    if dtype not in get_args(FeatureType):
        raise UserError(f"`dtype` is {dtype!r}; choose float32 or float16")
    options = {"dtype": dtype, "preprocess": preprocess, "vit": dict(vit or {})}
    if is_exported(model) and (preprocess is not None or vit):
        raise UserError(f"{model} is an exported model; omit `preprocess` and `vit`")
    return run_job("features", model, data, out, on, part, device, options)


def run_job(
    kind: Kind,
    model: str | Path,
    data: "str | Path | Source",
    out: str | Path,
    on: Where,
    part: int | None,
    device: str,
    options: dict[str, Any],
) -> BatchOutput:
    """Computes the parts that do not exist yet."""
    began = time.perf_counter()
    import_parquet()
    if on not in get_args(Where):
        raise UserError(f"`on` is {on!r}; choose local or ray")
    if part is not None and part < 1:
        raise UserError(f"`part` is {part}; give a whole number of at least 1")
    folder, model = open_part_folder(out), resolve_model(model)
    source, place = open_any_images(data)
    for name in (model, place):
        files.check_utf8_name(name)
    sha256 = hash_files(collect_model_files(model))
    maker = load_model_rows(kind, model, options, device)
    wanted = describe_job(kind, model, sha256, place, source, maker, options, part)
    manifest = claim_job(folder, wanted, given=part is not None)
    finished = finished_parts(folder)
    missing = [number for number in range(manifest.parts) if number not in finished]
    errors = compute_parts(manifest, folder, source, maker, missing, on, device)
    if manifest.errors is None or missing:
        stored = sorted(finished & set(range(manifest.parts)))
        errors += sum(count_errors(folder, part_name(number)) for number in stored)
        manifest = replace(manifest, errors=errors)
        folder.write(NAME, manifest.to_json())
        folder.clean()
    assert manifest.errors is not None
    return BatchOutput(
        out=str(out),
        kind=kind,
        images=manifest.images,
        errors=manifest.errors,
        parts=manifest.parts,
        computed=len(missing),
        seconds=time.perf_counter() - began,
    )


def resolve_model(model: str | Path) -> str:
    """The absolute path of a model, or its name."""
    path = files.expand_user(model)
    return str(path.resolve() if path.exists() else model)


def open_any_images(data: "str | Path | Source") -> tuple[Source, str]:
    """All images of a data set, whatever their labels and splits; and where they are."""
    if isinstance(data, str | Path):
        place = resolve_data(data)  # an absolute path, as workers have other working directories
        return open_data(place, labels="none", split=False), place
    return data, str(data.path or "")


def describe_job(
    kind: Kind,
    model: str,
    sha256: str,
    place: str,
    source: Source,
    maker: RowMaker,
    options: dict[str, Any],
    part: int | None,
) -> Manifest:
    return Manifest(
        kind=kind,
        model=model,
        sha256=sha256,
        options=json.loads(json.dumps(options)),  # as read back: lists instead of tuples
        preprocess=maker.preprocess.to_dict(),
        data=place,
        fingerprint=fingerprint(source),
        images=len(source),
        part=part or choose_part(len(source)),
        width=maker.width if isinstance(maker, FeatureRows) else None,
        dtype=maker.dtype if isinstance(maker, FeatureRows) else None,
        classes=maker.predictor.classes if isinstance(maker, PredictionRows) else (),
    )


def claim_job(folder: PartFolder, wanted: Manifest, *, given: bool) -> Manifest:
    """Stores the manifest of a new job, or checks that a stored one is the same job."""
    names = folder.list_names()
    if NAME in names:
        stored = read_manifest(folder)
        wanted = wanted if given else replace(wanted, part=stored.part)
        check_same_job(folder, stored, wanted)
        return replace(wanted, errors=stored.errors)
    if found := [name for name in names if not name.startswith(".")]:
        raise UserError(f"{folder} has other files, such as {min(found)}; choose another `out`")
    folder.write(NAME, wanted.to_json())
    return wanted


def compute_parts(
    manifest: Manifest,
    folder: PartFolder,
    source: Source,
    maker: RowMaker,
    numbers: list[int],
    on: Where,
    device: str,
) -> int:
    """Writes these parts; returns how many images have no result."""
    if not numbers:
        return 0
    images = sum(len(manifest.rows(number)) for number in numbers)
    with progress_bar(f"computing {manifest.kind}", images) as advance:

        def report(number: int) -> None:
            advance(len(manifest.rows(number)))

        if on == "ray":
            from vitrail.batch.ray_engine import write_on_ray

            return write_on_ray(manifest, folder, source, numbers, device, report)
        writer, errors = PartWriter(manifest, folder, source, maker, thread_count()), 0
        for number in numbers:
            errors += writer.write(number)
            report(number)
        return errors
