"""Vision towers of CLIP and SigLIP: Hugging Face's, OpenAI's and open_clip's names, read only."""

from collections.abc import Callable

from torch import Tensor

from vitrail.zoo.files.lazy import LazyTensor
from vitrail.zoo.layouts.layout import Layout, MappedStateDict

HUGGINGFACE_NAMES = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.patch_embedding.{p}": "patch_embed.proj.{p}",
    "embeddings.position_embedding.weight": "pos_embed",
    "pre_layrnorm.{p}": "norm_pre.{p}",  # spelled so
    "encoder.layers.{i}.layer_norm1.{p}": "blocks.{i}.norm1.{p}",
    "encoder.layers.{i}.self_attn.q_proj.{p}": "blocks.{i}.attn.qkv.{p}#0",
    "encoder.layers.{i}.self_attn.k_proj.{p}": "blocks.{i}.attn.qkv.{p}#1",
    "encoder.layers.{i}.self_attn.v_proj.{p}": "blocks.{i}.attn.qkv.{p}#2",
    "encoder.layers.{i}.self_attn.out_proj.{p}": "blocks.{i}.attn.proj.{p}",
    "encoder.layers.{i}.layer_norm2.{p}": "blocks.{i}.norm2.{p}",
    "encoder.layers.{i}.mlp.fc1.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layers.{i}.mlp.fc2.{p}": "blocks.{i}.mlp.fc2.{p}",
    "post_layernorm.{p}": "norm.{p}",
    "head.probe": "attn_pool.latent",  # from here on SigLIP only
    "head.attention.in_proj_weight": "attn_pool.qkv.weight",
    "head.attention.in_proj_bias": "attn_pool.qkv.bias",
    "head.attention.out_proj.{p}": "attn_pool.proj.{p}",
    "head.layernorm.{p}": "attn_pool.norm.{p}",
    "head.mlp.fc1.{p}": "attn_pool.mlp.fc1.{p}",
    "head.mlp.fc2.{p}": "attn_pool.mlp.fc2.{p}",
}
OPENAI_NAMES = {
    "class_embedding": "cls_token",
    "positional_embedding": "pos_embed",
    "conv1.{p}": "patch_embed.proj.{p}",
    "ln_pre.{p}": "norm_pre.{p}",
    "transformer.resblocks.{i}.ln_1.{p}": "blocks.{i}.norm1.{p}",
    "transformer.resblocks.{i}.attn.in_proj_weight": "blocks.{i}.attn.qkv.weight",
    "transformer.resblocks.{i}.attn.in_proj_bias": "blocks.{i}.attn.qkv.bias",
    "transformer.resblocks.{i}.attn.out_proj.{p}": "blocks.{i}.attn.proj.{p}",
    "transformer.resblocks.{i}.ln_2.{p}": "blocks.{i}.norm2.{p}",
    "transformer.resblocks.{i}.mlp.c_fc.{p}": "blocks.{i}.mlp.fc1.{p}",
    "transformer.resblocks.{i}.mlp.c_proj.{p}": "blocks.{i}.mlp.fc2.{p}",
    "transformer.resblocks.{i}.ls_1.gamma": "blocks.{i}.ls1.gamma",
    "transformer.resblocks.{i}.ls_2.gamma": "blocks.{i}.ls2.gamma",
    "ln_post.{p}": "norm.{p}",
}
TEXT_TOWER = "the text tower"
PROJECTION = "the projection to the space that texts share"
HUGGINGFACE_UNUSED = {
    r"text_model\..*": TEXT_TOWER,
    r"(visual|text)_projection\..*": PROJECTION,
    r"logit_(scale|bias)": TEXT_TOWER,
    r"(.*\.)?position_ids": "computed from the config",
    r"classifier\..*": "a classifier on the mean of the patches",
}
OPENAI_UNUSED = {r"proj": PROJECTION}


def finish_clip_mapping(mapped: MappedStateDict, names: list[str], source: str) -> None:
    """Adds the axes that their tokens and positions do not have; splits SigLIP's pooling."""
    reshape(mapped, "cls_token", 1, lambda x: x[None, None])
    reshape(mapped, "pos_embed", 2, lambda x: x[None])
    for kind in ("weight", "bias"):
        if chunks := mapped.chunks.pop(f"attn_pool.qkv.{kind}", None):
            query, rest = split_query(chunks[0])
            mapped.chunks[f"attn_pool.q.{kind}"] = {0: query}
            mapped.chunks[f"attn_pool.kv.{kind}"] = {0: rest}


def finish_openai_mapping(mapped: MappedStateDict, names: list[str], source: str) -> None:
    finish_clip_mapping(mapped, names, source)
    mapped.vit["eps"] = 1e-5
    mapped.assumed.append("eps 1e-05: as in the code of OpenAI and open_clip")


def reshape(
    mapped: MappedStateDict, name: str, axes: int, transform: Callable[[Tensor], Tensor]
) -> None:
    tensor = mapped.chunks.get(name, {}).get(0)
    if tensor is not None and len(tensor.shape) == axes:
        shape = (1,) * (3 - axes) + tensor.shape
        mapped.chunks[name][0] = tensor.add_transform(shape, transform)


def split_query(fused: LazyTensor) -> tuple[LazyTensor, LazyTensor]:
    """Queries, and keys with values, of one fused projection."""
    width, rest = fused.shape[0] // 3, fused.shape[1:]
    return (
        fused.add_transform((width, *rest), lambda x: x[:width]),
        fused.add_transform((2 * width, *rest), lambda x: x[width:]),
    )


HUGGINGFACE_LAYOUT = Layout(
    name="huggingface-clip",
    patch_weight="embeddings.patch_embedding.weight",
    names=HUGGINGFACE_NAMES,
    unused=HUGGINGFACE_UNUSED,
    finish=finish_clip_mapping,
)
OPENAI_LAYOUT = Layout(
    name="openai",
    patch_weight="class_embedding",
    names=OPENAI_NAMES,
    outside=TEXT_TOWER,
    unused=OPENAI_UNUSED,
    finish=finish_openai_mapping,
)
