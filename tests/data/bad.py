"""A folder with every kind of file that goes wrong, and some that only look so."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.fakes import encoded, photo

HOSTILE = "<img src=x onerror=alert(1)>"  # a class
NAMES = (  # of images: blanks, accents, two lines, markup for pages and for terminals
    "a b.jpg",
    "déjà vu.jpg",
    "two\nlines.jpg",
    "'\"><script>alert(2)<script>.jpg",
    "[bold red]shout.jpg",
    "\x1b[2Jescape.jpg",
    "\u202egpj.exe.jpg",
)


def bad_folder(root: Path) -> Path:
    """Three splits of two classes: 40 pictures that are fine, and the rest."""
    for split, start, count in (("train", 0, 12), ("val", 100, 4), ("test", 200, 4)):
        for number in range(count):
            put(root / split / "cat" / f"{number}.jpg", encoded(photo(start + number)))
            put(root / split / HOSTILE / f"{number}.jpg", encoded(photo(start + 50 + number)))
    for number, name in enumerate(NAMES):
        put(root / "train" / HOSTILE / name, encoded(photo(300 + number)))
    broken(root / "train" / "cat")
    odd(root / "train" / "cat")
    copies(root)
    litter(root / "train" / "cat")
    return root


def broken(folder: Path) -> None:
    whole = encoded(photo(400))
    put(folder / "empty.jpg", b"")
    put(folder / "half.jpg", whole[: len(whole) // 2])
    put(folder / "flipped.png", flipped(encoded(photo(401), "PNG")))
    put(folder / "bomb.png", bomb())
    put(folder / "words.jpg", b"this is no image")


def flipped(content: bytes) -> bytes:
    """One bit in the middle of the pixels."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def bomb(side: int = 12_000) -> bytes:
    """144 megapixels of nothing in 17 kB."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    packed = zlib.compress(bytes((1 + side // 8) * side), 9)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def odd(folder: Path) -> None:
    """Files that are read rightly, and are worth a word."""
    image = Image.fromarray(photo(500))
    put(folder / "gif.jpg", saved(Image.fromarray(photo(501)), "GIF"))
    put(folder / "cmyk.jpg", saved(image.convert("CMYK"), "JPEG"))
    put(folder / "palette.png", saved(Image.fromarray(photo(502)).quantize(32), "PNG"))
    deep = np.asarray(Image.fromarray(photo(503)).convert("L")).astype(np.uint16) * 257
    put(folder / "deep.png", saved(Image.fromarray(deep), "PNG"))
    clear = Image.fromarray(photo(504))
    clear.putalpha(128)
    put(folder / "clear.png", saved(clear, "PNG"))
    film = [Image.fromarray(photo(505 + number)) for number in range(3)]
    put(folder / "film.gif", saved(film[0], "GIF", save_all=True, append_images=film[1:]))
    exif = Image.Exif()
    exif[0x0112] = 6
    put(folder / "turned.jpg", saved(Image.fromarray(photo(508)), "JPEG", exif=exif))
    put(folder / "black.png", saved(Image.new("RGB", (90, 90)), "PNG"))
    put(folder / "white.png", saved(Image.new("RGB", (90, 90), "white"), "PNG"))
    put(folder / "long.jpg", encoded(photo(509, 70, 400)))


def copies(root: Path) -> None:
    """The same image twice in a split, across splits, under two labels, and saved again."""
    train, test = root / "train", root / "test"
    put(train / "cat" / "copy of 0.jpg", encoded(photo(0)))
    put(test / "cat" / "leak of 1.jpg", encoded(photo(1)))
    put(train / HOSTILE / "conflict with 2.jpg", encoded(photo(2)))
    small = Image.fromarray(photo(3)).resize((100, 75))
    put(train / "cat" / "small 3.jpg", saved(small, "JPEG", quality=60))
    small = Image.fromarray(photo(4)).resize((100, 75))
    put(test / "cat" / "small 4.png", saved(small, "PNG"))


def litter(folder: Path) -> None:
    """What is left out: hidden files, what systems leave, notes, links that loop or leave."""
    for name in ("Thumbs.db", ".hidden.jpg", ".ipynb_checkpoints/x.jpg"):
        put(folder / name, encoded(photo(600)))
    put(folder / "notes.txt", b"remember the milk")
    os.symlink("..", folder / "loop")
    os.symlink("/nowhere/at/all.jpg", folder / "dead.jpg")


def saved(image: Image.Image, kind: str, **settings: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
