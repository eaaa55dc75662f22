"""The table of published weights: where to find them, their preprocessing and accuracy."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Literal

from vitrail.data.config import NORMALISATIONS, Interpolation
from vitrail.model.config import ViTConfig
from vitrail.zoo.presets import PRESETS, preset

TIMM = "timm, results-imagenet.csv"  # in the repository pytorch-image-models
TORCHVISION = "torchvision 0.28, weights of vision_transformer.py"

Normalisation = Literal["half", "imagenet", "clip"]  # a name in NORMALISATIONS

# Attention heads of published models by width, depth and hidden width of the MLP. If models
# differ in heads only, the more common number.
KNOWN_HEADS = {
    (PRESETS[name]["width"], PRESETS[name]["depth"], preset(name).hidden): PRESETS[name]["heads"]
    for name in ("Ti/16", "S/16", "B/16", "L/16", "H/14", "g/14", "G/14", "DINOv2-g/14")
} | {
    (256, 10, 1024): 4,  # sizes of timm's own models
    (256, 14, 1280): 4,
    (320, 14, 1792): 5,
    (384, 36, 1536): 6,
    (512, 12, 2048): 8,
    (512, 20, 2048): 8,
    (640, 12, 2560): 10,
    (832, 21, 2176): 13,
    (896, 12, 3584): 14,
    (896, 18, 2304): 14,
    (1152, 27, 4304): 16,  # SigLIP So400m
    (1536, 40, 6144): 16,  # SigLIP 2 giant
}


@dataclass(frozen=True, kw_only=True)
class PublishedWeights:
    """Published weights: a row of `PUBLISHED`."""

    name: str  # the architecture as papers call it, then the training
    hub: str  # owner/name on huggingface.co; empty if they are not there
    files: tuple[str, ...]  # other names of files and hub repositories, with * for any characters
    preset: str
    changes: dict[str, Any]  # settings in which the model differs from the preset
    normalisation: Normalisation
    crop: float
    interpolation: Interpolation
    accuracy: float | None  # top-1 on the 50,000 ImageNet validation images; None: not a classifier
    source: str  # of the accuracy
    licence: str

    @property
    def vit(self) -> ViTConfig:
        return preset(self.preset, **self.changes)

    @property
    def preprocess(self) -> dict[str, Any]:
        """Settings of `Preprocess` without the size."""
        mean, std = NORMALISATIONS[self.normalisation]
        return {
            "crop": self.crop,
            "interpolation": self.interpolation,
            "mean": mean,
            "std": std,
        }

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names of weights with the thousand classes of ImageNet; None for others."""
        config = self.vit
        return imagenet_classes() if config.head != "none" and config.classes == 1000 else None


def imagenet_classes() -> tuple[str, ...]:
    """The classes of ILSVRC 2012 in their order, each by its first WordNet lemma."""
    return tuple(
        files("vitrail.zoo").joinpath("imagenet.txt").read_text(encoding="utf-8").splitlines()
    )


def find_published(*names: str) -> PublishedWeights | None:
    """The weights with one of these names: in the table, on the hub, of a folder or a file."""
    for name in names:
        for row in PUBLISHED:
            patterns = (row.name, row.hub, row.hub.partition("/")[2], *row.files)
            if name and any(pattern and fnmatchcase(name, pattern) for pattern in patterns):
                return row
    return None


def _timm(
    name: str,
    hub: str,
    model: str,
    accuracy: float | None = None,
    *files: str,
    normalisation: Normalisation = "half",
    crop: float = 0.9,
    licence: str = "apache-2.0",
    **changes: Any,
) -> PublishedWeights:
    """Weights that timm publishes, with timm's preprocessing and accuracy."""
    return PublishedWeights(
        name=name,
        hub=f"timm/{hub}",
        files=files,
        preset=model,
        changes=changes,
        normalisation=normalisation,
        crop=crop,
        interpolation="bicubic",
        accuracy=accuracy,
        source=TIMM if accuracy else "",
        licence=licence,
    )


def _torchvision(
    name: str,
    file: str,
    model: str,
    accuracy: float,
    crop: float = 0.875,
    interpolation: Interpolation = "bilinear",
    licence: str = "bsd-3-clause",
    **changes: Any,
) -> PublishedWeights:
    """Weights that torchvision publishes, with its preprocessing and accuracy."""
    return PublishedWeights(
        name=name,
        hub="",
        files=(f"{file}.pth",),
        preset=model,
        changes=changes,
        normalisation="imagenet",
        crop=crop,
        interpolation=interpolation,
        accuracy=accuracy,
        source=TORCHVISION,
        licence=licence,
    )


