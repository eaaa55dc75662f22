"""Patches and positions."""

import pytest
import torch
from torch.nn import functional as F

from vitrail.model.config import ViTConfig
from vitrail.model.embed import (
    PatchEmbed,
    apply_rotary,
    interpolate_positions,
    rotary_positions,
    sincos_positions,
)


@pytest.mark.parametrize(
    ("patch", "image", "channels"), [(4, (8, 12), 3), (3, (9, 6), 1), (5, (5, 5), 13)]
)
def test_the_convolution_equals_a_matrix_on_flattened_patches(patch, image, channels):
    config = ViTConfig(image=image, patch=patch, channels=channels, width=6, heads=1)
    embed, x = PatchEmbed(config), torch.randn(2, channels, *image)
    rows, columns = config.grid
    cut = x.reshape(2, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    flat = cut.reshape(2, rows * columns, channels * patch * patch)
    matrix = embed.proj.weight.reshape(6, -1)
    torch.testing.assert_close(embed(x), flat @ matrix.T + embed.proj.bias)


def test_interpolating_to_the_same_grid_is_the_identity():
    positions = torch.randn(1, 15, 8)
    assert interpolate_positions(positions, (3, 5), (3, 5)) is positions


def test_interpolation_keeps_a_constant():
    resampled = interpolate_positions(torch.full((1, 15, 8), 2.5), (3, 5), (7, 4))
    torch.testing.assert_close(resampled, torch.full((1, 28, 8), 2.5))


def test_interpolation_does_not_swap_rows_and_columns():
    slope = torch.arange(16.0).reshape(1, 16, 1).div(4, rounding_mode="floor")  # a 4 x 4 grid
    resampled = interpolate_positions(slope, (4, 4), (8, 5)).reshape(8, 5)
    assert (resampled.diff(dim=0) > 0).all()
    torch.testing.assert_close(resampled[:, 0], resampled[:, 4])


def test_stretching_keeps_the_precision_it_was_given():
    positions = torch.randn(1, 16, 4, dtype=torch.float64)
    resampled = interpolate_positions(positions, (4, 4), (5, 5))
    as_single = interpolate_positions(positions.float(), (4, 4), (5, 5))
    assert resampled.dtype == torch.float64
    assert 0 < (resampled - as_single).abs().max() < 1e-5


def test_sincos_positions_are_the_papers():
    positions = sincos_positions((3, 5), 8, torch.zeros(()))
    assert positions.shape == (15, 8)
    torch.testing.assert_close(positions[0], torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1]))
    x, y = 4.0, 2.0  # the last patch: column 4, row 2; speeds 1 and 1/10000
    angles = torch.tensor([x, x / 1e4, x, x / 1e4, y, y / 1e4, y, y / 1e4])
    sine = torch.tensor([True, True, False, False] * 2)
    torch.testing.assert_close(positions[14], torch.where(sine, angles.sin(), angles.cos()))


def test_rotation_keeps_norms_and_skips_the_prefix():
    rope, x = rotary_positions((3, 5), 8, 2, torch.zeros(())), torch.randn(2, 3, 17, 8)
    rotated = apply_rotary(x, rope)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[:, :, :2], x[:, :, :2])
    assert not torch.allclose(rotated[:, :, 2:], x[:, :, 2:])


def test_rotated_products_depend_on_the_offset_only():
    rope = rotary_positions((4, 4), 8, 0, torch.zeros((), dtype=torch.float64))
    q, k = torch.randn(2, 8, dtype=torch.float64)
    queries, keys = (apply_rotary(v.expand(1, 1, 16, 8), rope)[0, 0] for v in (q, k))
    products = (queries @ keys.T).reshape(4, 4, 4, 4)
    torch.testing.assert_close(products[0, 0, 1, 2], products[2, 1, 3, 3])
    assert not torch.isclose(products[0, 0, 1, 2], products[0, 0, 2, 1])


def test_rotary_angles_do_not_depend_on_the_resolution():
    small, large = (rotary_positions((n, n), 8, 0, torch.zeros(()))[:, 0, 0] for n in (1, 3))
    torch.testing.assert_close(small[:, 0], large[:, 4])  # the middle patch of nine


def test_a_patch_embedding_depends_on_its_own_pixels_only():
    embed, x = PatchEmbed(ViTConfig(image=8, patch=4, width=6, heads=1)), torch.randn(1, 3, 8, 8)
    changed = F.pad(x[:, :, :4, :4], (0, 4, 0, 4))
    torch.testing.assert_close(embed(x)[:, 0], embed(changed)[:, 0])
