"""Stores besides S3: a web server, the hub, and Google's, each as a server of this machine."""

import functools
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import vitrail
from tests.data.samples import class_folders
from tests.data.sources.test_store import same, why
from tests.local_hub import TreeHub, run_hub, use_hub
from tests.stores import free_port
from vitrail.data.open import open_data
from vitrail.data.sources import store

NAME = "owner/pets"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with class folders, the same as shards, and a table."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_systems", {})
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("VITRAIL_STORE_MINUTES", "0.05")
    root = tmp_path / "files"
    pets = class_folders(root / "pets", {"cat": 5, "dog": 5})
    vitrail.shard(pets, out=root / "shards", shard_mb=0.003)
    rows = [f"{p.relative_to(root).as_posix()},{p.parent.name}" for p in pets.rglob("*.png")]
    (root / "labels.csv").write_text("\n".join(["path,label", *sorted(rows)]))
    return root


@pytest.fixture
def web(files):
    """A web server with listings, which ignores ranges."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_): ...

    handler = functools.partial(Quiet, directory=str(files))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(files, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub", reason="needs vitrail[hub]")
    with run_hub(TreeHub, files, NAME) as server:
        yield use_hub(monkeypatch, server, tmp_path / "hub")


@pytest.mark.parametrize("data", ["pets", "shards", "labels.csv"])
def test_data_on_a_web_server_are_those_on_disk(web, files, data):
    pytest.importorskip("aiohttp", reason="needs vitrail[http]")
    same(open_data(f"{web}/{data}"), open_data(files / data))


def test_a_page_that_does_not_exist_is_one_line(web):
    pytest.importorskip("aiohttp", reason="needs vitrail[http]")
    assert why(f"{web}/cats") == f"{web}/cats does not exist; check the bucket and the path"


@pytest.mark.parametrize("data", ["pets", "shards", "labels.csv"])
def test_data_in_a_repository_of_the_hub_are_those_on_disk(hub, files, data):
    same(open_data(f"hf://datasets/{NAME}/{data}"), open_data(files / data))


def test_a_folder_of_the_hub_is_listed_once_and_not_for_every_image(hub, files):
    source = open_data(f"hf://datasets/{NAME}/pets")
    assert all(source[index].content for index in range(10))
    assert len([line for line in hub.requests if "/tree/" in line]) <= 3


def test_what_the_hub_does_not_have_is_one_line(hub):
    url = f"hf://datasets/{NAME}/cats"
    assert why(url) == f"{url} does not exist; check the bucket and the path"
    assert "does not exist" in why("hf://datasets/owner/cats/x")


def test_a_file_of_the_hub_that_changes_is_one_line(hub, files):
    source = open_data(f"hf://datasets/{NAME}/pets")
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store", ignore_errors=True)
    (files / "pets" / "cat" / "0.png").write_bytes(bytes(source.sizes[0]))
    with pytest.raises(store.StoreError, match=r"cat/0\.png changed after it was listed"):
        source[0]


@pytest.mark.filterwarnings("ignore")  # those of the emulator
def test_shards_are_written_to_google_and_read_from_there(files, monkeypatch):
    pytest.importorskip("gcsfs", reason="needs vitrail[gcs]")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="a server of Google's API")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    server.start()
    try:
        vitrail.shard(files / "pets", out="gs://bucket/shards", shard_mb=0.003)
        same(open_data("gs://bucket/shards"), open_data(files / "shards"))
        url = "gs://bucket/cats"
        assert why(url) == f"{url} does not exist; check the bucket and the path"
    finally:
        server.stop()
