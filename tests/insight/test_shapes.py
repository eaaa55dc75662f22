"""Executes every shape comment of `insight/`, on every branch that has one."""

from pathlib import Path

import numpy as np
import torch

from tests.shapes import Tracer, claims
from vitrail import insight
from vitrail.insight import explain, faithfulness, learned, maps, patch_attention
from vitrail.insight.backbone import explain_backbone
from vitrail.insight.explanation import explain_image
from vitrail.insight.methods import METHODS
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

SIZES = {"channels": 5, "classes": 7, "width": 24, "depth": 9, "heads": 3, "mlp_ratio": 1.5}
SIZES |= {"image": (12, 20), "patch": 4}
LEGEND = {
    "B": 2,
    "C": 5,
    "H": 12,
    "W": 20,
    "P": 15,
    "p": 4,
    "D": 24,
    "h": 3,
    "d": 8,
    "L": 9,
    "K": 7,
}


def test_every_shape_comment_of_insight_is_true():
    folder = Path(insight.__file__).parent
    found = {key: claim for path in folder.glob("*.py") for key, claim in claims(path).items()}
    tracer = Tracer(found)
    trace_insight(tracer)
    assert not tracer.wrong
    assert not {f"{Path(f).name}:{line}" for f, line in tracer.claims.keys() - tracer.reached}


def model(**settings):
    torch.manual_seed(0)
    return ViT(ViTConfig(**{**SIZES, **settings}))


def trace_insight(tracer):
    """Runs every branch, at sizes that all differ."""
    x, one = torch.randn(2, 5, 12, 20), torch.randn(1, 5, 12, 20)
    for settings, tokens in (
        ({}, 16),
        ({"distilled": True}, 17),
        ({"pool": "avg", "registers": 4, "positions": "sincos"}, 19),
        ({"pool": "map", "registers": 4, "positions": "rotary"}, 19),
        ({"pool": "cls_avg"}, 16),
    ):
        vit, legend = model(**settings), {**LEGEND, "N": tokens}
        for method in METHODS:
            tracer.run(lambda vit=vit, method=method: explain.explain(vit, x, method, 3), **legend)
        tracer.run(lambda vit=vit: maps.attention(vit, x, rows="mean"), **legend)
        tracer.run(lambda vit=vit: learned.position_similarity(vit), **legend)
    vit, legend = model(), {**LEGEND, "N": 16}
    tracer.run(lambda: explain.explain(vit, x, "occlusion", without="drop"), **legend)
    tracer.run(lambda: faithfulness.compare_methods(vit, x, ["attention"]), **legend)
    measures = (
        learned.attention_distance,
        learned.attention_entropy,
        learned.head_contribution,
        learned.token_norms,
        learned.feature_pca,
    )
    for measure in measures:
        tracer.run(lambda measure=measure: measure(vit, x), **legend)
    tracer.run(lambda: learned.patch_filters(vit), **legend)
    pixels = np.zeros((12, 20, 5), np.uint8)
    single = {**legend, "B": 1}
    tracer.run(lambda: explain_image(vit, one, pixels, "abcdefg").overview, **single)
    tracer.run(lambda: patch_attention.quantize_attention(vit, one, range(9), range(3)), **single)
    tracer.run(lambda: explain_backbone(vit, one, pixels), **single)
