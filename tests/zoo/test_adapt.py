"""Weights adapted to another image size, patch, number of channels, classes or depth."""

import pytest
import torch
from torch.nn import functional as F

from tests.zoo import samples
from vitrail.errors import UserError
from vitrail.zoo.adapt import adapt_input_channels, resize_patch_kernel
from vitrail.zoo.load import LoadedModel, load_weights

CLS = "timm-cls"
FLAGS = {"heads": 3, "image": (24, 30)}


@pytest.fixture
def plain(tmp_path):
    """Loads a model of 24 x 30 pixels with more settings."""
    path = samples.save(CLS, tmp_path / "weights")
    config = '{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": '
    config += '{"input_size": [3, 24, 30], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}'
    (path / "config.json").write_text(config)

    def load_adapted(**changes) -> LoadedModel:
        return load_weights(path, vit={"heads": 3, **changes})

    return load_adapted


@pytest.mark.parametrize(
    ("name", "size"),
    [("timm-stretched-up", (36, 54)), ("timm-stretched-down", (18, 12))],
)
def test_position_embedding_is_interpolated_as_in_timm(tmp_path, name, size):
    folder = samples.save(name, tmp_path / "weights")
    (folder / "config.json").write_text(
        '{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 24, 30]}}'
    )
    loaded = load_weights(folder, vit={"heads": 3, "image": size})
    samples.equal(loaded.model, name)
    assert loaded.model.config.size == size
    assert loaded.report.resized[0].startswith(
        f"positions 4 x 5 -> {size[0] // 6} x {size[1] // 6}"
    )


def test_the_position_of_cls_is_not_interpolated(plain):
    assert torch.equal(plain(image=(36, 48)).model.pos_embed[:, 0], plain().model.pos_embed[:, 0])


