"""The input bench: both sides deliver the batches they are timed for."""

from pathlib import Path

import torch

from bench.input import TINY, VIEW, Photos, Tinies, make_photos, photo_tasks, tiny_tasks
from vitrail.data.image import load_image


def test_photos_are_as_large_as_imagenets(tmp_path):
    source = make_photos(tmp_path, 4, Path("nowhere"))
    assert load_image(source[0].content).shape == (375, 500, 3)
    assert 80_000 < source.sizes.mean() < 160_000 and set(source.splits) == {"train"}


def test_the_usual_way_gives_normalised_images(tmp_path):
    source = make_photos(tmp_path, 4, Path("nowhere"))
    photos = Photos([source.root / name for name in source.ids], source.labels.tolist())
    image, label = photos[3]
    assert image.shape == (3, VIEW.height, VIEW.width) and label == source.labels[3]
    tiny, _ = Tinies(torch.zeros(2, 32, 32, 3, dtype=torch.uint8).numpy())[0]
    assert tiny.shape == (3, TINY.height, TINY.width)
    assert torch.allclose(tiny[:, 0, 0], -torch.tensor(TINY.mean) / torch.tensor(TINY.std))


def test_every_task_runs(tmp_path):
    cases = photo_tasks(make_photos(tmp_path, 64, Path("nowhere")), workers=0)
    for tasks in [*cases.values(), tiny_tasks(128)]:
        for task in tasks.values():
            task()
