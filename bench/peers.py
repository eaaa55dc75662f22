"""The same architecture built by each library, with random weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.model.config import ViTConfig

LIBRARIES: list[torch.library.Library] = []  # a library that is collected removes its operators


def build_vitrail(config: ViTConfig) -> nn.Module:
    from vitrail.model.vit import ViT

    return ViT(config)


def build_timm(config: ViTConfig) -> nn.Module:
    patch_torchvision()  # timm imports torchvision
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.size,
        patch_size=config.patch,
        in_chans=config.channels,
        num_classes=config.classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
    )


def build_transformers(config: ViTConfig) -> nn.Module:
    patch_torchvision()  # transformers imports torchvision if it is installed
    from transformers import ViTConfig as Settings
    from transformers import ViTForImageClassification

    settings = Settings(
        image_size=config.size,
        patch_size=config.patch,
        num_channels=config.channels,
        num_labels=config.classes,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.hidden,
        attn_implementation="sdpa",  # the faster of its two implementations
    )
    return Logits(ViTForImageClassification(settings))


def build_vit_pytorch(config: ViTConfig) -> nn.Module:
    """Has no bias in qkv, and two more norms around the patch projection."""
    patch_torchvision()  # the package imports torchvision for its other models
    from vit_pytorch.vit import ViT as Peer

    return Peer(
        image_size=config.size,
        patch_size=config.patch,
        channels=config.channels,
        num_classes=config.classes,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        dim_head=config.width // config.heads,
        mlp_dim=config.hidden,
    )


def build_torchvision(config: ViTConfig) -> nn.Module:
    patch_torchvision()
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        image_size=config.size[0],
        patch_size=config.patch,
        num_classes=config.classes,
        hidden_dim=config.width,
        num_layers=config.depth,
        num_heads=config.heads,
        mlp_dim=config.hidden,
    )


class Logits(nn.Module):
    """Extracts the logits from the output object of Hugging Face."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def patch_torchvision() -> None:
    """Makes `import torchvision` work with a torch that cannot load its compiled operators.

    The import needs the definitions of two operators, which no ViT calls.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # operator torchvision::nms does not exist
        LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            LIBRARIES[-1].define(f"{name}(Tensor boxes, Tensor scores, float overlap) -> Tensor")


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "vitrail": build_vitrail,
    "timm": build_timm,
    "transformers": build_transformers,
    "vit-pytorch": build_vit_pytorch,
    "torchvision": build_torchvision,
}
