"""A model without a head: features, pictures, and the command that draws them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.data.samples import class_folders
from vitrail.cli.main import main
from vitrail.errors import UserError
from vitrail.insight.backbone import patch_similarity
from vitrail.insight.patch_attention import MEAN, SIMILARITY
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.file import save_model

KINDS = {
    "dino": {},
    "mae": {"pool": "avg", "registers": 1},
    "siglip": {"pool": "map", "mlp": "gelu_tanh"},
    "dinov3": {"positions": "rotary", "registers": 4, "layer_scale": 1e-5},
    "clip": {"pre_norm": True, "mlp": "quick_gelu"},
}


@pytest.fixture
def weights(tmp_path):
    def write(kind="dino"):
        torch.manual_seed(0)
        config = ViTConfig(
            image=32, patch=8, width=24, depth=2, heads=3, head="none", **KINDS[kind]
        )
        view = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "channels": 3}
        path = tmp_path / f"{kind}.safetensors"
        save_model(path, ViT(config), {"preprocess": view})
        return path

    return write


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_backbone_is_explained(kind, weights, photo, tmp_path, capsys):
    main(["explain", str(weights(kind)), str(photo), "--out", str(tmp_path / "out"), "--json"])
    line = json.loads(capsys.readouterr().out)
    names = {name.rsplit("/", 1)[-1] for name in line["files"]}
    assert {"overview.png", "rollout.png", "attention.png", "similarity.png", "index.html"} <= names
    page = (tmp_path / "out" / "index.html").read_text()
    assert '"top": []' in page and '"hasSimilarity"' not in page


def test_what_a_backbone_has_learned_is_drawn(weights, photo, tmp_path, capsys):
    main(["explain", str(weights()), str(photo), "--learned", "--out", str(tmp_path / "out")])
    drawn = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert {"positions.png", "filters.png", "attention_distance.png", "feature_pca.png"} <= drawn


def test_similarity_is_the_cosine_of_patch_features(weights, photo):
    backbone = vitrail.load_backbone(weights())
    explanation = backbone.explain(photo, patch=(1, 2))
    features = backbone.patches(photo)
    unit = features / np.linalg.norm(features, axis=-1, keepdims=True)
    expected = (unit @ unit[1, 2]).clip(0)
    np.testing.assert_allclose(explanation.heatmaps["similarity"], expected, atol=1e-5)
    assert explanation.heatmaps["similarity"][1, 2] == pytest.approx(1, abs=1e-5)
    shown = explanation.patch_attention.weights(SIMILARITY, MEAN)[1 + 1 * 4 + 2]
    np.testing.assert_allclose(shown.reshape(4, 4), expected, atol=1 / 250)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(patch_similarity(backbone.model, x).diagonal(dim1=1, dim2=2),
                               torch.ones(2, 16))  # fmt: skip


def test_a_patch_outside_the_image_and_a_class_are_refused(weights, photo):
    backbone = vitrail.load_backbone(weights())
    with pytest.raises(UserError, match="`patch` is row 4, column 0; the image has 4"):
        backbone.explain(photo, patch=(4, 0))
    with pytest.raises(SystemExit, match="has no head, so no class can be explained"):
        main(["explain", str(weights()), str(photo), "--class", "3"])


def test_a_backbone_saves_figures_pages_and_arrays(weights, photo, tmp_path):
    explanation = vitrail.load_backbone(weights()).explain(photo)
    for suffix in ("png", "html", "npz"):
        explanation.save(tmp_path / f"why.{suffix}")
        assert (tmp_path / f"why.{suffix}").stat().st_size > 1000
    with pytest.raises(UserError, match="unknown suffix"):
        explanation.save(tmp_path / "why.txt")


def test_predicting_without_a_head_names_the_ways_out(weights):
    with pytest.raises(UserError, match=r"vitrail.load_backbone"):
        vitrail.load(weights())


def test_training_starts_from_a_backbone_without_a_head(weights, tmp_path):
    data = class_folders(tmp_path / "data", {"cat": 8, "dog": 8})
    settings = {"train": {"steps": 2, "batch": 4, "lr": 1e-6}, "data": {"workers": 0}}
    run = vitrail.train(
        data, weights=weights("mae"), out=tmp_path / "run", settings=settings, report=False,
        quiet=True,
    )  # fmt: skip
    assert run.classifier.classes == ("cat", "dog")
    before = vitrail.load_backbone(weights("mae")).model.state_dict()
    after = run.classifier.model.state_dict()
    assert after["head.weight"].shape == (2, 24)
    torch.testing.assert_close(
        after["blocks.1.attn.qkv.weight"], before["blocks.1.attn.qkv.weight"], atol=1e-4, rtol=0
    )
