"""Hostile files: real ones, mutated by a numbered seed. `python -m tests.faults.fuzz KIND SEED`."""

import io
import json
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from PIL import Image
from safetensors.torch import save

from tests.data.bad import bomb
from tests.zoo import samples
from tests.zoo.arrays import google_arrays
from vitrail.data.image import image_info, load_image
from vitrail.data.open import open_data
from vitrail.errors import UserError
from vitrail.inference.load import load
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.run.recipe import Recipe, read_recipe, recipe_to_toml, settings_from_dict
from vitrail.run.report import make
from vitrail.run.report.compare import compare
from vitrail.run.resume import resume
from vitrail.run.storage.record import read_run
from vitrail.training import checkpoint
from vitrail.zoo import load as zoo

MEMORY = 1 << 30  # bytes at most, above what the process has at its start
SECONDS = 30  # at most, for one file
LARGEST = 1 << 20  # bytes of a mutated file
PAGES = 60  # every so many runs, the report is made too

HUGE = [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]
WORDS = ["", "-1", "0", "1e999", "nan", "9" * 30, "true", "null", '"', "'", "[", "{", "\\", "\0"]
WORDS += [
    "[" * 20_000,
    '{"a":' * 20_000,
    "../" * 9,
    "/etc/passwd",
    "\u202e",
    "\ud800",
    "#",
    ",",
    "=",
]

VALUES = ["-1", "0", "7", "0.5", "1e400", "nan", "inf", "9" * 25, "true", "null", '"x"', '""']
VALUES += ["[]", "[1, 2]", "[[[]]]", "{a = 1}", '{"a": 1}', "1979-05-27", '["a", 1]']

Mutation = Callable[[bytes, Generator], bytes]


def flip(content: bytes, luck: Generator) -> bytes:
    changed = bytearray(content)
    for _ in range(int(luck.integers(1, 9))):
        changed[luck.integers(len(changed))] ^= 1 << int(luck.integers(8))
    return bytes(changed)


def cut(content: bytes, luck: Generator) -> bytes:
    return content[: luck.integers(len(content))]


def lose(content: bytes, luck: Generator) -> bytes:
    start, end = two(content, luck)
    return content[:start] + content[end:]


def splice(content: bytes, luck: Generator) -> bytes:
    start, end = two(content, luck)
    place = int(luck.integers(len(content)))
    return content[:place] + content[start:end] + content[place + (end - start) :]


def repeat(content: bytes, luck: Generator) -> bytes:
    start, end = two(content, luck)
    return content[:end] + content[start:end] * int(luck.integers(1, 50)) + content[end:]


def number(content: bytes, luck: Generator) -> bytes:
    size = int(luck.choice([1, 2, 4, 8]))
    value = HUGE[luck.integers(len(HUGE))] % 256**size
    order = "little" if luck.integers(2) else "big"
    place = int(luck.integers(max(1, min(len(content), int(luck.choice([64, 2000, 10**9]))))))
    return content[:place] + value.to_bytes(size, order) + content[place + size :]


def word(content: bytes, luck: Generator) -> bytes:
    """A part between two signs is replaced."""
    places = [i for i, byte in enumerate(content[:20_000]) if byte in b' ,:="\t\n[]{}'] or [0]
    place = int(luck.choice(places)) + 1
    end = next((i for i in places if i > place), len(content))
    said = WORDS[luck.integers(len(WORDS))].encode("utf-8", "surrogatepass")
    return content[:place] + said + content[end:]


def value(content: bytes, luck: Generator) -> bytes:
    """What stands behind a name becomes another value, which TOML or JSON may read."""
    places = [i for i, byte in enumerate(content[:20_000]) if byte in b"=:"] or [0]
    place = int(luck.choice(places)) + 1
    rest = content[place:]
    end = min(rest.find(sign) % (len(rest) + 1) for sign in (b"\n", b",", b"}"))
    said = VALUES[luck.integers(len(VALUES))].encode()
    return content[:place] + b" " + said + rest[end:]


def line(content: bytes, luck: Generator) -> bytes:
    """Lines change their places, come twice or go."""
    lines = content.split(b"\n")
    one, other = luck.integers(len(lines), size=2)
    what = luck.integers(3)
    if what == 0:
        lines[one], lines[other] = lines[other], lines[one]
    elif what == 1:
        lines.insert(int(one), lines[other])
    else:
        del lines[one]
    return b"\n".join(lines)


