"""Data in a bucket of a real S3 server: the same images as on disk, whatever the store does."""

import importlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.data.samples import class_folders, encoded, tar
from tests.stores import CREDENTIALS, Proxy, error_page, s3_server, upload
from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.reading.reader import Reader
from vitrail.data.source import fingerprint
from vitrail.data.sources import store, store_cache
from vitrail.data.sources.store_tree import StoreTree
from vitrail.errors import UserError
from vitrail.run.auto import Choice
from vitrail.run.design import adapt_to_store

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
    folder = class_folders(tmp_path / "pets", {"cat": 5, "dog": 5})
    (folder / "notes.txt").write_text("hello")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "1.png").write_bytes(encoded(1))
    source = open_data(upload(folder, f"{bucket}/pets"))
    same(source, open_data(folder))
    assert list(source.ignored) == ["notes.txt"]


def test_a_table_in_a_bucket_finds_its_images_beside_it(s3, bucket, tmp_path):
    folder = class_folders(tmp_path / "t", {"a": 4, "b": 4})
    rows = [f"{p.relative_to(folder).as_posix()},{p.parent.name}" for p in folder.rglob("*.png")]
    (folder / "labels.csv").write_text("\n".join(["path,label", *sorted(rows)]))
    url = upload(folder, f"{bucket}/t")
    same(open_data(f"{url}/labels.csv"), open_data(folder / "labels.csv"))


# ---- what a user got wrong: one line each


def test_a_bucket_that_does_not_exist_is_one_line(s3, bucket):
    assert why(f"{bucket}/x") == f"{bucket}/x does not exist; check the bucket and the path"


def test_a_folder_that_does_not_exist_is_one_line(s3, bucket, shards):
    upload(shards, f"{bucket}/x")
    assert "does not exist" in why(f"{bucket}/y")
    assert "does not exist" in why(f"{bucket}/x/labels.csv")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("AccessDenied", "no right to read"),
        pytest.param("InvalidAccessKeyId", "no right to read", marks=pytest.mark.full),
        ("ExpiredToken", "have expired; renew them"),
    ],
)
def test_credentials_without_rights_are_one_line(s3, bucket, shards, code, message):
    url = upload(shards, f"{bucket}/x")
    s3.fault = lambda method, path: ("answer", 403, error_page(code))
    assert message in why(url)


def test_without_credentials_the_line_says_so(s3, bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no credentials for" in why(f"{bucket}/x")


def test_a_missing_package_names_the_extra(s3, bucket, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    registry = importlib.import_module("fsspec.registry")  # which has already imported it
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    assert why(f"{bucket}/x").endswith("needs another package; pip install 'vitrail[s3]'")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "does not name a bucket"),
        ("nothing://x/y", "cannot be opened"),
        ("file:///tmp", "without file://"),
        ("s3://bucket/photos.zip", "is a zip; unpack it there"),
        ("s3://bucket/x?versionId=1", "is not a plain URL"),
    ],
)
def test_a_wrong_url_is_one_line(s3, url, message):
    assert message in why(url)


# ---- a store that fails


def fail_first(times: int, answer: tuple[str, int, bytes], text: str = ".tar"):
    """A fault for the first requests of shards."""
    left = itertools.count(times, -1)
    return lambda method, path: answer if text in path and next(left) > 0 else None


FAULTS = {
    "500": ("answer", 500, error_page("InternalError")),
    "503": ("answer", 503, error_page("SlowDown")),
    "dropped": ("drop", 0, b""),
    "truncated": ("truncate", 0, b""),
}


MORE = pytest.mark.full


@pytest.mark.parametrize(
    "fault", ["503", "truncated", *(pytest.param(name, marks=MORE) for name in ("500", "dropped"))]
)
def test_a_store_that_fails_delays_and_changes_nothing(s3, bucket, shards, fault):
    url = upload(shards, f"{bucket}/x")
    s3.fault = fail_first(4, FAULTS[fault])
    same(open_data(url), open_data(shards))


