"""Predictions and features in parts: right, complete, and the same after any kill."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import vitrail
from tests.batch.conftest import BROKEN, IMAGES, make_model, read, states
from vitrail.batch.folder import RemoteFolder, open_part_folder
from vitrail.batch.manifest import choose_part
from vitrail.batch.parts import PartWriter, count_errors, map_ahead
from vitrail.data.sources import store
from vitrail.data.sources.store import StoreError
from vitrail.errors import OutOfResources, UserError


def test_features_are_those_of_the_classifier(model, photos, tmp_path):
    result = vitrail.features(model, photos, out=tmp_path / "out", part=5)
    table = read(tmp_path / "out")
    ids = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    assert table["id"].to_pylist() == ids and result.parts == 5 and result.errors == 1
    good = [row for row in table.to_pylist() if row["error"] is None]
    assert len(good) == IMAGES - 1
    expected = vitrail.load(model).features([photos / row["id"] for row in good])
    np.testing.assert_allclose([row["features"] for row in good], expected, atol=1e-6)


def test_predictions_are_those_of_the_classifier(model, photos, tmp_path):
    vitrail.batch_predict(model, photos, out=tmp_path / "out", top=2, part=5)
    for row in read(tmp_path / "out").to_pylist():
        if row["error"] is None:
            expected = vitrail.load(model).predict(photos / row["id"], top=2)
            assert row["label"] == expected.label and row["index"] == expected.index
            assert row["probability"] == pytest.approx(expected.probability, abs=1e-6)
            assert [one["label"] for one in row["top"]] == [one.label for one in expected.top]


@pytest.mark.parametrize("job", [vitrail.features, vitrail.batch_predict])
def test_a_bad_image_has_a_row_with_its_error(job, model, photos, tmp_path):
    assert job(model, photos, out=tmp_path / "out", part=5).errors == 1
    rows = read(tmp_path / "out").to_pylist()
    (bad,) = [row for row in rows if row["error"]]
    assert bad["id"] == f"b/{BROKEN:02d}.png" and len(rows) == IMAGES
    assert all(value is None for name, value in bad.items() if name not in ("id", "error"))


def test_the_manifest_says_what_was_computed(model, photos, tmp_path):
    vitrail.features(model, photos, out=tmp_path / "out", part=5, dtype="float16")
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["sha256"] and manifest["fingerprint"] and manifest["preprocess"]["size"] == 16
    assert manifest["part"] == 5 and manifest["images"] == IMAGES and manifest["errors"] == 1
    assert str(read(tmp_path / "out").schema.field("features").type) == (
        "fixed_size_list<element: halffloat not null>[16]"
    )


def test_only_missing_parts_are_computed_again(model, photos, tmp_path):
    out = tmp_path / "out"
    vitrail.features(model, photos, out=out, part=5)
    table, before = read(out), states(out)
    (out / "part-00001.parquet").unlink()
    again = vitrail.features(model, photos, out=out)  # of the same size as before
    after = states(out)
    assert again.computed == 1 and again.errors == 1 and read(out).equals(table)
    assert {name for name in before if before[name] != after[name]} == {"part-00001.parquet"}


def test_a_finished_job_computes_nothing(model, photos, tmp_path):
    vitrail.features(model, photos, out=tmp_path / "out", part=5)
    before = states(tmp_path / "out")
    again = vitrail.features(model, photos, out=tmp_path / "out", part=5)
    assert again.computed == 0 and again.errors == 1 and states(tmp_path / "out") == before


def test_a_part_that_another_process_wrote_is_not_computed(model, photos, tmp_path, monkeypatch):
    out = tmp_path / "out"
    vitrail.features(model, photos, out=out, part=5)
    monkeypatch.setattr(PartWriter, "load", lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr("vitrail.batch.job.finished_parts", lambda _: set())  # a moment too early
    assert vitrail.features(model, photos, out=out, part=5).errors == 1


def test_another_job_in_the_same_folder_is_refused(model, photos, tmp_path):
    out = tmp_path / "out"
    vitrail.features(model, photos, out=out, part=5)
    other = make_model(tmp_path / "other.safetensors", seed=1)
    with pytest.raises(UserError, match=r"another model \(sha256 .*choose another `out`"):
        vitrail.features(other, photos, out=out)
    with pytest.raises(UserError, match="other settings: `dtype`"):
        vitrail.features(model, photos, out=out, dtype="float16")
    with pytest.raises(UserError, match="parts of 5 images, not 6"):
        vitrail.features(model, photos, out=out, part=6)
    with pytest.raises(UserError, match="features, not predictions"):
        vitrail.batch_predict(model, photos, out=out)
    (photos / "a" / "00.png").unlink()
    with pytest.raises(UserError, match="other data"):
        vitrail.features(model, photos, out=out)


def test_a_folder_with_other_files_is_refused(model, photos, tmp_path):
    with pytest.raises(UserError, match="has other files"):
        vitrail.features(model, photos, out=photos)


def test_the_system_without_file_handles_is_not_an_error_of_an_image(
    model, photos, tmp_path, monkeypatch
):
    def fail(*_):
        raise OutOfResources("too many open files")

    monkeypatch.setattr("vitrail.batch.rows.TorchFeatureRows.load", fail)
    with pytest.raises(OutOfResources):
        vitrail.features(model, photos, out=tmp_path / "out")
    assert not states(tmp_path / "out")


def test_a_killed_process_loses_nothing_and_repeats_nothing(model, photos, tmp_path):
    out = tmp_path / "out"
    code = (
        "import time, vitrail; from vitrail.batch import parts\n"
        "write = parts.PartWriter.write\n"
        "def slow(self, number):\n"
        "    time.sleep(60 * (number > 2))\n"
        "    return write(self, number)\n"
        "parts.PartWriter.write = slow\n"
        f"vitrail.features({str(model)!r}, {str(photos)!r}, out={str(out)!r}, part=2)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while len(states(out)) < 3 and process.poll() is None:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    before = states(out)
    assert len(before) == 3
    assert vitrail.features(model, photos, out=out).computed == IMAGES // 2 - 3
    assert {name: states(out)[name] for name in before} == before
    vitrail.features(model, photos, out=tmp_path / "whole", part=2)
    assert read(out).equals(read(tmp_path / "whole"))


def test_an_interrupted_write_leaves_no_part(model, photos, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitrail.files.fsync", fail)
    with pytest.raises(UserError, match="free some space"):
        vitrail.features(model, photos, out=tmp_path / "out")
    assert not states(tmp_path / "out")


def test_a_store_gets_each_part_by_one_put(model, photos, tmp_path, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    puts, put = [], MemoryFileSystem.pipe_file

    def count(self, path, *arguments, **settings):
        puts.append(path.rpartition("/")[2])
        return put(self, path, *arguments, **settings)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", count)
    url = f"memory://{tmp_path.name}/out"
    vitrail.features(model, photos, out=url, part=10)
    assert puts == ["_manifest.json", *(f"part-0000{n}.parquet" for n in range(3)), puts[0]]
    assert vitrail.features(model, photos, out=url).computed == 0
    found = vitrail.similar(url, photos / "a" / "00.png", top=1)[0]
    assert found.neighbours[0].id == "a/00.png"


def test_a_job_with_a_tuple_among_its_settings_continues(model, photos, tmp_path):
    for expected in (1, 0):
        done = vitrail.features(model, photos, out=tmp_path / "out", vit={"image": (16, 16)})
        assert done.computed == expected


def test_a_store_that_fails_is_not_a_damaged_part(monkeypatch):
    def fail(url):
        raise StoreError("the credentials have expired")

    monkeypatch.setattr(store, "find_file", fail)
    with pytest.raises(StoreError, match="have expired"):
        count_errors(open_part_folder("s3://bucket/x"), "part-00000.parquet")


def test_an_unknown_store_is_one_line():
    assert isinstance(open_part_folder("s3://bucket/x/"), RemoteFolder)
    with pytest.raises(UserError, match="Protocol not known: nowhere"):
        open_part_folder("nowhere://x").list_names()


def test_results_of_threads_keep_their_order():
    slow_first = lambda number: time.sleep(0.02 * (number == 0)) or number  # noqa: E731
    assert list(map_ahead(slow_first, range(20), threads=4, ahead=3)) == list(range(20))


def test_a_small_data_set_has_parts_for_several_workers():
    assert [choose_part(images) for images in (10, 16_000, 10_000_000)] == [256, 1000, 4096]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on": "spark"}, "choose local or ray"),
        ({"part": 0}, "`part` is 0"),
        ({"dtype": "int8"}, "choose float32 or float16"),
    ],
)
def test_bad_arguments_are_one_line(change, message, model, photos, tmp_path):
    with pytest.raises((UserError, TypeError), match=message):
        vitrail.features(model, photos, out=tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()
