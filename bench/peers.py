"""The same architecture as each peer builds it, with random weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.model.config import ViTConfig

KEPT: list[torch.library.Library] = []  # a library takes its operators with it when it is collected


def ours(config: ViTConfig) -> nn.Module:
    from vitrail.model.vit import ViT

    return ViT(config)


def timm(config: ViTConfig) -> nn.Module:
    mend_torchvision()  # timm imports torchvision
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


def hugging_face(config: ViTConfig) -> nn.Module:
    mend_torchvision()  # transformers looks for torchvision and trips over a broken one
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
        attn_implementation="sdpa",  # the faster one of its two
    )
    return Logits(ViTForImageClassification(settings))


def vit_pytorch(config: ViTConfig) -> nn.Module:
    """Without biases of queries, keys and values, with two norms more around the patches."""
    mend_torchvision()  # its package imports torchvision for other models
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


def torchvision(config: ViTConfig) -> nn.Module:
    mend_torchvision()
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
    """Hugging Face answers with an object; only its logits are wanted."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def mend_torchvision() -> None:
    """Makes `import torchvision` work beside a CPU-only torch, where its compiled part won't load.

    All it misses at import are two operators that it describes; no ViT calls them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # operator torchvision::nms does not exist
        KEPT.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            KEPT[-1].define(f"{name}(Tensor boxes, Tensor scores, float overlap) -> Tensor")


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "vitrail": ours,
    "timm": timm,
    "transformers": hugging_face,
    "vit-pytorch": vit_pytorch,
    "torchvision": torchvision,
}