def test_resizing_on_load_equals_resizing_in_forward(plain):
    x = torch.randn(2, 3, 36, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(plain(image=(36, 48)).model(x), plain().model(x))


@pytest.mark.parametrize("patch", [12, 9, 7])
def test_a_larger_patch_gives_the_same_tokens_of_a_larger_image(patch):
    torch.manual_seed(0)
    kernel, x = torch.randn(5, 3, 6, 6), torch.randn(4, 3, 6, 6)
    resized: list[str] = []
    larger = resize_patch_kernel(kernel, patch, resized)
    grown = F.interpolate(x, size=(patch, patch), mode="bicubic", antialias=True)
    expected = torch.einsum("bcij,ocij->bo", x, kernel)
    torch.testing.assert_close(torch.einsum("bcij,ocij->bo", grown, larger), expected)
    assert resized == [f"patch kernel 6 x 6 -> {patch} x {patch}: pseudo-inverse"]


def test_another_patch_size_changes_the_grid(plain):
    loaded = plain(patch=3)
    assert loaded.model.config.grid == (8, 10) and loaded.model.config.size == (24, 30)
    assert len(loaded.report.resized) == 2
    assert loaded.model(torch.zeros(1, 3, 24, 30)).shape == (1, 7)


def test_one_channel_gives_the_logits_of_three_equal_channels(plain):
    grey = torch.randn(2, 1, 24, 30, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, three = plain(channels=1).model(grey), plain().model(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(one, three)


@pytest.mark.parametrize("channels", [2, 4, 13])
def test_more_channels_repeat_and_rescale_the_kernel(channels):
    kernel = torch.randn(5, 3, 4, 4)
    wide = adapt_input_channels(kernel, channels, [])
    assert wide.shape == (5, channels, 4, 4)
    for number in range(channels):
        torch.testing.assert_close(wide[:, number], kernel[:, number % 3] * 3 / channels)


def test_mean_and_std_follow_the_channels(plain):
    assert plain(channels=1).preprocess.mean == pytest.approx((0.2,))
    assert plain(channels=4).preprocess.mean == (0.1, 0.2, 0.3, 0.1)
    assert plain(channels=4).preprocess.channels == 4


def test_four_channels_cannot_be_adapted_to_seven():
    with pytest.raises(UserError, match="use weights for 1 or 3"):
        adapt_input_channels(torch.zeros(5, 4, 2, 2), 7, [])


def test_other_classes_get_a_head_of_zeros(plain):
    loaded = plain(classes=4)
    assert not loaded.model.head.weight.any() and loaded.model.head.weight.shape == (4, 36)
    assert loaded.classes is None
    assert loaded.report.adapted == ["classes 7 -> classes 4: a new head of zeros"]


def test_the_same_number_of_classes_keeps_the_head(plain):
    assert torch.equal(plain(classes=7).model.head.weight, plain().model.head.weight)


def test_a_new_head_drops_the_hidden_layer(tmp_path):
    path = samples.save("torchvision-mlp-head", tmp_path / "weights")
    loaded = load_weights(path, vit={"heads": 3, "classes": 4})
    assert loaded.model.config.head == "linear"
    assert any("pre_logits" in line for line in loaded.report.left_out)


def test_a_model_without_head_gets_one_when_classes_are_requested(tmp_path):
    path = samples.save("timm-headless", tmp_path / "weights")
    loaded = load_weights(path, vit={**FLAGS, "classes": 4})
    assert loaded.model(torch.zeros(1, 3, 24, 30)).tolist() == [[0.0] * 4]


def test_a_head_can_be_left_out(plain):
    loaded = plain(head="none")
    assert loaded.model(torch.zeros(1, 3, 24, 30)).shape == (1, 36)
    assert "head: not requested" in loaded.report.left_out


def test_both_heads_of_a_distilled_model_are_reset(tmp_path):
    path = samples.save("timm-distilled", tmp_path / "weights")
    model = load_weights(path, vit={**FLAGS, "classes": 4}).model
    assert not model.head.weight.any() and not model.head_dist.weight.any()


def test_fewer_layers_are_the_first_ones(plain):
    short, whole = plain(depth=1), plain()
    assert short.model.config.depth == 1
    for name, x in short.model.state_dict().items():
        assert torch.equal(x, whole.model.state_dict()[name])
    assert short.report.adapted == ["depth 2 -> 1: the first blocks"]
    assert whole.report.loaded - short.report.loaded == 12
    assert whole.report.loaded - plain(classes=4).report.loaded == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 3}, "too few for depth 3"),
        ({"width": 48}, "weights cannot be adapted"),
        ({"pool": "avg"}, "weights cannot be adapted"),
        ({"head": "mlp"}, "no hidden layer"),
        ({"image": 25}, "not a multiple of patch"),
        ({"imgae": 24}, "nearest are image"),
        ({"registers": 2}, "weights cannot be adapted"),
    ],
)
def test_settings_that_weights_cannot_be_adapted_to_are_refused(plain, changes, words):
    with pytest.raises(UserError, match=words):
        plain(**changes)


def test_the_patch_size_of_a_resnet_stem_cannot_change(tmp_path):
    path = samples.save("timm-hybrid-r50-32", tmp_path / "weights")
    with pytest.raises(UserError, match="stem r50 with patch 32"):
        load_weights(path, vit={"heads": 3, "patch": 16})


def test_training_settings_pass_through(plain):
    assert plain(drop_path=0.1, dropout=0.2).model.config.drop_path == 0.1


@pytest.mark.parametrize("size", [160, 288, (224, 320)])
def test_published_weights_load_at_other_sizes(shared, size):
    loaded = load_weights(
        shared / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k", vit={"image": size}
    )
    height, width = (size, size) if isinstance(size, int) else size
    assert (loaded.preprocess.height, loaded.preprocess.width) == (height, width)
    assert loaded.model(torch.zeros(1, 3, height, width)).shape == (1, 1000)
    assert loaded.report.resized
