"""What others call our parameters, a table for each; read both ways."""

import re
from collections.abc import Mapping
from functools import cache

# {i} to {n} stand for numbers, {p} for weight or bias, {r} for the rest of a name. What lies in
# pieces there and in one parameter here is numbered from the top: #0, #1, #2.
HOLES = {"p": "weight|bias", "r": r"[\w.]+", **dict.fromkeys("ijkn", r"\d+")}

Table = Mapping[str, str]

TIMM = {  # ours, but for what is named here; DeiT, DINO and MAE share these names
    "cls_token": "cls_token",
    "dist_token": "dist_token",
    "reg_token": "reg_token",
    "pos_embed": "pos_embed",
    "patch_embed.proj.{p}": "patch_embed.proj.{p}",
    "patch_embed.backbone.{r}": "patch_embed.backbone.{r}",
    "norm_pre.{p}": "norm_pre.{p}",
    "blocks.{i}.norm1.{p}": "blocks.{i}.norm1.{p}",
    "blocks.{i}.attn.qkv.{p}": "blocks.{i}.attn.qkv.{p}",
    "blocks.{i}.attn.q_norm.{p}": "blocks.{i}.attn.q_norm.{p}",
    "blocks.{i}.attn.k_norm.{p}": "blocks.{i}.attn.k_norm.{p}",
    "blocks.{i}.attn.proj.{p}": "blocks.{i}.attn.proj.{p}",
    "blocks.{i}.ls1.gamma": "blocks.{i}.ls1.gamma",
    "blocks.{i}.norm2.{p}": "blocks.{i}.norm2.{p}",
    "blocks.{i}.mlp.fc1.{p}": "blocks.{i}.mlp.fc1.{p}",
    "blocks.{i}.mlp.fc2.{p}": "blocks.{i}.mlp.fc2.{p}",
    "blocks.{i}.ls2.gamma": "blocks.{i}.ls2.gamma",
    "norm.{p}": "norm.{p}",
    "attn_pool.{r}": "attn_pool.{r}",
    "pre_logits.fc.{p}": "pre_logits.fc.{p}",
    "head.{p}": "head.{p}",
    "head_dist.{p}": "head_dist.{p}",
}
KIN_OF_TIMM = {  # only read, never written
    "fc_norm.{p}": "norm.{p}",  # the norm after the average
    "blocks.{i}.gamma_1": "blocks.{i}.ls1.gamma",  # DeiT-III
    "blocks.{i}.gamma_2": "blocks.{i}.ls2.gamma",
    "register_tokens": "reg_token",  # DINOv2
    "blocks.{i}.mlp.w12.{p}": "blocks.{i}.mlp.fc1.{p}",
    "blocks.{i}.mlp.w3.{p}": "blocks.{i}.mlp.fc2.{p}",
    "storage_tokens": "reg_token",  # DINOv3
    "blocks.{i}.attn.q_bias": "blocks.{i}.attn.qkv.bias#0",  # timm's DINOv3; keys have no bias
    "blocks.{i}.attn.v_bias": "blocks.{i}.attn.qkv.bias#2",
}

