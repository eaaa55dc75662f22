"""The contact sheet shows what the model receives."""

import io
from itertools import islice

import numpy as np
import torch
from PIL import Image

from tests.data.fakes import Fake, arrays
from vitrail.data.config import AUGMENT_PRESETS, NORMALISATIONS, DataConfig, Preprocess
from vitrail.data.loader import Batch, Loader
from vitrail.data.preprocess import normalise
from vitrail.display.sheet import (
    CELL,
    GAP,
    LINE,
    denormalise,
    describe_target,
    draw_sheet,
    label_or_index,
    load_font,
)


def shown(batch, classes, view, **settings):
    return draw_sheet(
        batch.images, batch.targets, classes, mean=view.mean, std=view.std, **settings
    )


def test_denormalisation_is_exact():
    view = Preprocess(
        size=16, mean=NORMALISATIONS["imagenet"][0], std=NORMALISATIONS["imagenet"][1]
    )
    pixels = np.stack(arrays(4))
    images = normalise(view, torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous())
    assert np.array_equal(denormalise(images, view.mean, view.std), pixels)


def test_every_image_has_its_cell():
    view, source = Preprocess(size=16), Fake(arrays())
    batch = next(iter(Loader(source, view, DataConfig(), batch=10).training()))
    page = Image.open(io.BytesIO(shown(batch, source.classes, view, columns=4)))
    side = CELL // 16 * 16
    assert page.size == (4 * (side + GAP) + GAP, 3 * (side + LINE + GAP) + GAP)
    left, top = GAP + side + GAP, GAP + side + LINE + GAP  # the sixth: second row, second column
    cell = page.crop((left, top, left + side, top + side)).resize(
        (16, 16), Image.Resampling.NEAREST
    )
    assert np.array_equal(np.asarray(cell), source.contents[batch.items[5]])


def test_grey_and_mixed_batches_can_be_shown():
    view = Preprocess(size=8, channels=1)
    source = Fake(arrays(side=8, channels=1))
    config = DataConfig(augment=AUGMENT_PRESETS["strong"])
    for batch in islice(Loader(source, view, config, batch=4).training(), 3):
        assert Image.open(io.BytesIO(shown(batch, source.classes, view))).mode == "RGB"


def test_both_classes_of_a_mixed_image_are_named():
    assert (
        describe_target(torch.tensor([0.3, 0.0, 0.7]), ["cat", "dog", "owl"])
        == "70 % owl, 30 % cat"
    )
    assert describe_target(torch.tensor([0.0, 1.0, 0.0]), ["cat", "dog", "owl"]) == "dog"
    assert describe_target(torch.tensor(2), ["cat", "dog", "owl"]) == "owl"


def test_a_long_label_stays_in_its_column():
    labels = torch.zeros(2, dtype=torch.int64)
    batch = Batch(torch.zeros(2, 3, 16, 16), labels, labels, np.arange(2), step=0, epoch=0)
    page = Image.open(io.BytesIO(shown(batch, ["W" * 80], Preprocess(size=16))))
    gap = np.asarray(page)[:, GAP + 112 : 2 * GAP + 112]
    assert gap.min() == 255


def test_a_class_that_the_font_cannot_write_is_named_by_its_number():
    names = ["café 2", "Ж", "\u732b"]  # the last one Chinese
    names_shown = [label_or_index(name, number, load_font()) for number, name in enumerate(names)]
    assert names_shown == ["café 2", "Ж", "class 2"]
