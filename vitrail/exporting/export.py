"""Exports a model: traces it, proves the result equal to PyTorch, and only then names the file."""

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail import __version__
from vitrail.data.config import Preprocess
from vitrail.display.text import format_bytes, format_percent
from vitrail.errors import UserError
from vitrail.exporting.card import render_proof
from vitrail.exporting.engine import Engine, PixelKind
from vitrail.exporting.equalize import equalize_channels
from vitrail.exporting.formats import FORMATS, FormatName
from vitrail.exporting.graph import ExportGraph, GraphOptions, prepare_model
from vitrail.exporting.packages import import_package
from vitrail.exporting.proof import (
    LabelRule,
    Proof,
    ProofImages,
    collect_reference,
    prove,
    run_torch,
    to_float,
)
from vitrail.exporting.quantize import measure_calibration, quantize_onnx, split_calibration
from vitrail.exporting.staging import PROOF_HTML, check_export_target, stage_files
from vitrail.exporting.triton import check_model_name, write_repository
from vitrail.exporting.writers import OnnxWriter, OpenVinoWriter, Writer, build_writer
from vitrail.model.vit import ViT

METADATA_FORMAT = 1  # of the JSON in the file, as in model.safetensors
MOST_LOST = 0.5  # percentage points of accuracy that int8 may lose
TIMING_ROUNDS, TIMING_SECONDS = 7, 0.5  # at least and at most, both contenders in turn


