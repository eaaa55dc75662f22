"""Pixels to tensors: against Pillow and timm's rules, on odd shapes, and as plain data."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.config import NORMALISATIONS, Preprocess
from vitrail.data.preprocess import normalise, preprocess, resize_and_crop, shrink_to_cover
from vitrail.errors import UserError

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "imagenet-val-300"


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pillow(pixels: np.ndarray, short: int, size: int, how: Image.Resampling) -> np.ndarray:
    """What timm does in evaluation, spelled out with Pillow."""
    height, width = pixels.shape[:2]
    image = Image.fromarray(pixels)
    if width <= height:
        image = image.resize((short, int(short * height / width)), how)
    else:
        image = image.resize((int(short * width / height), short), how)
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize("how", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(375, 500, 3), (500, 333, 3), (180, 120, 3), (97, 97, 3)])
def test_fit_equals_pillow_to_one_grey_level_and_seldom_two(shape, how):
    pixels = np.asarray(
        Image.fromarray(noise(9, 7, 3)).resize(shape[1::-1], Image.Resampling.BICUBIC)
    )
    ours = resize_and_crop(Preprocess(size=224, crop=0.9, interpolation=how), pixels)
    theirs = pillow(pixels, 248, 224, Image.Resampling[how.upper()])
    far = np.abs(ours.astype(int) - theirs)
    assert far.max() <= 2 and (far > 1).mean() < 1e-3


@pytest.mark.skipif(not PHOTOS.exists(), reason="needs ../shared/data/imagenet-val-300")
def test_real_photos_come_out_as_pillow_has_them():
    settings, far = Preprocess(size=224, crop=0.9), []
    for path in sorted(PHOTOS.glob("*.jpg"))[:20]:
        pixels = np.asarray(Image.open(path).convert("RGB"))
        theirs = pillow(pixels, 248, 224, Image.Resampling.BICUBIC)
        far.append(np.abs(resize_and_crop(settings, pixels).astype(int) - theirs))
    assert np.max(far) <= 2 and np.mean(np.array(far) > 1) < 1e-5 and np.mean(far) < 0.01


def test_normalised_pixels_are_value_minus_mean_over_std():
    mean, std = NORMALISATIONS["imagenet"]
    pixels = noise(32, 32, 3)
    ours = preprocess(Preprocess(size=32, mean=mean, std=std), pixels)
    theirs = (pixels / 255 - mean) / std
    np.testing.assert_allclose(ours.permute(1, 2, 0), theirs, atol=1e-6)


def test_half_statistics_reach_from_minus_one_to_one():
    pixels = np.stack([np.zeros((4, 4, 3)), np.full((4, 4, 3), 255)], 1).reshape(8, 4, 3)
    x = preprocess(Preprocess(size=(8, 4)), pixels.astype(np.uint8))
    assert x.min() == -1 and x.max() == 1


def test_an_image_alone_and_in_a_batch_give_the_same_bits():
    settings = Preprocess(size=33, mean=NORMALISATIONS["clip"][0], std=NORMALISATIONS["clip"][1])
    images = [noise(50, 41, 3, seed=i) for i in range(7)]
    alone = torch.stack([preprocess(settings, image) for image in images])
    fitted = np.stack([resize_and_crop(settings, image) for image in images]).transpose(0, 3, 1, 2)
    assert torch.equal(normalise(settings, torch.from_numpy(np.ascontiguousarray(fitted))), alone)


def test_the_number_of_threads_does_not_matter():
    settings, pixels, before = Preprocess(size=224), noise(500, 400, 3), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = preprocess(settings, pixels)
        torch.set_num_threads(2)
        assert torch.equal(preprocess(settings, pixels), one)
    finally:
        torch.set_num_threads(before)


def test_a_picture_of_the_right_size_is_untouched():
    pixels = noise(32, 32, 3)
    assert np.array_equal(resize_and_crop(Preprocess(size=32), pixels), pixels)


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_any_number_of_channels_has_a_way(channels):
    x = preprocess(Preprocess(size=20, channels=channels), noise(31, 45, channels))
    assert x.shape == (channels, 20, 20)


@pytest.mark.parametrize("shape", [(1, 30_000, 3), (30_000, 1, 3), (1, 1, 3), (2, 700, 3)])
def test_extreme_shapes_do_not_fill_the_memory(shape):
    assert resize_and_crop(Preprocess(size=224, crop=0.9), noise(*shape)).shape == (224, 224, 3)


def test_height_and_width_may_differ():
    pixels = np.zeros((60, 90, 3), np.uint8)
    pixels[:, 45:] = 255
    fitted = resize_and_crop(Preprocess(size=(20, 40)), pixels)
    assert fitted.shape == (20, 40, 3) and fitted[:, :19].max() == 0 and fitted[:, 21:].min() == 255


def test_crop_keeps_the_centre():
    pixels = np.zeros((100, 100, 3), np.uint8)
    pixels[26:74, 26:74] = 200
    assert resize_and_crop(Preprocess(size=50, crop=0.5), pixels).mean() > 180


def test_shrink_never_enlarges():
    small, large = noise(40, 60, 3), noise(400, 600, 3)
    assert shrink_to_cover(small, (50, 50), "bicubic") is small
    assert shrink_to_cover(large, (50, 50), "bicubic").shape == (50, 75, 3)


def test_settings_survive_json():
    settings = Preprocess(size=(8, 16), crop=0.9, mean=(0.1, 0.2, 0.3), interpolation="bilinear")
    assert Preprocess.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_one_number_stands_for_all_channels():
    assert Preprocess(mean=(0.4,), channels=2).mean == (0.4, 0.4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": (1, 2, 3)}, "give one number or"),
        ({"crop": 1.5}, "crop is 1.5"),
        ({"interpolation": "nearest"}, "unknown interpolation 'nearest'"),
        ({"mean": (0.5, 0.5)}, "mean has 2 values for 3 channels"),
        ({"std": (0.0,)}, "std is"),
        ({"stretch": True}, "has no setting 'stretch'"),
    ],
)
def test_wrong_settings_are_named(wrong, says):
    with pytest.raises(UserError) as error:
        Preprocess.from_dict(wrong)
    assert says in str(error.value)


def test_wrong_pixels_are_named():
    with pytest.raises(UserError, match=r"give uint8 of shape \(height, width, 3\)"):
        preprocess(Preprocess(), noise(10, 10, 1))
