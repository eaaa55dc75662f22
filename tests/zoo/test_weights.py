"""The table of published weights: complete, consistent, and quick to ask."""

import re

import pytest

from vitrail.model.cost import count_parameters
from vitrail.zoo.presets import PRESETS
from vitrail.zoo.weights import KNOWN_HEADS, PUBLISHED, find_published, imagenet_classes


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_every_row_is_complete(row):
    assert row.preset in PRESETS
    assert row.hub.count("/") == 1 or row.files
    assert row.licence and row.normalisation in ("half", "imagenet", "clip") and 0.5 < row.crop <= 1
    assert (row.accuracy is None) == (row.source == "")
    assert row.accuracy is None or 0.7 < row.accuracy < 0.9
    assert row.accuracy is None or row.vit.head != "none"
    assert set(row.preprocess) == {"crop", "interpolation", "mean", "std"}


def test_names_and_hub_repositories_are_unique():
    for names in ([row.name for row in PUBLISHED], [row.hub for row in PUBLISHED if row.hub]):
        assert len(names) == len(set(names))


def test_known_sizes_have_the_published_number_of_parameters():
    counts = {row.name: count_parameters(row.vit) for row in PUBLISHED}
    assert counts["Ti/16 augreg-in21k-in1k"] == 5_717_416
    assert counts["B/16 augreg-in21k-in1k"] == 86_567_656
    assert counts["DeiT3-B/16"] == 86_586_088
    assert counts["DINOv2-g/14"] == 1_136_479_232


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("dino_deitsmall16_pretrain.pth", "S/16 dino"),
        ("dino_deitsmall16_pretrain_full_checkpoint.pth", "S/16 dino"),
        ("mae_pretrain_vit_base.pth", "B/16 mae"),
        ("deit_base_patch16_224-b5f2ef4d.pth", "DeiT-B/16"),
        ("vit_b_16-c867db91.pth", "B/16 torchvision-in1k"),
        ("facebook/dinov2-base", "DINOv2-B/14"),
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "Ti/16 augreg-in21k-in1k"),
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "Ti/16 augreg-in21k-in1k"),
        (
            "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-"
            "lr_0.03-res_224.npz",
            "Ti/16 augreg-in21k-in1k",
        ),
        ("B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz", "B/16 augreg-in21k"),
    ],
)
def test_weights_are_found_by_each_of_their_names(name, row):
    found = find_published("something else", name)
    assert found is not None and found.name == row


@pytest.mark.parametrize("name", ["", "model.safetensors", "weights", "vit", "checkpoint.pth"])
def test_other_names_find_no_weights(name):
    assert find_published(name) is None


def test_heads_are_known_for_every_row():
    for row in PUBLISHED:
        config = row.vit
        assert KNOWN_HEADS[config.width, config.depth, config.hidden] == config.heads, row.name


def test_the_classes_of_imagenet_are_a_thousand_and_differ():
    names = imagenet_classes()
    assert len(names) == len(set(names)) == 1000
    assert (names[0], names[207], names[999]) == ("tench", "golden retriever", "toilet tissue")
    assert not [name for name in names if re.search(r"^\s|\s$|^$", name)]
