"""Shards in a bucket against the same shards on disk, images per second through the loader.

The bucket is on moto's S3 server, a process on the same machine. JPEG files of 500 x 375 pixels
become batches of 64 at 224 pixels, decoded in every epoch. The first epoch begins with an empty
local copy, so that every image comes from the server; a later epoch reads the copy.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

import vitrail
from bench.input import PHOTOS, PREPROCESS, make_photos
from bench.measure import Budget, Case, OnProgress, interleave, measure, time_calls
from vitrail.data.config import Augment, DataConfig
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.sources.shards import ShardSource

IMAGES, BATCH, WORKERS = 2560, 64, 2
FIRST_EPOCH, LATER_EPOCH = "shards, first epoch", "shards, later epoch"
BUCKET = "in a bucket"  # against "vitrail", which reads them from the disk
MIN_ROUNDS = 3  # each is an epoch


@contextmanager
def s3_server() -> Iterator[str]:
    """Starts moto's server; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def make_loader(place: str) -> Loader:
    source = cast(ShardSource, open_data(place, progress=False))
    source = replace(source, splits=np.full(len(source), "train"))
    augment = Augment(flip=0.5, scale=0.08)
    config = DataConfig(augment=augment, workers=WORKERS, cache_gb=0, disk_gb=0)
    return Loader(source, PREPROCESS, config, batch=BATCH, progress=False)


def run_epoch(loader: Loader, copy: Path, empty: bool) -> None:
    """One epoch in workers of its own, which prefetch nothing beyond it."""
    if empty:
        shutil.rmtree(copy, ignore_errors=True)
    for _ in loader.training(0, loader.steps):
        pass


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    budget = replace(budget, min_rounds=MIN_ROUNDS)
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with tempfile.TemporaryDirectory() as folder, s3_server() as endpoint:
        cache = Path(folder) / "cache"
        os.environ |= {"VITRAIL_CACHE": str(cache), "AWS_ENDPOINT_URL": endpoint}
        (Path(folder) / "photos").mkdir()
        progress(0.0, f"making {IMAGES} photos")
        photos = make_photos(Path(folder) / "photos", IMAGES, PHOTOS)
        make_bucket()
        loaders = {}
        for name, out in (("vitrail", f"{folder}/shards"), (BUCKET, "s3://bench/photos")):
            vitrail.shard(photos, out=out, shard_mb=16, progress=False)
            loaders[name] = make_loader(out)
        cases = [
            Case(
                label=label,
                unit="images/s",
                measure=partial(
                    interleave,
                    {
                        name: partial(
                            time_calls, partial(run_epoch, loader, cache / "store", empty)
                        )
                        for name, loader in loaders.items()
                    },
                ),
                images=IMAGES // BATCH * BATCH,
            )
            for label, empty in ((FIRST_EPOCH, True), (LATER_EPOCH, False))
        ]
        return {"cases": measure(cases, budget, progress)}


def make_bucket() -> None:
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bench")