HUGGING_FACE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.distillation_token": "dist_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.{p}": "patch_embed.proj.{p}",
    "encoder.layer.{i}.attention.attention.query.{p}": "blocks.{i}.attn.qkv.{p}#0",
    "encoder.layer.{i}.attention.attention.key.{p}": "blocks.{i}.attn.qkv.{p}#1",
    "encoder.layer.{i}.attention.attention.value.{p}": "blocks.{i}.attn.qkv.{p}#2",
    "encoder.layer.{i}.attention.output.dense.{p}": "blocks.{i}.attn.proj.{p}",
    "layernorm.{p}": "norm.{p}",
    "pooler.dense.{p}": "pre_logits.fc.{p}",
}
HUGGING_FACE_VIT = {
    **HUGGING_FACE,
    "encoder.layer.{i}.layernorm_before.{p}": "blocks.{i}.norm1.{p}",
    "encoder.layer.{i}.layernorm_after.{p}": "blocks.{i}.norm2.{p}",
    "encoder.layer.{i}.intermediate.dense.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layer.{i}.output.dense.{p}": "blocks.{i}.mlp.fc2.{p}",
    "classifier.{p}": "head.{p}",
}
HUGGING_FACE_DEIT = {  # with both heads
    **HUGGING_FACE_VIT,
    "cls_classifier.{p}": "head.{p}",
    "distillation_classifier.{p}": "head_dist.{p}",
}
HUGGING_FACE_DINO = {
    **HUGGING_FACE,
    "encoder.layer.{i}.norm1.{p}": "blocks.{i}.norm1.{p}",
    "encoder.layer.{i}.norm2.{p}": "blocks.{i}.norm2.{p}",
    "encoder.layer.{i}.layer_scale1.lambda1": "blocks.{i}.ls1.gamma",
    "encoder.layer.{i}.layer_scale2.lambda1": "blocks.{i}.ls2.gamma",
    "encoder.layer.{i}.mlp.fc1.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layer.{i}.mlp.fc2.{p}": "blocks.{i}.mlp.fc2.{p}",
    "classifier.{p}": "head.{p}",
}
HUGGING_FACE_SWIGLU = {
    **HUGGING_FACE_DINO,
    "encoder.layer.{i}.mlp.weights_in.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layer.{i}.mlp.weights_out.{p}": "blocks.{i}.mlp.fc2.{p}",
}
HUGGING_FACE_5 = {  # as transformers 5 has them in memory; only read
    "encoder.layer.{i}.attention.q_proj.{p}": "blocks.{i}.attn.qkv.{p}#0",
    "encoder.layer.{i}.attention.k_proj.{p}": "blocks.{i}.attn.qkv.{p}#1",
    "encoder.layer.{i}.attention.v_proj.{p}": "blocks.{i}.attn.qkv.{p}#2",
    "encoder.layer.{i}.attention.o_proj.{p}": "blocks.{i}.attn.proj.{p}",
    "encoder.layer.{i}.mlp.gate_proj.{p}": "blocks.{i}.mlp.fc1.{p}#0",
    "encoder.layer.{i}.mlp.up_proj.{p}": "blocks.{i}.mlp.fc1.{p}#1",
    "encoder.layer.{i}.mlp.down_proj.{p}": "blocks.{i}.mlp.fc2.{p}",
}

TORCHVISION = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    "conv_proj.{p}": "patch_embed.proj.{p}",
    "encoder.layers.encoder_layer_{i}.ln_1.{p}": "blocks.{i}.norm1.{p}",
    "encoder.layers.encoder_layer_{i}.self_attention.in_proj_{p}": "blocks.{i}.attn.qkv.{p}",
    "encoder.layers.encoder_layer_{i}.self_attention.out_proj.{p}": "blocks.{i}.attn.proj.{p}",
    "encoder.layers.encoder_layer_{i}.ln_2.{p}": "blocks.{i}.norm2.{p}",
    "encoder.layers.encoder_layer_{i}.mlp.0.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layers.encoder_layer_{i}.mlp.3.{p}": "blocks.{i}.mlp.fc2.{p}",
    "encoder.ln.{p}": "norm.{p}",
    "heads.pre_logits.{p}": "pre_logits.fc.{p}",
    "heads.head.{p}": "head.{p}",
}
OLD_TORCHVISION = {  # only read
    "encoder.layers.encoder_layer_{i}.mlp.linear_1.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layers.encoder_layer_{i}.mlp.linear_2.{p}": "blocks.{i}.mlp.fc2.{p}",
}

GOOGLE = {  # with a dot for each slash, and weight for kernel and scale; {n} differs in big_vision
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
    "conv_root.{p}": "patch_embed.backbone.stem.conv.{p}",  # from here the ResNet of hybrids
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

# Tensors that published files carry and a model that looks at pictures does not use.
LEFT_OUT = {
    r"rope_embed\.periods": "computed here",
    r"blocks\.\d+\.attn\.qkv\.bias_mask": "it takes the bias of keys off, as here",
    r"(.*\.)?mask_token": "used in pretraining only",
    r"(.*\.)?decoder(_|\.).*": "a decoder, used in pretraining only",
    r"(.*\.)?(head|dino_head|ibot_head)\.(mlp|last_layer)\..*": "a head for self-supervision",
    r"(.*\.)?(dino_loss|ibot_patch_loss|koleo_loss)\..*": "a loss, used in pretraining only",
    r"(optim\w*|opt|scaler|\w*scheduler)\b.*": "the state of a training",
    r"(params\.)?(txt\..*|t|b)": "the half that reads text",
}


def translate(name: str, table: Table) -> str | None:
    """What a name of the table's left side is called on its right."""
    for pattern, target in patterns(tuple(table.items())):
        if match := pattern.fullmatch(name):
            return target.format(**match.groupdict())
    return None


def inverse(table: Table) -> dict[str, str]:
    return {ours: theirs for theirs, ours in table.items()}


@cache
def patterns(lines: tuple[tuple[str, str], ...]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern(left)), right) for left, right in lines]


def pattern(template: str) -> str:
    return re.sub(
        r"\\\{(\w)\\\}", lambda hole: f"(?P<{hole[1]}>{HOLES[hole[1]]})", re.escape(template)
    )
