"""The content buffer: each file is read once before training, within a limit, and never stale."""

import os
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import vitrail
from tests.data.fakes import encoded, photo
from tests.data.samples import class_folders, tar
from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.image import load_image, read_file
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.reading import contents, workers
from vitrail.data.reading.contents import ContentBuffer
from vitrail.data.reading.reader import DecodeChunk, Reader, StageContents
from vitrail.data.source import sample_indices
from vitrail.data.sources import folder
from vitrail.data.sources.shards import ShardSource
from vitrail.errors import UserError

LARGE, SMALL = Preprocess(size=72), Preprocess(size=8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path):
    """JPEG files without given splits, all of them different."""
    for number in range(120):
        path = tmp_path / "data" / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(number, 90 + number % 5, 110)))
    return tmp_path / "data"


@pytest.fixture
def opens(tmp_path, monkeypatch):
    """Returns and resets the number of times that each file was opened, in any process."""
    log = tmp_path / "opens"

    def logged(path, *limit):
        with open(log, "a") as file:
            file.write(f"{path}\n")
        return read_file(path, *limit)

    def counts():
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return {path: lines.count(path) for path in lines}

    monkeypatch.setattr(folder, "read_file", logged)
    return counts


def start(data, preprocess, **config):
    """What `train` does before its first step: open, sample, decode, yield a batch."""
    source = open_data(data, progress=False)
    for index in sample_indices(source).tolist():
        load_image(source[index].content, None)
    loader = Loader(source, preprocess, DataConfig(**config), batch=16, progress=False)
    loader.prepare()
    return next(loader.training()), source


@pytest.mark.parametrize("preprocess", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("where", [{}, {"cache_gb": 0}], ids=["memory", "file"])
def test_each_file_is_opened_once_before_the_first_step(root, opens, preprocess, count, where):
    _, source = start(root, preprocess, workers=count, **where)
    once = {os.path.join(source.root, name): 1 for name in source.ids}
    assert opens() == once
    assert len(source.contents) == 0
    start(root, preprocess, workers=count, **where)
    warm = opens()
    assert set(warm.values()) == {1} and warm.keys() <= once.keys()


@pytest.mark.slow
def test_a_whole_run_opens_each_file_once(root, opens, tmp_path):
    settings = {"model": "Pico/4", "epochs": 1, "report": False, "quiet": True}
    for name in ("cold", "warm"):
        vitrail.train(root, out=tmp_path / name, **settings)
        counts = opens()
        assert len(counts) == 120 and set(counts.values()) == {1}


def test_without_the_buffer_files_would_be_opened_again(root, opens, monkeypatch):
    monkeypatch.setattr(ContentBuffer, "expect", lambda *_: None)
    start(root, LARGE, workers=0)
    assert max(opens().values()) > 2


def test_given_splits_are_sampled_and_decoded_with_one_read(tmp_path, opens):
    for number, name in enumerate(("train", "val", "test")):
        class_folders(tmp_path / "data" / name, {"a": 30, "b": 30}, start=100 * number)
    start(tmp_path / "data", SMALL, workers=0)
    assert set(opens().values()) == {1}


@pytest.mark.slow
def test_spawned_workers_get_the_buffered_contents(root, opens, monkeypatch):
    forked, _ = start(root, LARGE, workers=2)
    monkeypatch.setenv("VITRAIL_CACHE", str(root.parent / "other"))
    monkeypatch.setattr(workers, "start_method", lambda: "spawn")
    source = open_data(root, progress=False)
    taken = []
    monkeypatch.setattr(
        ContentBuffer, "take", lambda self, i, take=ContentBuffer.take: keep(taken, take(self, i))
    )
    opens()
    loader = Loader(source, LARGE, DataConfig(workers=2), batch=16, progress=False)
    spawned = next(loader.training())
    assert np.array_equal(spawned.images, forked.images)
    assert None not in taken and len(taken) > 64


def test_a_worker_decodes_staged_contents_without_reading(root):
    source = open_data(root, progress=False)
    slot = np.empty(10**6, np.uint8)
    staged = StageContents(source)(np.arange(3), slot)
    assert staged.sizes == source.sizes[:3].tolist()
    moved = replace(source, root=root / "nowhere")
    shapes = DecodeChunk(Reader(moved, LARGE, True))(staged, slot, lambda item: None)
    pixels = [Reader(source, LARGE, True)(item) for item in range(3)]
    assert shapes == [image.shape for image in pixels]
    joined = np.concatenate([image.reshape(-1) for image in pixels])
    assert np.array_equal(slot[: len(joined)], joined)


def keep(taken, content):
    taken.append(content)
    return content


def test_shards_are_read_once(tmp_path, monkeypatch):
    images = {f"{number}.jpg": encoded(photo(number)) for number in range(60)}
    labels = {f"{number}.cls": str(number % 2).encode() for number in range(60)}
    tar(tmp_path / "data" / "x.tar", images | labels)
    read, original = [], ShardSource._read
    monkeypatch.setattr(
        ShardSource, "_read", lambda self, *which: read.append(which) or original(self, *which)
    )
    _, source = start(tmp_path / "data", SMALL, workers=0)
    assert len(read) == len(set(read)) == len(source)


def test_a_file_that_changes_or_vanishes_is_never_taken_from_the_buffer(root):
    source = open_data(root, progress=False)
    first, second = (root / source.ids[index] for index in (0, 1))
    content = bytearray(first.read_bytes())
    content[-5] ^= 1
    first.write_bytes(bytes(content))
    os.utime(first, ns=(5, 5))
    assert source[0].content == bytes(content)
    second.unlink()
    with pytest.raises(UserError, match="no such file"):
        source[1]


def test_the_buffer_stays_below_its_limit(tmp_path):
    for number in range(10):
        (tmp_path / str(number)).write_bytes(bytes(100))
    buffer = ContentBuffer(limit=350)
    buffer.expect(np.arange(10))
    for number in range(10):
        path = tmp_path / str(number)
        assert buffer.read(number, path, path.read_bytes) == bytes(100)
    assert len(buffer) == 3
    assert buffer.take(0) == bytes(100) and buffer.take(0) is None and len(buffer) == 2


def test_the_limit_is_a_share_of_the_available_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "available_memory", lambda: 8 * 250)
    buffer = ContentBuffer()
    buffer.expect(np.arange(3))
    for number in range(3):
        (tmp_path / str(number)).touch()
        buffer.read(number, tmp_path / str(number), partial(bytes, 100))
    assert len(buffer) == 2


def test_unannounced_reads_are_not_buffered_and_a_copy_starts_empty(tmp_path):
    (tmp_path / "a").touch()
    buffer = ContentBuffer()
    buffer.read(0, tmp_path / "a", lambda: b"a")
    assert len(buffer) == 0
    buffer.expect(np.array([0]))
    buffer.read(0, tmp_path / "a", lambda: b"a")
    assert len(buffer) == 1 and len(pickle.loads(pickle.dumps(buffer))) == 0
