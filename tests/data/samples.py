"""Small images and folders that several tests build."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def encoded(seed: int, kind: str = "PNG", side: int = 4) -> bytes:
    """A tiny image file, different for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def write(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(seed))
    return path


def class_folders(root: Path, counts: dict[str, int], start: int = 0) -> Path:
    """Images `0.png`, `1.png`, ... in a folder for each class, all of them different."""
    seed = start
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            write(root / name / f"{number}.png", seed)
            seed += 1
    return root


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