@dataclass(frozen=True, kw_only=True)
class Export:
    """A file that was written, and how it compares with PyTorch.

    >>> exported = vitrail.export("runs/digits-1", "result.onnx")  # doctest: +SKIP
    >>> exported.largest_difference < 1e-4  # doctest: +SKIP
    True
    """

    source: str
    target: str
    format: str
    bytes: int
    images: int  # that the proof compared
    largest_difference: float
    agreement: float | None
    accuracy: dict[str, Any] | None  # before, after, interval of the change
    speedup: float  # PyTorch's time for one image over this engine's
    proof: Proof = field(repr=False)
    files: tuple[Path, ...] = field(repr=False)

    @property
    def proof_page(self) -> Path:
        """The proof card as a page.

        >>> vitrail.export("runs/digits-1", "page.onnx").proof_page.name  # doctest: +SKIP
        'page.onnx.proof.html'
        """
        folder = Path(self.target)
        if folder.is_dir():
            return folder / PROOF_HTML
        return folder.with_name(f"{folder.name}.{PROOF_HTML}")

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail export --json` prints.

        >>> vitrail.export("runs/digits-1", "document.onnx").to_dict()["format"]  # doctest: +SKIP
        'onnx'
        """
        hidden = ("proof", "files")
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def __repr__(self) -> str:
        parts = [self.target, format_bytes(self.bytes)]
        parts.append(f"largest difference {self.largest_difference:.2g}")
        if self.agreement is not None:
            parts.append(f"agreement {format_percent(self.agreement)}")
        if self.accuracy is not None:
            before, after = map(format_percent, (self.accuracy["before"], self.accuracy["after"]))
            parts.append(f"accuracy {before} -> {after}")
        return f"Export({', '.join(parts)}, {self.speedup:.2f} x the speed of PyTorch)"

    def _repr_html_(self) -> str:
        return render_proof(self.proof, Path(self.target).name)


def export_model(
    model: ViT,
    target: str | Path,
    *,
    classes: Sequence[str],
    preprocess: Preprocess,
    to: FormatName = "onnx",
    metadata: Mapping[str, Any] | None = None,
    images: NDArray[np.uint8] | None = None,
    labels: NDArray[np.int64] | None = None,
    calibration: NDArray[np.uint8] | None = None,
    rule: LabelRule | None = None,
    source: str = "",
    name: str | None = None,
    int8: bool = False,
    attention: bool = False,
    features: bool = False,
    odd: bool = False,
    pixels: PixelKind = "float32",
    any_size: bool = False,
    tolerance: float | None = None,
    most: float = MOST_LOST,
    force: bool = False,
    overwrite: bool = False,
) -> Export:
    """Writes the model for another runtime, with a proof card beside it.

    Args:
        model: a ViT; it is not changed
        target: the file, or for Triton the folder of the model repository
        classes: one name for each logit
        preprocess: how images become the input of the model
        to: onnx, openvino, torch or triton
        metadata: other entries of the model file, such as the temperature
        images: cropped but not normalised, uint8 (N, C, H, W); without them some are generated
        labels: the class index of each image, or its row of 0 and 1; int8 needs them
        calibration: other images, on which int8 is calibrated; by default some of `images`, which
            then do not judge it
        rule: of a multi-label model, from which logit each label is predicted
        source: where the model comes from, for the result
        name: the model's name in a Triton repository; by default that of `source`
        int8: quantise weights and activations to 8 bits
        attention: also return the attention weights of every block
        features: also return the pooled features
        odd: also return the features that tell odd images; not for int8, which changes them
        pixels: float32 for normalised images; uint8 if the graph is to normalise them
        any_size: accept images of any size that patches tile
        tolerance: largest difference from PyTorch; by default 1e-4, more only if PyTorch's own
            rounding error is larger
        most: percentage points of accuracy that int8 may lose
        force: write the int8 file even if it loses more
        overwrite: replace an existing file
    """
    target, name = Path(target), name or Path(source).stem or "vitrail"
    check_request(model, target, to, name, int8=int8, odd=odd, labels=labels, overwrite=overwrite)
    options = GraphOptions(
        pixels=pixels, attention=attention, features=features, odd=odd, any_size=any_size
    )
    graph = ExportGraph(prepare_model(model, preprocess, any_size), preprocess, options).eval()
    if int8 and images is not None and labels is not None and calibration is None:
        chosen, others = split_calibration(len(images))
        calibration, images, labels = images[chosen], images[others], labels[others]
    bundle = collect_reference(graph, images, labels, rule)
    document = describe_export(graph, classes, metadata, to, int8)
    with stage_files(target, to, name) as staged:
        place = staged.main
        if to == "triton":
            place = write_repository(staged.main, name, graph, preprocess, classes)
        if int8:
            assert calibration is not None
            writer, proof = quantize_until_accurate(
                bundle, calibration, place, to, most=most, force=force
            )
        else:
            writer = build_writer(to, graph, bundle.example())
            writer.write(place, document)
            engine = writer.open(place)
            proof = prove(bundle, engine, to, tolerance=tolerance, locate=writer.locate)
        document["export"] |= {**writer.details, "float_layers": list(proof.float_layers)}
        writer.write(place, document | {"proof": proof.to_dict()})
        speedup = measure_speedup(bundle, writer.open(place))
        staged.proof_json.write_text(json.dumps(proof.to_dict(), indent=2) + "\n")
        staged.proof_html.write_text(render_proof(proof, staged.final.name), encoding="utf-8")
        size = sum(file.stat().st_size for file in staged.model_files())
    return Export(
        source=source,
        target=str(staged.final),
        format=to,
        bytes=size,
        images=proof.images,
        largest_difference=proof.largest_difference,
        agreement=proof.agreement,
        accuracy=proof.accuracy.to_dict() if proof.accuracy else None,
        speedup=speedup,
        proof=proof,
        files=staged.final_files,
    )


def check_request(
    model: ViT,
    target: Path,
    to: str,
    name: str,
    *,
    int8: bool,
    odd: bool,
    labels: NDArray[np.int64] | None,
    overwrite: bool,
) -> None:
    """Raises before any work for what can be known beforehand."""
    if not isinstance(model, ViT):
        raise UserError(
            "a scikit-learn head cannot be exported, only the Vision Transformer itself; "
            "export the model without its head"
        )
    if to not in FORMATS:
        raise UserError(f"unknown format {to!r}; choose {', '.join(FORMATS)}")
    if int8 and to == "torch":
        raise UserError("`int8` needs `to='onnx'`, `to='openvino'` or `to='triton'`, not torch")
    if int8 and odd:
        raise UserError("int8 changes the features that tell odd images; leave out `int8` or `odd`")
    if int8 and (labels is None or not len(labels)):
        raise UserError(
            "int8 changes the logits, and only labelled images show what that costs; "
            "give labelled images as `data`"
        )
    if int8 and model.config.head == "none":
        raise UserError("`int8` needs a classification head to measure its accuracy")
    for package in FORMATS[to].packages:
        import_package(package)
    if to == "triton":
        check_model_name(name)
    check_export_target(target, to, name, overwrite)


def describe_export(
    graph: ExportGraph,
    classes: Sequence[str],
    metadata: Mapping[str, Any] | None,
    to: str,
    int8: bool,
) -> dict[str, Any]:
    """The metadata of the file: what model.safetensors holds, and what was exported."""
    config = graph.model.config
    if config.head != "none" and len(classes) != config.classes:
        raise UserError(
            f"{len(classes)} names for {config.classes} classes; give one for each class"
        )
    return {
        "temperature": None,
        **(metadata or {}),
        "format": METADATA_FORMAT,
        "vit": asdict(config),
        "versions": {"vitrail": __version__, "torch": str(torch.__version__)},
        "classes": list(classes),
        "preprocess": graph.preprocess.to_dict(),
        "export": {"to": to, "int8": int8, "outputs": list(graph.outputs), **asdict(graph.options)},
    }


def quantize_until_accurate(
    bundle: ProofImages,
    calibration_images: NDArray[np.uint8],
    path: Path,
    to: str,
    *,
    most: float,
    force: bool,
) -> tuple[Writer, Proof]:
    """The int8 form with the fewest layers in float that loses at most `most` points."""
    images = to_float(bundle.graph.preprocess, calibration_images)
    graph = copy.deepcopy(bundle.graph)
    equalize_channels(graph.model, images)
    writer = build_writer(to, graph, bundle.example())
    assert isinstance(writer, OnnxWriter | OpenVinoWriter)
    calibration = measure_calibration(graph.model, images)
    attempts: list[tuple[float, Writer, Proof]] = []
    for float_layers in calibration.float_layers():
        model = quantize_onnx(writer.model, calibration, float_layers)
        candidate = replace(writer, model=model)
        candidate.write(path, {})
        proof = prove(bundle, candidate.open(path), to, exact=False)
        assert proof.accuracy is not None
        attempts.append((proof.accuracy.loss, candidate, replace(proof, float_layers=float_layers)))
        if proof.accuracy.loss <= most:
            break
    loss, best, proof = min(attempts, key=lambda attempt: attempt[0])
    proof = replace(proof, attempts=len(attempts))
    if loss > most and not force:
        assert proof.accuracy is not None
        before, after = map(format_percent, (proof.accuracy.before, proof.accuracy.after))
        raise UserError(
            f"int8 loses {loss:.1f} points of accuracy ({before} to {after} on {proof.images} "
            f"images), more than {most:g}; raise `most` or set `force`; nothing was written"
        )
    return best, proof


def measure_speedup(bundle: ProofImages, engine: Engine) -> float:
    """PyTorch's time for one image over the engine's: the medians of several runs in turn."""
    ours = bundle.inputs(bundle.graph.options.pixels, slice(0, 1))
    theirs = bundle.inputs(engine.pixels, slice(0, 1))
    contenders: list[Callable[[], object]] = [
        lambda: run_torch(bundle.graph, ours),
        lambda: engine.run(theirs),
    ]
    seconds: list[list[float]] = [[], []]
    began = time.perf_counter()
    while len(seconds[0]) <= TIMING_ROUNDS or time.perf_counter() - began < TIMING_SECONDS:
        for index, run in enumerate(contenders):
            start = time.perf_counter()
            run()
            seconds[index].append(time.perf_counter() - start)
    ours_median, theirs_median = (float(np.median(times[1:])) for times in seconds)  # 1 warms up
    return ours_median / theirs_median
