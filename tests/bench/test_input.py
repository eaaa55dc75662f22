"""The input benchmark: every loader delivers the batches that are timed."""

from pathlib import Path

import pytest
import torch

from bench import input as bench
from bench.input import PREPROCESS, TINY_PREPROCESS, PillowPhotos, PillowTinyImages, make_photos
from bench.measure import Budget
from vitrail.data.image import load_image

WITHOUT_PEERS = ("vitrail", "torch + Pillow")


def test_photos_are_as_large_as_imagenets(tmp_path):
    source = make_photos(tmp_path, 4, Path("nowhere"))
    assert load_image(source[0].content).shape == (375, 500, 3)
    assert 80_000 < source.sizes.mean() < 160_000 and set(source.splits) == {"train"}


def test_the_pillow_datasets_return_normalised_images(tmp_path):
    source = make_photos(tmp_path, 4, Path("nowhere"))
    photos = PillowPhotos([source.root / name for name in source.ids], source.labels.tolist())
    image, label = photos[3]
    assert image.shape == (3, PREPROCESS.height, PREPROCESS.width) and label == source.labels[3]
    tiny, _ = PillowTinyImages(torch.zeros(2, 32, 32, 3, dtype=torch.uint8).numpy())[0]
    assert tiny.shape == (3, TINY_PREPROCESS.height, TINY_PREPROCESS.width)
    assert torch.allclose(
        tiny[:, 0, 0], -torch.tensor(TINY_PREPROCESS.mean) / torch.tensor(TINY_PREPROCESS.std)
    )


@pytest.mark.full
def test_every_case_is_measured_in_images_per_second(monkeypatch):
    for table in ("LOADERS", "TINY_LOADERS"):
        selected = {
            name: new for name, new in getattr(bench, table).items() if name in WITHOUT_PEERS
        }
        monkeypatch.setattr(bench, table, selected)
    monkeypatch.setattr(bench, "IMAGES", 64)
    monkeypatch.setattr(bench, "TINY_IMAGES", 128)
    monkeypatch.setattr(bench, "WORKERS", 0)
    monkeypatch.setattr(bench, "PHOTOS", Path("nowhere"))
    cases = bench.run(Budget(rounds=1, seconds=0.1), lambda done, activity: None)["cases"]
    assert [case["images"] for case in cases] == [64, 64, 128]
    assert all(tuple(case["rows"]) == WITHOUT_PEERS for case in cases)
