"""Training normalises by its own images, whatever their channels and pixel type."""

import numpy as np
import pytest

import vitrail
from tests.run.conftest import FEW, tensors
from vitrail.errors import UserError
from vitrail.model.vit import ViT
from vitrail.run.drive import Stopped
from vitrail.run.recipe import merge_settings, read_recipe
from vitrail.zoo.file import save_model
from vitrail.zoo.presets import preset

CHANNELS = 13


@pytest.fixture
def bands(tmp_path):
    """13 channels of 16 bits, of which the brightest uses a hundredth: 0.5 fits none of them."""
    rng = np.random.default_rng(0)
    for label, level in (("field", 200), ("forest", 400)):
        (tmp_path / "bands" / label).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(level, level + 100, (16, 16, CHANNELS))
            name = tmp_path / "bands" / label / f"{number}.npy"
            np.save(name, (pixels * np.arange(1, CHANNELS + 1) / CHANNELS).astype(np.uint16))
    return tmp_path / "bands"


def train(bands, out, **settings):
    return vitrail.train(
        bands, out=out, settings=merge_settings(FEW, settings), report=False, quiet=True
    )


def test_mean_and_std_are_those_of_the_training_images(bands, tmp_path):
    run = train(bands, tmp_path / "run")
    source = vitrail.open_data(bands)
    images = [np.load(bands / source.ids[i]) for i in np.flatnonzero(source.splits == "train")]
    stored = read_recipe(run.folder / "recipe.toml")["preprocess"]
    np.testing.assert_allclose(stored["mean"], np.stack(images).mean((0, 1, 2)) / 65535, rtol=1e-4)
    np.testing.assert_allclose(stored["std"], np.stack(images).std((0, 1, 2)) / 65535, rtol=1e-4)
    classifier = run.classifier
    assert classifier.preprocess.pixels == "uint16"
    assert classifier.preprocess.mean == tuple(stored["mean"])
    prediction = classifier.predict(bands / "field" / "0.npy")
    assert prediction.label in ("field", "forest")
    assert classifier.explain(bands / "field" / "0.npy").pixels.dtype == np.uint8
    with pytest.raises(UserError, match="17 channels; expected 13"):
        classifier.predict(np.zeros((16, 16, 17), np.uint16))


def test_what_was_asked_for_is_not_measured(bands, tmp_path):
    run = train(bands, tmp_path / "run", preprocess={"std": (0.25,)})
    stored = read_recipe(run.folder / "recipe.toml")["preprocess"]
    assert set(stored["std"]) == {0.25}
    assert max(stored["mean"]) < 0.01


def test_a_resumed_run_has_the_same_normalisation_and_bits(bands, tmp_path, stop_at):
    whole = tensors(train(bands, tmp_path / "whole").folder)
    stop_at(2)
    with pytest.raises(Stopped):
        train(bands, tmp_path / "part")
    stop_at(None)
    resumed = tensors(vitrail.resume(tmp_path / "part", report=False, quiet=True).folder)
    assert all((whole[name] == resumed[name]).all() for name in whole)


def test_photo_weights_need_the_number_of_channels_to_be_asked_for(bands, tmp_path):
    model = ViT(preset("Nano/4", image=16, classes=2))
    weights = tmp_path / "photo.safetensors"
    view = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3, "channels": 3}
    save_model(weights, model, {"classes": ["a", "b"], "preprocess": view, "channels": 3})
    few = {name: FEW[name] for name in ("train", "data")}
    options = {"weights": weights, "settings": few, "report": False, "quiet": True}
    with pytest.raises(UserError, match=r"expects 3 channels, the data has 13; .*vit\.channels=13"):
        vitrail.train(bands, out=tmp_path / "no", **options)
    options["settings"] = merge_settings(few, {"vit": {"channels": CHANNELS}})
    run = vitrail.train(bands, out=tmp_path / "yes", **options)
    assert run.classifier.preprocess.pixels == "uint16"
    assert max(run.classifier.preprocess.mean) < 0.01  # of the data, not of the photos


def test_check_reads_what_training_reads(bands):
    found = vitrail.check(bands)
    assert found.error is None
    assert found.plan.recipe.preprocess.pixels == "uint16"
    assert "16-bit 13-channel training images" in found.plan.reasons[0]
    np.save(bands / "field" / "nan.npy", np.full((16, 16, CHANNELS), np.nan))
    assert "NaN or infinity" in vitrail.check(bands).broken[0].why
