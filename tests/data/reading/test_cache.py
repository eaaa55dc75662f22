"""The cache: equal to a read, never incomplete, never stale, and optional."""

import errno
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.fakes import Fake, arrays, encoded, photo, photos
from vitrail import files
from vitrail.data.config import Preprocess
from vitrail.data.reading import cache, memory
from vitrail.data.reading.cache import cache_images, cache_key, free_cache_space
from vitrail.data.reading.reader import Reader
from vitrail.errors import UserError

LARGE, SMALL, PLENTY = Preprocess(size=48), Preprocess(size=16), 10**9


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pixels"


@pytest.fixture(scope="module")
def source() -> Fake:
    return Fake(photos(40))


def cached(source, *, uncropped=True, memory=0, disk=PLENTY, workers=0, view=LARGE, items=None):
    items = np.arange(len(source)) if items is None else np.array(items)
    reader = Reader(source, view, uncropped)
    return cache_images(reader, items, memory=memory, disk=disk, workers=workers, progress=False)


@pytest.mark.parametrize("where", [{"memory": PLENTY}, {}], ids=["memory", "file"])
@pytest.mark.parametrize("uncropped", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_cache_holds_exactly_what_a_read_yields(source, where, uncropped, workers):
    found, broken = cached(source, uncropped=uncropped, workers=workers, **where)
    read = Reader(source, LARGE, uncropped)
    assert not broken and (found.file is None) == ("memory" in where)
    assert all(np.array_equal(found(item), read(item)) for item in range(40))


def test_uncropped_images_are_stored_a_third_larger_and_never_enlarged():
    source = Fake([encoded(photo(k, *size)) for k, size in enumerate([(300, 500), (50, 70)] * 6)])
    found, _ = cached(source, memory=PLENTY)
    assert found(0).shape == (62, 103, 3) and found(1).shape == (50, 70, 3)


def test_images_of_one_size_are_stacked(source):
    found, _ = cached(source, uncropped=False, memory=PLENTY)
    assert found.stacked.shape == (40, 3, 48, 48)
    assert cached(source, memory=PLENTY)[0].stacked is None


def test_any_choice_of_items_is_found(source):
    items = [3, 5, 20, 39]
    found, _ = cached(source, items=items)
    assert all(np.array_equal(found(k), Reader(source, LARGE, True)(k)) for k in items)


def test_a_file_is_built_once(source, monkeypatch):
    first, _ = cached(source)
    monkeypatch.setattr(cache, "build_cache", lambda *_: pytest.fail("built again"))
    second, _ = cached(source)
    assert np.array_equal(first.memory, second.memory)


def test_memory_is_used_before_the_disk(source, folder):
    assert cached(source, memory=PLENTY)[0].file is None
    assert not folder.exists()


def test_images_that_do_not_fit_are_not_cached(source, caplog):
    assert cached(source, memory=1000, disk=1000) is None
    assert "every epoch decodes them again" in caplog.text


def test_a_disabled_cache_logs_nothing(source, caplog):
    assert cached(source, memory=0, disk=0) is None
    assert not caplog.text


def test_images_that_exceed_the_estimate_go_to_the_file(source, monkeypatch):
    monkeypatch.setattr(Reader, "estimate_bytes", lambda self, items: 1)
    assert cached(source, memory=1000)[0].file is not None


def test_the_estimate_is_within_two_percent(source):
    reader = Reader(source, LARGE, uncropped=True)
    real = sum(reader(item).size for item in range(40))
    assert abs(reader.estimate_bytes(np.arange(40)) - real) < 0.02 * real


def test_changed_data_settings_or_decoders_have_another_key(source, monkeypatch):
    items, reader = np.arange(40), Reader(source, LARGE, True)
    other = Fake(photos(40))
    other.mtimes = other.mtimes + 1
    names = {
        cache_key(reader, items),
        cache_key(reader, items[:20]),
        cache_key(Reader(source, LARGE, False), items),
        cache_key(Reader(source, Preprocess(size=40), True), items),
        cache_key(Reader(source, Preprocess(size=48, interpolation="bilinear"), True), items),
        cache_key(Reader(other, LARGE, True), items),
    }
    monkeypatch.setattr(cache, "installed_version", lambda name: "another version")
    assert len(names | {cache_key(reader, items)}) == 7


def test_the_same_names_in_another_folder_are_other_data(tmp_path):
    sources = [Fake(photos(9)), Fake(photos(9))]
    for source, version in zip(sources, ("v1", "v2"), strict=True):
        source.path = tmp_path / version
    one, two = (cache_key(Reader(source, LARGE, True), np.arange(9)) for source in sources)
    assert one != two


def test_normalisation_does_not_change_the_key(source):
    view = Preprocess(size=48, mean=(0.1,))
    assert cache_key(Reader(source, view, True), np.arange(9)) == cache_key(
        Reader(source, LARGE, True), np.arange(9)
    )


def test_broken_files_are_remembered_with_the_file():
    contents = photos(20)
    contents[7] = b"no image"
    for _ in range(2):
        found, broken = cached(Fake(contents))
        assert list(broken) == [7] and broken[7].startswith("class 1/7.jpg: not an image")
        assert 7 not in found.items and np.array_equal(
            found(8), Reader(Fake(contents), LARGE, True)(8)
        )


@pytest.mark.parametrize("harm", ["short", "long", "index", "gone"])
def test_a_damaged_file_is_built_again(source, folder, harm):
    complete = cached(source)[0].memory.copy()
    (place,) = [path for path in folder.iterdir() if path.is_dir()]
    pixels, index = place / "pixels.bin", place / "index.npz"
    {
        "short": lambda: pixels.write_bytes(pixels.read_bytes()[:-5]),
        "long": lambda: pixels.write_bytes(pixels.read_bytes() + b"more"),
        "index": lambda: index.write_bytes(index.read_bytes()[:100]),
        "gone": lambda: pixels.unlink(),
    }[harm]()
    again, _ = cached(source)
    assert np.array_equal(again.memory, complete)


def test_a_full_disk_is_logged_and_leaves_nothing_behind(source, folder, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "decode_into", full)
    assert cached(source) is None
    assert "No space left on device; every epoch decodes them again" in caplog.text
    assert not [path for path in folder.iterdir() if path.suffix != ".lock"]


def test_a_read_only_cache_folder_is_logged(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file" / "cache"))
    assert cached(source) is None
    assert "cannot be cached in" in caplog.text


BUILDER = """
import sys, numpy as np
from tests.data.fakes import Fake, photos
from vitrail.data.reading.cache import cache_images
from vitrail.data.config import Preprocess
from vitrail.data.reading.reader import Reader
reader = Reader(Fake(photos(40)), Preprocess(size=48), True)
found, _ = cache_images(reader, np.arange(40), memory=0, disk=10**9, workers=0)
assert all(np.array_equal(found(item), reader(item)) for item in range(40))
"""


@pytest.mark.slow
def test_two_processes_may_build_at_the_same_time(folder):
    builders = [subprocess.Popen([sys.executable, "-c", BUILDER]) for _ in range(2)]
    assert [builder.wait() for builder in builders] == [0, 0]
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1


def test_a_killed_builder_leaves_nothing_that_is_used(source, folder, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "fsync", killed)
    with monkeypatch.context() as no_cleaning, pytest.raises(KeyboardInterrupt):
        no_cleaning.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        cached(source)
    rest = [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    assert len(rest) == 1
    monkeypatch.undo()
    monkeypatch.setenv("VITRAIL_CACHE", str(folder.parent))
    found, _ = cached(source)
    assert np.array_equal(found(39), Reader(source, LARGE, True)(39)) and not rest[0].exists()


def test_least_recently_used_files_are_deleted_first(source, folder):
    sizes = [len(cached(source, items=range(n))[0].memory) for n in (40, 39, 38)]
    cached(source, items=range(40))  # used again: now the second is the oldest
    assert free_cache_space(folder / "new", sizes[1] // 2, disk=sum(sizes))
    left = {path.stat().st_size for path in folder.glob("*/pixels.bin")}
    assert left == {sizes[0], sizes[2]}


def test_a_worker_gets_the_file_by_name_not_by_content(source):
    found, _ = cached(source)
    pipe, other = multiprocessing.Pipe()
    pipe.send(found)
    assert len(multiprocessing.reduction.ForkingPickler.dumps(found)) < 10_000
    assert np.array_equal(other.recv()(11), found(11))


def test_pixels_need_no_worker(monkeypatch):
    monkeypatch.setattr(
        cache.worker_processes, "Worker", lambda *_: pytest.fail("a worker was started")
    )
    found, _ = cached(Fake(arrays(100)), uncropped=False, view=SMALL, memory=PLENTY, workers=2)
    assert len(found.items) == 100


def test_an_empty_split_has_an_empty_cache(source):
    found, broken = cached(source, items=np.array([], np.int64), memory=PLENTY)
    assert len(found.items) == 0 and not broken


def test_a_read_names_the_image_it_cannot_read():
    with pytest.raises(UserError, match=r"^class 0/0.jpg: not an image"):
        Reader(Fake([b"nothing"]), LARGE, True)(0)


def test_memory_and_disk_are_measured():
    assert 10**6 < memory.available_memory() < 10**14
    assert 0 < cache.available_disk() < 10**16
