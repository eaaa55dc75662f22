"""`vitrail explain` as a user calls it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.cli.conftest import call
from tests.data.samples import encoded
from tests.insight.samples import small
from vitrail.cli import explain as verb
from vitrail.zoo.file import save_model

SINGLE = ["attention.png", "grad-cam.png", "gradient-rollout.png", "heads.png", "overview.png"]
SINGLE += ["relevance.png", "rollout.png"]
NAMES = ["tench", "sturgeon, great", "eel", "3", "coho"]


@pytest.fixture(autouse=True)
def lightly(monkeypatch):
    """Figures are drawn but not rendered, which takes most of the time and is tested elsewhere."""
    blank = encoded(0)
    for module in ("canvas", "explanation"):
        monkeypatch.setattr(f"vitrail.insight.{module}.render_png", lambda figure: blank)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "fish.safetensors"
    settings = {"size": 16, "crop": 1.0, "interpolation": "bicubic", "mean": [0.5], "std": [0.5]}
    save_model(root, small(), {"classes": NAMES, "preprocess": {**settings, "channels": 3}})
    return root


@pytest.fixture
def pictures(tmp_path):
    """Two images of one name, and a file that is none."""
    pixels = np.random.default_rng(0).integers(0, 255, (2, 20, 30, 3), np.uint8)
    for folder, image in zip(("a", "b"), pixels, strict=True):
        (tmp_path / folder).mkdir()
        Image.fromarray(image).save(tmp_path / folder / "x y.png")
    (tmp_path / "a" / "broken.png").write_bytes(b"\x89PNG but not really")
    return tmp_path


def explain(capsys, *arguments):
    return call(capsys, "explain", *arguments)


def inside(folder):
    return sorted(path.name for path in folder.iterdir())


def test_each_image_has_a_folder_and_all_have_a_page(capsys, model, pictures):
    out = pictures / "out"
    code, printed, _ = explain(
        capsys, model, pictures / "a" / "x y.png", pictures / "b", "--out", out
    )
    assert code == 0 and len(printed.splitlines()) == 3
    assert printed.endswith(f"page {out / 'index.html'}\n")
    assert inside(out) == ["index.html", "x_y", "x_y-2"]
    assert inside(out / "x_y") == SINGLE


def test_json_names_every_file(capsys, model, pictures):
    out = pictures / "out"
    code, printed, _ = explain(capsys, model, pictures / "b", "--out", out, "--json", "--npz")
    line = json.loads(printed)
    assert code == 0 and list(line) == ["path", "label", "probability", "files"]
    written = {str(path) for path in out.rglob("*.*")}
    assert set(line["files"]) == written and f"{out}/x_y/arrays.npz" in written
    found = vitrail.load(model).predict(pictures / "b" / "x y.png")
    assert (line["label"], line["probability"]) == (found.label, pytest.approx(found.probability))


def test_the_probability_is_calibrated_unless_raw_is_given(capsys, model, pictures, tmp_path):
    from vitrail.zoo.file import load_model

    weights, metadata = load_model(model)
    path = tmp_path / "calibrated.safetensors"
    save_model(path, weights, {**metadata.document, "temperature": 3.0})
    for flags, raw in (((), False), (("--raw",), True)):
        out = tmp_path / f"out-{raw}"
        _, printed, _ = explain(capsys, path, pictures / "b", "--out", out, "--json", *flags)
        expected = vitrail.load(path).predict(pictures / "b" / "x y.png", raw=raw).probability
        assert json.loads(printed)["probability"] == pytest.approx(expected)


def test_a_bad_image_is_reported_and_the_others_are_explained(capsys, model, pictures):
    code, printed, _ = explain(
        capsys, model, pictures / "a", pictures / "gone.jpg", "--out", pictures / "out", "--json"
    )
    lines = [json.loads(line) for line in printed.splitlines()]
    assert code == 1
    assert ["error" in line for line in lines] == [True, False, True]
    assert inside(pictures / "out") == ["index.html", "x_y"]


def test_errors_go_to_stderr(capsys, model, pictures):
    code, printed, err = explain(capsys, model, pictures / "gone.jpg", "--out", pictures / "out")
    assert code == 1 and printed == ""
    assert f"error: {pictures}/gone.jpg: no such file" in err


def test_nothing_is_ever_overwritten(capsys, model, pictures, monkeypatch):
    monkeypatch.chdir(pictures)
    for _ in range(2):
        explain(capsys, model, "b")
    assert inside(pictures / "explained") == ["fish.safetensors-1", "fish.safetensors-2"]
    code, _, _ = explain(capsys, model, "b", "--out", pictures / "a")
    assert code == f"error: {pictures}/a already exists and is not empty; choose another --out"


def test_each_requested_layer_gets_its_own_figure(capsys, model, pictures):
    out = pictures / "out"
    code, _, _ = explain(
        capsys, model, pictures / "b", "--out", out, "--layers", "0", "-1", "--heads", "-1"
    )
    assert code == 0
    assert {"layer-0.png", "layer-2.png"} <= set(inside(out / "x_y"))


@pytest.mark.parametrize(
    ("name", "index"), [("EEL", 2), ("great", 1), ("3", 3), ("4", 4), ("sturgeon, great", 1)]
)
def test_a_class_is_found_by_its_names_and_its_index(model, name, index):
    assert vitrail.load(model).index(name) == index


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--class", "tensh"), "no class is called 'tensh'; the nearest are 'tench'"),
        (("--class", "17"), "no such class: 17; give 0 to 4"),
        (("--layers", "7"), "no such layers: [7]; give indices from 0 to 2, or from -1 down"),
        (("--heads", "3"), "no such heads: [3]; give indices from 0 to 2, or from -1 down"),
        (("--device", "abacus"), "cannot use device abacus"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, model, pictures, flags, message):
    code, printed, _ = explain(capsys, model, pictures / "b", "--out", pictures / "out", *flags)
    assert code.startswith(f"error: {message}") and printed == ""
    assert not list((pictures / "out").glob("*"))


def test_the_requested_class_is_explained(capsys, model, pictures):
    out = pictures / "out"
    explain(capsys, model, pictures / "b", "--out", out, "--class", "coho", "--npz")
    with np.load(out / "x_y" / "arrays.npz", allow_pickle=False) as read:
        assert read["target"] == "coho" and str(read["method"]) in ("relevance", "gradient-rollout")


def test_occlusion_is_drawn_on_request(capsys, model, pictures):
    out = pictures / "out"
    explain(capsys, model, pictures / "b", "--out", out, "--method", "occlusion")
    assert "occlusion.png" in inside(out / "x_y")


def test_without_images_it_draws_what_the_model_learned(capsys, model, tmp_path, caplog):
    with caplog.at_level("INFO"):
        code, printed, _ = explain(capsys, model, "--out", tmp_path / "out", "--json")
    assert code == 0
    names = [f"{tmp_path}/out/{name}.png" for name in ("positions", "filters")]
    assert json.loads(printed) == {"model": str(model), "files": names}
    assert "give some with `learned=True`" in caplog.text


def test_learned_properties_are_measured_on_given_images(capsys, model, pictures):
    out = pictures / "out"
    code, _, _ = explain(capsys, model, pictures / "b", "--out", out, "--learned", "--npz")
    assert code == 0
    drawn = {path.name for path in out.glob("*.png")}
    assert len(drawn) == 6 and {"attention_distance.png", "token_norms.png"} < drawn
    with np.load(out / "learned.npz", allow_pickle=False) as read:
        assert read["attention_entropy"].shape == (3, 3)


def test_a_run_uses_its_own_validation_images(capsys, tmp_path):
    root = tmp_path / "digits.safetensors"
    settings = {"size": 8, "crop": 1.0, "interpolation": "bicubic", "mean": [0.5], "std": [0.5]}
    metadata = {"classes": [str(n) for n in range(10)], "preprocess": {**settings, "channels": 1}}
    tiny = small("grey", image=8, patch=2, classes=10)
    save_model(root, tiny, {**metadata, "data": {"name": "digits", "source": "digits"}})
    code, printed, _ = explain(capsys, root, "--out", tmp_path / "out")
    assert code == 0 and len(printed.splitlines()) == 6


def test_a_model_with_nan_is_one_line(capsys, model, pictures, tmp_path):
    broken = small()
    broken.head.weight.data[0] = float("nan")
    settings = {"size": 16, "mean": [0.5], "std": [0.5], "channels": 3}
    save_model(tmp_path / "nan.safetensors", broken, {"classes": NAMES, "preprocess": settings})
    code, _, _ = explain(
        capsys, tmp_path / "nan.safetensors", pictures / "b", "--out", pictures / "o"
    )
    assert "contain NaN or infinity in head.weight; load other weights" in code
    assert inside(pictures / "o") == []


def test_figures_are_written_completely_or_not_at_all(capsys, model, pictures, monkeypatch):
    write = Path.write_bytes

    def full(path, content):
        if path.name == "rollout.png":
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    code, _, _ = explain(capsys, model, pictures / "b", "--out", pictures / "out")
    assert code.startswith(f"error: cannot write {pictures}/out/x_y: No space left on device")
    assert inside(pictures / "out") == []


@pytest.mark.parametrize(
    ("name", "folder"), [("..", "image"), ("a/../b", "a_.._b"), ("日本 1", "日本_1"), ("", "image")]
)
def test_folder_names_cannot_escape_the_output_folder(name, folder):
    assert verb.safe_name(name) == folder


@pytest.mark.slow
def test_the_explanation_highlights_the_bird(shared):
    """0023: a kite in an empty sky."""
    classifier = vitrail.load(shared / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    torch.set_num_threads(1)
    one = classifier.explain(shared / "data" / "imagenet-val-300" / "0023.jpg")
    hottest = np.argsort(one.heatmap.flatten())[-10:]
    assert one.top[0][0] == "kite"
    assert all(3 <= root // 14 < 8 and 3 <= root % 14 < 11 for root in hottest.tolist())
    assert one.scores[one.method] > 0.2
