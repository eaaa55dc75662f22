"""The cache: exactly what a read yields, never half, never stale, and never in the way."""

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
from vitrail.data.reading import cache
from vitrail.data.reading.cache import keep, key, make_room
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


def kept(source, *, whole=True, memory=0, disk=PLENTY, workers=0, view=LARGE, items=None):
    items = np.arange(len(source)) if items is None else np.array(items)
    reader = Reader(source, view, whole)
    return keep(reader, items, memory=memory, disk=disk, workers=workers, progress=False)


@pytest.mark.parametrize("where", [{"memory": PLENTY}, {}], ids=["memory", "file"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_cache_holds_exactly_what_a_read_yields(source, where, whole, workers):
    found, broken = kept(source, whole=whole, workers=workers, **where)
    read = Reader(source, LARGE, whole)
    assert not broken and (found.file is None) == ("memory" in where)
    assert all(np.array_equal(found(item), read(item)) for item in range(40))


def test_whole_images_are_kept_a_third_larger_and_never_enlarged():
    source = Fake([encoded(photo(k, *size)) for k, size in enumerate([(300, 500), (50, 70)] * 6)])
    found, _ = kept(source, memory=PLENTY)
    assert found(0).shape == (62, 103, 3) and found(1).shape == (50, 70, 3)


def test_images_of_one_size_lie_together(source):
    found, _ = kept(source, whole=False, memory=PLENTY)
    assert found.together.shape == (40, 3, 48, 48)
    assert kept(source, memory=PLENTY)[0].together is None


def test_any_choice_of_items_is_found(source):
    items = [3, 5, 20, 39]
    found, _ = kept(source, items=items)
    assert all(np.array_equal(found(k), Reader(source, LARGE, True)(k)) for k in items)


def test_a_file_is_built_once(source, monkeypatch):
    first, _ = kept(source)
    monkeypatch.setattr(cache, "build", lambda *_: pytest.fail("built again"))
    second, _ = kept(source)
    assert np.array_equal(first.pixels, second.pixels)


def test_memory_is_used_before_the_disk(source, folder):
    assert kept(source, memory=PLENTY)[0].file is None
    assert not folder.exists()


def test_what_does_not_fit_is_not_kept(source, caplog):
    assert kept(source, memory=1000, disk=1000) is None
    assert "every epoch decodes them anew" in caplog.text


def test_without_any_room_nothing_is_said(source, caplog):
    assert kept(source, memory=0, disk=0) is None
    assert not caplog.text


def test_a_sample_that_promised_too_little_moves_on_to_the_file(source, monkeypatch):
    monkeypatch.setattr(Reader, "room", lambda self, items: 1)
    assert kept(source, memory=1000)[0].file is not None


def test_the_room_is_guessed_well(source):
    reader = Reader(source, LARGE, whole=True)
    real = sum(reader(item).size for item in range(40))
    assert abs(reader.room(np.arange(40)) - real) < 0.02 * real


def test_changed_data_settings_or_decoders_have_another_name(source, monkeypatch):
    items, reader = np.arange(40), Reader(source, LARGE, True)
    other = Fake(photos(40))
    other.dates = other.dates + 1
    names = {
        key(reader, items),
        key(reader, items[:20]),
        key(Reader(source, LARGE, False), items),
        key(Reader(source, Preprocess(size=40), True), items),
        key(Reader(source, Preprocess(size=48, interpolation="bilinear"), True), items),
        key(Reader(other, LARGE, True), items),
    }
    monkeypatch.setattr(cache, "installed", lambda name: "another version")
    assert len(names | {key(reader, items)}) == 7


def test_the_same_names_in_another_folder_are_other_data(tmp_path):
    sources = [Fake(photos(9)), Fake(photos(9))]
    for source, version in zip(sources, ("v1", "v2"), strict=True):
        source.path = tmp_path / version
    one, two = (key(Reader(source, LARGE, True), np.arange(9)) for source in sources)
    assert one != two


def test_statistics_do_not_matter_to_pixels(source):
    view = Preprocess(size=48, mean=(0.1,))
    assert key(Reader(source, view, True), np.arange(9)) == key(
        Reader(source, LARGE, True), np.arange(9)
    )


def test_broken_files_are_remembered_with_the_file():
    contents = photos(20)
    contents[7] = b"no image"
    for _ in range(2):
        found, broken = kept(Fake(contents))
        assert list(broken) == [7] and broken[7].startswith("class 1/7.jpg: not an image")
        assert 7 not in found.items and np.array_equal(
            found(8), Reader(Fake(contents), LARGE, True)(8)
        )


@pytest.mark.parametrize("harm", ["short", "long", "index", "gone"])
def test_a_damaged_file_is_built_again(source, folder, harm):
    whole = kept(source)[0].pixels.copy()
    (place,) = [path for path in folder.iterdir() if path.is_dir()]
    pixels, index = place / "pixels.bin", place / "index.npz"
    {
        "short": lambda: pixels.write_bytes(pixels.read_bytes()[:-5]),
        "long": lambda: pixels.write_bytes(pixels.read_bytes() + b"more"),
        "index": lambda: index.write_bytes(index.read_bytes()[:100]),
        "gone": lambda: pixels.unlink(),
    }[harm]()
    again, _ = kept(source)
    assert np.array_equal(again.pixels, whole)


def test_a_full_disk_is_said_and_leaves_nothing_behind(source, folder, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "pack", full)
    assert kept(source) is None
    assert "No space left on device; every epoch decodes them anew" in caplog.text
    assert not [path for path in folder.iterdir() if path.suffix != ".lock"]


def test_a_cache_folder_that_cannot_be_written_is_said(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file" / "cache"))
    assert kept(source) is None
    assert "cannot be kept in" in caplog.text


BUILDER = """
import sys, numpy as np
from tests.data.fakes import Fake, photos
from vitrail.data.reading.cache import keep
from vitrail.data.config import Preprocess
from vitrail.data.reading.reader import Reader
reader = Reader(Fake(photos(40)), Preprocess(size=48), True)
found, _ = keep(reader, np.arange(40), memory=0, disk=10**9, workers=0)
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

    monkeypatch.setattr(files, "sync", killed)
    with monkeypatch.context() as no_cleaning, pytest.raises(KeyboardInterrupt):
        no_cleaning.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        kept(source)
    rest = [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    assert len(rest) == 1
    monkeypatch.undo()
    monkeypatch.setenv("VITRAIL_CACHE", str(folder.parent))
    found, _ = kept(source)
    assert np.array_equal(found(39), Reader(source, LARGE, True)(39)) and not rest[0].exists()


def test_longest_unused_files_make_room(source, folder):
    sizes = [len(kept(source, items=range(n))[0].pixels) for n in (40, 39, 38)]
    kept(source, items=range(40))  # used again: now the second is the oldest
    assert make_room(folder / "new", sizes[1] // 2, disk=sum(sizes))
    left = {path.stat().st_size for path in folder.glob("*/pixels.bin")}
    assert left == {sizes[0], sizes[2]}


def test_a_worker_gets_the_file_by_name_not_by_content(source):
    found, _ = kept(source)
    pipe, other = multiprocessing.Pipe()
    pipe.send(found)
    assert len(multiprocessing.reduction.ForkingPickler.dumps(found)) < 10_000
    assert np.array_equal(other.recv()(11), found(11))


def test_pixels_need_no_worker(monkeypatch):
    monkeypatch.setattr(cache.processes, "Worker", lambda *_: pytest.fail("a worker was started"))
    found, _ = kept(Fake(arrays(100)), whole=False, view=SMALL, memory=PLENTY, workers=2)
    assert len(found.items) == 100


def test_an_empty_split_is_kept_as_nothing(source):
    found, broken = kept(source, items=np.array([], np.int64), memory=PLENTY)
    assert len(found.items) == 0 and not broken


def test_a_read_names_the_image_it_cannot_read():
    with pytest.raises(UserError, match=r"^class 0/0.jpg: not an image"):
        Reader(Fake([b"nothing"]), LARGE, True)(0)


def test_memory_and_disk_are_measured():
    assert 10**6 < cache.free_memory() < 10**14
    assert 0 < cache.free_disk() < 10**16
