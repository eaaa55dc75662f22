"""Nearest neighbours among stored features: exact, in parts, with the right model."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.batch.conftest import BROKEN, IMAGES, make_model
from vitrail.batch.similar import keep_best
from vitrail.errors import UserError


@pytest.fixture
def stored(model, photos, tmp_path):
    vitrail.features(model, photos, out=tmp_path / "stored", part=5)
    return tmp_path / "stored"


def test_neighbours_are_those_of_brute_force(stored, model, photos):
    paths = [path for path in sorted(photos.rglob("*.png")) if path.stem != f"{BROKEN:02d}"]
    x = vitrail.load(model).features(paths).astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for query in (0, 13):
        expected = np.argsort(-(x @ x[query]), kind="stable")[:4]
        found = vitrail.similar(stored, paths[query], top=4)[0].neighbours
        assert [one.id for one in found] == [
            str(paths[index].relative_to(photos)) for index in expected
        ]
        assert [one.similarity for one in found] == pytest.approx(x[expected] @ x[query], abs=1e-5)


def test_more_neighbours_than_images_gives_all_that_have_features(stored, photos):
    found = vitrail.similar(stored, photos / "a" / "00.png", top=100)[0].neighbours
    assert len(found) == IMAGES - 1 and f"b/{BROKEN:02d}.png" not in [one.id for one in found]


def test_a_part_without_features_is_skipped(model, photos, tmp_path):
    (photos / "b" / "99.png").write_bytes(b"broken")
    vitrail.features(model, photos, out=tmp_path / "stored", part=IMAGES)  # the last one alone
    found = vitrail.similar(tmp_path / "stored", photos / "a" / "00.png", top=2)[0].neighbours
    assert found[0].id == "a/00.png"


def test_of_equal_images_the_earlier_is_nearer():
    best = torch.tensor([[0.7, 0.5]]), torch.tensor([[1, 2]])
    more, items = torch.tensor([[0.5, 0.7, 0.6]]), torch.tensor([3, 4, 5])
    values, index = keep_best(best, more, items, top=2)
    assert index.tolist() == [[1, 4]] and values[0].tolist() == pytest.approx([0.7, 0.7])
    worse = torch.tensor([[0.7, 0.6, 0.1]])
    assert keep_best((values, index), worse, items + 3, top=2)[1].tolist() == [[1, 4]]


def test_a_sheet_shows_the_image_and_its_neighbours(stored, photos, tmp_path):
    queries = [photos / "a" / "00.png", photos / "b" / "01.png"]
    vitrail.similar(stored, queries, top=3, sheet=tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 4 * 100 and sheet.height > 2 * 100


def test_another_model_is_refused_and_a_moved_one_is_found(stored, model, photos, tmp_path):
    image = photos / "a" / "00.png"
    other = make_model(tmp_path / "other.safetensors", seed=1)
    with pytest.raises(UserError, match="is not the model of the features"):
        vitrail.similar(stored, image, model=other)
    moved = model.rename(tmp_path / "moved.safetensors")
    with pytest.raises(UserError, match="give its path as `model`"):
        vitrail.similar(stored, image)
    assert vitrail.similar(stored, image, model=moved, top=1)[0].neighbours[0].id == "a/00.png"


def test_only_a_folder_of_features_is_searched(model, photos, tmp_path):
    vitrail.batch_predict(model, photos, out=tmp_path / "predictions")
    with pytest.raises(UserError, match=r"has predictions; .*`vitrail features` wrote"):
        vitrail.similar(tmp_path / "predictions", photos / "a" / "00.png")
    with pytest.raises(UserError, match=r"has no _manifest.json"):
        vitrail.similar(photos, photos / "a" / "00.png")


def test_an_image_that_cannot_be_read_is_named(stored, photos):
    with pytest.raises(UserError, match=f"{BROKEN:02d}.png: "):
        vitrail.similar(stored, photos / "b" / f"{BROKEN:02d}.png")


def test_a_sheet_of_changed_data_is_refused(stored, photos, tmp_path):
    (photos / "a" / "02.png").unlink()
    with pytest.raises(UserError, match="is not the data set of the features"):
        vitrail.similar(stored, photos / "a" / "00.png", sheet=tmp_path / "sheet.png")


def test_an_unfinished_job_is_searched_with_a_warning(stored, photos, caplog):
    (stored / "part-00004.parquet").unlink()
    vitrail.similar(stored, photos / "a" / "00.png")
    assert "has 4 of 5 parts" in caplog.text


def test_a_damaged_part_is_named(stored, photos):
    (stored / "part-00002.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UserError, match=r"part-00002.parquet cannot be read"):
        vitrail.similar(stored, photos / "a" / "00.png")
