"""Proof of an export: the same images through PyTorch and through the exported file."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.data.preprocess import normalise
from vitrail.display.text import format_count, format_percent
from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.exporting.accuracy import AccuracyChange, Labels, compare_accuracy, matches
from vitrail.exporting.engine import Arrays, Engine
from vitrail.exporting.graph import ExportGraph

BATCHES = (1, 2, 17)  # one image, the smallest batch, and an odd one that no export assumes
TOLERANCE = 1e-4  # largest absolute difference of two float32 computations
# A deep model rounds more: up to this many times PyTorch's own float32 error is accepted as well.
ROUNDING = 4.0
TIE = 2 * TOLERANCE  # two classes whose logits are nearer may swap within the tolerance
GENERATED = 20  # images that are generated where none are given: each batch size once

Images = NDArray[np.uint8]
# Multi-label (2, classes): a label is predicted where slope * logit + offset is not negative.
LabelRule = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How far the outputs of an exported model are from PyTorch's on the same images."""

    format: str
    engine: str  # name and version of what ran the file
    images: int
    generated: bool  # random images, because none were given
    batches: tuple[int, ...]  # batch sizes that were run
    differences: dict[str, float]  # largest absolute difference of each output
    tolerance: float | None  # limit of the differences; None for int8
    agreement: float | None  # share of equal predictions, ties excluded; None without head
    ties: int  # images whose prediction may change within the tolerance
    accuracy: AccuracyChange | None = None  # on labelled images
    float_layers: tuple[str, ...] = ()  # int8: layers whose activations stay in float32
    attempts: int = 1  # int8: forms that were measured on these images before this one was taken

    @property
    def largest_difference(self) -> float:
        """Of the logits; of the features for a model without a head."""
        return next(iter(self.differences.values()))

    def to_dict(self) -> dict[str, Any]:
        """What the file `.proof.json` holds."""
        document = asdict(self) | {"largest_difference": self.largest_difference}
        document |= {"batches": list(self.batches), "float_layers": list(self.float_layers)}
        return document | {"accuracy": self.accuracy.to_dict() if self.accuracy else None}

    def __repr__(self) -> str:
        parts = [f"{self.format} by {self.engine}", format_count(self.images, "image")]
        parts.append(f"largest difference {self.largest_difference:.2g}")
        if self.agreement is not None:
            parts.append(f"agreement {format_percent(self.agreement)}")
        if self.accuracy is not None:
            before, after = map(format_percent, (self.accuracy.before, self.accuracy.after))
            parts.append(f"accuracy {before} -> {after}")
        return f"Proof({', '.join(parts)})"

    def _repr_html_(self) -> str:
        from vitrail.exporting.card import render_proof

        return render_proof(self)


