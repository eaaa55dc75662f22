"""The common corruptions: deterministic, graded, for any size and number of channels."""

import numpy as np
import pytest

from vitrail.data.corruptions import COMMON, CORRUPTIONS, STRENGTHS, corrupt_image


def photo(side, channels=3):
    """A smooth image with an edge and fine texture."""
    y, x = np.mgrid[0:side, 0:side] / side
    base = 0.5 + 0.3 * np.sin(6 * x) * np.cos(4 * y) + 0.15 * (x > 0.5) + 0.04 * np.sin(90 * x * y)
    layers = [np.roll(base, 3 * c, axis=0) for c in range(channels)]
    return (np.stack(layers, axis=2) * 255).clip(0, 255).astype(np.uint8)


def test_there_are_fifteen_common_ones_and_three_more():
    assert len(COMMON) == 15
    assert set(CORRUPTIONS) - set(COMMON) == {"jpeg_quality", "small_size", "rotation"}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_deterministic_and_grows(name):
    image = photo(96)
    before = image.copy()
    changes = []
    for strength in STRENGTHS:
        corrupted = corrupt_image(image, name, strength, 7)
        assert corrupted.shape == image.shape and corrupted.dtype == np.uint8
        assert np.array_equal(corrupted, corrupt_image(image, name, strength, 7))
        changes.append(np.abs(corrupted.astype(float) - image).mean())
    assert np.array_equal(image, before)
    assert 0 < changes[0] < changes[-1]


@pytest.mark.parametrize(("side", "channels"), [(8, 1), (32, 3), (32, 5)])
def test_small_images_and_other_channels_are_corrupted(side, channels):
    image = photo(side, channels)
    for name in CORRUPTIONS:
        assert corrupt_image(image, name, 5, 0).shape == image.shape


def test_images_are_corrupted_differently():
    image = photo(32)
    first, second = (corrupt_image(image, "gaussian_noise", 3, item) for item in (0, 1))
    assert not np.array_equal(first, second)
