"""Parts in a bucket of a real S3 server, which is a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import vitrail
from tests.batch.conftest import read
from vitrail.data.sources import store
from vitrail.errors import UserError

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


@pytest.fixture
def bucket(monkeypatch):
    """The URL of an empty bucket."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(store, "_systems", {})  # of an earlier server
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert server.poll() is None, "the S3 server ended"
                time.sleep(0.1)
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir("bucket")
            yield "s3://bucket"
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.kill()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of sockets that s3fs leaves open
def test_a_killed_process_continues_in_a_bucket(bucket, model, photos, tmp_path):
    out = f"{bucket}/out"
    code = (
        "import time, vitrail; from vitrail.batch import parts\n"
        "write = parts.PartWriter.write\n"
        "def slow(self, number):\n"
        "    print(number, flush=True)\n"
        "    time.sleep(600 * (number == 2))\n"
        "    return write(self, number)\n"
        "parts.PartWriter.write = slow\n"
        f"vitrail.features({str(model)!r}, {str(photos)!r}, out={out!r}, part=4)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline().strip() not in ("2", ""):
            pass
        os.kill(process.pid, signal.SIGKILL)
    again = vitrail.features(model, photos, out=out)
    assert again.parts == 6 and again.computed == 4 and again.errors == 1
    whole = tmp_path / "whole"
    vitrail.features(model, photos, out=whole, part=4)
    copy = tmp_path / "copy"
    download(out, copy)
    assert read(copy).equals(read(whole))
    assert vitrail.similar(out, photos / "a" / "00.png", top=1)[0].neighbours[0].id == "a/00.png"


def download(url, folder):
    import fsspec

    system, root = fsspec.url_to_fs(url)
    folder.mkdir()
    for path in system.ls(root, detail=False):
        (folder / path.rpartition("/")[2]).write_bytes(system.cat_file(path))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of sockets that s3fs leaves open
def test_a_missing_bucket_is_one_line(bucket, model, photos):
    with pytest.raises(UserError, match=r"s3://nowhere/out.* does not exist; check the bucket"):
        vitrail.features(model, photos, out="s3://nowhere/out")
