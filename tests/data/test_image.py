"""Every kind of image file becomes the right pixels, or an error that says why in a few words."""

import io
import os
import struct
import sys
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data import image as module
from vitrail.data.image import can_decode, detect_format, image_info, load_image
from vitrail.errors import UserError


def picture(height: int = 24, width: int = 40, channels: int = 3) -> np.ndarray:
    """Smooth colours with an edge, so that JPEG has something to do and every side differs."""
    y, x = np.mgrid[:height, :width]
    planes = [x * 6, y * 10, (x + y) * 4, x * y, x + 3 * y][:channels]
    pixels = np.stack(planes, axis=2) % 256
    pixels[: height // 3, : width // 4] = 250
    return pixels.astype(np.uint8)


def save(image: Image.Image | np.ndarray, kind: str, **settings: object) -> bytes:
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=False)
    return stream.getvalue()


def png(header: tuple[int, int, int, int], rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG by hand: (width, height, bits, colour type), raw rows, and chunks before the pixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", *header, 0, 0, 0)), *chunks]
    parts += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def why(content: object, channels: int | None = 3, **limits: int) -> str:
    with pytest.raises(UserError) as error:
        load_image(content, channels, **limits)
    return str(error.value)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats_give_back_the_pixels(kind):
    settings = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(load_image(save(picture(), kind, **settings)), picture())


def test_pixels_are_writable_and_own_their_memory():
    for content in (save(picture(), "PNG"), save(picture(), "JPEG"), picture(), npy(picture())):
        pixels = load_image(content)
        assert pixels.flags.writeable and pixels.flags.c_contiguous
        assert pixels.dtype == np.uint8


def test_the_name_of_a_file_does_not_matter(tmp_path):
    liar = tmp_path / "cat.jpg"
    liar.write_bytes(save(picture(), "GIF"))
    assert detect_format(liar.read_bytes()) == "GIF"
    assert load_image(liar).shape == (24, 40, 3)


def test_path_string_and_bytes_are_the_same(tmp_path):
    path = tmp_path / "déjà vu\n2.png"
    path.write_bytes(save(picture(), "PNG"))
    assert np.array_equal(load_image(path), load_image(str(path)))
    assert np.array_equal(load_image(path), load_image(path.read_bytes()))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_only_the_first_frame_counts(kind):
    first = Image.new("RGB", (8, 8), (200, 0, 0))
    second = Image.new("RGB", (8, 8), (0, 0, 200))
    settings = {"lossless": True} if kind == "WEBP" else {}
    film = save(first, kind, save_all=True, append_images=[second], **settings)
    assert load_image(film)[0, 0].tolist() == [200, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_turned_picture_is_put_upright(kind, orientation):
    upright = picture(24, 40)
    stored = {  # how a camera stores the same scene for each orientation
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    settings = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    content = save(np.ascontiguousarray(stored), kind, exif=exif, **settings.get(kind, {}))
    pixels = load_image(content).astype(int)
    assert pixels.shape == upright.shape
    assert np.abs(pixels - upright).max() <= (8 if kind == "JPEG" else 0)


def test_damaged_exif_counts_as_none():
    broken = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\xff\xff\xff\x7f" * 3
    assert np.array_equal(
        load_image(save(picture(), "PNG", exif=broken)), load_image(save(picture(), "PNG"))
    )


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled_not_cut(kind):
    values = np.linspace(0, 65535, 24 * 40).reshape(24, 40).astype(np.uint16)
    pixels = load_image(save(values, kind), channels=1)
    assert np.array_equal(pixels[:, :, 0], np.rint(values / 257).astype(np.uint8))


def test_big_endian_tiff_of_16_bits_is_scaled():
    values = np.linspace(0, 65535, 24 * 40).reshape(24, 40).astype(">u2")
    content = save(Image.frombytes("I;16B", (40, 24), values.tobytes()), "TIFF")
    assert np.array_equal(load_image(content, 1)[:, :, 0], np.rint(values / 257))


def test_white_is_zero_in_tiffs_that_say_so():
    values = np.array([[0, 65535]], np.uint16)
    content = bytearray(save(values, "TIFF"))
    entry = content.index(struct.pack("<HHI", 262, 3, 1))
    content[entry + 8] = 0
    assert load_image(bytes(content), 1).ravel().tolist() == [255, 0]


def test_colour_of_16_bits_is_scaled():
    row = struct.pack(">6H", 0, 32768, 65535, 257, 65280, 40000)
    pixels = load_image(png((2, 1, 16, 2), b"\0" + row))
    assert pixels.tolist() == [[[0, 128, 255], [1, 254, 156]]]


def test_a_transparent_colour_of_16_bits_becomes_white():
    row = struct.pack(">6H", 1, 2, 3, 60000, 0, 0)
    clear = (b"tRNS", struct.pack(">3H", 1, 2, 3))
    assert load_image(png((2, 1, 16, 2), b"\0" + row, clear))[0, 0].tolist() == [255, 255, 255]
    grey = png((2, 1, 16, 0), b"\0" + struct.pack(">2H", 7, 514), (b"tRNS", struct.pack(">H", 7)))
    assert load_image(grey, channels=1).ravel().tolist() == [255, 2]


def test_32_bit_integers_count_as_16_bits():
    values = np.array([[0, 257, 65535]], np.int32)
    assert load_image(save(values, "TIFF"), 1).ravel().tolist() == [0, 1, 255]
    assert "32-bit integers outside 0 to 65535" in why(save(values * 2, "TIFF"))


def test_floats_count_from_0_to_1():
    values = np.array([[0, 0.5, 1]], np.float32)
    assert load_image(save(values, "TIFF"), 1).ravel().tolist() == [0, 128, 255]
    assert why(save(values * 2, "TIFF")) == "floats outside [0, 1]; scale them"


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_of_few_bits_spans_black_to_white(bits):
    rows = b"\0" + bytes([0xFF, 0x00])
    pixels = load_image(png((2 * 8 // bits, 1, bits, 0), rows), channels=1)
    assert pixels.min() == 0 and pixels.max() == 255 and pixels.shape[2] == 1


def test_black_and_white_pictures_are_read():
    flags = np.arange(960).reshape(24, 40) % 7 == 0
    for kind in ("PNG", "TIFF", "BMP"):
        assert np.array_equal(load_image(save(flags, kind), 1)[:, :, 0], flags * 255)


def test_cmyk_has_the_colours_it_shows():
    for kind in ("JPEG", "TIFF"):
        red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
        assert np.abs(load_image(save(red, kind)).astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGBA", "PNG"), ("RGBA", "TIFF"), ("RGBA", "WEBP"), ("LA", "PNG"), ("LA", "TIFF")],
)
def test_transparency_lies_on_white(mode, kind):
    image = Image.new(mode, (3, 1), 0)
    ink = (0, 0, 0) if mode == "RGBA" else (0,)
    for x, alpha in enumerate((0, 51, 255)):
        image.putpixel((x, 0), (*ink, alpha))
    settings = {"lossless": True} if kind == "WEBP" else {}
    assert load_image(save(image, kind, **settings))[0, :, 0].tolist() == [255, 204, 0]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_transparent_palette_entry_is_white(kind):
    image = Image.new("P", (4, 2), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.paste(0, (0, 0, 2, 2))
    pixels = load_image(save(image, kind, transparency=0))
    assert pixels[0].tolist() == [[255] * 3] * 2 + [[40, 50, 60]] * 2


def test_a_half_transparent_palette_lies_on_white():
    image = Image.new("P", (1, 1), 0)
    image.putpalette([0, 0, 0])
    assert load_image(save(image, "PNG", transparency=b"\x33"))[0, 0].tolist() == [204] * 3


def test_grey_stays_exactly_grey():
    grey = picture(channels=1)[:, :, 0]
    for kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(load_image(save(grey, kind), channels=1)[:, :, 0], grey)
        assert load_image(save(grey, kind), channels=None).shape == (24, 40, 1)
    assert np.array_equal(load_image(save(grey, "PNG"), 3), np.stack([grey] * 3, axis=2))


def test_colour_becomes_grey_by_itu_601():
    pixels = load_image(save(picture(), "PNG"), channels=1)[:, :, 0]
    assert np.abs(pixels - picture() @ [0.299, 0.587, 0.114]).max() <= 0.51


def test_natural_channels_are_1_or_3():
    shapes = {"RGB": 3, "RGBA": 3, "P": 3, "CMYK": 3, "L": 1, "LA": 1, "1": 1, "I;16": 1}
    for mode, channels in shapes.items():
        kind = "TIFF" if mode == "CMYK" else "PNG"
        content = save(Image.new(mode, (5, 4)), kind)
        assert load_image(content, channels=None).shape == (4, 5, channels)


def test_arrays_of_any_depth_come_from_npy():
    cube = picture(channels=5)
    assert np.array_equal(load_image(npy(cube), channels=5), cube)
    assert np.array_equal(load_image(npy(np.asfortranarray(cube)), channels=5), cube)
    assert np.array_equal(load_image(cube, channels=None), cube)
    assert load_image(npy(cube[:, :, 0]), channels=1).shape == (24, 40, 1)


def test_white_of_every_array_type_is_255():
    for white in (np.uint8(255), np.uint16(65535), np.float16(1), np.float32(1), np.float64(1)):
        for order in "<>":
            values = np.full((2, 2, 2), white).astype(np.dtype(white.dtype).newbyteorder(order))
            assert (load_image(npy(values), 2) == 255).all()
    assert load_image(np.array([[True, False]]), 1).ravel().tolist() == [255, 0]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32, bool])
def test_the_pixels_of_any_array_lie_row_by_row(kind):
    values = (np.random.default_rng(0).random((6, 5, 4)) > 0.5).astype(kind)
    pixels = load_image(npy(np.asfortranarray(values)), 4)
    assert pixels.data.c_contiguous and np.array_equal(pixels, load_image(npy(values), 4))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros((4, 4, 3), np.int64), "an array of int64"),
        (np.zeros((4, 4, 3), np.complex64), "an array of complex64"),
        (np.zeros((4,), np.uint8), "shape (4,)"),
        (np.zeros((4, 0, 3), np.uint8), "shape (4, 0, 3)"),
        (np.full((4, 4, 3), np.nan), "NaN or infinity among its pixels"),
        (np.full((4, 4, 3), 1.5), "floats outside [0, 1]; scale them"),
        (np.zeros((3, 4, 6), np.uint8), "6 channels; expected 3"),
        (np.zeros((4, 4, 5), np.uint8), "5 channels; expected 3"),
    ],
)
def test_invalid_arrays_are_refused_with_a_reason(values, words):
    assert words in why(values)
    assert words in why(npy(values))


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("RGBA", 1), ("LA", 1), ("LA", 3)])
def test_an_array_with_transparency_is_read_like_the_file(mode, channels):
    image = Image.fromarray(picture(channels=len(mode)))
    assert image.mode == mode
    read = load_image(np.asarray(image), channels)
    assert np.array_equal(read, load_image(save(image, "PNG"), channels))


