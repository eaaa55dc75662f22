"""Google's JAX layout (.npz of the original code and of big_vision): read, not written."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.zoo.files.lazy import LazyTensor, Shape
from vitrail.zoo.layouts.layout import Layout, MappedStateDict

# After `normalise_jax_name`. {n} differs between the original code and big_vision.
NAMES = {
    "cls": "cls_token",
    "Transformer.posembed_input.pos_embedding": "pos_embed",
    "pos_embedding": "pos_embed",
    "embedding.{p}": "patch_embed.proj.{p}",
    "Transformer.encoderblock_{i}.LayerNorm_0.{p}": "blocks.{i}.norm1.{p}",
    "Transformer.encoderblock_{i}.Attention_{n}.query.{p}": "blocks.{i}.attn.qkv.{p}#0",
    "Transformer.encoderblock_{i}.Attention_{n}.key.{p}": "blocks.{i}.attn.qkv.{p}#1",
    "Transformer.encoderblock_{i}.Attention_{n}.value.{p}": "blocks.{i}.attn.qkv.{p}#2",
    "Transformer.encoderblock_{i}.Attention_{n}.out.{p}": "blocks.{i}.attn.proj.{p}",
    "Transformer.encoderblock_{i}.LayerNorm_{n}.{p}": "blocks.{i}.norm2.{p}",
    "Transformer.encoderblock_{i}.MlpBlock_{n}.Dense_0.{p}": "blocks.{i}.mlp.fc1.{p}",
    "Transformer.encoderblock_{i}.MlpBlock_{n}.Dense_1.{p}": "blocks.{i}.mlp.fc2.{p}",
    "Transformer.encoder_norm.{p}": "norm.{p}",
    "pre_logits.{p}": "pre_logits.fc.{p}",
    "head.{p}": "head.{p}",
    "MAPHead_0.probe": "attn_pool.latent",
    "MAPHead_0.Attention_0.query.{p}": "attn_pool.q.{p}",
    "MAPHead_0.Attention_0.key.{p}": "attn_pool.kv.{p}#0",
    "MAPHead_0.Attention_0.value.{p}": "attn_pool.kv.{p}#1",
    "MAPHead_0.Attention_0.out.{p}": "attn_pool.proj.{p}",
    "MAPHead_0.LayerNorm_0.{p}": "attn_pool.norm.{p}",
    "MAPHead_0.MlpBlock_0.Dense_0.{p}": "attn_pool.mlp.fc1.{p}",
    "MAPHead_0.MlpBlock_0.Dense_1.{p}": "attn_pool.mlp.fc2.{p}",
    # the ResNet stem of hybrid models
    "conv_root.{p}": "patch_embed.backbone.stem.conv.{p}",
    "gn_root.{p}": "patch_embed.backbone.stem.norm.{p}",
    "stages.{i}.blocks.{j}.conv{k}.{p}": "patch_embed.backbone.stages.{i}.blocks.{j}.conv{k}.{p}",
    "stages.{i}.blocks.{j}.gn{k}.{p}": "patch_embed.backbone.stages.{i}.blocks.{j}.norm{k}.{p}",
    "stages.{i}.blocks.{j}.conv_proj.{p}": (
        "patch_embed.backbone.stages.{i}.blocks.{j}.downsample.conv.{p}"
    ),
    "stages.{i}.blocks.{j}.gn_proj.{p}": (
        "patch_embed.backbone.stages.{i}.blocks.{j}.downsample.norm.{p}"
    ),
}


def unstack_blocks(
    tensors: Mapping[str, LazyTensor],
) -> Iterator[tuple[str, tuple[str, LazyTensor]]]:
    """Each tensor by its normalised name, with its original name.

    big_vision may store the tensors of all blocks stacked in one array.
    """
    for original, tensor in tensors.items():
        name = normalise_jax_name(original)
        if "Transformer.encoderblock." in name:
            for number, block in enumerate(tensor.unstack()):
                block_name = name.replace("encoderblock.", f"encoderblock_{number}.")
                yield block_name, (f"{original}[{number}]", block)
        else:
            yield name, (original, tensor)


def normalise_jax_name(name: str) -> str:
    """JAX's slashes become dots, `kernel` and `scale` become `weight`; other names stay."""
    if "/" not in name:
        return name
    name = name.replace("/", ".").replace("MultiHeadDotProductAttention_", "Attention_")
    name = re.sub(r"\.(kernel|scale)$", ".weight", name)
    return re.sub(
        r"\bblock(\d+)\.unit(\d+)\.",
        lambda match: f"stages.{int(match[1]) - 1}.blocks.{int(match[2]) - 1}.",
        name,
    )


def finish_google_mapping(mapped: MappedStateDict, names: list[str], source: str) -> None:
    """Transposes every array and reads the number of heads from the shapes."""
    heads = set()
    for name, chunks in mapped.chunks.items():
        for number, tensor in chunks.items():
            if re.search(r"\.(qkv|q|kv)\.weight$", name) and len(tensor.shape) == 3:
                heads.add(tensor.shape[1])
            chunks[number] = transpose(name, tensor, source)
    if len(heads) != 1:
        raise UserError(
            f"{source} has blocks with {sorted(heads)} heads; all blocks must have the same number"
        )
    mapped.vit.update(heads=heads.pop(), mlp="gelu_tanh")
    mapped.assumed.append("mlp gelu_tanh: as in Google's code")


def transpose(name: str, tensor: LazyTensor, source: str) -> LazyTensor:
    """From JAX's axes, inputs before outputs, to PyTorch's."""
    shape = tensor.shape
    if name in ("cls_token", "pos_embed", "attn_pool.latent") and len(shape) == 3:
        return tensor
    if not name.endswith(".weight") or is_vector(shape):  # a bias, or the scale of a norm
        return tensor.add_transform((torch.Size(shape).numel(),), Tensor.flatten)
    if len(shape) == 4:  # height, width, channels in, channels out
        return tensor.add_transform(
            (shape[3], shape[2], *shape[:2]), lambda x: x.permute(3, 2, 0, 1)
        )
    if len(shape) == 3 and name.endswith("proj.weight"):  # heads, head width, width
        return tensor.add_transform((shape[2], shape[0] * shape[1]), lambda x: x.flatten(0, 1).T)
    if len(shape) == 3:  # width, heads, head width
        return tensor.add_transform((shape[1] * shape[2], shape[0]), lambda x: x.flatten(1).T)
    if len(shape) == 2:
        return tensor.add_transform(shape[::-1], Tensor.t)
    raise UserError(f"{source} has {name} with {len(shape)} axes; Google's layout has 1 to 4")


def is_vector(shape: Shape) -> bool:
    return len(shape) == 1 or (len(shape) == 4 and shape[:3] == (1, 1, 1))


LAYOUT = Layout(
    name="google",
    patch_weight="embedding.weight",
    names=NAMES,
    unused={r"(params\.)?(txt\..*|t|b)": "the text encoder of an image-text model"},
    finish=finish_google_mapping,
)
