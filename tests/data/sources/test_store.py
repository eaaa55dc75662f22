"""Data in a bucket of a real S3 server: the same images as on disk, whatever the store does."""

import itertools
import logging
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.samples import class_folders, encoded, tar
from tests.stores import CREDENTIALS, Proxy, error_page, s3_server, upload
from vitrail.data.open import open_data
from vitrail.data.source import fingerprint
from vitrail.data.sources import store, store_cache
from vitrail.errors import UserError

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def port():
    with s3_server() as number:
        yield number


@pytest.fixture
def s3(port, tmp_path, monkeypatch):
    """A proxy before an S3 server, which all AWS clients of this process find; a cache folder."""
    proxy = Proxy(port)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_systems", {})
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.01)
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


@pytest.fixture
def bucket():
    return f"s3://bucket-{next(NUMBERS)}"


def pairs(start: int, count: int, classes: int = 2) -> dict[str, bytes]:
    found = {}
    for number in range(start, start + count):
        found[f"{number:04d}.png"] = encoded(number, side=16)
        found[f"{number:04d}.cls"] = str(number % classes).encode()
    return found


@pytest.fixture
def shards(tmp_path):
    for shard in range(3):
        tar(tmp_path / "x" / f"{shard:03d}.tar", pairs(shard * 20, 20))
    return tmp_path / "x"


def why(data, **settings):
    with pytest.raises(UserError) as error:
        open_data(data, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(remote, local) -> None:
    assert list(remote.ids) == list(local.ids)
    assert (remote.name, remote.classes) == (local.name, local.classes)
    assert np.array_equal(remote.labels, local.labels)
    assert np.array_equal(remote.splits, local.splits)
    assert fingerprint(remote) == fingerprint(local)
    assert all(remote[i].content == local[i].content for i in range(len(local)))


def test_shards_in_a_bucket_are_those_on_disk(s3, bucket, shards):
    source = open_data(upload(shards, f"{bucket}/x") + "/")
    same(source, open_data(shards))
    assert str(source.path) == f"{bucket}/x"
    same(pickle.loads(pickle.dumps(source)), open_data(shards))


def test_class_folders_in_a_bucket_are_those_on_disk(s3, bucket, tmp_path):
    folder = class_folders(tmp_path / "pets", {"cat": 12, "dog": 12})
    (folder / "notes.txt").write_text("hello")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "1.png").write_bytes(encoded(1))
    source = open_data(upload(folder, f"{bucket}/pets"))
    same(source, open_data(folder))
    assert list(source.ignored) == ["notes.txt"]


def test_a_table_in_a_bucket_finds_its_images_beside_it(s3, bucket, tmp_path):
    folder = class_folders(tmp_path / "t", {"a": 9, "b": 9})
    rows = [f"{p.relative_to(folder).as_posix()},{p.parent.name}" for p in folder.rglob("*.png")]
    (folder / "labels.csv").write_text("\n".join(["path,label", *sorted(rows)]))
    url = upload(folder, f"{bucket}/t")
    same(open_data(f"{url}/labels.csv"), open_data(folder / "labels.csv"))
