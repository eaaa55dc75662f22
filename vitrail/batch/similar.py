"""Nearest neighbours of images among stored features, by cosine similarity: exact, part by part."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.batch.folder import PartFolder, open_part_folder
from vitrail.batch.job import open_any_images
from vitrail.batch.manifest import Manifest, finished_parts, part_name, read_manifest
from vitrail.batch.parts import open_part
from vitrail.data.config import Preprocess
from vitrail.data.source import Source, fingerprint
from vitrail.data.sources.parquet import import_parquet
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError
from vitrail.inference.prediction import ImageInput, as_images, name_image_in_errors
from vitrail.inference.weight_files import collect_model_files, hash_files

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.batch.rows import FeatureRows

ROWS_AT_ONCE = 4096  # features in memory; with more of them, the processor's cache is too small
MAX_LABEL = 24  # characters of an id below its picture

log = logging.getLogger(__name__)

Float32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One stored image."""

    id: str  # as the data set calls it
    similarity: float  # cosine, at most 1
    item: int  # its position in the data set


@dataclass(frozen=True, kw_only=True, repr=False)
class Similar:
    """The nearest neighbours of one image, nearest first; `save` draws them.

    >>> found = vitrail.similar("stored", "digit.png", top=3)[0]
    >>> len(found.neighbours), found.neighbours[0].similarity <= 1
    (3, True)
    """

    path: str  # of the image; "image" for other inputs
    neighbours: tuple[Neighbour, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `vitrail similar --json` prints for an image.

        >>> list(vitrail.similar("stored", "digit.png", top=3)[0].to_dict())
        ['path', 'neighbours']
        """
        return {"path": self.path, "neighbours": [asdict(one) for one in self.neighbours]}

    def __repr__(self) -> str:
        lines = [f"  {one.similarity:.3f}  {one.id}" for one in self.neighbours]
        return "\n".join([f"Similar to {self.path}:", *lines])


@check_arguments
def similar(
    features: str | Path,
    images: "ImageInput | Iterable[ImageInput]",
    *,
    top: int = 10,
    model: str | Path | None = None,
    data: "str | Path | Source | None" = None,
    sheet: str | Path | None = None,
    device: str = "auto",
) -> list[Similar]:
    """Finds the stored images that are most similar to each of these images.

    Compares with all stored features, by cosine similarity, a part at a time: memory does not grow
    with their number.

    Args:
        features: folder or URL that `vitrail.features` wrote
        images: path, bytes, PIL image or array; or an iterable of them
        top: neighbours of each image
        model: where the model of the features is now, if it was moved
        data: where the images of the features are now, if they were moved; for `sheet`
        sheet: PNG file to write: each image, followed by its neighbours
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one

    >>> vitrail.similar("stored", "digit.png", top=3)
    [Similar to digit.png:
      ...]
    """
    import_parquet()
    if top < 1:
        raise UserError(f"`top` is {top}; give a whole number of at least 1")
    folder = open_part_folder(features)
    manifest = read_manifest(folder)
    if manifest.kind != "features":
        raise UserError(
            f"{folder} has {manifest.kind}; give a folder that `vitrail features` wrote"
        )
    maker = load_same_model(manifest, model, device)
    inputs = list(as_images(images))
    queries = compute_queries(maker, inputs)
    found = search_parts(folder, manifest, queries, top)
    named = name_neighbours(folder, manifest, found)
    results = [
        Similar(path=describe_input(image), neighbours=neighbours)
        for image, neighbours in zip(inputs, named, strict=True)
    ]
    if sheet is not None:
        draw_neighbours(sheet, maker, inputs, results, open_same_data(manifest, data))
    return results


def load_same_model(manifest: Manifest, model: str | Path | None, device: str) -> "FeatureRows":
    """The model that computed the features."""
    from vitrail.batch.rows import FeatureRows, load_rows

    place = str(model or manifest.model)
    try:
        sha256 = hash_files(collect_model_files(place))
    except UserError as error:
        raise UserError(
            f"cannot find the model that computed the features: {error}; give its path as `model`"
        ) from error
    if sha256 != manifest.sha256:
        raise UserError(
            f"{place} is not the model of the features (sha256 {sha256:.12}, not "
            f"{manifest.sha256:.12}); give that one as `model`"
        )
    maker = load_rows(replace(manifest, model=place), device)
    assert isinstance(maker, FeatureRows)
    return maker


def compute_queries(maker: "FeatureRows", images: Sequence[ImageInput]) -> Float32:
    """The features of the images that neighbours are searched for."""
    rows = []
    for number, image in enumerate(images, 1):
        with name_image_in_errors(image, number):
            result = maker.compute(maker.load(image)[None])[0]
            if isinstance(result, UserError):
                raise result
        rows.append(result)
    return np.stack(rows).astype(np.float32) if rows else np.empty((0, maker.width), np.float32)


def search_parts(
    folder: PartFolder, manifest: Manifest, queries: Float32, top: int
) -> "tuple[Tensor, Tensor]":
    """Similarity and item of the nearest neighbours of each query, nearest first."""
    import torch
    from torch.nn import functional as F

    numbers = sorted(finished_parts(folder))
    if len(numbers) < manifest.parts:
        log.warning(
            f"{folder} has {len(numbers)} of {manifest.parts} parts; only these are searched"
        )
    x = F.normalize(torch.from_numpy(queries), dim=1)
    best = torch.empty(len(x), 0), torch.empty(len(x), 0, dtype=torch.int64)
    with progress_bar("searching", manifest.images) as advance, torch.inference_mode():
        for number in numbers:
            for items, rows in iterate_features(folder, manifest, number):
                similarities = x @ F.normalize(torch.from_numpy(rows), dim=1).T
                best = keep_best(best, similarities, torch.from_numpy(items), top)
            advance(len(manifest.rows(number)))
    return best


def keep_best(
    best: "tuple[Tensor, Tensor]", similarities: "Tensor", items: "Tensor", top: int
) -> "tuple[Tensor, Tensor]":
    """The nearest of the best so far and of some later items; of equal ones the earlier items."""
    import torch

    if best[0].shape[1] == top and not (similarities.amax(dim=1) > best[0][:, -1]).any():
        return best
    values, index = similarities.topk(min(top, similarities.shape[1]), dim=1)
    values = torch.cat([best[0], values], dim=1)
    index = torch.cat([best[1], items[index]], dim=1)
    by_item = index.argsort(dim=1)
    values, index = values.gather(1, by_item), index.gather(1, by_item)
    order = values.argsort(dim=1, descending=True, stable=True)[:, :top]
    return values.gather(1, order), index.gather(1, order)


def iterate_features(
    folder: PartFolder, manifest: Manifest, number: int
) -> Iterable[tuple[NDArray[np.int64], Float32]]:
    """Items and features of a part, without the images that have none."""
    import pyarrow

    first = manifest.rows(number).start
    try:
        with open_part(folder, part_name(number)) as part:
            for batch in part.iter_batches(ROWS_AT_ONCE, columns=["features"]):
                column = batch.column(0)
                present = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
                values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
                if len(present):
                    yield first + present, values.reshape(len(present), manifest.width)
                first += len(column)
    except UserError:  # of a store that fails
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        name = f"{folder}/{part_name(number)}"
        raise UserError(f"{name} cannot be read: {' '.join(str(error).split()):.100}") from error


def name_neighbours(
    folder: PartFolder, manifest: Manifest, found: "tuple[Tensor, Tensor]"
) -> list[tuple[Neighbour, ...]]:
    """The neighbours with their ids, which are read only from the parts that hold them."""
    values, items = (one.tolist() for one in found)
    wanted: dict[int, list[int]] = {}
    for item in sorted({item for row in items for item in row}):
        wanted.setdefault(item // manifest.part, []).append(item)
    ids: dict[int, str] = {}
    for number, inside in wanted.items():
        with open_part(folder, part_name(number)) as part:
            column = part.read(columns=["id"]).column(0)
        start = manifest.rows(number).start
        ids |= {item: column[item - start].as_py() for item in inside}
    return [
        tuple(
            Neighbour(id=ids[item], similarity=min(1.0, similarity), item=item)
            for similarity, item in zip(similarities, row, strict=True)
        )
        for similarities, row in zip(values, items, strict=True)
    ]


def describe_input(image: ImageInput) -> str:
    return str(image) if isinstance(image, str | Path) else "image"


def open_same_data(manifest: Manifest, data: "str | Path | Source | None") -> Source:
    """The data set whose features are stored."""
    if data is None and not manifest.data:
        raise UserError("the features are those of images in memory; give them as `data`")
    source, _ = open_any_images(manifest.data if data is None else data)
    if fingerprint(source) != manifest.fingerprint:
        raise UserError(
            f"{source.name} is not the data set of the features, or it changed; give the right one "
            f"as `data`, or omit `sheet`"
        )
    return source


def draw_neighbours(
    path: str | Path,
    maker: "FeatureRows",
    images: Sequence[ImageInput],
    results: Sequence[Similar],
    source: Source,
) -> None:
    """Writes a PNG: in each line an image and its neighbours, as the model receives them."""
    import torch

    from vitrail.display.sheet import draw_sheet
    from vitrail.inference.torch_predictor import load_input

    settings: Preprocess = maker.preprocess
    pictures, labels = [], []
    for image, result in zip(images, results, strict=True):
        pictures.append(load_input(image, settings))
        labels.append(describe_input(image)[-MAX_LABEL:])
        for one in result.neighbours:
            pictures.append(load_input(source[one.item].content, settings))
            labels.append(f"{one.similarity:.2f} {one.id[-MAX_LABEL:]}")
    columns = 1 + max((len(result.neighbours) for result in results), default=0)
    drawn = draw_sheet(
        torch.stack(pictures),
        torch.arange(len(pictures)),
        labels,
        mean=settings.mean,
        std=settings.std,
        columns=columns,
        stretch=settings.pixels != "uint8",
    )
    files.write_file(files.expand_user(path), drawn)
