"""A model without a head: its features, and what it sees in an image."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.arguments import check_arguments
from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.preprocess import preprocess as preprocess_image
from vitrail.data.preprocess import resize_and_crop
from vitrail.display.page import stretch_to_uint8
from vitrail.inference.prediction import ImageInput, as_images, name_image_in_errors
from vitrail.inference.predictor import BATCH
from vitrail.inference.torch_predictor import load_batches, load_input
from vitrail.model.vit import ViT
from vitrail.training.device import pick_device
from vitrail.training.learner import compute_dtype
from vitrail.zoo import load as zoo
from vitrail.zoo.load import log_weight_changes, missing_preprocess
from vitrail.zoo.metadata import Metadata
from vitrail.zoo.weights import Normalisation

if TYPE_CHECKING:
    from vitrail.insight.backbone import BackboneExplanation


class Backbone:
    """A Vision Transformer without a head: DINO, MAE, CLIP and others, or a run without its own.

    >>> backbone = vitrail.load_backbone("runs/digits-1")
    >>> backbone
    Backbone(... features; 8 x 8 pixels, 1 channel; ... blocks; cpu)
    >>> backbone.features("digit.png").shape == (1, backbone.model.config.feature_width)
    True
    """

    @check_arguments
    def __init__(
        self,
        model: ViT,
        preprocess: Preprocess,
        metadata: Metadata | None = None,
        device: str | torch.device = "auto",
    ):
        """
        Args:
            model: a ViT; if it has a head, it is not used
            preprocess: how images become the input of the model
            metadata: what the model file says
            device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        """
        self.device = pick_device(device) if isinstance(device, str) else device
        self.model = model.eval().to(self.device)
        self.preprocess = preprocess
        self.metadata = metadata or Metadata()

    @check_arguments
    def features(self, images: "ImageInput | Iterable[ImageInput]") -> "NDArray[np.float32]":
        """One vector for each image: [CLS], the average patch or the pooling, as the model has it.

        >>> len(vitrail.load_backbone("runs/digits-1").features(["digit.png", "digit.png"]))
        2
        """
        rows = [np.empty((0, self.model.config.feature_width), np.float32)]
        for x in load_batches(as_images(images), self.preprocess, BATCH):
            rows.append(compute_features(self, x))
        return np.concatenate(rows)

    @check_arguments
    def patches(self, image: "ImageInput") -> "NDArray[np.float32]":
        """The features of every patch after the last block: rows x columns x width.

        >>> vitrail.load_backbone("runs/digits-1").patches("digit.png").shape[:2]
        (4, 4)
        """
        with name_image_in_errors(image, 1):
            x = load_input(image, self.preprocess)[None].to(self.device)
        with torch.inference_mode():
            features = self.model.features(x)[0][0].float().cpu()
        patches: NDArray[np.float32] = features.unflatten(0, self.model.grid(x)).numpy()
        return patches

    @check_arguments
    def explain(
        self,
        image: "ImageInput",
        *,
        patch: tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        max_bytes: int | None = None,
    ) -> "BackboneExplanation":
        """Attention, rollout, the similarity of a patch to all others, and PCA colours.

        Args:
            image: path, bytes, PIL image or array
            patch: row and column of the patch; by default the one that rollout finds strongest
            layers: blocks whose attention is drawn; by default a selection
            heads: attention heads that are drawn; by default all
            max_bytes: size limit of the attention maps on the page; by default 3 MB

        >>> explanation = vitrail.load_backbone("runs/digits-1").explain("digit.png")
        >>> sorted(explanation.heatmaps)
        ['attention', 'rollout', 'similarity']
        """
        from vitrail.insight.backbone import explain_backbone
        from vitrail.insight.patch_attention import MAX_BYTES

        settings = self.preprocess
        with name_image_in_errors(image, 1):
            pixels = load_image(image, settings.channels, settings.pixels)
        return explain_backbone(
            self.model,
            preprocess_image(settings, pixels)[None].to(self.device),
            stretch_to_uint8(resize_and_crop(settings, pixels)),
            name=str(image) if isinstance(image, str | Path) else "image",
            patch=patch,
            layers=layers,
            heads=heads,
            max_bytes=MAX_BYTES if max_bytes is None else max_bytes,
        )

    def __repr__(self) -> str:
        view, config = self.preprocess, self.model.config
        channels = f"{view.channels} channel{'s' * (view.channels != 1)}"
        return (
            f"Backbone({config.feature_width} features; {view.height} x {view.width} pixels, "
            f"{channels}; {config.depth} blocks; {self.device})"
        )


def compute_features(backbone: Backbone, x: Tensor) -> NDArray[np.float32]:
    """The features (B, D) of preprocessed images (B, C, H, W)."""
    dtype = compute_dtype("auto", backbone.device)
    enabled = dtype != torch.float32
    with torch.inference_mode(), torch.autocast(backbone.device.type, dtype=dtype, enabled=enabled):
        pooled = backbone.model.pool(backbone.model.encode(x.to(backbone.device)))
    rows: NDArray[np.float32] = pooled.float().cpu().numpy()
    return rows


@check_arguments
def load_backbone(
    path: str | Path,
    *,
    device: str = "auto",
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> Backbone:
    """Loads weights without a head, or any others without using theirs.

    Args:
        path: run folder, weight file or folder, name of published weights, or "hf:owner/name"
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, such as {"heads": 6}, or to adapt the
            model to, such as {"image": 384}

    >>> vitrail.load_backbone("runs/digits-1").model.config.head
    'none'
    """
    settings = {"head": "none", **(vit or {})}
    loaded = log_weight_changes(zoo.load_weights(path, preprocess=preprocess, vit=settings))
    if loaded.preprocess is None:
        raise missing_preprocess(path)
    return Backbone(loaded.model, loaded.preprocess, loaded.metadata, pick_device(device))
