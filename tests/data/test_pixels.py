"""Images of more than 8 bits keep their range from the file to the tensor."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.image import image_info, load_image
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.pixels import widest_type
from vitrail.data.preprocess import preprocess
from vitrail.data.statistics import channel_statistics
from vitrail.errors import UserError

RNG = np.random.default_rng(0)


def save(image: Image.Image, kind: str, **settings: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def png16(values: np.ndarray) -> bytes:
    """A PNG of 16 bits per channel, which Pillow cannot write in colour."""
    height, width, channels = values.shape
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def pages(values: np.ndarray, **settings: object) -> bytes:
    """A TIFF with one page for each channel."""
    first, *others = (Image.fromarray(np.ascontiguousarray(page)) for page in values.T)
    return save(first, "TIFF", save_all=True, append_images=others, **settings)


def sensor(channels: int, dtype: type, high: int = 10_000) -> np.ndarray:
    return RNG.integers(0, high, (6, 6, channels)).astype(dtype)


def why(content: bytes | np.ndarray, channels: int | None = None, **kind: str) -> str:
    with pytest.raises(UserError) as error:
        load_image(content, channels, **kind)
    return str(error.value)


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_png_keeps_every_level(channels):
    values = sensor(channels, np.uint16, 65536)
    assert np.array_equal(load_image(png16(values), None, None), values)


@pytest.mark.parametrize("channels", [2, 4])
def test_16_bit_png_with_alpha_is_composited_in_16_bits(channels):
    values = sensor(channels, np.uint16, 65536)
    values[0, 0, -1], values[1, 1, -1] = 65535, 0
    read = load_image(png16(values), None, None)
    assert read.dtype == np.uint16
    assert np.array_equal(read[0, 0], values[0, 0, :-1])
    assert (read[1, 1] == 65535).all()


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate"])
def test_colour_tiff_of_16_bits_keeps_every_level(compression):
    tifffile = pytest.importorskip("tifffile")
    values = sensor(3, np.uint16, 65536)
    stream = io.BytesIO()
    name = {"tiff_lzw": "lzw", "tiff_adobe_deflate": "zlib"}.get(compression or "")
    tifffile.imwrite(stream, values, photometric="rgb", compression=name)
    assert np.array_equal(load_image(stream.getvalue(), None, None), values)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_pages_of_a_tiff_are_channels(dtype):
    values = sensor(13, dtype, 250)
    assert np.array_equal(load_image(pages(values), 13, None), values.transpose(1, 0, 2))


def test_pages_of_different_sizes_are_refused():
    small, large = Image.new("L", (4, 4)), Image.new("L", (8, 4))
    content = save(small, "TIFF", save_all=True, append_images=[large])
    assert why(content).startswith("page 2 has 8 x 4 pixels, page 1 has 4 x 4")


def test_pages_of_different_types_are_refused():
    values = Image.new("L", (4, 4)), Image.new("F", (4, 4))
    content = save(values[0], "TIFF", save_all=True, append_images=[values[1]])
    assert why(content, pixels=None) == (
        "pages of float32 and uint8; save all of them with the same type"
    )


def test_a_thumbnail_page_is_not_a_channel():
    thumbnail = Image.new("L", (2, 2))
    thumbnail.encoderinfo = {"tiffinfo": {254: 1}}
    content = save(Image.new("L", (4, 4), 9), "TIFF", save_all=True, append_images=[thumbnail])
    assert load_image(content, None).shape == (4, 4, 1)


def test_the_pixel_limit_counts_all_pages():
    content = pages(sensor(13, np.uint8, 250))
    with pytest.raises(UserError, match="megapixels, over the limit"):
        load_image(content, None, max_pixels=400)


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_channels_inside_one_page_are_read_by_tifffile(planar):
    tifffile = pytest.importorskip("tifffile")
    values = sensor(13, np.uint16)
    stream = io.BytesIO()
    stored = values if planar == "contig" else values.transpose(2, 0, 1)
    options = {"photometric": "minisblack", "planarconfig": planar, "compression": "zlib"}
    tifffile.imwrite(stream, stored, **options)
    assert np.array_equal(load_image(stream.getvalue(), 13, None), values)
    assert image_info(stream.getvalue()).width == 6
    with pytest.raises(UserError, match="megapixels, over the limit"):
        load_image(stream.getvalue(), None, max_pixels=30)


def test_the_model_decides_the_unit_of_integers():
    values = sensor(3, np.uint16)
    as_16_bits = load_image(values, 3, "uint16")
    assert as_16_bits.dtype == np.float32
    assert len(np.unique(as_16_bits)) == len(np.unique(values))
    white = np.full((2, 2, 3), 255, np.uint8)
    assert (load_image(white, 3, "uint16") == 1).all()
    assert (load_image(np.full((2, 2, 3), 65535, np.uint16), 3) == 255).all()


def test_floats_keep_their_numbers_and_integers_are_no_floats():
    values = RNG.normal(270, 10, (4, 4, 2))
    assert np.array_equal(load_image(values, 2, "float32"), values.astype(np.float32))
    assert why(values, 2, pixels="uint8") == "floats outside [0, 1]; scale them"
    assert why(np.zeros((4, 4, 2), np.uint8), 2, pixels="float32") == (
        "uint8 pixels; the model expects floats: convert them"
    )


def test_nan_and_other_channels_are_refused():
    values = np.zeros((4, 4, 13), np.float32)
    values[1, 2, 3] = np.nan
    assert why(values, 13, pixels=None).startswith("NaN or infinity among its pixels")
    assert why(np.zeros((4, 4, 17), np.uint16), 13) == "17 channels; expected 13"


def test_a_data_set_has_the_type_that_loses_nothing():
    assert widest_type(["uint8", "uint8"]) == "uint8"
    assert widest_type(["uint8", "uint16"]) == "uint16"
    assert widest_type(["uint16", "float32"]) == "float32"


def test_statistics_are_those_of_numpy_whatever_the_offset():
    images = [RNG.normal((1e4, -2.0), (3.0, 0.1), (5, 7, 2)).astype(np.float32) for _ in range(4)]
    mean, std = channel_statistics(images, channels_first=False)
    stack = np.stack(images).astype(np.float64).reshape(-1, 2)
    np.testing.assert_allclose(mean, stack.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(std, stack.std(axis=0), rtol=1e-4)


def test_a_constant_channel_has_deviation_1():
    images = [np.full((4, 4, 2), 7, np.uint8)]
    mean, std = channel_statistics(images, channels_first=False)
    assert mean == pytest.approx((7 / 255, 7 / 255), rel=1e-5)
    assert std == (1.0, 1.0)


@pytest.fixture
def bands(tmp_path):
    """A folder of 13-channel .npy images, 16 bits of which 10,000 levels are used."""
    for label in ("field", "forest"):
        (tmp_path / "bands" / label).mkdir(parents=True)
        for number in range(20):
            pixels = RNG.integers(0, 10_000, (24, 24, 13)).astype(np.uint16)
            np.save(tmp_path / "bands" / label / f"{number}.npy", pixels)
    return tmp_path / "bands"


@pytest.mark.parametrize("size", [24, 80])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_16_bit_images_are_normalised_without_loss(bands, size, workers):
    source = open_data(bands)
    settings = Preprocess(size=size, channels=13, pixels="uint16")
    config = DataConfig(workers=workers, augment=Augment(flip=0.5, shift=0.1, policy="trivial"))
    loader = Loader(source, settings, config, batch=8, progress=False)
    loader.prepare()
    mean, std = loader.measure()
    train = [
        load_image(source[i].content, 13, None) / 65535
        for i in np.flatnonzero(source.splits == "train")
    ]
    if size == 24:
        np.testing.assert_allclose(mean, np.stack(train).mean((0, 1, 2)), rtol=1e-4)
        np.testing.assert_allclose(std, np.stack(train).std((0, 1, 2)), rtol=1e-4)
    loader.preprocess = Preprocess(size=size, channels=13, pixels="uint16", mean=mean, std=std)
    batch = next(loader.training(end=1))
    assert batch.images.shape == (8, 13, size, size) and batch.images.dtype == torch.float32
    again = next(loader.training(end=1))
    assert torch.equal(batch.images, again.images)
    first = next(loader.evaluation("val"))
    expected = preprocess(
        loader.preprocess, load_image(source[int(first.items[0])].content, 13, "uint16")
    )
    assert torch.equal(first.images[0], expected)
    if size == 24:
        assert len(first.images[0, 0].unique()) > 500  # 8 bits would leave 40


def test_augmentation_leaves_floats_unclipped_and_unrounded():
    from vitrail.data import augment

    images = torch.full((64, 2, 8, 8), 300.25)
    settings = Augment(flip=0.5, shift=0.1, rotate=5, policy="trivial", magnitude=0.0)
    uniforms = augment.sample_uniforms(0, 0, np.arange(64))
    torch.testing.assert_close(augment.augment(images, settings, uniforms), images)
