"""Histograms of oriented gradients: which way edges run, whatever their contrast and colour."""

import math

import pytest
import torch

from vitrail.pretraining.hog import (
    ANGLE,
    DIRECTIONS,
    EPSILON,
    SCALE,
    cell_size,
    oriented_gradients,
)

SIDE = torch.arange(8.0)


@pytest.mark.parametrize("direction", range(DIRECTIONS))
def test_a_ramp_counts_for_its_direction_alone(direction):
    ramp = SIDE * math.cos(direction * ANGLE) + SIDE[:, None] * math.sin(direction * ANGLE)
    inside = oriented_gradients(ramp[None, None], 1)[0, :, 1:-1, 1:-1]
    expected = torch.zeros_like(inside)
    length = 2 * (1 - math.cos(ANGLE))  # 2 is the difference of pixels two apart
    expected[direction] = SCALE * length / (length + EPSILON)
    torch.testing.assert_close(inside, expected, atol=1e-4, rtol=0)


def test_between_two_directions_both_count_equally():
    ramp = SIDE * math.cos(1.5 * ANGLE) + SIDE[:, None] * math.sin(1.5 * ANGLE)
    found = oriented_gradients(ramp[None, None], 1)[0, :, 3, 3]
    torch.testing.assert_close(found[1], found[2])
    assert found[1] > 2 and found[[0, 3, 4, 5, 6, 7]].abs().max() < 1e-4


def test_contrast_and_brightness_hardly_change_histograms():
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 10
    once, twice = oriented_gradients(images, 4), oriented_gradients(2 * images + 5, 4)
    assert once.shape == (2, DIRECTIONS, 4, 4)
    torch.testing.assert_close(once, twice, atol=0.05, rtol=0.05)


def test_flat_images_have_no_gradients():
    assert not oriented_gradients(torch.ones(1, 1, 8, 8), 4).any()


def test_cells_divide_every_patch():
    assert [cell_size(patch) for patch in (2, 4, 7, 8, 14, 16, 32)] == [2, 4, 7, 4, 7, 8, 16]
    assert all(patch % cell_size(patch) == 0 for patch in range(1, 65))
