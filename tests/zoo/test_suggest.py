"""Published weights to start from: in the variable, in the cache, on the hub, or nowhere."""

import json

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.local_hub import Hub, run_hub, use_hub
from tests.zoo import samples
from vitrail.errors import UserError
from vitrail.run.design import design_recipe
from vitrail.run.request import Request
from vitrail.training.device import pick_device
from vitrail.zoo.suggest import SUGGESTIONS, find_row, find_weights, suggest

TINY = find_row("Ti/16 augreg-in21k-in1k")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local hub that has a small model under the name of the suggested one, and its cache."""
    pytest.importorskip("huggingface_hub", reason="needs vitrail[hub]")
    folder = samples.save("timm-cls", tmp_path / "remote")
    stated = {"input_size": [3, 24, 30], "mean": [0.5] * 3, "std": [0.5] * 3}
    config = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"num_heads": 3},
        "pretrained_cfg": stated,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with run_hub(Hub, folder, TINY.hub) as server:
        yield use_hub(monkeypatch, server, tmp_path / "cache")


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for label in ("dark", "light"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 255, (96, 120, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    return tmp_path / "photos"


def plan(photos, *, download=False, **request):
    source = vitrail.open_data(photos)
    made = Request(data=str(photos), **request)
    return design_recipe(source, made, pick_device("cpu"), download=download)


def find(**more):
    return find_weights("cpu", None, download=True, **more)


def test_the_variable_names_a_file_a_folder_or_a_folder_of_folders(tmp_path, monkeypatch):
    several = tmp_path / "several"
    several.mkdir()
    folder = samples.save("timm-cls", several / TINY.hub.partition("/")[2])
    samples.save("timm-map", several / "another")
    for value in (folder, folder / "model.safetensors", several):
        monkeypatch.setenv("VITRAIL_WEIGHTS", str(value))
        expected = folder if value == several else value
        assert find().weights == str(expected)
        assert find().reason.endswith("from VITRAIL_WEIGHTS")
    monkeypatch.setenv("VITRAIL_WEIGHTS", TINY.name)
    assert find().weights == TINY.name


def test_a_variable_without_weights_is_an_error(photos, tmp_path, monkeypatch):
    for value, message in (("", "does not exist"), (photos, "has no weight file")):
        monkeypatch.setenv("VITRAIL_WEIGHTS", str(value))
        with pytest.raises(UserError, match=message):
            plan(photos)
    for name in ("one", "two"):
        samples.save("timm-cls", tmp_path / name)
    monkeypatch.setenv("VITRAIL_WEIGHTS", str(tmp_path))
    with pytest.raises(UserError, match=r"several weights \(one, two\) but not Ti/16"):
        plan(photos)


def test_the_table_has_permissive_weights_that_the_hub_has():
    for row in SUGGESTIONS:
        assert find_row(row.name).hub and find_row(row.name).licence in ("apache-2.0", "mit")
    assert suggest("cpu", None).name == suggest("cpu", 2).name == TINY.name
    assert suggest("cuda", 5).name.startswith("S/16")
    assert suggest("cuda", None).name.startswith("B/16")


def test_the_hub_is_asked_before_the_download_and_then_not_again(hub, caplog):
    caplog.set_level("INFO", "vitrail")
    before = find_weights("cpu", None, download=False)
    size = (hub.folder / "model.safetensors").stat().st_size
    assert before.size == size
    assert not any("GET" in line for line in hub.requests)
    after = find()
    assert (after.weights, after.size) == (f"hf:{TINY.hub}", 0)
    assert after.reason == before.reason
    assert "from hf:timm/vit_tiny" in caplog.text and "licence apache-2.0" in caplog.text
    hub.requests.clear()
    assert "in Hugging Face's cache" in find().reason
    assert hub.requests == []


def test_a_cached_model_needs_no_hub_and_offline_mode_asks_none(hub, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        find()
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    find()
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find().weights == f"hf:{TINY.hub}"
    assert hub.requests == []


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "or it is private"), (404, "the hub has no"), (429, "429"), (500, "500")],
)
def test_a_hub_that_refuses_is_one_line_and_the_training_starts_from_scratch(
    hub, photos, status, message
):
    hub.status = status
    made = plan(photos, download=True)
    (line,) = [reason for reason in made.reasons if reason.startswith("from scratch")]
    assert message in line and "set VITRAIL_WEIGHTS to it" in line and "\n" not in line
    assert made.recipe.weights == ""


def test_a_hub_that_does_not_answer_is_given_up_soon(hub, photos, monkeypatch):
    monkeypatch.setattr("vitrail.zoo.hub.TIMEOUT", 0.3)
    hub.pause = 2.0
    (line,) = [reason for reason in plan(photos).reasons if reason.startswith("from scratch")]
    assert "timed out" in line


def test_a_cut_download_is_resumed(hub, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut = 1000
    find()
    assert [line for line in hub.requests if "bytes=1000-" in line]


def test_a_download_with_another_checksum_is_deleted(hub, tmp_path):
    hub.flip = True
    with pytest.raises(UserError, match=r"has checksum .* it was deleted"):
        find()
    hub.flip = False
    assert find().weights == f"hf:{TINY.hub}"


def test_a_full_disk_is_one_line(hub, monkeypatch):
    package = pytest.importorskip("huggingface_hub")

    def fail(*names, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(package, "hf_hub_download", fail)
    with pytest.raises(UserError, match="No space left on device; free some space, or set HF_HOME"):
        find()


def test_the_check_prints_the_plan_of_the_training_without_a_download(hub, photos):
    remote = find_row(TINY.name)
    before = plan(photos)
    assert not any("GET" in line for line in hub.requests)
    assert before.recipe.weights == f"hf:{remote.hub}"
    assert before.recipe.vit.width == remote.vit.width
    assert before.reasons[2] == plan(photos, download=True).reasons[2]


def test_small_images_other_channels_and_architectures_start_from_scratch(
    tmp_path, photos, monkeypatch
):
    monkeypatch.setenv("VITRAIL_WEIGHTS", str(samples.save("timm-cls", tmp_path / "weights")))
    assert plan(photos, settings={"vit": {"heads": 3}, "data": {"workers": 0}}).recipe.weights == ""
    assert plan(photos, weights="none").recipe.weights == ""
    assert plan(photos, model="Nano/4").recipe.weights == ""
    assert plan(photos, settings={"weights": ""}).recipe.weights == ""
    made = design_recipe(vitrail.open_data("digits"), Request(data="digits"), pick_device("cpu"))
    assert made.recipe.weights == ""
    assert "from scratch: published weights need photos" in made.reasons[2]
