"""The explanation methods, free of torch, so that the command line lists them without waiting."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Method:
    summary: str  # what its heatmap shows
    class_specific: bool = True  # whether the heatmap depends on the explained class
    fast: bool = True  # one or two passes for an image, not hundreds


METHODS = {
    "relevance": Method(summary="attention weighted by its gradient, through all layers"),
    "gradient-rollout": Method(summary="rollout of attention weighted by its gradient"),
    "grad-cam": Method(summary="tokens before the last attention weighted by their mean gradient"),
    "rollout": Method(
        summary="attention multiplied through all layers; class-agnostic", class_specific=False
    ),
    "attention": Method(
        summary="attention of the last layer; class-agnostic", class_specific=False
    ),
    "occlusion": Method(summary="drop in log probability when a patch is hidden", fast=False),
}

FAST = tuple(name for name, method in METHODS.items() if method.fast)
CLASS_AGNOSTIC = tuple(name for name, method in METHODS.items() if not method.class_specific)
BEST = "best"  # in place of a name: the fast method that is most faithful on the image
SIMILARITY_SUMMARY = "cosine similarity of the chosen patch to all others after the last block"
