"""`vitrail.shard`: the same images in shards, byte for byte, however often it is interrupted."""

import json
import os

import numpy as np
import pytest

import vitrail
from tests.data.samples import class_folders, encoded
from vitrail.data import sharding
from vitrail.data.open import open_data
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pets(tmp_path):
    return class_folders(tmp_path / "pets", {"cat": 20, "dog": 15})


def contents(source) -> list[tuple[bytes, str, str]]:
    return sorted(
        (bytes(source[i].content), source.classes[source.labels[i]], str(source.splits[i]))
        for i in range(len(source))
    )


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_shards_hold_the_same_images_labels_and_splits(pets, tmp_path):
    result = vitrail.shard(pets, out=tmp_path / "out", shard_mb=0.001)
    assert contents(open_data(tmp_path / "out")) == contents(open_data(pets))
    assert result.images == 35 and result.written == len(result.shards) > 3
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    assert [one["name"] for one in manifest["shards"]] == [one.name for one in result.shards]
    assert "35 images" in repr(result)


def test_the_same_call_writes_the_same_bytes(pets, tmp_path):
    for name, workers in (("a", 1), ("b", 5)):
        vitrail.shard(pets, out=tmp_path / name, shard_mb=0.001, workers=workers)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    vitrail.shard(pets, out=tmp_path / "c", shard_mb=0.001, seed=1)
    assert files_of(tmp_path / "a") != files_of(tmp_path / "c")


def test_an_interrupted_call_continues(pets, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    names = [one.name for one in vitrail.shard(pets, out=whole, shard_mb=0.001).shards]
    write, made = sharding.ShardWriter.write, []

    def stop_at_third(self, planned):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(planned.name)
        return write(self, planned)

    out = tmp_path / "out"
    monkeypatch.setattr(sharding.ShardWriter, "write", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        vitrail.shard(pets, out=out, shard_mb=0.001, workers=1)
    (out / names[1]).with_name(f"{names[1]}.npz").unlink()  # killed before it was verified
    monkeypatch.setattr(sharding.ShardWriter, "write", write)
    assert vitrail.shard(pets, out=out, shard_mb=0.001).written == len(names) - 1
    assert files_of(out) == files_of(whole)
    assert vitrail.shard(pets, out=out, shard_mb=0.001).written == 0


def test_a_shard_that_reads_back_differently_is_an_error(pets, tmp_path, monkeypatch):
    monkeypatch.setattr(sharding.FolderTarget, "measure", lambda self, name: (1, "0" * 64))
    with pytest.raises(UserError, match="was read back with 1 bytes"):
        vitrail.shard(pets, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.npz"))


def test_shards_of_other_data_are_not_mixed(pets, tmp_path):
    out = tmp_path / "out"
    vitrail.shard(pets, out=out, shard_mb=0.001)
    with pytest.raises(UserError, match="which this data set does not write"):
        vitrail.shard(pets, out=out, shard_mb=1)
    with pytest.raises(UserError, match="another `shard_mb` or `seed`"):
        vitrail.shard(pets, out=out, shard_mb=0.001, seed=3)
    other = class_folders(tmp_path / "other", {"cow": 20, "dog": 15})
    with pytest.raises(UserError, match="of other classes"):
        vitrail.shard(other, out=out, shard_mb=0.001)


def test_pixels_in_memory_and_numeric_classes(tmp_path):
    digits = open_data("digits")
    vitrail.shard(digits, out=tmp_path / "out")
    packed = open_data(tmp_path / "out")
    assert packed.classes == digits.classes and len(packed) == len(digits)
    counts = [np.bincount(one.labels).tolist() for one in (packed, digits)]
    assert counts[0] == counts[1]


def test_several_labels_per_image(tmp_path):
    rows = ["path,label"]
    (tmp_path / "t").mkdir()
    for number in range(12):
        (tmp_path / "t" / f"{number}.png").write_bytes(encoded(number))
        rows.append(f"{number}.png,{('a;b', 'b', 'a')[number % 3]}")
    (tmp_path / "t" / "t.csv").write_text("\n".join(rows))
    source = open_data(tmp_path / "t" / "t.csv", labels="multi")
    vitrail.shard(source, out=tmp_path / "out")
    packed = open_data(tmp_path / "out", labels="multi")
    assert packed.classes == ("a", "b")
    assert sorted(packed.labels.tolist()) == sorted(source.labels.tolist())


def test_bad_input_is_one_line(pets, tmp_path):
    with pytest.raises(UserError, match="`shard_mb` is 0"):
        vitrail.shard(pets, out=tmp_path / "out", shard_mb=0)
    with pytest.raises(UserError, match="`workers` is 0"):
        vitrail.shard(pets, out=tmp_path / "out", workers=0)
    with pytest.raises(UserError, match="part of the data"):
        vitrail.shard(pets, out=pets / "shards")
    (pets / "cat" / "0.png").chmod(0)
    if os.geteuid():
        with pytest.raises(UserError, match=r"cat/0\.png"):
            vitrail.shard(pets, out=tmp_path / "out")
