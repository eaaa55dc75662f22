"""Features: which ones, and when they are computed again."""

import numpy as np
import pytest
import torch

from tests.heads.samples import VIEW, tiny
from vitrail.data.open import open_data
from vitrail.data.source import indices
from vitrail.errors import UserError
from vitrail.heads.features import Extractor, Features


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def counted(monkeypatch):
    """How many images went through a model."""
    seen, of = [], Features.of

    def counting(self, model, x):
        seen.append(len(x))
        return of(self, model, x)

    monkeypatch.setattr(Features, "of", counting)
    return seen


@pytest.mark.parametrize("pool", ["cls", "avg", "map"])
def test_pooled_features_are_what_the_head_reads(pool):
    model, x = tiny(pool=pool), torch.randn(2, 1, 8, 8)
    found = Features().of(model, x)
    torch.testing.assert_close(model.head(found), model(x))


def test_average_features_are_the_mean_of_the_patches():
    model, x = tiny(registers=2), torch.randn(2, 1, 8, 8)
    found = Features(what="average").of(model, x)
    torch.testing.assert_close(found, model.features(x)[0].mean(dim=1))


@pytest.mark.parametrize("settings", [{}, {"registers": 2}, {"distilled": True}])
def test_cls_features_are_the_first_token_after_the_norm(settings):
    model, x = tiny(**settings), torch.randn(2, 1, 8, 8)
    found = Features(what="cls", layers=(0, 2)).of(model, x)
    layers = model.features(x, [0, 2], prefix=True)
    torch.testing.assert_close(found, torch.cat([layer[:, 0] for layer in layers], dim=1))


@pytest.mark.parametrize("pool", ["avg", "map"])
def test_cls_features_of_a_model_without_cls_are_told(pool):
    with pytest.raises(UserError, match=r"no \[CLS\] token, .* choose pooled or average"):
        Extractor(model=tiny(pool=pool), view=VIEW, features=Features(what="cls"))


def test_layers_are_joined_in_the_order_asked_for():
    model, x = tiny(), torch.randn(2, 1, 8, 8)
    found = Features(layers=(-1, 0)).of(model, x)
    torch.testing.assert_close(found[:, :16], Features().of(model, x))
    torch.testing.assert_close(found[:, 16:], Features(layers=(0,)).of(model, x))


def test_the_same_images_are_not_computed_twice(counted):
    source = open_data("digits")
    first = Extractor(model=tiny(), view=VIEW, features=Features()).examples(source, "test")
    images = sum(counted)
    again = Extractor(model=tiny(), view=VIEW, features=Features()).examples(source, "test")
    assert sum(counted) == images == len(first)
    assert np.array_equal(first.x, again.x)
    assert np.array_equal(again.y, source.labels[indices(source, "test")])


@pytest.mark.parametrize("what", ["weights", "average", "cls", "view", "layers"])
def test_what_features_depend_on_is_in_their_name(what):
    source = open_data("digits")
    items = indices(source, "test")
    model, changed = tiny(), tiny()
    keys = {Extractor(model=model, view=VIEW, features=Features()).key(source, items)}
    settings = {"model": changed, "view": VIEW, "features": Features()}
    if what == "weights":
        with torch.no_grad():
            changed.blocks[1].mlp.fc1.bias[0] += 1e-6
    elif what == "view":
        settings["view"] = type(VIEW)(size=8, channels=1, crop=0.9)
    else:
        changed_to = {"layers": (0,)} if what == "layers" else {"what": what}
        settings["features"] = Features(**changed_to)
    keys.add(Extractor(**settings).key(source, items))
    assert len(keys) == 2


def test_the_head_of_the_model_is_not_in_their_name():
    source, changed = open_data("digits"), tiny()
    with torch.no_grad():
        changed.head.bias += 1
    items = indices(source, "test")
    names = {
        Extractor(model=model, view=VIEW, features=Features()).key(source, items)
        for model in (tiny(), changed)
    }
    assert len(names) == 1


def test_a_damaged_cache_is_computed_again(cache, counted):
    source = open_data("digits")
    extractor = Extractor(model=tiny(), view=VIEW, features=Features())
    first = extractor.examples(source, "test")
    (file,) = cache.glob("*.kept")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    again = extractor.examples(source, "test")
    assert np.array_equal(first.x, again.x)
    assert sum(counted) == 2 * len(first)


def test_unknown_features_are_told():
    with pytest.raises(UserError, match="choose pooled or cls or average"):
        Features(what="max")
