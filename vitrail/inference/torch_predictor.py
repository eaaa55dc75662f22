"""A predictor whose logits come from a PyTorch module, and images as its input."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.preprocess import preprocess
from vitrail.exporting.graph import compute_odd_features
from vitrail.inference.prediction import ImageInput, name_image_in_errors
from vitrail.inference.predictor import Array, Predictor
from vitrail.model.vit import ViT
from vitrail.training.learner import compute_dtype


class LogitsAndFeatures(nn.Module):
    """A ViT that returns its logits and the features that tell odd images, (B, K + 2 D)."""

    def __init__(self, model: ViT):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        embedded, rope = self.model.embed(x)
        tokens = embedded
        for block in self.model.blocks:
            tokens = block(tokens, rope)
        features = compute_odd_features(self.model, embedded, tokens)
        return torch.cat([self.model.classify(tokens), features], dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchPredictor(Predictor):
    """A PyTorch module with its classes, preprocessing and temperature."""

    network: nn.Module  # preprocessed images in, logits out
    device: torch.device

    def load(self, image: ImageInput) -> Array:
        """One preprocessed image, (C, H, W)."""
        array: Array = load_input(image, self.preprocess).numpy()
        return array

    def logits(self, x: Array) -> Array:
        """The logits (B, K) of preprocessed images (B, C, H, W)."""
        with torch.inference_mode(), self.autocast():
            out: Tensor = self.network(torch.from_numpy(x).to(self.device))
        array: Array = out.float().cpu().numpy()
        return array

    def outputs(self, x: Array) -> Array:
        """The logits, followed by the features that tell odd images, if any: (B, K) or more."""
        if self.calibration is None or self.calibration.neighbours is None:
            return self.logits(x)
        with torch.inference_mode(), self.autocast():
            out: Tensor = self.network_with_features(torch.from_numpy(x).to(self.device))
        array: Array = out.float().cpu().numpy()
        return array

    @property
    def network_with_features(self) -> nn.Module:
        """The network, with features behind the logits if it is a ViT."""
        return LogitsAndFeatures(self.network) if isinstance(self.network, ViT) else self.network

    def autocast(self) -> torch.autocast:
        dtype = compute_dtype("auto", self.device)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)


def load_input(image: ImageInput, settings: Preprocess) -> Tensor:
    """One preprocessed image, (C, H, W)."""
    return preprocess(settings, load_image(image, settings.channels, settings.pixels))


def load_batches(images: Iterable[ImageInput], settings: Preprocess, size: int) -> Iterator[Tensor]:
    """Preprocessed images in batches of at most `size`."""
    remaining = enumerate(images, 1)
    while part := list(islice(remaining, size)):
        tensors = []
        for number, image in part:
            with name_image_in_errors(image, number):
                tensors.append(load_input(image, settings))
        yield torch.stack(tensors)