NO_HEAD: dict[str, Any] = {"head": "none"}
META: dict[str, Any] = {"normalisation": "imagenet"}  # DeiT, DINO, MAE
DINO: dict[str, Any] = {**META, **NO_HEAD}
MAE: dict[str, Any] = {**META, **NO_HEAD, "licence": "cc-by-nc-4.0"}
DINO2: dict[str, Any] = {**META, "crop": 1.0}
DINO3: dict[str, Any] = {**DINO2, "image": 256, "pool": "avg", "licence": "dinov3-license"}
DINO3["registers"] = 5  # four and [CLS]: timm pools these models by averaging, no head reads [CLS]
SWAG: dict[str, Any] = {"crop": 1.0, "interpolation": "bicubic", "licence": "cc-by-nc-4.0"}

PUBLISHED = [
    # Steiner et al., 2022, "How to train your ViT?": ImageNet-21k, then ImageNet
    _timm("Ti/16 augreg-in21k-in1k", "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "Ti/16", 0.75454,
          "Ti_16-i21k-*-res_224.npz"),
    _timm("Ti/16 augreg-in21k-in1k-384", "vit_tiny_patch16_384.augreg_in21k_ft_in1k", "Ti/16",
          0.78424, "Ti_16-i21k-*-res_384.npz", crop=1.0, image=384),
    _timm("S/32 augreg-in21k-in1k", "vit_small_patch32_224.augreg_in21k_ft_in1k", "S/32", 0.75994,
          "S_32-i21k-*-res_224.npz"),
    _timm("S/16 augreg-in21k-in1k", "vit_small_patch16_224.augreg_in21k_ft_in1k", "S/16", 0.81384,
          "S_16-i21k-*-res_224.npz"),
    _timm("S/16 augreg-in21k-in1k-384", "vit_small_patch16_384.augreg_in21k_ft_in1k", "S/16",
          0.83802, "S_16-i21k-*-res_384.npz", crop=1.0, image=384),
    _timm("B/32 augreg-in21k-in1k", "vit_base_patch32_224.augreg_in21k_ft_in1k", "B/32", 0.80716,
          "B_32-i21k-*-res_224.npz"),
    _timm("B/16 augreg-in21k-in1k", "vit_base_patch16_224.augreg_in21k_ft_in1k", "B/16", 0.84532,
          "B_16-i21k-*-res_224.npz"),
    _timm("B/16 augreg-in21k-in1k-384", "vit_base_patch16_384.augreg_in21k_ft_in1k", "B/16",
          0.85996, "B_16-i21k-*-res_384.npz", crop=1.0, image=384),
    _timm("B/16 augreg2-in21k-in1k", "vit_base_patch16_224.augreg2_in21k_ft_in1k", "B/16", 0.85096),
    _timm("B/8 augreg2-in21k-in1k", "vit_base_patch8_224.augreg2_in21k_ft_in1k", "B/8", 0.86218),
    _timm("L/16 augreg-in21k-in1k", "vit_large_patch16_224.augreg_in21k_ft_in1k", "L/16", 0.85834,
          "L_16-i21k-*-res_224.npz"),
    _timm("L/16 augreg-in21k-in1k-384", "vit_large_patch16_384.augreg_in21k_ft_in1k", "L/16",
          0.87084, "L_16-i21k-*-res_384.npz", crop=1.0, image=384),
    _timm("B/16 augreg-in21k", "vit_base_patch16_224.augreg_in21k", "B/16", None,
          "B_16-i21k-300ep-*_0.?.npz", classes=21843),
    _timm("R26+S/32 augreg-in21k-in1k", "vit_small_r26_s32_224.augreg_in21k_ft_in1k", "R26+S/32",
          0.81864, "R26_S_32-i21k-*-res_224.npz"),
    _timm("R50+L/32 augreg-in21k-in1k", "vit_large_r50_s32_224.augreg_in21k_ft_in1k", "R50+L/32",
          0.84422, "R50_L_32-i21k-*-res_224.npz"),
    # Dosovitskiy et al., 2021, "An image is worth 16x16 words"
    _timm("B/16 paper-in21k-in1k", "vit_base_patch16_224.orig_in21k_ft_in1k", "B/16", 0.81786,
          "jx_vit_base_p16_224-80ecf9dd.pth", "google/vit-base-patch16-224"),
    _timm("B/16 paper-in21k-in1k-384", "vit_base_patch16_384.orig_in21k_ft_in1k", "B/16", 0.84200,
          "jx_vit_base_p16_384-83fb41ba.pth", "google/vit-base-patch16-384", crop=1.0, image=384),
    _timm("R50+B/16 paper-in21k-in1k-384", "vit_base_r50_s16_384.orig_in21k_ft_in1k", "R50+B/16",
          0.84976, "jx_vit_base_resnet50_384-9fd3c705.pth", crop=1.0, image=384),
    _timm("B/16 paper-in21k", "vit_base_patch16_224.orig_in21k", "B/16", None,
          "google/vit-base-patch16-224-in21k", **NO_HEAD),
    _timm("H/14 paper-in21k", "vit_huge_patch14_224.orig_in21k", "H/14", None,
          "google/vit-huge-patch14-224-in21k", **NO_HEAD),
    # Chen et al., 2022, "When vision transformers outperform ResNets"
    _timm("B/16 sam-in1k", "vit_base_patch16_224.sam_in1k", "B/16", 0.80244),
    # Beyer et al., 2023, "FlexiViT"
    _timm("B/16 flexivit-in1k", "flexivit_base.1200ep_in1k", "B/16", 0.84678,
          "flexivit_b_i1k.npz", crop=0.95, image=240),
    # Touvron et al., 2021, "DeiT"
    _timm("DeiT-Ti/16", "deit_tiny_patch16_224.fb_in1k", "Ti/16", 0.72172,
          "deit_tiny_patch16_224-a1311bcf.pth", **META),
    _timm("DeiT-S/16", "deit_small_patch16_224.fb_in1k", "S/16", 0.79844,
          "deit_small_patch16_224-cd65a155.pth", **META),
    _timm("DeiT-B/16", "deit_base_patch16_224.fb_in1k", "B/16", 0.81992,
          "deit_base_patch16_224-b5f2ef4d.pth", **META),
    _timm("DeiT-Ti/16 distilled", "deit_tiny_distilled_patch16_224.fb_in1k", "DeiT-Ti/16 distilled",
          0.74500, "deit_tiny_distilled_patch16_224-b40b3cf7.pth", **META),
    _timm("DeiT-S/16 distilled", "deit_small_distilled_patch16_224.fb_in1k", "DeiT-S/16 distilled",
          0.81218, "deit_small_distilled_patch16_224-649709d9.pth", **META),
    _timm("DeiT-B/16 distilled", "deit_base_distilled_patch16_224.fb_in1k", "DeiT-B/16 distilled",
          0.83386, "deit_base_distilled_patch16_224-df68dfff.pth", **META),
    # Touvron et al., 2022, "DeiT III"
    _timm("DeiT3-S/16", "deit3_small_patch16_224.fb_in1k", "DeiT3-S/16", 0.81370,
          "deit_3_small_224_1k.pth", **META),
    _timm("DeiT3-B/16", "deit3_base_patch16_224.fb_in1k", "DeiT3-B/16", 0.83786,
          "deit_3_base_224_1k.pth", **META),
    _timm("DeiT3-B/16 in21k-in1k", "deit3_base_patch16_224.fb_in22k_ft_in1k", "DeiT3-B/16", 0.85700,
          "deit_3_base_224_21k.pth", crop=1.0, **META),
    # Caron et al., 2021, "DINO"
    _timm("S/16 dino", "vit_small_patch16_224.dino", "S/16", None,
          "dino_deitsmall16_pretrain*.pth", "facebook/dino-vits16", **DINO),
    _timm("S/8 dino", "vit_small_patch8_224.dino", "S/8", None,
          "dino_deitsmall8_pretrain*.pth", "facebook/dino-vits8", **DINO),
    _timm("B/16 dino", "vit_base_patch16_224.dino", "B/16", None,
          "dino_vitbase16_pretrain*.pth", "facebook/dino-vitb16", **DINO),
    _timm("B/8 dino", "vit_base_patch8_224.dino", "B/8", None,
          "dino_vitbase8_pretrain*.pth", "facebook/dino-vitb8", **DINO),
    # He et al., 2022, "Masked autoencoders are scalable vision learners": encoders
    _timm("B/16 mae", "vit_base_patch16_224.mae", "B/16", None,
          "mae_pretrain_vit_base*.pth", "mae_visualize_vit_base*.pth", "facebook/vit-mae-base",
          **MAE),
    _timm("L/16 mae", "vit_large_patch16_224.mae", "L/16", None,
          "mae_pretrain_vit_large*.pth", "mae_visualize_vit_large*.pth", "facebook/vit-mae-large",
          **MAE),
    _timm("H/14 mae", "vit_huge_patch14_224.mae", "H/14", None,
          "mae_pretrain_vit_huge*.pth", "facebook/vit-mae-huge", **MAE),
    # Oquab et al., 2024, "DINOv2"; Darcet et al., 2024, with registers
    _timm("DINOv2-S/14", "vit_small_patch14_dinov2.lvd142m", "DINOv2-S/14", None,
          "dinov2_vits14_pretrain.pth", "facebook/dinov2-small", **DINO2),
    _timm("DINOv2-B/14", "vit_base_patch14_dinov2.lvd142m", "DINOv2-B/14", None,
          "dinov2_vitb14_pretrain.pth", "facebook/dinov2-base", **DINO2),
    _timm("DINOv2-L/14", "vit_large_patch14_dinov2.lvd142m", "DINOv2-L/14", None,
          "dinov2_vitl14_pretrain.pth", "facebook/dinov2-large", **DINO2),
    _timm("DINOv2-g/14", "vit_giant_patch14_dinov2.lvd142m", "DINOv2-g/14", None,
          "dinov2_vitg14_pretrain.pth", "facebook/dinov2-giant", **DINO2),
    _timm("DINOv2-S/14 reg4", "vit_small_patch14_reg4_dinov2.lvd142m", "DINOv2-S/14 reg4", None,
          "dinov2_vits14_reg4_pretrain.pth", "facebook/dinov2-with-registers-small", **DINO2),
    _timm("DINOv2-B/14 reg4", "vit_base_patch14_reg4_dinov2.lvd142m", "DINOv2-B/14 reg4", None,
          "dinov2_vitb14_reg4_pretrain.pth", "facebook/dinov2-with-registers-base", **DINO2),
    # Siméoni et al., 2025, "DINOv3"
    _timm("DINOv3-S/16", "vit_small_patch16_dinov3.lvd1689m", "DINOv3-S/16", **DINO3),
    _timm("DINOv3-B/16", "vit_base_patch16_dinov3.lvd1689m", "DINOv3-B/16", **DINO3),
    _timm("DINOv3-L/16", "vit_large_patch16_dinov3.lvd1689m", "DINOv3-L/16", **DINO3),
    # Cherti et al., 2023, CLIP trained on LAION: with an ImageNet head, or CLIP's projection to 512
    _timm("CLIP-B/16 laion2b-in12k-in1k", "vit_base_patch16_clip_224.laion2b_ft_in12k_in1k",
          "CLIP-B/16", 0.86174, normalisation="clip", crop=0.95, head="linear"),
    _timm("CLIP-B/16 laion2b", "vit_base_patch16_clip_224.laion2b", "CLIP-B/16",
          normalisation="clip", crop=1.0, head="linear", classes=512),
    # Zhai et al., 2023, "SigLIP": timm computes the exact GELU
    _timm("SigLIP-B/16 webli", "vit_base_patch16_siglip_224.webli", "SigLIP-B/16", mlp="gelu"),
    # torchvision's own training; SWAG is Singh et al., 2022
    _torchvision("B/16 torchvision-in1k", "vit_b_16-c867db91", "B/16", 0.81072),
    _torchvision("B/32 torchvision-in1k", "vit_b_32-d86f8d99", "B/32", 0.75912),
    _torchvision("L/16 torchvision-in1k", "vit_l_16-852ce7e3", "L/16", 0.79662, crop=224 / 242),
    _torchvision("L/32 torchvision-in1k", "vit_l_32-c7638314", "L/32", 0.76972),
    _torchvision("B/16 swag-in1k-384", "vit_b_16_swag-9ac1b537", "B/16", 0.85304,
          image=384, **SWAG),
    _torchvision("L/16 swag-in1k-512", "vit_l_16_swag-4f3808c9", "L/16", 0.88064,
          image=512, **SWAG),
    _torchvision("H/14 swag-in1k-518", "vit_h_14_swag-80465313", "H/14", 0.88552,
          image=518, **SWAG),
]  # fmt: skip
