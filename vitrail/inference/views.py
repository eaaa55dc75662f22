"""Test-time views: the mean logits of an image, its mirror image and slightly shifted ones."""

import logging
from dataclasses import dataclass, replace

import numpy as np

from vitrail.errors import UserError
from vitrail.inference.prediction import ImageInput
from vitrail.inference.predictor import Array, Predictor

log = logging.getLogger(__name__)

SHIFTS = ((0, 0), (-1, -1), (1, 1), (-1, 1), (1, -1))  # rows and columns, in units of SHIFT
SHIFT = 1 / 32  # of a side: one pixel of an image of 32
MOST = 2 * len(SHIFTS)


@dataclass(frozen=True, kw_only=True, eq=False)
class ViewsPredictor(Predictor):
    """A predictor whose logits are the mean over several views of each image."""

    single: Predictor  # what computes the logits of one view
    views: int  # 1: the image, 2: and its mirror image, more: shifted by a few pixels

    def load(self, image: ImageInput) -> Array:
        """One preprocessed image, (C, H, W)."""
        return self.single.load(image)

    def logits(self, x: Array) -> Array:
        """The mean logits (B, K) of the views of preprocessed images (B, C, H, W)."""
        total = sum(self.single.logits(make_view(x, number)) for number in range(self.views))
        mean: Array = np.asarray(total) / self.views
        return mean


def make_view(x: Array, number: int) -> Array:
    """One view of images (B, C, H, W): odd ones are mirrored, from the third on all are shifted."""
    rows, columns = (
        round(step * max(1, SHIFT * side))
        for step, side in zip(SHIFTS[number // 2], x.shape[2:], strict=True)
    )
    view = shift_axis(shift_axis(x, rows, 2), columns, 3)
    return np.ascontiguousarray(view[..., ::-1] if number % 2 else view)


def shift_axis(x: Array, distance: int, axis: int) -> Array:
    """Shifts along one axis; pixels at the border are repeated."""
    index = np.clip(np.arange(x.shape[axis]) - distance, 0, x.shape[axis] - 1)
    shifted: Array = np.take(x, index, axis)
    return shifted


def add_views(predictor: Predictor, views: int) -> Predictor:
    """The predictor with this number of views, calibrated again on the validation images.

    Warns if these cannot be opened, or if the views lower the accuracy on them.
    """
    if not isinstance(views, int) or isinstance(views, bool) or not 1 <= views <= MOST:
        raise UserError(f"`views` is {views!r}; give a whole number from 1 to {MOST}")
    if views == 1:
        return predictor
    if predictor.multi_label is not None:
        raise UserError("`views` need one label per image, this model has several; omit `views`")
    several = ViewsPredictor(
        single=predictor,
        views=views,
        classes=predictor.classes,
        preprocess=predictor.preprocess,
        training_data=predictor.training_data,
    )
    return replace(several, temperature=fit_temperature_of_views(several))


def fit_temperature_of_views(several: ViewsPredictor) -> float | None:
    """The temperature of the mean logits; None without validation images."""
    from vitrail.evaluation.metrics import accuracy, fit_temperature
    from vitrail.inference.evaluate import compute_validation_logits

    try:
        logits, labels = compute_validation_logits(several)
        before, _ = compute_validation_logits(several.single)
    except UserError as error:
        log.warning(f"the probabilities of {several.views} views are not calibrated: {error}")
        return None
    single, mean = accuracy(before, labels), accuracy(logits, labels)
    if mean < single:
        log.warning(
            f"{several.views} views lower the accuracy on validation images from {single:.1%} to "
            f"{mean:.1%}; was this model trained without flips?"
        )
    return fit_temperature(logits, labels)
