"""Features: their kinds, and their cache."""

import numpy as np
import pytest
import torch

from tests.heads.samples import PREPROCESS, tiny
from vitrail.data.open import open_data
from vitrail.data.source import split_indices
from vitrail.errors import UserError
from vitrail.heads.features import FeatureExtractor, Features


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def counted(monkeypatch):
    """How many images went through a model."""
    seen, extract = [], Features.extract

    def counting(self, model, x):
        seen.append(len(x))
        return extract(self, model, x)

    monkeypatch.setattr(Features, "extract", counting)
    return seen


@pytest.mark.parametrize("pool", ["cls", "avg", "cls_avg", "map"])
def test_pooled_features_are_what_the_head_reads(pool):
    model, x = tiny(pool=pool), torch.randn(2, 1, 8, 8)
    found = Features().extract(model, x)
    torch.testing.assert_close(model.head(found), model(x))
    extractor = FeatureExtractor(model=model, preprocess=PREPROCESS, features=Features())
    assert extractor.width == found.shape[1]


def test_average_features_are_the_mean_of_the_patches():
    model, x = tiny(registers=2), torch.randn(2, 1, 8, 8)
    found = Features(kind="average").extract(model, x)
    torch.testing.assert_close(found, model.features(x)[0].mean(dim=1))


@pytest.mark.parametrize("settings", [{}, {"registers": 2}, {"distilled": True}])
def test_cls_features_are_the_first_token_after_the_norm(settings):
    model, x = tiny(**settings), torch.randn(2, 1, 8, 8)
    found = Features(kind="cls", layers=(0, 2)).extract(model, x)
    layers = model.features(x, [0, 2], prefix=True)
    torch.testing.assert_close(found, torch.cat([layer[:, 0] for layer in layers], dim=1))


@pytest.mark.parametrize("pool", ["avg", "map"])
def test_cls_features_of_a_model_without_cls_are_an_error(pool):
    with pytest.raises(UserError, match=r"no \[CLS\] token: .* choose pooled or average"):
        FeatureExtractor(
            model=tiny(pool=pool), preprocess=PREPROCESS, features=Features(kind="cls")
        )


def test_layers_are_concatenated_in_the_given_order():
    model, x = tiny(), torch.randn(2, 1, 8, 8)
    found = Features(layers=(-1, 0)).extract(model, x)
    torch.testing.assert_close(found[:, :16], Features().extract(model, x))
    torch.testing.assert_close(found[:, 16:], Features(layers=(0,)).extract(model, x))


def test_the_same_images_are_extracted_once(counted):
    source = open_data("digits")
    first = FeatureExtractor(
        model=tiny(), preprocess=PREPROCESS, features=Features()
    ).extract_split(source, "test")
    images = sum(counted)
    again = FeatureExtractor(
        model=tiny(), preprocess=PREPROCESS, features=Features()
    ).extract_split(source, "test")
    assert sum(counted) == images == len(first)
    assert np.array_equal(first.x, again.x)
    assert np.array_equal(again.y, source.labels[split_indices(source, "test")])


@pytest.mark.parametrize("what", ["weights", "average", "cls", "preprocess", "layers"])
def test_the_cache_key_depends_on_weights_and_settings(what):
    source = open_data("digits")
    items = split_indices(source, "test")
    model, changed = tiny(), tiny()
    keys = {
        FeatureExtractor(model=model, preprocess=PREPROCESS, features=Features()).cache_key(
            source, items
        )
    }
    settings = {"model": changed, "preprocess": PREPROCESS, "features": Features()}
    if what == "weights":
        with torch.no_grad():
            changed.blocks[1].mlp.fc1.bias[0] += 1e-6
    elif what == "preprocess":
        settings["preprocess"] = type(PREPROCESS)(size=8, channels=1, crop=0.9)
    else:
        changed_to = {"layers": (0,)} if what == "layers" else {"kind": what}
        settings["features"] = Features(**changed_to)
    keys.add(FeatureExtractor(**settings).cache_key(source, items))
    assert len(keys) == 2


def test_the_cache_key_does_not_depend_on_the_head():
    source, changed = open_data("digits"), tiny()
    with torch.no_grad():
        changed.head.bias += 1
    items = split_indices(source, "test")
    names = {
        FeatureExtractor(model=model, preprocess=PREPROCESS, features=Features()).cache_key(
            source, items
        )
        for model in (tiny(), changed)
    }
    assert len(names) == 1


def test_a_damaged_cache_file_is_computed_again(cache, counted):
    source = open_data("digits")
    extractor = FeatureExtractor(model=tiny(), preprocess=PREPROCESS, features=Features())
    first = extractor.extract_split(source, "test")
    (file,) = cache.glob("*.features")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    again = extractor.extract_split(source, "test")
    assert np.array_equal(first.x, again.x)
    assert sum(counted) == 2 * len(first)


def test_unknown_features_are_an_error():
    with pytest.raises(UserError, match="choose one of pooled, cls, average"):
        Features(kind="max")
