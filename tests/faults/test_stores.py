"""What can happen to a bucket while processes that torchrun started train on it."""

import time

import pytest

from tests.data.samples import class_folders
from tests.faults.test_processes import TINY, Launch, equal
from tests.stores import CREDENTIALS, Proxy, s3_server, upload
from vitrail import shard

pytestmark = [pytest.mark.slow, pytest.mark.full]

OUTAGE = 61  # seconds
FLAGS = [
    *(*TINY, "--train.batch", "8", "--train.steps", "12", "--train.ema", "0.9", "--seed", "1"),
    *("--data.workers", "1", "--data.cache-gb", "0", "--data.disk-gb", "0"),
    *("--data.shuffle", "windows"),
]


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """A proxy before an S3 server; the local copy of its files holds none of them for long."""
    with s3_server() as port:
        proxy = Proxy(port)
        places = {"AWS_ENDPOINT_URL": proxy.url, "VITRAIL_CACHE": str(tmp_path / "cache")}
        for name, value in (CREDENTIALS | places | {"VITRAIL_STORE_GB": "1e-6"}).items():
            monkeypatch.setenv(name, value)
        yield proxy
        proxy.server.shutdown()
        proxy.server.server_close()


def test_two_ranks_wait_for_a_store_and_end_with_the_tensors_of_local_shards(s3, tmp_path, tell):
    pets = class_folders(tmp_path / "pets", {"cat": 40, "dog": 40})
    shard(pets, out=tmp_path / "shards", shard_mb=0.003)
    url, (run, local) = upload(tmp_path / "shards", "s3://pets/shards"), ("run", "local")
    Launch(tmp_path, "train", str(tmp_path / "shards"), *FLAGS, "--out", local).succeed()
    journal, failed = tmp_path / run / "log.jsonl", []

    def fail_after_three_steps(method, path):
        if not failed and journal.exists() and journal.read_bytes().count(b"\n") > 3:
            failed.append(time.monotonic())
        return ("drop", 0, b"") if failed and time.monotonic() < failed[0] + OUTAGE else None

    s3.fault = fail_after_three_steps
    launch = Launch(tmp_path, "train", url, *FLAGS, "--out", run)
    launch.succeed()
    assert failed and time.monotonic() > failed[0] + OUTAGE
    assert "trying again for up to" in launch.told.read_text()
    assert equal(tmp_path / run, tmp_path / local)
    tell("store fails for a minute under two ranks", 1, 1)