def two(content: bytes, luck: Generator) -> tuple[int, int]:
    start = int(luck.integers(len(content)))
    return start, min(len(content), start + int(luck.choice([1, 4, 16, 100, 2000])))


BYTES: list[Mutation] = [flip, flip, cut, lose, splice, repeat, number, number]
TEXT: list[Mutation] = [*BYTES, word, word, line, line, *[value] * 12]


def mutated(content: bytes, luck: Generator, ways: list[Mutation]) -> bytes:
    for _ in range(int(luck.choice([1, 1, 1, 2, 5]))):
        if content:
            content = ways[luck.integers(len(ways))](content, luck)[:LARGEST]
    return content


def pictures() -> dict[str, bytes]:
    """One of each kind that `load_image` reads."""
    luck = np.random.default_rng(0)
    colour = Image.fromarray(luck.integers(0, 256, (24, 20, 3), np.uint8))
    deep = Image.fromarray(luck.integers(0, 65536, (24, 20)).astype(np.uint16))
    clear = colour.copy()
    clear.putalpha(99)
    exif = Image.Exif()
    exif[0x0112] = 6
    found = {}
    for name, image, kind, settings in (
        ("rgb.jpg", colour, "JPEG", {"exif": exif}),
        ("cmyk.jpg", colour.convert("CMYK"), "JPEG", {}),
        ("turns.jpg", colour, "JPEG", {"progressive": True}),
        ("rgb.png", colour, "PNG", {}),
        ("deep.png", deep, "PNG", {}),
        ("clear.png", clear, "PNG", {}),
        ("few.png", colour.quantize(8), "PNG", {}),
        ("film.gif", colour, "GIF", {"save_all": True, "append_images": [clear]}),
        ("a.webp", colour, "WEBP", {}),
        ("clear.webp", clear, "WEBP", {"lossless": True}),
        ("a.bmp", colour, "BMP", {}),
        ("few.bmp", colour.quantize(8), "BMP", {}),
        ("a.tif", colour, "TIFF", {}),
        ("packed.tif", colour, "TIFF", {"compression": "tiff_lzw"}),
        ("deep.tif", deep, "TIFF", {}),
    ):
        stream = io.BytesIO()
        image.save(stream, kind, **settings)
        found[name] = stream.getvalue()
    stream = io.BytesIO()
    np.save(stream, luck.random((24, 20, 5)).astype(np.float32))
    return {**found, "five.npy": stream.getvalue()}


class Images:
    ways = BYTES

    def __init__(self, place: Path, done: Path):
        self.files = pictures()

    def read(self, name: str, content: bytes, seed: int) -> None:
        for look in (image_info, load_image):
            try:
                look(content)
            except UserError:
                if look is load_image:
                    raise


class Tables:
    ways = TEXT

    def __init__(self, place: Path, done: Path):
        self.place = place
        shots = pictures()["rgb.png"], pictures()["deep.png"]
        for number in range(12):
            (place / f"{number}.png").write_bytes(shots[number % 2])
        rows = [(f"{number}.png", "ab"[number % 2], "train") for number in range(12)]
        entries = [dict(zip(("path", "label", "split"), row, strict=True)) for row in rows]
        lines = [("path", "label", "split"), *rows]
        self.files = {
            "t.csv": "\n".join(",".join(row) for row in lines).encode(),
            "t.tsv": "\n".join("\t".join(row) for row in lines).encode(),
            "t.jsonl": "\n".join(json.dumps(entry) for entry in entries).encode(),
        }

    def read(self, name: str, content: bytes, seed: int) -> None:
        path = self.place / name
        path.write_bytes(content)
        everything(path)


class Shards:
    ways = BYTES

    def __init__(self, place: Path, done: Path):
        self.place = place
        shot, stream = pictures()["rgb.jpg"], io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for number in range(8):
                parts = {"jpg": shot, "cls": str(number % 2).encode()}
                for suffix, content in parts.items():
                    member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        self.files = {"0.tar": stream.getvalue()}

    def read(self, name: str, content: bytes, seed: int) -> None:
        (self.place / name).write_bytes(content)
        everything(self.place)


def everything(path: Path) -> None:
    source = open_data(path, split=False, progress=False)
    for index in range(min(len(source), 40)):
        load_image(source[index].content)


