"""Broken images: reported before the first step if possible; a run can be resumed after one."""

import pytest

import vitrail
from tests.run.conftest import FEW, UNCACHED, tensors
from tests.run.test_run import equal, journal_without_time
from vitrail.errors import UserError
from vitrail.run.recipe import merge_settings, read_recipe
from vitrail.run.storage.record import read_reasons
from vitrail.training import checkpoint


@pytest.fixture
def broken(photos):
    """Breaks images without changing their sizes; returns a function that repairs them."""

    def breaking(*names):
        whole = {photos / name: (photos / name).read_bytes() for name in names}
        for path, content in whole.items():
            path.write_bytes(bytes(len(content)))
        return lambda: [path.write_bytes(content) for path, content in whole.items()]

    return breaking


def resume(folder, **more):
    return vitrail.resume(folder, report=False, quiet=True, **more)


def test_broken_images_of_all_splits_are_reported_before_training(on_photos, broken, tmp_path):
    broken("train/dark/1.png", "val/light/0.png", "test/dark/0.png")
    with pytest.raises(UserError, match=r"^3 images cannot be read: ") as error:
        on_photos()
    for name in ("train/dark/1.png", "val/light/0.png", "test/dark/0.png"):
        assert name in str(error.value)
    assert not (tmp_path / "run").exists()


def test_test_images_that_are_not_used_may_be_broken(on_photos, broken):
    broken("test/dark/0.png")
    assert on_photos(test=False).metrics["test"] is None


def test_a_broken_validation_image_stops_a_run_that_ends_as_if_it_never_had(
    on_photos, broken, tmp_path
):
    whole = on_photos("whole", UNCACHED)
    mend = broken("val/light/0.png")
    with pytest.raises(UserError, match=r"val/light/0\.png: .* skip it with `data\.skip_broken"):
        on_photos("part", UNCACHED)
    assert checkpoint.load_checkpoint(tmp_path / "part" / "checkpoints").step == 12
    with pytest.raises(UserError, match=r"val/light/0\.png"):  # evaluates first, and fails again
        resume(tmp_path / "part")
    mend()
    part = resume(tmp_path / "part")
    assert equal(tensors(whole.folder), tensors(part.folder))
    assert part.metrics["val"] == whole.metrics["val"]
    assert journal_without_time(part.folder) == journal_without_time(whole.folder)


def test_an_evaluation_not_repeated_would_be_noticed(on_photos, broken, tmp_path, monkeypatch):
    whole = on_photos("whole", UNCACHED)
    mend = broken("val/light/0.png")
    with pytest.raises(UserError):
        on_photos("part", UNCACHED)
    mend()
    load = checkpoint.load_checkpoint

    def evaluated(folder, **named):
        saved = load(folder, **named)
        saved.progress["epoch_steps"] = 0
        return saved

    monkeypatch.setattr(checkpoint, "load_checkpoint", evaluated)
    part = resume(tmp_path / "part")
    assert journal_without_time(part.folder) != journal_without_time(whole.folder)


def test_a_run_with_a_broken_image_resumes_without_it(on_photos, broken, tmp_path):
    broken("val/light/0.png", "test/dark/0.png")
    with pytest.raises(UserError):
        on_photos("run", UNCACHED)
    reasons = read_reasons(tmp_path / "run" / "recipe.toml")
    before = read_recipe(tmp_path / "run" / "recipe.toml")
    done = resume(tmp_path / "run", skip_broken=True)
    assert done.metrics["steps"] == 16 and done.metrics["test"]["accuracy"] in (0, 1)
    after = read_recipe(done.folder / "recipe.toml")
    assert after == merge_settings(before, {"data": {"skip_broken": True}})
    assert reasons and read_reasons(done.folder / "recipe.toml") == reasons


def test_a_split_of_broken_images_is_not_evaluated(on_photos, broken):
    broken("test/dark/0.png", "test/light/0.png")
    done = on_photos(settings=merge_settings(FEW, {"data": {"skip_broken": True}}))
    assert done.metrics["test"] is None
