"""Broken images: told before the first step where that is possible, and never the end of a run."""

import pytest

from tests.run.conftest import FEW, UNKEPT, tensors
from tests.run.test_run import equal, journal_without_time
from vitrail.errors import UserError
from vitrail.run import run
from vitrail.run.recipe import merge, read_recipe
from vitrail.run.record import read_reasons
from vitrail.training import checkpoint


@pytest.fixture
def broken(photos):
    """Breaks pictures without changing their sizes; returns what mends them."""

    def breaking(*names):
        whole = {photos / name: (photos / name).read_bytes() for name in names}
        for path, content in whole.items():
            path.write_bytes(bytes(len(content)))
        return lambda: [path.write_bytes(content) for path, content in whole.items()]

    return breaking


def go_on(folder, **more):
    return run.resume(folder, report=False, quiet=True, **more)


def test_broken_images_of_all_splits_are_told_before_the_first_step(on_photos, broken, tmp_path):
    broken("train/dark/1.png", "val/light/0.png", "test/dark/0.png")
    with pytest.raises(UserError, match=r"^3 images cannot be read: ") as error:
        on_photos()
    for name in ("train/dark/1.png", "val/light/0.png", "test/dark/0.png"):
        assert name in str(error.value)
    assert not (tmp_path / "run").exists()


def test_test_images_that_nobody_will_look_at_may_be_broken(on_photos, broken):
    broken("test/dark/0.png")
    assert on_photos(test=False).metrics["test"] is None


def test_a_broken_validation_image_stops_a_run_that_ends_as_if_it_never_had(
    on_photos, broken, tmp_path
):
    whole = on_photos("whole", UNKEPT)
    mend = broken("val/light/0.png")
    with pytest.raises(UserError, match=r"val/light/0\.png: .* leave it out with --data\.skip-"):
        on_photos("part", UNKEPT)
    assert checkpoint.load(tmp_path / "part" / "checkpoints").step == 12
    with pytest.raises(UserError, match=r"val/light/0\.png"):  # looks first, and fails again
        go_on(tmp_path / "part")
    mend()
    part = go_on(tmp_path / "part")
    assert equal(tensors(whole.folder), tensors(part.folder))
    assert part.metrics["val"] == whole.metrics["val"]
    assert journal_without_time(part.folder) == journal_without_time(whole.folder)


def test_a_look_that_is_not_repeated_would_be_noticed(on_photos, broken, tmp_path, monkeypatch):
    whole = on_photos("whole", UNKEPT)
    mend = broken("val/light/0.png")
    with pytest.raises(UserError):
        on_photos("part", UNKEPT)
    mend()
    load = checkpoint.load

    def looked(folder):
        saved = load(folder)
        saved.facts["epoch_steps"] = 0
        return saved

    monkeypatch.setattr(checkpoint, "load", looked)
    part = go_on(tmp_path / "part")
    assert journal_without_time(part.folder) != journal_without_time(whole.folder)


def test_a_run_with_a_broken_image_goes_on_without_it(on_photos, broken, tmp_path):
    broken("val/light/0.png", "test/dark/0.png")
    with pytest.raises(UserError):
        on_photos("run", UNKEPT)
    reasons = read_reasons(tmp_path / "run" / "recipe.toml")
    before = read_recipe(tmp_path / "run" / "recipe.toml")
    done = go_on(tmp_path / "run", skip_broken=True)
    assert done.metrics["steps"] == 16 and done.metrics["test"]["accuracy"] in (0, 1)
    after = read_recipe(done.folder / "recipe.toml")
    assert after == merge(before, {"data": {"skip_broken": True}})
    assert reasons and read_reasons(done.folder / "recipe.toml") == reasons


def test_a_split_of_broken_images_is_not_judged(on_photos, broken):
    broken("test/dark/0.png", "test/light/0.png")
    done = on_photos(changes=merge(FEW, {"data": {"skip_broken": True}}))
    assert done.metrics["test"] is None
