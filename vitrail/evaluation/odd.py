"""Odd images: those unlike all training images, in their features or in how little any class fits.

Late features, taken after the last block, describe what is in an image: their distance is the mean
Euclidean distance to the nearest training images, all normalised to length 1 (after Sun et al.,
2022). Early features, taken before the first block, describe colours and edges: theirs is the
Mahalanobis distance to the training images (after Lee et al., 2018). The third distance is the
negated largest logit (Hendrycks et al., 2022), which is high for what is like no class.

The three are combined by Fisher's method, as evidence that adds up: each becomes a p-value, that
of a logistic distribution fitted to validation images, and the sum of -log p is how odd the image
is. A distance that finds nothing unusual adds next to nothing and subtracts nothing. Colours and
edges count only where they are unusual for such images (a truncated product, Zaykin et al.,
2002): photos of one thing differ in them as much as photos of two things do. As the three are not
independent, the p-value of the sum is again the fraction of validation images with at least as
large a one: 1 % of images like the training images have a p-value below 0.01, whatever the model.
"""

import base64
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError

Rows = NDArray[np.float32]

ODD = 0.01  # images with a smaller p-value are flagged: one in a hundred that are not odd
NEIGHBOURS = 5  # whose mean distance counts
DIMENSIONS = 64  # that principal components keep of the features
MAX_BYTES = 1_000_000  # of everything in the model file, as base64
MAX_KNOWN = 1024  # validation images whose oddness is stored
CHUNK = 256  # rows whose distances are in memory at once
UPPER = 0.84  # quantile that fits the scale of a logistic distribution, besides the median
STARTS = (0.5, 0.9, 0.5)  # quantiles from which late, early and logit count as evidence
SHRINKAGE = 0.01  # of the largest variance, added to all: directions without any do not dominate
MIN_IMAGES = 20  # training and validation images without which distances mean nothing


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Mean and principal components of the early features of training images."""

    width: int  # of the features
    dimensions: int  # after projection
    mean: str  # float32 (width)
    components: str  # projection, float16 (width, dimensions)
    spread: tuple[float, ...]  # along each component, and along one direction that they leave out

    def __post_init__(self) -> None:
        if len(self.spread) != self.dimensions + 1 or not min(self.spread) > 0:
            raise UserError("the spread of early features is damaged; calibrate the model again")
        _ = self._arrays  # raises if a length is wrong

    def measure(self, features: NDArray[Any]) -> Rows:
        """The distance of each image to the mean, (N)."""
        mean, components, spread = self._arrays
        rows = project(np.asarray(features, np.float32) - mean, components) / spread
        distances: Rows = np.sqrt((rows**2).sum(axis=1))
        return distances

    @cached_property
    def _arrays(self) -> tuple[Rows, Rows, Rows]:
        mean = unpack(self.mean, "<f4", (self.width,))
        components = unpack(self.components, "<f2", (self.width, self.dimensions))
        return mean, components, np.array(self.spread, np.float32)


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The features of training images, compressed, and how odd validation images are."""

    width: int  # of the features, late and early
    dimensions: int  # of the late ones after projection
    images: int  # training images
    scale: float  # of one step of the quantised features
    mean: str  # of the late features, float16 (width)
    components: str  # projection, float16 (width, dimensions)
    features: str  # int8 (images, dimensions + 1)
    early: Gaussian
    starts: tuple[float, float, float]  # late, early, logit: from where each counts as evidence
    scales: tuple[float, float, float]  # of their logistic distributions
    known: tuple[float, ...]  # how odd validation images are, ascending

    def __post_init__(self) -> None:
        if min(self.width, self.dimensions, self.images, len(self.known)) < 1:
            raise UserError("the features of training images are empty; calibrate the model again")
        if not min(self.scales) > 0:
            raise UserError("the distances of validation images are damaged; calibrate it again")
        _ = self._arrays  # raises if a length is wrong

    def p_values(self, outputs: NDArray[Any]) -> NDArray[np.float64]:
        """The p-value of each image (N), from its logits and features (N, K + width).

        Beyond all validation images it falls as e^-x, the tail of a sum of -log p, so that a model
        with fewer than 100 of them can flag images, too.
        """
        known, measured = np.array(self.known), self.measure(outputs).astype(np.float64)
        at_least = len(known) - np.searchsorted(known, measured)
        beyond = np.maximum(measured - known[-1], 0)
        p_values: NDArray[np.float64] = (at_least + 1) / (len(known) + 1) * np.exp(-beyond)
        return p_values

    def measure(self, outputs: NDArray[Any]) -> Rows:
        """How odd each image is, (N): the sum of -log p over its three distances."""
        fits = zip(self.distances(outputs), self.starts, self.scales, strict=True)
        evidence = [np.logaddexp(0, (each - start) / scale) for each, start, scale in fits]
        total: Rows = np.sum(evidence, axis=0, dtype=np.float32)
        return total

    def distances(self, outputs: NDArray[Any]) -> tuple[Rows, Rows, Rows]:
        """Late and early distance and negated largest logit of each image, each (N)."""
        mean, components, stored = self._arrays
        logits, late, early = np.split(outputs, [-self.width, -self.early.width], axis=1)
        near = mean_distance(project(normalise_rows(late) - mean, components), stored)
        return near, self.early.measure(early), -logits.max(axis=1)

    @cached_property
    def _arrays(self) -> tuple[Rows, Rows, Rows]:
        late = self.width - self.early.width
        mean = unpack(self.mean, "<f2", (late,))
        components = unpack(self.components, "<f2", (late, self.dimensions))
        features = unpack(self.features, "i1", (self.images, self.dimensions + 1))
        return mean, components, features * self.scale