def test_bytes_of_any_kind_are_taken():
    content = save(picture(), "PNG")
    for kind in (bytearray, memoryview):
        assert np.array_equal(load_image(kind(content)), picture())


def test_objects_that_are_not_images_are_refused_by_type():
    assert why(None).startswith("a NoneType is not an image; give a path, bytes,")


def test_an_array_with_pickled_objects_is_never_unpickled():
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([[print]]), allow_pickle=True)
    assert "an array of object" in why(stream.getvalue())


def test_an_array_header_that_promises_too_much_takes_no_memory():
    def header(shape: tuple[int, ...]) -> bytes:
        stream = io.BytesIO()
        fields = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, fields)
        return stream.getvalue()

    assert why(header((9000, 9000, 3))) == "truncated"
    assert "megapixels, over the limit" in why(header((10**9, 10**9, 3)))
    assert "exceeds the limit" in why(header((1000, 1000, 10**12)))


def test_a_file_format_has_no_fourth_channel():
    assert why(save(picture(), "PNG"), channels=4) == "3 channels; expected 4"


def test_a_bomb_of_144_megapixels_in_17_kilobytes_is_refused():
    bomb = png((12000, 12000, 1, 0), (b"\0" + b"\0" * 1500) * 12000)
    assert len(bomb) < 20_000
    assert why(bomb) == "12000 x 12000 is 144 megapixels, over the limit of 100"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_pixel_limit_comes_before_decoding(kind, monkeypatch):
    content = save(Image.new("RGB", (100, 100)), kind)
    decoded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: decoded.append(self))
    assert "over the limit of 0.005" in why(content, max_pixels=5000)
    assert not decoded


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_a_huge_canvas_is_refused_before_it_takes_memory(kind, monkeypatch):
    content = save(Image.new("RGB", (100, 100)), kind)
    opened = []
    readers = {"GIF": opened.append, "WebP": opened.append}
    monkeypatch.setattr(module, "DECODERS", readers)
    assert "megapixels" in why(content, max_pixels=5000)
    assert not opened


