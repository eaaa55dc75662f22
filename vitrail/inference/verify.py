"""Verifies that a model file is intact, and that this machine computes what its author computed."""

from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.arguments import check_arguments
from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.exporting.engine import EngineName
from vitrail.inference.classifier import Classifier
from vitrail.inference.engine_classifier import EngineClassifier
from vitrail.inference.load import load
from vitrail.zoo.reference import compute_reference, reference_images

# Largest accepted difference of logits, relative to the largest logit: float32 on different
# processors, with different kernels and orders of summation, stays below a tenth of it.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification:
    """Whether a model is the one that was tested; its fields are the keys of `verify --json`.

    >>> vitrail.verify("runs/digits-1").passed
    True
    """

    source: str  # path as given
    passed: bool  # the largest difference is within the tolerance
    sha256: str  # of weights and metadata: two files with the same one are the same model
    tensors: int  # whose sha256 was compared; 0 for an exported file
    images: int  # generated ones whose logits were compared
    largest_difference: float  # of these logits, absolute
    tolerance: float  # limit of the difference
    engine: str  # what computed the logits here

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail verify --json` prints.

        >>> vitrail.verify("runs/digits-1").to_dict()["images"]
        4
        """
        return asdict(self)

    def __repr__(self) -> str:
        return "\n".join([self._title, *(f"  {line}" for line in self._lines())])

    def _repr_html_(self) -> str:
        lines = "".join(f"<br>{escape(line)}" for line in self._lines())
        return f"<p>{escape(self._title)}{lines}</p>"

    @property
    def _title(self) -> str:
        answer = "is the model that was tested" if self.passed else "computes different answers"
        return f"{self.source} {answer}"

    def _lines(self) -> list[str]:
        return [
            f"sha256 {self.sha256}: "
            + (
                f"{format_count(self.tensors, 'tensor')} and metadata unchanged"
                if self.tensors
                else "of the model that was exported"
            ),
            f"largest difference {self.largest_difference:.1e} in the logits of "
            f"{format_count(self.images, 'reference image')}, tolerance {self.tolerance:.1e}",
            f"computed by {self.engine}",
        ]


@check_arguments
def verify(
    model: str | Path, *, device: str = "auto", engine: EngineName | None = None
) -> Verification:
    """Checks the sha256 of every tensor, and the logits of generated reference images.

    Args:
        model: run folder, model file or exported file; `vitrail.convert` makes a model file of
            the weights of other libraries
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        engine: torch, onnxruntime, openvino, or auto for the fastest; by default torch, for an
            exported file its own

    >>> vitrail.verify("runs/digits-1")
    runs/digits-1 is the model that was tested
      sha256 ...: ... tensors and metadata unchanged
      largest difference ... in the logits of 4 reference images, tolerance ...
      computed by torch ... on cpu
    """
    return verify_classifier(load(model, device=device, engine=engine), str(model))


def check_same_answers(classifier: Classifier, source: str) -> None:
    """Raises if a model computes other answers here than after training; for serve and export.

    Models without reference answers are not checked.
    """
    if classifier.metadata.checksums is None or classifier.metadata.reference is None:
        return
    result = verify_classifier(classifier, source)
    if not result.passed:
        raise UserError(
            f"{source} computes other answers here than after training: logits differ by up to "
            f"{result.largest_difference:.1e}, tolerance {result.tolerance:.1e} ({result.engine}); "
            f"try another version of torch, or another `device`"
        )


def verify_classifier(classifier: Classifier, source: str) -> Verification:
    """Verifies a loaded classifier; loading it has compared the checksums."""
    metadata = classifier.metadata
    if metadata.checksums is None or metadata.reference is None:
        raise UserError(
            f"{source} has no checksums and reference answers to verify: another library or an "
            f"older version wrote it; `vitrail convert MODEL --to vitrail` adds them"
        )
    expected = np.array(metadata.reference.logits)
    tensors, engine = 0, classifier._where()
    if isinstance(classifier, EngineClassifier):
        predictor, images = classifier.predictor, reference_images(classifier.preprocess)
        logits = predictor.logits(np.stack([predictor.load(image) for image in images]))
    else:  # in float32, also where predictions are in bfloat16
        import torch

        logits = compute_reference(classifier.model, classifier.preprocess).numpy()
        tensors, engine = len(metadata.checksums.tensors), f"torch {torch.__version__} on {engine}"
    if expected.shape != logits.shape:
        raise UserError(
            f"{source} has reference answers of shape {tuple(expected.shape)}, expected "
            f"{tuple(logits.shape)}; train or convert it again"
        )
    difference = float(np.abs(logits - expected).max())
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    passed = difference <= tolerance  # false for NaN, too
    if metadata.document.get("export", {}).get("int8"):  # quantised: only the classes must agree
        passed = bool((logits.argmax(axis=1) == expected.argmax(axis=1)).all())
    return Verification(
        source=source,
        passed=passed,
        sha256=metadata.checksums.model,
        tensors=tensors,
        images=len(logits),
        largest_difference=difference,
        tolerance=tolerance,
        engine=engine,
    )
