"""predict --out, features and similar as a user calls them."""

import json

import pytest

from tests.batch.conftest import BROKEN, IMAGES, read
from tests.cli.conftest import call


def test_features_print_one_document_and_similar_a_line_per_image(capsys, model, photos, tmp_path):
    arguments = ("features", model, photos, "--out", tmp_path / "out", "--part", 10, "--json")
    code, out, _ = call(capsys, *arguments)
    keys = ["out", "kind", "images", "errors", "parts", "computed", "seconds"]
    assert code == 0 and list(json.loads(out)) == keys
    assert json.loads(out)["errors"] == 1 and json.loads(out)["parts"] == 3
    queries = (photos / "a" / "00.png", photos / "b" / "01.png")
    code, out, _ = call(capsys, "similar", tmp_path / "out", *queries, "--top", 2, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["path"] for line in lines] == [str(one) for one in queries]
    assert [line["neighbours"][0]["id"] for line in lines] == ["a/00.png", "b/01.png"]
    assert list(lines[0]["neighbours"][0]) == ["id", "similarity", "item"]


def test_predict_writes_parts(capsys, model, photos, tmp_path):
    code, out, _ = call(capsys, "predict", model, photos, "--out", tmp_path / "out", "--top", 2)
    assert code == 0 and "24 images in 1 part, 1 without a result" in out
    rows = read(tmp_path / "out").to_pylist()
    assert len(rows) == IMAGES and {len(row["top"]) for row in rows if row["top"]} == {2}
    assert [row["id"] for row in rows if row["error"]] == [f"b/{BROKEN:02d}.png"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["photos", "photos", "--out", "x"], "--out is for one data set"),
        (["photos", "--out", "x", "--csv"], "--out and --csv exclude each other"),
        (["photos", "--on", "ray"], "--on needs --out"),
        (["photos", "--part", "4"], "--part needs --out"),
        (["missing", "--out", "x"], "does not exist"),
    ],
)
def test_mistakes_are_one_line(capsys, model, photos, monkeypatch, flags, message):
    monkeypatch.chdir(photos.parent)
    code, out, _ = call(capsys, "predict", model, *flags)
    assert message in str(code) and str(code).startswith("error: ") and not out


def test_another_model_in_the_same_folder_is_one_line(capsys, model, photos, tmp_path):
    call(capsys, "features", model, photos, "--out", tmp_path / "out")
    code, _, _ = call(
        capsys, "features", model, photos, "--out", tmp_path / "out", "--dtype", "float16"
    )
    assert str(code).endswith("other settings: --dtype; choose another --out")