def test_webp_canvases_are_known_from_every_kind_of_header():
    settings = [{"lossless": True}, {"quality": 80}, {"lossless": True, "exif": b"Exif\0\0MM"}]
    for setting in settings:
        content = save(Image.new("RGB", (301, 77)), "WEBP", **setting)
        assert list(module.declared_sizes("WebP", content)) == [(301, 77)]


def test_the_byte_limit_holds_for_files_and_bytes(tmp_path):
    content = save(picture(), "BMP") + b"\0" * 2**20
    (tmp_path / "a.bmp").write_bytes(content)
    assert why(content, max_bytes=2**20) == "1 MB, over the limit of 1 MB"
    assert why(tmp_path / "a.bmp", max_bytes=2**20) == "1 MB, over the limit of 1 MB"


def test_what_is_no_file_says_so(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "empty.jpg").touch()
    assert why(tmp_path / "pipe.jpg") == "not a regular file"
    assert why(Path("/dev/zero")) == "not a regular file"
    assert why(tmp_path) == "not a regular file"
    assert why(tmp_path / "nothing.jpg") == "no such file"
    assert why("nul\0.jpg").startswith("cannot be read")
    assert why(tmp_path / "empty.jpg") == "empty file"
    assert why(b"") == "empty file"


def test_what_is_no_image_says_so():
    assert why(b"hello").startswith("not an image")
    assert why(b"%PDF-1.4 ...").startswith("not an image")
    assert why(b"\0\0\0\x18ftypisom").startswith("a video")
    assert why(save(picture(), "ICO")).startswith("not an image")
    assert why(save(picture(), "PPM")).startswith("not an image")
    assert why(b"<svg xmlns='http://www.w3.org/2000/svg'/>").startswith("not an image")