class Recipes:
    ways = TEXT

    def __init__(self, place: Path, done: Path):
        self.path = place / "recipe.toml"
        self.files = {"recipe.toml": recipe_to_toml(Recipe()).encode()}

    def read(self, name: str, content: bytes, seed: int) -> None:
        self.path.write_bytes(content)
        settings_from_dict(Recipe, read_recipe(self.path))


class Runs:
    """One file of a finished run at a time; `done` is such a run."""

    ways = TEXT

    def __init__(self, place: Path, done: Path):
        self.run, self.other = place / "run", place / "other"
        shutil.copytree(done, self.run), shutil.copytree(done, self.other)
        names = [
            path
            for path in self.run.rglob("*")
            if path.is_file() and path.name not in (".lock", ".owner")
        ]
        self.files = {str(path.relative_to(self.run)): path.read_bytes() for path in names}

    def read(self, name: str, content: bytes, seed: int) -> None:
        (self.run / name).write_bytes(content)
        looks: list[Callable[[], Any]] = [
            lambda: checkpoint.load_checkpoint(self.run / "checkpoints"),
            lambda: read_run(self.run),
            lambda: compare(self.run, self.other),
            lambda: load(self.run),
            lambda: resume(self.run, report=False, quiet=True),
        ]
        if seed % PAGES == PAGES - 1:
            looks.append(lambda: make.write_report(self.run))
        try:
            for look in looks:
                try:
                    look()
                except UserError as error:
                    check_words(error)
        finally:
            (self.run / name).write_bytes(self.files[name])


class Models:
    """Weights of ours and of others."""

    ways = BYTES

    def __init__(self, place: Path, done: Path):
        self.place = place
        tensors, stream = samples.tensors("timm-cls"), io.BytesIO()
        torch.save(tensors, stream)
        self.files = {
            "ours.safetensors": (done / "model.safetensors").read_bytes(),
            "timm.safetensors": save(tensors),
            "timm.pth": stream.getvalue(),
        }
        model = ViT(ViTConfig(image=24, patch=6, classes=5, width=24, depth=2, heads=3))
        np.savez(place / "google.npz", **google_arrays(model, "original"))
        self.files["google.npz"] = (place / "google.npz").read_bytes()
        self.flags = {"timm": {"heads": 3, "image": (24, 30)}}

    def read(self, name: str, content: bytes, seed: int) -> None:
        path = self.place / name
        path.write_bytes(content)
        if name.startswith("ours"):
            load(path).predict(np.zeros((8, 8, 1), np.uint8))
        else:
            zoo.load_weights(path, vit=self.flags.get(name.partition(".")[0], {}))


KINDS: dict[str, type[Any]] = {
    "images": Images,
    "tables": Tables,
    "tar shards": Shards,
    "recipes": Recipes,
    "run folders": Runs,
    "model files": Models,
}


def once(target: Any, kind: str, seed: int) -> None:
    """One mutated file is read rightly, or refused in words."""
    luck = np.random.default_rng((sorted(KINDS).index(kind), seed))
    name = list(target.files)[luck.integers(len(target.files))]
    try:
        target.read(name, mutated(target.files[name], luck, target.ways), seed)
    except UserError as error:
        check_words(error)


def check_words(error: UserError) -> None:
    assert str(error).split(), "no words"


def tried(kind: str, place: Path, done: Path, seeds: list[int], now: Path) -> list[list[Any]]:
    """The seeds that went wrong, and how; `now` is told the seed in hand."""
    target, wrong = KINDS[kind](place, done), []
    for seed in seeds:
        now.write_text(str(seed))
        signal.alarm(SECONDS)
        try:
            once(target, kind, seed)
        except Exception as error:
            wrong.append([seed, f"{type(error).__name__}: {str(error)[:300]}"])
        signal.alarm(0)
    return wrong


def room_of_a_bomb() -> int:
    """Bytes that 144 megapixels in 17 kB take while they are refused."""
    content = bomb()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    try:
        load_image(content)
    except UserError as error:
        assert "over the limit" in str(error)
    return memory("VmHWM") - before


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    from tests.faults.lab import Lab

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place"
        place.mkdir()
        once(KINDS[sys.argv[1]](place, Lab(Path(folder)).whole), sys.argv[1], int(sys.argv[2]))
