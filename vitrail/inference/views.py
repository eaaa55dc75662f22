"""Test-time views: the mean logits of an image, its mirror image and slightly shifted ones."""

import logging
from dataclasses import dataclass, replace

import numpy as np

from vitrail.errors import UserError
from vitrail.evaluation.calibration import Promise
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

    def promise(self, coverage: float | None = None, abstain: float | None = None) -> Promise:
        """The thresholds of the mean logits, which a model file does not hold."""
        if self.calibration is None and (coverage is not None or abstain is not None):
            name = "abstain" if coverage is None else "coverage"
            raise UserError(
                f"`{name}` with `views` needs the validation images of the training data, which "
                f"cannot be used; omit `views` or `{name}`"
            )
        return super().promise(coverage, abstain)


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


def without_views(predictor: Predictor) -> Predictor:
    """The predictor of the image alone."""
    return predictor.single if isinstance(predictor, ViewsPredictor) else predictor


def add_views(predictor: Predictor, views: int) -> Predictor:
    """The predictor with this number of views, calibrated again on the validation images.

    Warns if these cannot be opened, or if the views lower the accuracy on them.
    """
    if not isinstance(views, int) or isinstance(views, bool) or not 1 <= views <= MOST:
        raise UserError(f"`views` is {views!r}; give a whole number from 1 to {MOST}")
    single = without_views(predictor)
    if views == 1:
        return single
    if single.multi_label is not None:
        raise UserError("`views` need one label per image, this model has several; omit `views`")
    several = ViewsPredictor(
        single=single,
        views=views,
        classes=single.classes,
        preprocess=single.preprocess,
        training_data=single.training_data,
    )
    return calibrate_views(several)


def calibrate_views(several: ViewsPredictor) -> ViewsPredictor:
    """Temperature, prediction sets and abstention of the mean logits; none without images.

    Odd images are not told: the model file holds the features and logits of single images.
    """
    from vitrail.evaluation.metrics import accuracy
    from vitrail.inference.calibrate import fit_outputs
    from vitrail.inference.evaluate import compute_validation_logits

    try:
        logits, labels = compute_validation_logits(several)
        before, _ = compute_validation_logits(several.single)
    except UserError as error:
        log.warning(f"the probabilities of {several.views} views are not calibrated: {error}")
        return several
    single, mean = accuracy(before, labels), accuracy(logits, labels)
    if mean < single:
        log.warning(
            f"{several.views} views lower the accuracy on validation images from {single:.1%} to "
            f"{mean:.1%}; was this model trained without flips?"
        )
    name, classes = several.training_data.name, len(several.classes)
    calibration, temperature = fit_outputs(logits, labels, classes, name, None)
    return replace(several, temperature=temperature, calibration=calibration)