# 12 x 7 pixels of one colour, by libjxl; and the same in a container
JPEG_XL = bytes.fromhex(
    "ff0a30501009080001006c004b188b1500d48831deddc53bc05ee36802401d34193de105d0862c"
)
BOXES = bytes.fromhex("0000000c4a584c200d0a870a00000014667479706a786c20000000006a786c200000002f")
JPEG_XL_BOXES = BOXES + b"jxlc" + JPEG_XL


def test_heic_and_jpeg_xl_without_their_packages_say_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 40
    assert why(heic) == "HEIC needs the package pillow-heif; pip install 'vitrail[heic]'"
    monkeypatch.setitem(sys.modules, "pillow_jxl", None)
    monkeypatch.delitem(Image.OPEN, "JXL", raising=False)
    for content in (JPEG_XL, JPEG_XL_BOXES):
        line = "JPEG XL needs a plugin of Pillow; pip install pillow-jxl-plugin"
        assert why(content) == line and not can_decode(detect_format(content))
    assert why(b"\0\0\0\x0cJXL \r\n\x87\n" + b"\0" * 40).startswith("a damaged JPEG XL")


def test_a_registered_plugin_decodes_jpeg_xl_of_a_size_within_the_limit(monkeypatch):
    opened, pixels = [], picture(7, 12)

    def plugin(stream):
        opened.append(stream.read())
        return Image.fromarray(pixels)

    monkeypatch.setitem(Image.OPEN, "JXL", (plugin, None))
    for content in (JPEG_XL, JPEG_XL_BOXES):
        assert np.array_equal(load_image(content), pixels) and can_decode(detect_format(content))
        assert "over the limit" in why(content, max_pixels=83)
    assert opened == [JPEG_XL, JPEG_XL_BOXES]  # not for those over the limit