class Clock:
    """Stands for the module `time`; a pause takes no time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("minutes", [1, 9])
def test_a_store_that_fails_for_minutes_delays_and_changes_nothing(
    s3, bucket, shards, monkeypatch, minutes
):
    source = open_data(upload(shards, f"{bucket}/x"))
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store")
    monkeypatch.setattr(store, "time", clock := Clock())
    s3.fault = lambda method, path: FAULTS["dropped"] if clock.now < 60 * minutes else None
    assert source[0].content == encoded(0, side=16)
    assert 60 * minutes <= clock.now <= 60 * minutes + store.LONGEST_PAUSE
    assert len(s3.requests("tar bytes=")) < 100, "pauses grow"


@pytest.mark.parametrize(("rank", "level"), [("0", "WARNING"), ("1", "ERROR")])
def test_any_rank_says_that_it_waits_and_once_a_minute(s3, monkeypatch, caplog, rank, level):
    monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        store.report_failure("s3://x", "dropped", 60.0)
    assert [one.levelname for one in caplog.records] == [level]
    assert "s3://x fails (dropped); trying again for up to 1.0 minutes" in caplog.text


def test_a_store_that_keeps_failing_is_one_line(s3, bucket, shards, monkeypatch):
    url = upload(shards, f"{bucket}/x")
    monkeypatch.setenv("VITRAIL_STORE_MINUTES", "0.001")
    s3.fault = lambda method, path: FAULTS["dropped"] if ".tar" in path else None
    message = why(url)
    assert f"{url}/00" in message and "raise VITRAIL_STORE_MINUTES (now 0.001)" in message


def test_a_failing_store_is_reported_once(s3, bucket, shards, monkeypatch, caplog):
    url = upload(shards, f"{bucket}/x")
    monkeypatch.setattr(store, "REPORT_AFTER", -1)
    s3.fault = fail_first(8, FAULTS["503"])
    open_data(url)
    assert len([line for line in caplog.messages if "trying again for up to" in line]) == 1


def test_a_range_that_breaks_off_is_continued(s3, bucket, tmp_path, monkeypatch):
    content = encoded(1, side=64)
    file = store.StoreFile(f"{bucket}/x", len(content), "v")
    asked = []

    class Short:
        def cat_file(self, path, start, end):
            asked.append(start)
            return content[start : min(end, start + 1000)]

    monkeypatch.setattr(store, "open_system", lambda url: (Short(), url))
    monkeypatch.setattr(store, "check_unchanged_file", lambda file: None)
    assert store.read_bytes(file, 0, len(content)) == content
    assert asked == list(range(0, len(content), 1000))


def test_a_range_of_s3_that_breaks_off_is_continued(s3, bucket, tmp_path):
    content = os.urandom(4 << 20)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "a.bin").write_bytes(content)
    file = store.find_file(f"{upload(tmp_path / 'big', bucket)}/a.bin")
    s3.fault = fail_first(1, FAULTS["truncated"], "a.bin")
    assert store.read_bytes(file, 0, len(content)) == content
    first, second = s3.requests("a.bin bytes=")
    assert "bytes=0-" in first and "bytes=0-" not in second


def test_a_shard_that_changes_under_the_run_is_one_line(s3, bucket, shards, monkeypatch):
    url = upload(shards, f"{bucket}/x")
    source = open_data(url)
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store")
    s3.fault = lambda method, path: ("change", 0, b"") if path.endswith("001.tar") else None
    assert source[0].content == encoded(0, side=16)
    with pytest.raises(store.StoreError, match=r"001\.tar changed after it was listed") as error:
        source[25]
    assert "start again with the new data" in str(error.value)


def test_a_store_that_fails_while_splitting_is_not_a_broken_image(s3, bucket, shards, monkeypatch):
    url = upload(shards, f"{bucket}/x")
    open_data(url, split=False)  # indexed
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store")
    expired = ("answer", 403, error_page("ExpiredToken"))
    s3.fault = lambda method, path: expired if ".tar" in path else None
    assert "have expired" in why(url)


# ---- the local copy


def test_what_was_read_is_not_read_again(s3, bucket, shards):
    url = upload(shards, f"{bucket}/x")
    s3.log.clear()
    open_data(url)
    source = open_data(url)
    assert all(source[index].content for index in range(60))
    assert len(s3.requests("tar bytes=")) == len(s3.requests(".tar")) == 3  # one for each shard


def test_a_changed_shard_is_indexed_anew(s3, bucket, shards, tmp_path):
    url = upload(shards, f"{bucket}/x")
    open_data(url)
    tar(shards / "000.tar", pairs(100, 20))
    upload(shards, url)
    same(open_data(url), open_data(shards))


def test_the_copy_stays_within_its_limit(s3, bucket, tmp_path, monkeypatch):
    content = os.urandom(100_000)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "a.bin").write_bytes(content)
    upload(tmp_path / "big", f"{bucket}/big")
    monkeypatch.setattr(store_cache, "BLOCK", 1000)
    monkeypatch.setenv("VITRAIL_STORE_GB", "2e-5")  # 20 blocks
    monkeypatch.setattr(store, "check_unchanged_file", lambda file: None)
    file = store.find_file(f"{bucket}/big/a.bin")
    for start in range(0, 100_000, 5000):
        assert store_cache.read_range(file, start, 700) == content[start : start + 700]
        assert store_cache.read_range(file, 0, 700) == content[:700]
        assert sum(size for _, size, _ in store_cache.list_blocks()) <= 20_000
    assert store_cache.block_path(file, 0).exists(), "the block that was used last stays"
    assert store_cache.read_range(file, 1500, 3000) == content[1500:4500]
    assert store_cache.read_range(file, 99_500, 3000) == content[99_500:]


def test_a_block_that_another_process_writes_is_not_deleted(s3, monkeypatch):
    monkeypatch.setenv("VITRAIL_STORE_GB", "1e-6")
    folder = Path(os.environ["VITRAIL_CACHE"]) / "store" / "00"
    folder.mkdir(parents=True)
    written, left = folder / "a.1.1", folder / "b.2.2"
    for path, age in ((written, 0), (left, 3600), (folder / "c", 0)):
        path.write_bytes(bytes(1000))
        os.utime(path, (time.time() - age,) * 2)
    monkeypatch.setattr(store_cache, "_unchecked", {})
    store_cache.check_limit(1000)
    assert list(folder.iterdir()) == [written]


def test_a_block_that_is_not_complete_is_read_again(s3, bucket, shards):
    source = open_data(upload(shards, f"{bucket}/x"))
    for _, _, path in store_cache.list_blocks():
        path.write_bytes(b"short")
    assert source[0].content == encoded(0, side=16)


def test_what_the_copy_has_is_read_while_the_rest_arrives(s3, bucket, shards):
    """The second shard does not come before an image of each other shard was read."""
    source = open_data(upload(shards, f"{bucket}/x"))
    places = [source.stored_range(index) for index in range(0, 60, 10)]
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store")
    list(store_cache.iterate_arrivals(places[4:]))
    free, in_time = threading.Event(), []
    s3.fault = lambda method, path: in_time.append(free.wait(60)) if "001.tar" in path else None
    arrivals = store_cache.iterate_arrivals([*places, None])
    assert [next(arrivals) for _ in range(3)] == [4, 5, 6]
    assert sorted(next(arrivals) for _ in range(2)) == [0, 1]
    free.set()
    assert sorted(arrivals) == [2, 3] and all(in_time)
    s3.fault = lambda method, path: FAULTS["dropped"]
    assert [source[index].content for index in (0, 59)] == [encoded(i, side=16) for i in (0, 59)]


def test_a_range_over_several_blocks_arrives_with_the_last(s3, bucket, shards, monkeypatch):
    source = open_data(upload(shards, f"{bucket}/x"))
    monkeypatch.setattr(store_cache, "BLOCK", 300)
    places = [source.stored_range(index) for index in (0, 9)]
    assert all(len(list(store_cache.blocks_of(place))) > 2 for place in places)
    for position in store_cache.iterate_arrivals(places):
        assert all(map(store_cache.has_block, store_cache.blocks_of(places[position])))


def test_a_store_that_refuses_a_block_is_an_error_of_the_batch(s3, bucket, shards):
    source = open_data(upload(shards, f"{bucket}/x"))
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store")
    expired = ("answer", 403, error_page("ExpiredToken"))
    s3.fault = lambda method, path: expired if "001.tar" in path else None
    with pytest.raises(store.StoreError, match=r"001\.tar have expired"):
        list(store_cache.iterate_arrivals([source.stored_range(index) for index in (0, 20)]))


def test_a_pass_in_order_reads_one_block_ahead_and_a_sample_does_not(
    s3, bucket, shards, monkeypatch
):
    source = open_data(upload(shards, f"{bucket}/x"))
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store")
    monkeypatch.setattr("vitrail.data.reading.reader.BLOCK", source.sizes.mean() * 20)  # 20 images
    reader = Reader(source, Preprocess(size=16), uncropped=False)
    s3.log.clear()
    reader.download([0, 20])
    assert len(s3.requests("tar bytes=")) == 2
    s3.log.clear()
    reader.download([20, 21])
    for _ in range(6000):
        if s3.requests("002.tar bytes="):
            break
        time.sleep(0.01)
    reader.download([22, 23])
    assert len(s3.requests("tar bytes=")) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_bucket_are_those_from_disk_in_whatever_order_they_arrive(
    s3, bucket, shards, workers
):
    delays = itertools.cycle([0.0, 0.03, 0.01])
    s3.fault = lambda method, path: time.sleep(next(delays)) if ".tar" in path else None
    config = DataConfig(
        workers=workers, cache_gb=0, disk_gb=0, augment=Augment(flip=0.5, scale=0.3)
    )
    batches = []
    for place in (upload(shards, f"{bucket}/x"), shards):
        source = open_data(place)
        shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store", ignore_errors=True)
        loader = Loader(source, Preprocess(size=80), config, batch=16, progress=False)
        batches.append([batch.images.clone() for batch in loader.training(0, 3)])
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def read_some(source, start, count, results):
    results.put([source[i].content == encoded(i, side=16) for i in range(start, start + count)])


def test_processes_share_the_copy_and_download_each_block_once(s3, bucket, shards):
    source = open_data(upload(shards, f"{bucket}/x"))
    shutil.rmtree(Path(os.environ["VITRAIL_CACHE"]) / "store")
    s3.log.clear()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)
        children = [
            context.Process(target=read_some, args=(source, 0, 60, results)) for _ in range(3)
        ]
        for child in children:
            child.start()
    assert all(all(results.get(timeout=120)) for _ in children)
    for child in children:
        child.join()
    assert len(s3.requests("tar bytes=")) == 3  # one for each shard


# ---- shards that Vitrail wrote, and training on them


@pytest.fixture
def pets(tmp_path):
    return class_folders(tmp_path / "pets", {"cat": 40, "dog": 40})


def test_shards_written_to_a_bucket_open_without_being_read(s3, bucket, pets, tmp_path):
    upload(tmp_path / "nothing", bucket)  # makes the bucket
    result = vitrail.shard(pets, out=f"{bucket}/pets", shard_mb=0.003, workers=2)
    assert vitrail.shard(pets, out=f"{bucket}/pets", shard_mb=0.003).written == 0
    vitrail.shard(pets, out=tmp_path / "local", shard_mb=0.003)
    s3.log.clear()
    source = open_data(f"{bucket}/pets")
    assert not s3.requests("tar bytes="), "the index says where each image is"
    local = open_data(tmp_path / "local")
    assert fingerprint(source) == fingerprint(local)
    assert all(source[i].content == local[i].content for i in range(len(local)))
    assert len(result.shards) == len(source.files) > 3


def test_a_store_that_refuses_an_index_is_one_line_and_no_shard_is_read(s3, bucket, pets, tmp_path):
    vitrail.shard(pets, out=tmp_path / "local", shard_mb=0.003)
    url = upload(tmp_path / "local", f"{bucket}/pets")
    expired = ("answer", 403, error_page("ExpiredToken"))
    s3.fault = lambda method, path: expired if ".npz" in path else None
    message = why(url)
    assert message.startswith(f"the credentials for {url}/") and ".tar.npz have expired" in message
    assert not s3.requests("tar bytes=")


def test_a_deleted_index_is_made_anew(s3, bucket, pets, tmp_path):
    vitrail.shard(pets, out=tmp_path / "x", shard_mb=0.003)
    min((tmp_path / "x").glob("*.npz")).unlink()
    source = open_data(upload(tmp_path / "x", f"{bucket}/x"))
    assert len(s3.requests("tar bytes=")) == 1
    same(source, open_data(tmp_path / "x"))


def test_names_are_not_listed_again_for_every_shard(s3, bucket, pets, tmp_path, monkeypatch):
    vitrail.shard(pets, out=tmp_path / "x", shard_mb=0.001)
    url, listed = upload(tmp_path / "x", f"{bucket}/x"), []
    list_names = StoreTree.list_names
    monkeypatch.setattr(
        StoreTree, "list_names", lambda *of: (listed.append(of), list_names(*of))[1]
    )
    assert len(open_data(url).files) > 10 > len(listed)


def test_an_image_that_is_not_what_the_index_says_is_an_error(s3, bucket, pets, tmp_path):
    vitrail.shard(pets, out=tmp_path / "local")
    name = "train-00000.tar"
    content = bytearray((tmp_path / "local" / name).read_bytes())
    content[550] ^= 1  # in the first image
    (tmp_path / "local" / name).write_bytes(content)
    source = open_data(upload(tmp_path / "local", f"{bucket}/pets"))
    with pytest.raises(store.StoreError, match=r"not what the index of .* describes"):
        [source[i] for i in range(len(source))]


def test_no_right_to_write_is_one_line(s3, bucket, pets, tmp_path):
    upload(tmp_path / "nothing", bucket)
    denied = ("answer", 403, error_page("AccessDenied"))
    s3.fault = lambda method, path: denied if method in ("PUT", "POST") else None
    with pytest.raises(UserError, match=f"no right to write {bucket}/pets"):
        vitrail.shard(pets, out=f"{bucket}/pets")


SMALL = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "train": {"steps": 12, "batch": 8, "ema": 0.9, "log_every": 1, "save_every": 3600},
    "data": {"workers": 0, "cache_gb": 0, "disk_gb": 0, "shuffle": "windows"},
}


@pytest.mark.slow
def test_training_on_a_bucket_saves_and_resumes_when_a_shard_changes(
    s3, bucket, pets, tmp_path, monkeypatch
):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    upload(tmp_path / "nothing", bucket)
    vitrail.shard(pets, out=f"{bucket}/pets", shard_mb=0.003)
    run = dict(settings=SMALL, quiet=True, report=False)
    whole = vitrail.train(f"{bucket}/pets", out=tmp_path / "whole", **run)
    assert f'source = "{bucket}/pets"' in (tmp_path / "whole" / "recipe.toml").read_text()
    log, read_copy = tmp_path / "run" / "log.jsonl", store_cache.read_copy

    def forget_after_four_steps(*arguments):
        forgets = log.exists() and log.read_text().count('"kind": "step"') >= 4
        return None if forgets else read_copy(*arguments)

    monkeypatch.setattr(store_cache, "read_copy", forget_after_four_steps)
    s3.fault = lambda method, path: ("change", 0, b"") if path.endswith(".tar") else None
    with pytest.raises(UserError, match="changed after it was listed"):
        vitrail.train(f"{bucket}/pets", out=tmp_path / "run", **run)
    assert list((tmp_path / "run" / "checkpoints").iterdir()), "the run was saved"
    monkeypatch.setattr(store_cache, "read_copy", read_copy)
    s3.fault = None
    resumed = vitrail.resume(tmp_path / "run", quiet=True)
    weights = [load_file(one.folder / "model.safetensors") for one in (whole, resumed)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_windows_are_chosen_for_shards_that_exceed_the_copy(s3, bucket, shards, monkeypatch):
    source = open_data(upload(shards, f"{bucket}/x"))

    def choose(requested) -> Choice:
        choice = Choice(settings={"data": {"balanced": True}, "train": {}}, reasons=[])
        adapt_to_store(choice, source, requested)
        return choice

    assert choose({}).settings["data"] == {"balanced": True}
    monkeypatch.setenv("VITRAIL_STORE_GB", "1e-6")
    chosen = choose({})
    assert chosen.settings["data"] == {"balanced": False, "shuffle": "windows"}
    assert chosen.settings["train"] == {"class_weights": True}
    assert "exceed the 0.0 GB of the local copy" in chosen.reasons[0]
    assert choose({"data": {"shuffle": "all"}}).settings["data"] == {"balanced": True}


def test_a_number_in_a_url_is_not_taken_for_a_status():
    url = "s3://expired-goods/403/a.jpg"
    assert store.describe_store_problem(url, TimeoutError(f"Read timeout on {url}"), False) == ""
    assert "no right" in store.describe_store_problem(url, OSError("403 Forbidden"), False)