@dataclass(frozen=True, eq=False)
class ProofImages:
    """The images of a proof with PyTorch's outputs for them, computed once."""

    graph: ExportGraph
    images: Images
    labels: Labels | None
    generated: bool
    reference: Arrays
    rule: LabelRule | None = None

    def inputs(self, pixels: str, chosen: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Some images as an engine reads them."""
        images = self.images[chosen]
        return images if pixels == "uint8" else to_float(self.graph.preprocess, images).numpy()

    def example(self) -> Tensor:
        """A batch of two images: a batch of one would fix the batch size of a traced graph."""
        chosen = np.arange(2) % len(self.images)
        return torch.from_numpy(self.inputs(self.graph.options.pixels, chosen))


def collect_reference(
    graph: ExportGraph,
    images: Images | None,
    labels: Labels | None,
    rule: LabelRule | None = None,
) -> ProofImages:
    """Runs the images, or generated ones, through PyTorch."""
    preprocess = graph.preprocess
    generated = images is None or not len(images)
    if images is None or generated:
        images, labels = generate_images(preprocess), None
    check_images(preprocess, images, labels)
    bundle = ProofImages(graph, images, labels, generated, {}, rule)
    rows: list[Arrays] = []
    for start in range(0, len(images), max(BATCHES)):
        chosen = slice(start, start + max(BATCHES))
        rows.append(run_torch(graph, bundle.inputs(graph.options.pixels, chosen)))
    outputs = {name: np.concatenate([row[name] for row in rows]) for name in graph.outputs}
    for name, values in outputs.items():
        if not np.isfinite(values).all():
            raise UserError(
                f"PyTorch's {name} are NaN or infinite for some images; the weights are damaged, "
                f"or training diverged: use other weights"
            )
    bundle.reference.update(outputs)
    return bundle


def prove(
    bundle: ProofImages,
    engine: Engine,
    format: str,
    *,
    tolerance: float | None = None,
    exact: bool = True,
    locate: Callable[[NDArray[Any]], str] = lambda pixels: "",
) -> Proof:
    """Compares an engine with PyTorch; raises where an exact export differs by too much.

    `locate` names the first part of the model that differs on one image, for that error.
    """
    outputs = dict.fromkeys(bundle.graph.outputs, np.empty(0, np.float32))
    for name, reference in bundle.reference.items():
        outputs[name] = np.full_like(reference, np.nan)
    for chosen in choose_batches(len(bundle.images)):
        for name, values in engine.run(bundle.inputs(engine.pixels, chosen)).items():
            check_shape(name, values, bundle.reference[name][chosen])
            outputs[name][chosen] = values
    limit = None
    if exact:
        limit = check_differences(bundle, outputs, tolerance, engine, locate)
    logits, rule = bundle.reference.get("logits"), bundle.rule
    return Proof(
        format=format,
        engine=f"{engine.name} {engine.version}",
        images=len(bundle.images),
        generated=bundle.generated,
        batches=BATCHES,
        differences={
            name: float(np.abs(outputs[name] - reference).max())
            for name, reference in bundle.reference.items()
        },
        tolerance=limit,
        agreement=None if logits is None else measure_agreement(logits, outputs["logits"], rule),
        ties=0 if logits is None else int(find_ties(logits, rule).sum()),
        accuracy=measure_accuracy(bundle, outputs),
    )


def check_differences(
    bundle: ProofImages,
    outputs: Arrays,
    tolerance: float | None,
    engine: Engine,
    locate: Callable[[NDArray[Any]], str],
) -> float:
    """The tolerance that every output meets; otherwise raises and says where it differs most."""
    limit = TOLERANCE if tolerance is None else tolerance
    for name, reference in bundle.reference.items():
        difference = np.abs(outputs[name] - reference)
        difference[np.isnan(difference)] = math.inf
        index = np.unravel_index(int(difference.argmax()), difference.shape)
        worst, image = float(difference[index]), int(index[0])
        if worst > limit and tolerance is None:
            limit = max(limit, ROUNDING * measure_rounding(bundle, name, image))
        if worst > limit:
            where = f"image {image + 1} of {len(bundle.images)}"
            position = ", ".join(str(int(number)) for number in index[1:])
            where += f", {'class' if name == 'logits' else 'position'} {position}"
            part = locate(bundle.inputs(engine.pixels, slice(image, image + 1)))
            raise UserError(
                f"the {name} of {engine.name} differ from PyTorch's by {worst:.2g} ({where}), more "
                f"than {limit:.2g}{part}; nothing was written"
            )
    return limit


def measure_rounding(bundle: ProofImages, name: str, image: int) -> float:
    """PyTorch's own rounding error in float32 on one image: its difference from float64."""
    pixels = torch.from_numpy(bundle.inputs("float32", slice(image, image + 1))).double()
    model = copy.deepcopy(bundle.graph).double()
    model.options = replace(model.options, pixels="float32")
    with eval_mode(model), torch.inference_mode():
        exact = dict(zip(model.outputs, model(pixels), strict=True))[name]
    reference = torch.from_numpy(bundle.reference[name][image : image + 1])
    return float((exact - reference).abs().max())


def choose_batches(count: int) -> Iterator[NDArray[np.int64]]:
    """Indices of all images in batches of every size in turn; the first ones fill up the last."""
    start = 0
    while start < max(count, sum(BATCHES)):
        for size in BATCHES:
            yield np.arange(start, start + size) % count
            start += size


def run_torch(graph: ExportGraph, pixels: NDArray[Any]) -> Arrays:
    """PyTorch's outputs by name."""
    with eval_mode(graph), torch.inference_mode():
        outputs = graph(torch.from_numpy(pixels))
    return {name: x.numpy() for name, x in zip(graph.outputs, outputs, strict=True)}


def decide(logits: NDArray[np.float32], rule: LabelRule | None) -> NDArray[np.int64]:
    """The predicted class of each image; multi-label: a row of 0 and 1."""
    decisions: NDArray[np.int64] = (
        logits.argmax(axis=1)
        if rule is None
        else (rule[0] * logits + rule[1] >= 0).astype(np.int64)
    )
    return decisions


def measure_agreement(
    reference: NDArray[np.float32],
    outputs: NDArray[np.float32],
    rule: LabelRule | None = None,
) -> float:
    """The share of images with the same predicted class or labels, without those that are ties."""
    clear = ~find_ties(reference, rule)
    same = matches(decide(reference, rule), decide(outputs, rule))
    return float(same[clear].mean()) if clear.any() else 1.0


def find_ties(logits: NDArray[np.float32], rule: LabelRule | None = None) -> NDArray[np.bool_]:
    """Images whose prediction the tolerance may change.

    Their two highest logits differ by less, or, multi-label, a logit from where a label begins.
    """
    if rule is not None:
        margins = np.abs(rule[0] * logits + rule[1])
        near: NDArray[np.bool_] = (margins <= np.abs(rule[0]) * TOLERANCE).any(axis=1)
        return near
    if logits.shape[1] < 2:
        return np.zeros(len(logits), bool)
    highest = np.partition(logits, -2, axis=1)[:, -2:]
    ties: NDArray[np.bool_] = highest[:, 1] - highest[:, 0] <= TIE
    return ties


def measure_accuracy(bundle: ProofImages, outputs: Arrays) -> AccuracyChange | None:
    if bundle.labels is None or "logits" not in outputs:
        return None
    before, after = (
        decide(arrays["logits"], bundle.rule) for arrays in (bundle.reference, outputs)
    )
    return compare_accuracy(before, after, bundle.labels)


def check_shape(name: str, values: NDArray[Any], expected: NDArray[Any]) -> None:
    if values.shape != expected.shape:
        raise UserError(
            f"the exported {name} have the shape {values.shape}, PyTorch's {expected.shape}; "
            f"nothing was written"
        )


def check_images(preprocess: Preprocess, images: Images, labels: Labels | None) -> None:
    """Raises unless the images are cropped bytes, with one label each if there are any."""
    shape = (preprocess.channels, preprocess.height, preprocess.width)
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise UserError(
            f"images are {images.dtype} of shape {images.shape}; give uint8 of shape "
            f"(images, {', '.join(map(str, shape))})"
        )
    if labels is not None and len(labels) != len(images):
        raise UserError(f"{len(labels)} labels for {len(images)} images; give one for each image")


def generate_images(preprocess: Preprocess) -> Images:
    """Random images: coarse patterns with noise, from dark to bright."""
    generator = np.random.default_rng(0)
    shape = (GENERATED, preprocess.channels, preprocess.height, preprocess.width)
    coarse = torch.from_numpy(generator.uniform(0, 255, (*shape[:2], 4, 4)))
    smooth = torch.nn.functional.interpolate(coarse, size=shape[2:], mode="bilinear").numpy()
    noise = generator.normal(0, 30, shape)
    return (smooth + noise).clip(0, 255).astype(np.uint8)


def to_float(preprocess: Preprocess, images: Images) -> Tensor:
    """Normalised images, as a model reads them."""
    return normalise(preprocess, torch.from_numpy(np.ascontiguousarray(images)))