def test_jpeg_xl_is_decoded_with_its_package():
    pytest.importorskip("pillow_jxl", reason="needs pillow-jxl-plugin")
    assert np.array_equal(load_image(JPEG_XL), np.full((7, 12, 3), (200, 100, 50), np.uint8))


def test_avif_is_decoded_upright(tmp_path):
    upright = np.repeat(np.repeat(picture(4, 6), 16, axis=0), 16, axis=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = save(np.rot90(upright), "AVIF", quality=100, subsampling="4:4:4", exif=exif)
    assert (detect_format(turned), image_info(turned).format) == ("AVIF", "AVIF")
    decoded = load_image(turned)
    assert decoded.shape == upright.shape
    assert np.abs(decoded.astype(int) - upright).mean() < 8
    assert "over the limit" in why(turned, max_pixels=1000)
    (tmp_path / "photo.avif").write_bytes(turned)
    assert np.array_equal(load_image(tmp_path / "photo.avif"), decoded)


def test_heic_is_decoded_with_its_package():
    package = pytest.importorskip("pillow_heif", reason="needs vitrail[heic]")
    stream, pixels = io.BytesIO(), np.full((64, 48, 3), (200, 100, 50), np.uint8)
    package.from_pillow(Image.fromarray(pixels)).save(stream, quality=95)
    decoded = load_image(stream.getvalue())
    assert detect_format(stream.getvalue()) == "HEIC" and decoded.shape == pixels.shape
    assert np.abs(decoded.astype(int) - pixels).max() < 8
    assert "over the limit" in why(stream.getvalue(), max_pixels=1000)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_half_a_file_is_an_error(kind):
    content = save(picture(240, 400), kind)
    assert why(content[: len(content) // 2]).split(":")[0] in ("truncated", "damaged")


def test_a_truncated_jpeg_or_png_is_called_so():
    for content in (save(picture(240, 400), "JPEG"), save(picture(240, 400), "PNG")):
        assert why(content[: len(content) * 3 // 4]) == "truncated"
    cube = npy(picture(channels=5))
    assert why(cube[:-1], channels=5) == "truncated"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "npy"])
def test_damage_anywhere_gives_pixels_or_a_short_reason(kind):
    whole = npy(picture()) if kind == "npy" else save(picture(), kind)
    random = np.random.default_rng(7)
    for _ in range(150):
        content = bytearray(whole)
        for place in random.integers(0, len(content), random.integers(1, 4)):
            content[place] ^= 1 << random.integers(8)
        cut = random.integers(1, len(content)) if random.random() < 0.3 else len(content)
        try:
            pixels = load_image(bytes(content[:cut]), channels=3)
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
        except UserError as error:
            assert 0 < len(str(error)) < 200


def with_and_without_simplejpeg(content: bytes, monkeypatch) -> tuple[object, object]:
    pytest.importorskip("simplejpeg")

    def outcome() -> object:
        try:
            pixels = load_image(content, channels=None)
            return pixels.shape, pixels.tobytes()
        except UserError as error:
            return str(error)

    fast = outcome()
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_simplejpeg", lambda: None)
        return fast, outcome()


JPEGS = {
    "plain": {},
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "optimised": {"optimize": True},
    "coarse": {"quality": 5},
    "fine": {"quality": 100},
    "stored as RGB": {"keep_rgb": True},
    "restarts": {"restart_marker_blocks": 2},
}


@pytest.mark.parametrize("name", JPEGS)
def test_simplejpeg_gives_the_pixels_of_pillow(name, monkeypatch):
    for size in ((24, 40), (37, 23), (1, 1), (8, 9)):
        fast, slow = with_and_without_simplejpeg(
            save(picture(*size), "JPEG", **JPEGS[name]), monkeypatch
        )
        assert fast == slow


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_simplejpeg_gives_the_pixels_of_pillow_for_other_colours(mode, monkeypatch):
    content = save(Image.fromarray(picture()).convert(mode), "JPEG")
    fast, slow = with_and_without_simplejpeg(content, monkeypatch)
    assert fast == slow


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_simplejpeg_gives_the_pixels_of_pillow_for_turned_pictures(mode, monkeypatch):
    exif = Image.Exif()
    for number in range(2, 9):
        exif[0x0112] = number
        content = save(Image.fromarray(picture()).convert(mode), "JPEG", exif=exif)
        fast, slow = with_and_without_simplejpeg(content, monkeypatch)
        assert fast == slow


def test_simplejpeg_and_pillow_agree_on_damaged_files(monkeypatch):
    whole = save(picture(60, 90), "JPEG")
    random = np.random.default_rng(3)
    for trial in range(120):
        content = bytearray(whole)
        content[random.integers(2, len(content))] ^= 1 << random.integers(8)
        cut = random.integers(100, len(content)) if trial % 2 else len(content)
        fast, slow = with_and_without_simplejpeg(bytes(content[:cut]), monkeypatch)
        assert fast == slow


def test_simplejpeg_is_used_where_it_is_there(monkeypatch):
    decoder = pytest.importorskip("simplejpeg").decode_jpeg
    used = []
    monkeypatch.setattr(
        module, "load_simplejpeg", lambda: lambda *a, **k: used.append(1) or decoder(*a, **k)
    )
    load_image(save(picture(), "JPEG"))
    assert used


def test_simplejpeg_gives_the_pixels_of_pillow_on_photos(shared, monkeypatch):
    for path in sorted((shared / "data" / "imagenet-val-300").glob("*.jpg"))[:20]:
        fast, slow = with_and_without_simplejpeg(path.read_bytes(), monkeypatch)
        assert fast == slow


def test_pillow_warnings_never_leak(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)  # Pillow warns of a bomb from here on
    odd_palette = Image.new("P", (2, 2), 0)
    odd_palette.putpalette([1, 2, 3])
    contents = [
        save(odd_palette, "PNG", transparency=b"\x20"),
        save(picture(), "TIFF")[:-2] + b"\xff\xff",
        save(picture(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0" + b"\xff" * 12),
        save(picture(), "PNG")[:33] + b"\0\0\0\x08acTL" + b"\0" * 12 + save(picture(), "PNG")[33:],
        save(picture(), "GIF"),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for content in contents:
            try:
                load_image(content, channels=1)
            except UserError as error:
                assert "damaged" in str(error)
    assert not caught


def test_threads_share_the_decoder():
    contents = [
        save(picture(60 + n, 80), kind) for n in range(4) for kind in ("JPEG", "PNG", "TIFF")
    ]
    expected = [load_image(content) for content in contents]
    wrong: list[int] = []

    def work() -> None:
        for number, content in enumerate(contents * 5):
            if not np.array_equal(load_image(content), expected[number % len(contents)]):
                wrong.append(number)

    before = list(warnings.filters)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert warnings.filters == before


def test_image_info_reads_only_the_header():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = save(Image.new("CMYK", (30, 20)), "JPEG", exif=exif)
    found = image_info(content[:700])
    assert found is not None
    assert (found.format, found.mode, found.width, found.height) == ("JPEG", "CMYK", 30, 20)
    assert found.orientation == 6
    assert image_info(npy(picture())) is None


def test_pil_images_are_taken_too():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(save(picture(), "PNG", exif=exif)))
    assert load_image(turned).shape == (40, 24, 3)
    assert "over the limit" in why(Image.new("L", (100, 100)), max_pixels=10)
