"""A Vitrail model as Google's training code would have saved it, in each of its variants."""

from typing import Literal

import numpy as np

from vitrail.model.vit import ViT

Layout = Literal["original", "target", "big_vision", "img", "scan"]
FRONT = {"original": "", "target": "opt/target/", "img": "params/img/"}


def google_arrays(model: ViT, layout: str) -> dict[str, np.ndarray]:
    """Written from the layout's description, independently of the tables in vitrail/zoo/layouts."""
    state = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    config, modern = model.config, layout not in ("original", "target")
    attention, norm, mlp = (0, 1, 0) if modern else (1, 2, 3)
    arrays: dict[str, np.ndarray] = {}

    def dense(theirs: str, ours: str) -> None:
        arrays[f"{theirs}/kernel"] = state[f"{ours}.weight"].T
        arrays[f"{theirs}/bias"] = state[f"{ours}.bias"]

    def scale(theirs: str, ours: str) -> None:
        arrays[f"{theirs}/scale"] = state[f"{ours}.weight"]
        arrays[f"{theirs}/bias"] = state[f"{ours}.bias"]

    def heads(theirs: str, weight: np.ndarray, bias: np.ndarray, names: list[str]) -> None:
        for name, w, b in zip(
            names, np.split(weight, len(names)), np.split(bias, len(names)), strict=True
        ):
            arrays[f"{theirs}/{name}/kernel"] = w.T.reshape(config.width, config.heads, -1)
            arrays[f"{theirs}/{name}/bias"] = b.reshape(config.heads, -1)

    def out(theirs: str, ours: str) -> None:
        kernel = state[f"{ours}.weight"].T
        arrays[f"{theirs}/out/kernel"] = kernel.reshape(config.heads, -1, config.width)
        arrays[f"{theirs}/out/bias"] = state[f"{ours}.bias"]

    for i in range(config.depth):
        there, here = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        scale(f"{there}/LayerNorm_0", f"{here}.norm1")
        multi = f"{there}/MultiHeadDotProductAttention_{attention}"
        qkv = state[f"{here}.attn.qkv.weight"], state[f"{here}.attn.qkv.bias"]
        heads(multi, *qkv, ["query", "key", "value"])
        out(multi, f"{here}.attn.proj")
        scale(f"{there}/LayerNorm_{norm}", f"{here}.norm2")
        for k in (0, 1):
            dense(f"{there}/MlpBlock_{mlp}/Dense_{k}", f"{here}.mlp.fc{k + 1}")
    scale("Transformer/encoder_norm", "norm")
    arrays["embedding/kernel"] = state["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    arrays["embedding/bias"] = state["patch_embed.proj.bias"]
    place = "pos_embedding" if modern else "Transformer/posembed_input/pos_embedding"
    arrays[place] = state["pos_embed"]
    if "cls_token" in state:
        arrays["cls"] = state["cls_token"]
    if config.head == "mlp":
        dense("pre_logits", "pre_logits.fc")
    if config.head != "none":
        dense("head", "head")
    if config.pool == "map":
        pool = "MAPHead_0"
        arrays[f"{pool}/probe"] = state["attn_pool.latent"]
        multi = f"{pool}/MultiHeadDotProductAttention_0"
        heads(multi, state["attn_pool.q.weight"], state["attn_pool.q.bias"], ["query"])
        heads(multi, state["attn_pool.kv.weight"], state["attn_pool.kv.bias"], ["key", "value"])
        out(multi, "attn_pool.proj")
        scale(f"{pool}/LayerNorm_0", "attn_pool.norm")
        for k in (0, 1):
            dense(f"{pool}/MlpBlock_0/Dense_{k}", f"attn_pool.mlp.fc{k + 1}")
    if config.stem != "patch":
        resnet(arrays, state)
    if layout == "scan":
        arrays = stacked(arrays, config.depth)
    front = FRONT.get(layout, "params/")
    return {front + name: np.ascontiguousarray(array) for name, array in arrays.items()}


def resnet(arrays: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> None:
    kinds = {"conv": "kernel", "norm": "scale"}
    for name, array in state.items():
        if not name.startswith("patch_embed.backbone."):
            continue
        path = name.removeprefix("patch_embed.backbone.").split(".")
        if path[0] == "stem":
            place, kind = "", path[1]
            word = {"conv": "conv_root", "norm": "gn_root"}[kind]
        else:
            place = f"block{int(path[1]) + 1}/unit{int(path[3]) + 1}/"
            if path[4] == "downsample":
                kind = path[5]
                word = {"conv": "conv_proj", "norm": "gn_proj"}[kind]
            else:
                kind = path[4][:4]
                word = {"conv": "conv", "norm": "gn"}[kind] + path[4][4:]
        if kind == "conv":
            arrays[f"{place}{word}/kernel"] = array.transpose(2, 3, 1, 0)
        else:
            part = kinds[kind] if path[-1] == "weight" else "bias"
            arrays[f"{place}{word}/{part}"] = array.reshape(1, 1, 1, -1)


def stacked(arrays: dict[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    first = "Transformer/encoderblock_0/"
    found = {name: x for name, x in arrays.items() if "encoderblock_" not in name}
    for name in [name for name in arrays if name.startswith(first)]:
        rest = name.removeprefix(first)
        blocks = [arrays[f"Transformer/encoderblock_{i}/{rest}"] for i in range(depth)]
        found[f"Transformer/encoderblock/{rest}"] = np.stack(blocks)
    return found