def fit_neighbours(train: NDArray[Any], val: NDArray[Any], classes: int) -> Neighbours | None:
    """Compresses features of training images and fits the distances of validation images.

    Both are logits, late and early features (N, K + 2 D); None if there are too few images.
    """
    if min(len(train), len(val)) < MIN_IMAGES:
        return None
    features = np.asarray(train)[:, classes:]
    late_half, early_half = np.split(features, 2, axis=1)
    rows, early = normalise_rows(late_half), fit_gaussian(early_half)
    mean = rows.mean(axis=0).astype("<f2")
    components = principal_components(rows - mean).astype("<f2")
    used = mean.nbytes + components.nbytes + 16 * MAX_KNOWN
    room = MAX_BYTES * 3 // 4 - used - 3 * (len(early.mean) + len(early.components)) // 4
    rows = pick_rows(rows, max(1, room // (components.shape[1] + 1)))
    projected = project(rows - mean.astype(np.float32), components.astype(np.float32))
    scale = float(np.abs(projected).max()) / 127 or 1.0
    fitted = Neighbours(
        width=features.shape[1],
        dimensions=components.shape[1],
        images=len(projected),
        scale=scale,
        mean=pack(mean),
        components=pack(components),
        features=pack((projected / scale).round().astype("i1")),
        early=early,
        starts=(0.0, 0.0, 0.0),
        scales=(1.0, 1.0, 1.0),
        known=(0.0,),
    )
    a, b, c = map(fit_evidence, fitted.distances(val), STARTS)
    fitted = replace(fitted, starts=(a[0], b[0], c[0]), scales=(a[1], b[1], c[1]))
    known = pick_rows(np.sort(fitted.measure(val)), MAX_KNOWN)
    return replace(fitted, known=tuple(float(f"{one:.5g}") for one in known))


def fit_evidence(values: Rows, start: float) -> tuple[float, float]:
    """The quantile `start` and the scale of the logistic distribution that fits the values."""
    median, upper = (float(np.quantile(values, q)) for q in (0.5, UPPER))
    scale = max((upper - median) / math.log(UPPER / (1 - UPPER)), 1e-6)
    return median + scale * math.log(start / (1 - start)), scale


def fit_gaussian(features: NDArray[Any]) -> Gaussian:
    """Mean and spread of features (N, D)."""
    rows = np.asarray(features, np.float32)
    mean = rows.mean(axis=0)
    components = principal_components(rows - mean).astype("<f2")
    variance = (project(rows - mean, components.astype(np.float32)) ** 2).mean(axis=0)
    variance[-1] /= max(1, len(mean) - components.shape[1])  # of one direction that is left out
    spread = np.sqrt(variance + SHRINKAGE * max(float(variance.max()), 1e-12))
    return Gaussian(
        width=len(mean),
        dimensions=components.shape[1],
        mean=pack(mean.astype("<f4")),
        components=pack(components),
        spread=tuple(float(f"{one:.5g}") for one in spread),
    )


def normalise_rows(features: NDArray[Any]) -> Rows:
    """Rows of length 1, in float32."""
    rows = np.asarray(features, np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    normalised: Rows = (rows / np.maximum(lengths, 1e-12)).astype(np.float32, copy=False)
    return normalised


def principal_components(centred: Rows) -> Rows:
    """The directions of largest variance, (D, dimensions)."""
    _, vectors = np.linalg.eigh(centred.T.astype(np.float64) @ centred)
    return vectors[:, -DIMENSIONS:].astype(np.float32)


def project(centred: Rows, components: Rows) -> Rows:
    """Principal components, and the length of what they leave out: (N, dimensions + 1).

    An image that differs in a direction in which training images do not vary is far away, too.
    """
    projected = centred @ components
    rest = (centred**2).sum(axis=1) - (projected**2).sum(axis=1)
    return np.concatenate([projected, np.sqrt(np.maximum(rest, 0))[:, None]], axis=1)


def pick_rows(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """At most `count` rows, evenly spaced."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    chosen: NDArray[Any] = rows[places]
    return chosen


def mean_distance(rows: Rows, stored: Rows) -> Rows:
    """The mean Euclidean distance of each row to its nearest stored ones, (N)."""
    count, lengths = min(NEIGHBOURS, len(stored)), (stored**2).sum(axis=1)
    distances = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        squares = (part**2).sum(axis=1)[:, None] + lengths - 2 * part @ stored.T
        nearest = np.partition(squares, count - 1, axis=1)[:, :count]
        distances[start : start + CHUNK] = np.sqrt(np.maximum(nearest, 0)).mean(axis=1)
    return distances


def pack(array: NDArray[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def unpack(text: str, dtype: str, shape: tuple[int, ...]) -> Rows:
    """An array as float32; raises unless the text holds exactly this shape."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserError("the features of training images are not valid base64") from error
    if len(content) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise UserError(f"the features of training images do not have the shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape).astype(np.float32)


def auroc(known: NDArray[Any], foreign: NDArray[Any]) -> float:
    """The probability that a foreign image scores higher than a known one; ties count half."""
    order = np.sort(known)
    below = np.searchsorted(order, foreign, side="left")
    not_above = np.searchsorted(order, foreign, side="right")
    return float((below + not_above).mean() / 2 / len(order))
