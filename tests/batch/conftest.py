"""A tiny model with random weights and a folder of pictures, one of which is broken."""

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.zoo.file import save_model

IMAGES, BROKEN = 24, 7  # pictures, and the one that cannot be read


def make_model(path, seed=0):
    """A model file: 16 pixels, three classes."""
    torch.manual_seed(seed)
    config = vitrail.ViTConfig(image=16, patch=4, width=16, depth=1, heads=1, classes=3)
    model = vitrail.ViT(config)
    torch.nn.init.normal_(model.head.weight)  # it starts at zero
    preprocess = {"size": 16, "mean": [0.5], "std": [0.5], "channels": 3}
    metadata = {"classes": ["cat", "dog", "owl"], "preprocess": preprocess, "temperature": 2.0}
    save_model(path, model, metadata)
    return path


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model.safetensors")


@pytest.fixture
def photos(tmp_path):
    """Pictures in two folders; `b/07.png` is broken."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 18, 3), dtype=np.uint8)).save(path)
        if number == BROKEN:
            path.write_bytes(b"\x89PNG but not really")
    return tmp_path / "photos"


def read(folder):
    """All rows of a job, in order."""
    parts = sorted(folder.glob("part-*.parquet"))
    return pyarrow.concat_tables([pyarrow.parquet.read_table(part) for part in parts])


def states(folder):
    """Identity and time of each part: another one if it was written again."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.glob("part-*.parquet")
    }
