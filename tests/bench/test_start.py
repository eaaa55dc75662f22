"""The start bench: reproducible images, and the time until a real run reaches its first step."""

import os

import pytest

from bench import start
from bench.measure import Budget
from vitrail.data.image import load_image


@pytest.fixture(autouse=True)
def few_images(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "IMAGES", 60)
    monkeypatch.setattr(start, "CLASSES", 2)
    monkeypatch.setattr(start, "MODEL", "Pico/4")
    monkeypatch.setattr(start, "DROP_CACHES", tmp_path / "drop_caches")


def test_images_are_different_jpegs_and_always_the_same(tmp_path):
    for name in ("one", "two"):
        start.make_images(tmp_path / name)
    one, two = (sorted((tmp_path / name).rglob("*.jpg")) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert len({path.read_bytes() for path in one}) == 60
    assert load_image(one[0]).shape == (300, 400, 3)
    assert 10_000 < one[0].stat().st_size < 60_000


def test_the_page_cache_is_dropped_where_permitted(tmp_path, monkeypatch):
    start.DROP_CACHES.touch()
    start.drop_page_cache([])
    assert start.DROP_CACHES.read_text() == "1"
    start.DROP_CACHES.unlink()
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: advised.append(args), raising=False)
    (tmp_path / "a.jpg").touch()
    start.drop_page_cache([tmp_path / "a.jpg"])
    assert len(advised) == 1


@pytest.mark.full
def test_cold_and_warm_starts_are_timed_beside_another_checkout():
    result = start.run(
        Budget(rounds=1, seconds=0.1), lambda done, activity: None, before=start.ROOT
    )
    assert [case["label"] for case in result["cases"]] == ["60 JPEGs, cold", "60 JPEGs, warm"]
    for case in result["cases"]:
        assert set(case["rows"]) == {"vitrail", "before"}
        assert case["rows"]["vitrail"]["median"] > 0.5


@pytest.mark.slow
def test_a_run_that_fails_before_its_first_step_is_reported(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(RuntimeError, match="no images in"):
        start.seconds_to_first_step(start.ROOT, tmp_path, tmp_path / "cache", cold=False)
