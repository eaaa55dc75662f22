"""Augmentation: each operation equals Pillow's, and random numbers depend on their key only."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from vitrail.data import operations
from vitrail.data.augment import (
    RANDOM_CHOICES,
    augment,
    mixup_or_cutmix,
    random_box,
    random_crop,
    random_erasing,
    sample_uniforms,
)
from vitrail.data.config import AUGMENT_PRESETS, Augment, Preprocess
from vitrail.data.preprocess import resize_and_crop
from vitrail.errors import UserError


def photos(count: int = 6, side: int = 32, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Smooth random pictures, as photos are, not noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 5, 5, channels), dtype=np.uint8)
    fine = [
        np.stack(
            [
                np.asarray(
                    Image.fromarray(image[:, :, c]).resize((side, side), Image.Resampling.BICUBIC)
                )
                for c in range(channels)
            ]
        )
        for image in coarse
    ]
    return torch.from_numpy(np.stack(fine))


def as_pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def given(count: int, **numbers: float) -> dict[str, np.ndarray]:
    """Random numbers with the given values, and 0.5 for the others: no translation, no rotation."""
    known = {name.replace("_", " "): value for name, value in numbers.items()}
    return {name: np.full(count, known.get(name, 0.5)) for name in RANDOM_CHOICES}


PILLOW = {
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    "colour": lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
    "posterize": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "solarize": lambda image, s: ImageOps.solarize(image, math.ceil(256 * (1 - abs(s)))),
    "autocontrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
}


@pytest.mark.parametrize("magnitude", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", PILLOW)
def test_colour_operations_equal_pillow(name, sign, magnitude):
    images = photos()
    ours = operations.OPERATIONS[name](images, np.full(6, magnitude), np.full(6, sign))
    theirs = [np.asarray(PILLOW[name](as_pillow(x), sign * magnitude)) for x in images]
    far = ours.permute(0, 2, 3, 1).numpy().astype(int) - np.stack(theirs)
    assert np.abs(far).max() <= 1


@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_moving_operations_equal_pillow_inside(name):
    magnitude, side, half = 0.5, 33, 16.5
    turn, slant, far = math.radians(15), 0.15, round(0.45 * side * magnitude)
    matrix = {  # from a pixel of the result to one of the image, around the centre
        "rotate": (math.cos(turn), -math.sin(turn), 0, math.sin(turn), math.cos(turn), 0),
        "shear_x": (1, slant, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, slant, 1, 0),
        "translate_x": (1, 0, far, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, far),
    }[name]
    a, b, c, d, e, f = matrix
    matrix = (a, b, c + half - half * (a + b), d, e, f + half - half * (d + e))
    images = photos(side=side)
    ours = operations.OPERATIONS[name](images, np.full(6, magnitude), np.ones(6))
    how = {"method": Image.Transform.AFFINE, "resample": Image.Resampling.BILINEAR}
    theirs = [np.asarray(as_pillow(x).transform((side, side), data=matrix, **how)) for x in images]
    core = Image.fromarray(np.pad(np.full((side - 2, side - 2), 255, np.uint8), 1))
    inside = np.asarray(core.transform((side, side), data=matrix, **how)) == 255
    far = ours.permute(0, 2, 3, 1).numpy().astype(int) - np.stack(theirs)
    assert np.abs(far[:, inside]).max() <= 2


def test_every_operation_keeps_grey_and_other_sensors():
    for channels in (1, 4):
        images = photos(channels=channels)
        for operation in operations.OPERATIONS.values():
            changed = operation(images, np.full(6, 0.5), np.ones(6))
            assert changed.shape == images.shape and changed.dtype == torch.uint8


def test_a_constant_image_survives_every_operation_in_one_colour():
    images = torch.full((2, 3, 16, 16), 77, dtype=torch.uint8)
    for operation in operations.OPERATIONS.values():
        assert len(operation(images, np.full(2, 0.7), np.ones(2)).unique()) == 1


def test_each_image_of_a_batch_gets_its_own_operation():
    images, names = photos(), list(operations.OPERATIONS)
    chosen = np.array([names.index(name) for name in ("identity", "equalize", "rotate") * 2])
    changed = operations.apply_operations(images, chosen, np.full(6, 0.5), np.ones(6))
    alone = [
        operations.OPERATIONS[names[k]](images[i : i + 1], np.array([0.5]), np.ones(1))
        for i, k in enumerate(chosen)
    ]
    assert torch.equal(changed, torch.cat(alone)) and torch.equal(changed[0], images[0])


def test_flipped_is_flipped():
    images = photos()
    always = augment(images, Augment(flip=1.0), given(6))
    assert torch.equal(always, images.flip(-1))


def test_a_flip_among_other_moves_is_exact():
    images = photos()
    moved = augment(images, Augment(flip=1.0, shift=0.1), given(6, left=0.5, top=0.5))
    assert torch.equal(moved, images.flip(-1))


def test_translate_equals_a_warp_by_whole_pixels():
    images, random = photos(40), np.random.default_rng(0)
    right, down = random.integers(-5, 6, 40), random.integers(-3, 4, 40)
    flipped = random.random(40) < 0.5
    matrix = np.eye(2)[None] * np.where(flipped[:, None, None], [[-1], [1]], 1)
    warped = operations.affine_warp(images, matrix, np.stack([right, down], 1).astype(float))
    assert torch.equal(
        operations.flip_horizontally(operations.translate(images, right, down), flipped), warped
    )


def test_half_of_the_images_are_flipped():
    flips = sample_uniforms(0, 0, np.arange(10_000))["flip"] < 0.5
    assert 4_800 < flips.sum() < 5_200


def test_shift_moves_by_whole_pixels_and_fills_with_the_border():
    images = photos()
    images[:, :, :1] = images[:, :, -1:] = 9
    images[:, :, :, :1] = images[:, :, :, -1:] = 9
    moved = augment(images, Augment(shift=0.125), given(6, left=0.0, top=0.999))
    assert torch.equal(moved[:, :, :-4, 4:], images[:, :, 4:, :-4])
    assert moved[:, :, -4:].unique().tolist() == [9]
    assert moved[:, :, :, :4].unique().tolist() == [9]


def test_shift_reaches_each_distance_equally_often():
    column = torch.arange(32, dtype=torch.uint8).expand(4_000, 1, 32, 32)
    moved = augment(column, Augment(shift=0.125), sample_uniforms(3, 1, np.arange(4_000)))
    far, count = (moved[:, 0, 16, 16].int() - 16).unique(return_counts=True)
    assert far.tolist() == list(range(-4, 5)) and count.min() > 350 and count.max() < 550


def test_a_random_crop_of_everything_is_everything():
    images, numbers = photos(), given(6, area=0.9999999, ratio=0.5)
    near = augment(images, Augment(scale=0.5), numbers).int() - images
    assert near.abs().max() <= 1


def test_a_random_crop_shows_the_box_it_drew():
    numbers = given(1, area=0.0, ratio=0.5, top=0.0, left=1.0)
    images = photos(1)
    quarter = augment(images, Augment(scale=0.25), numbers)
    theirs = as_pillow(images[0]).resize((32, 32), Image.Resampling.BILINEAR, box=(16, 0, 32, 16))
    far = quarter[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(theirs)
    assert np.abs(far[1:-1, 1:-1]).max() <= 12  # Pillow stops at the box, a sample looks beyond it


def test_boxes_stay_inside_with_area_and_shape_as_asked():
    numbers = sample_uniforms(0, 0, np.arange(5_000))
    top, left, tall, wide = random_box(Augment(scale=0.3), numbers, (100, 100), 1.0)
    assert min(top.min(), left.min()) >= 0
    assert (top + tall).max() <= 100 and (left + wide).max() <= 100
    assert (tall * wide).min() > 2_500 and (wide / tall).max() < 4 / 3 + 0.1


def test_a_crop_without_augmentation_is_the_center_crop_of_evaluation():
    pixels = photos(1, side=400)[0].permute(1, 2, 0).numpy()
    view = Preprocess(size=32, crop=0.8)
    seen = random_crop(pixels, Augment(), view, sample_uniforms(0, 0, np.arange(1)))
    assert np.abs(seen.transpose(1, 2, 0).astype(int) - resize_and_crop(view, pixels)).mean() < 3


def test_a_crop_is_flipped_with_its_probability():
    pixels, view = photos(1, side=90)[0].permute(1, 2, 0).numpy(), Preprocess(size=64)
    plain, turned = (random_crop(pixels, Augment(flip=flip), view, given(1)) for flip in (0.0, 1.0))
    assert np.array_equal(turned, plain[:, :, ::-1])


@pytest.mark.parametrize("shape", [(1, 1), (1, 400), (400, 1), (3, 5), (224, 224), (300, 225)])
@pytest.mark.parametrize("settings", [Augment(scale=0.2), Augment(shift=1.0), Augment()])
def test_crop_takes_any_shape(shape, settings):
    pixels = np.full((*shape, 3), 50, np.uint8)
    for item in range(5):
        numbers = sample_uniforms(0, 0, np.array([item]))
        seen = random_crop(pixels, settings, Preprocess(size=(64, 48), crop=0.9), numbers)
        assert seen.shape == (3, 64, 48) and np.all(seen == 50)


def test_digits_are_never_flipped():
    assert AUGMENT_PRESETS["digits"].flip == 0
    images = torch.zeros(500, 1, 28, 28, dtype=torch.uint8)
    images[:, :, :, :9] = 255
    moved = augment(images, AUGMENT_PRESETS["digits"], sample_uniforms(0, 0, np.arange(500)))
    assert (moved[..., :14].float().mean((1, 2, 3)) > moved[..., 14:].float().mean((1, 2, 3))).all()


def test_random_numbers_are_the_same_in_any_batch():
    together = sample_uniforms(7, 3, np.arange(100))
    alone = sample_uniforms(7, 3, np.array([41]))
    assert all(together[name][41] == alone[name][0] for name in RANDOM_CHOICES)


@pytest.mark.parametrize("other", [(8, 3, 41), (7, 4, 41), (7, 3, 42)])
def test_random_numbers_differ_with_seed_epoch_and_item(other):
    mine, theirs = (
        sample_uniforms(7, 3, np.array([41])),
        sample_uniforms(*other[:2], np.array([other[2]])),
    )
    assert all(mine[name][0] != theirs[name][0] for name in RANDOM_CHOICES)


def test_random_numbers_are_uniform_and_uncorrelated():
    numbers = np.stack([sample_uniforms(0, epoch, np.arange(2_000))["flip"] for epoch in range(8)])
    numbers = np.concatenate(
        [numbers, np.stack(list(sample_uniforms(1, 0, np.arange(2_000)).values()))]
    )
    assert np.abs(numbers.mean(1) - 0.5).max() < 0.03
    assert np.abs(np.corrcoef(numbers) - np.eye(len(numbers))).max() < 0.1


@pytest.mark.parametrize("name", AUGMENT_PRESETS)
def test_an_image_is_augmented_the_same_alone_and_in_any_batch(name):
    images, items = photos(24), np.arange(24)
    together = augment(images, AUGMENT_PRESETS[name], sample_uniforms(1, 2, items))
    order = np.random.default_rng(0).permutation(24)
    shuffled = augment(images[order], AUGMENT_PRESETS[name], sample_uniforms(1, 2, items[order]))
    alone = [
        augment(images[i : i + 1], AUGMENT_PRESETS[name], sample_uniforms(1, 2, items[i : i + 1]))
        for i in items
    ]
    assert torch.equal(torch.cat(alone), together) and torch.equal(shuffled, together[order])


def test_augmenting_leaves_the_input_alone():
    images = photos()
    before = images.clone()
    augment(images, AUGMENT_PRESETS["strong"], sample_uniforms(0, 0, np.arange(6)))
    assert torch.equal(images, before)


def test_erase_paints_one_rectangle_of_one_grey():
    images = torch.full((400, 3, 32, 32), 9.0)
    painted = (
        random_erasing(images, Augment(erase=0.25), sample_uniforms(0, 0, np.arange(400))) != 9
    )
    hit = painted[painted.flatten(1).any(1)]
    assert 70 < len(hit) < 130
    tall, wide = hit.any(1).any(2).sum(1), hit.any(1).any(1).sum(1)
    assert torch.equal(hit.flatten(1).sum(1), 3 * tall * wide)
    share = (tall * wide / 1024).numpy()
    assert share.min() > 0.01 and share.max() < 0.4


def test_mixup_blends_images_and_labels_alike():
    images = torch.eye(10).view(10, 10, 1, 1).expand(10, 10, 8, 8).contiguous()
    random = np.random.default_rng(0)
    mixed, targets = mixup_or_cutmix(images, torch.arange(10), 10, Augment(mixup=0.8), random)
    torch.testing.assert_close(mixed.mean((2, 3)), targets)
    assert targets.sum(1).allclose(torch.ones(10)) and (targets.max(1).values < 1).any()


def test_cutmix_pastes_as_much_as_the_labels_say():
    images = torch.eye(10).view(10, 10, 1, 1).expand(10, 10, 8, 8).contiguous()
    for seed in range(20):
        random = np.random.default_rng(seed)
        mixed, targets = mixup_or_cutmix(images, torch.arange(10), 10, Augment(cutmix=1.0), random)
        torch.testing.assert_close(mixed.mean((2, 3)), targets)
        assert set(mixed.unique().tolist()) <= {0.0, 1.0}


def test_every_setting_is_used_by_a_preset():
    changed = {
        name
        for preset in AUGMENT_PRESETS.values()
        for name, default in vars(Augment()).items()
        if getattr(preset, name) != default
    }
    assert changed == set(vars(Augment()))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"flip": 2}, "flip is 2"), ({"scale": 0}, "scale is 0"), ({"policy": "auto"}, "'auto'")],
)
def test_wrong_settings_are_named(wrong, says):
    with pytest.raises(UserError, match=says):
        replace(Augment(), **wrong)
