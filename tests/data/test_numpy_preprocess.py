"""Preprocessing without PyTorch gives the bits of preprocessing with it."""

import numpy as np
import pytest

from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.numpy_preprocess import preprocess_with_numpy, resize_with_numpy
from vitrail.data.preprocess import preprocess, resize

SIZES = [  # larger and smaller, one side only, extreme ratios, single pixels
    *((60, 90, 30, 40), (40, 30, 90, 60), (50, 70, 50, 30), (64, 300, 64, 19)),
    *((1, 1, 7, 9), (9, 7, 1, 1), (2, 255, 255, 2), (17, 33, 16, 32)),
]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6])
def test_resizing_equals_torch_to_the_bit(channels, interpolation):
    generator = np.random.default_rng(channels)
    for height, width, *size in SIZES:
        noise = generator.integers(0, 256, (height, width, channels)).astype(np.uint8)
        extreme = np.where(noise > 127, 255, 0).astype(np.uint8)  # overshoots are clipped
        for pixels in (noise, extreme):
            found = resize_with_numpy(pixels, tuple(size), interpolation)
            assert np.array_equal(found, resize(pixels, tuple(size), interpolation))


def test_photos_are_preprocessed_to_the_bit(shared):
    settings = Preprocess(size=224, crop=0.9, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    photos = sorted((shared / "data" / "imagenet-val-300").glob("*.jpg"))[:20]
    photos += sorted((shared / "data" / "pets-8").rglob("*.jpg"))[:5]
    for photo in photos:
        pixels = load_image(photo, 3)
        found = preprocess_with_numpy(settings, pixels)
        assert np.array_equal(found, preprocess(settings, pixels).numpy())
        assert found.flags.c_contiguous and found.dtype == np.float32


def test_a_tall_image_is_resized_in_bands():
    pixels = np.random.default_rng(0).integers(0, 256, (700, 50, 3)).astype(np.uint8)
    found = resize_with_numpy(pixels, (70, 25), "bicubic")
    assert np.array_equal(found, resize(pixels, (70, 25), "bicubic"))
