"""Vitrail's model equals those of other libraries: same weights, same image, same logits."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.parity.weights import random_image, random_weight
from vitrail.model import config as kinds
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

PATHS = sorted((Path(__file__).parent / "fixtures").glob("*.json"))
FIXTURES: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in PATHS}
PRECISIONS = [(name, kind) for name in FIXTURES for kind in FIXTURES[name]["outputs"]]
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

# The parameter names of each library and Vitrail's; the first pattern that matches counts. Separate
# queries, keys and values are concatenated afterwards.
NAMES = {
    "timm": {
        r"fc_norm\.(.*)": r"norm.\1",
        r"(blocks\.\d+\.attn)\.(q|v)_bias": r"\1.\2.bias",  # this and the next: Eva
        r"(blocks\.\d+)\.gamma_(\d)": r"\1.ls\2.gamma",
        r"(.*)": r"\1",
    },
    "transformers": {
        r"embeddings\.mask_token": "",  # for pretraining only
        r"embeddings\.cls_token": "cls_token",
        r"embeddings\.register_tokens": "reg_token",
        r"embeddings\.position_embeddings": "pos_embed",
        r"embeddings\.patch_embeddings\.projection\.(.*)": r"patch_embed.proj.\1",
        r"encoder\.layer\.(\d+)\.attention\.attention\.(q|k|v)\w+\.(.*)": r"blocks.\1.attn.\2.\3",
        r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(.*)": r"blocks.\1.attn.proj.\2",
        r"encoder\.layer\.(\d+)\.layernorm_before\.(.*)": r"blocks.\1.norm1.\2",
        r"encoder\.layer\.(\d+)\.layernorm_after\.(.*)": r"blocks.\1.norm2.\2",
        r"encoder\.layer\.(\d+)\.intermediate\.dense\.(.*)": r"blocks.\1.mlp.fc1.\2",
        r"encoder\.layer\.(\d+)\.output\.dense\.(.*)": r"blocks.\1.mlp.fc2.\2",
        r"encoder\.layer\.(\d+)\.layer_scale(\d)\.lambda1": r"blocks.\1.ls\2.gamma",
        r"encoder\.layer\.(\d+)\.mlp\.weights_in\.(.*)": r"blocks.\1.mlp.fc1.\2",
        r"encoder\.layer\.(\d+)\.mlp\.weights_out\.(.*)": r"blocks.\1.mlp.fc2.\2",
        r"encoder\.layer\.(\d+)\.(norm\d|mlp)\.(.*)": r"blocks.\1.\2.\3",
        r"layernorm\.(.*)": r"norm.\1",
        r"pooler\.dense\.(.*)": r"pre_logits.fc.\1",
        r"classifier\.(.*)": r"head.\1",
    },
    "torchvision": {
        r"class_token": "cls_token",
        r"encoder\.pos_embedding": "pos_embed",
        r"conv_proj\.(.*)": r"patch_embed.proj.\1",
        r"encoder\.layers\.encoder_layer_(\d+)\.ln_(\d)\.(.*)": r"blocks.\1.norm\2.\3",
        r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_(.*)": (
            r"blocks.\1.attn.qkv.\2"
        ),
        r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.(.*)": (
            r"blocks.\1.attn.proj.\2"
        ),
        r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.0\.(.*)": r"blocks.\1.mlp.fc1.\2",
        r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.3\.(.*)": r"blocks.\1.mlp.fc2.\2",
        r"encoder\.ln\.(.*)": r"norm.\1",
        r"heads\.pre_logits\.(.*)": r"pre_logits.fc.\1",
        r"heads\.head\.(.*)": r"head.\1",
    },
    "vit-pytorch": {  # SimpleViT; ViT has `fn` and other indices
        r"cls_token": "cls_token",
        r"pos_embedding": "pos_embed",
        r"to_patch_embedding\.1\.(.*)": r"patch_embed.proj.\1",
        r"transformer\.layers\.(\d+)\.0\.norm\.(.*)": r"blocks.\1.norm1.\2",
        r"transformer\.layers\.(\d+)\.0\.(?:fn\.)?to_qkv\.(.*)": r"blocks.\1.attn.qkv.\2",
        r"transformer\.layers\.(\d+)\.0\.(?:fn\.)?to_out\.(?:0\.)?(.*)": r"blocks.\1.attn.proj.\2",
        r"transformer\.layers\.(\d+)\.1\.(?:net\.0|norm)\.(.*)": r"blocks.\1.norm2.\2",
        r"transformer\.layers\.(\d+)\.1\.(?:net\.1|fn\.net\.0)\.(.*)": r"blocks.\1.mlp.fc1.\2",
        r"transformer\.layers\.(\d+)\.1\.(?:fn\.)?net\.3\.(.*)": r"blocks.\1.mlp.fc2.\2",
        r"(?:linear|mlp)_head\.0\.(.*)": r"norm.\1",
        r"(?:linear|mlp)_head\.1\.(.*)": r"head.\1",
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small run up to ten times slower on two threads of a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "kind"), PRECISIONS)
def test_our_logits_equal_the_other_librarys(name: str, kind: str):
    fixture, dtype = FIXTURES[name], getattr(torch, kind)
    model = build_our_model(fixture, dtype)
    with torch.no_grad():
        logits = model(torch.from_numpy(random_image(**fixture["image"])).to(dtype))
    published = torch.tensor(fixture["outputs"][kind], dtype=dtype)
    torch.testing.assert_close(logits, published, rtol=0, atol=TOLERANCE[kind])


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("mlp", get_args(kinds.MlpKind)),
        ("positions", get_args(kinds.PositionKind)),
        ("pool", get_args(kinds.PoolKind)),
        ("head", get_args(kinds.HeadKind)),
        ("stem", tuple({*get_args(kinds.StemKind)} - {"conv", "r9"})),  # no peer has these two
    ],
)
def test_every_kind_of_model_is_compared(setting: str, values: tuple[str, ...]):
    compared = {getattr(ViTConfig(**fixture["config"]), setting) for fixture in FIXTURES.values()}
    assert compared == set(values)


def build_our_model(fixture: dict[str, Any], dtype: torch.dtype) -> ViT:
    """Vitrail's model with the weights of a fixture."""
    config = ViTConfig(**fixture["config"])
    state = rename_parameters(fixture, dtype)
    join_queries_keys_values(state)
    reshape_patch_projection(state, config)
    convert_class_token(state, config)
    add_omitted_parameters(state, config)
    with torch.device("meta"):
        model = ViT(config)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def rename_parameters(fixture: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    names = NAMES[fixture["peer"].split()[0]]
    state = {}
    for theirs, shape in fixture["shapes"].items():
        plain = re.sub(r"^(vit|dinov2(_with_registers)?)\.", "", theirs)
        if name := rename(plain, names):
            state[name] = torch.from_numpy(random_weight(theirs, shape)).to(dtype)
    return state


def rename(theirs: str, names: dict[str, str]) -> str:
    for pattern, name in names.items():
        if match := re.fullmatch(pattern, theirs):
            return match.expand(name)
    raise AssertionError(f"no pattern matches {theirs}")


def join_queries_keys_values(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if ".attn.q." in name]:
        q, v = state.pop(name), state.pop(name.replace(".q.", ".v."))
        k = state.pop(
            name.replace(".q.", ".k."), torch.zeros_like(q)
        )  # timm's Eva has no bias for keys
        state[name.replace(".q.", ".qkv.")] = torch.cat([q, k, v])


def reshape_patch_projection(state: dict[str, Tensor], config: ViTConfig) -> None:
    """vit-pytorch multiplies flattened patches by a matrix, with the channels last."""
    matrix = state["patch_embed.proj.weight"]
    if matrix.ndim == 2:
        patch = (config.patch, config.patch, config.channels)
        state["patch_embed.proj.weight"] = matrix.unflatten(1, patch).permute(0, 3, 1, 2)


def convert_class_token(state: dict[str, Tensor], config: ViTConfig) -> None:
    """A class token has a position here, and one that the head does not read is a register."""
    token, positions = state.get("cls_token"), state.get("pos_embed")
    if token is not None and positions is not None and positions.shape[1] == config.patches:
        positions = torch.cat([torch.zeros_like(token), positions], dim=1)
        state["pos_embed"] = positions
    if token is not None and not config.has_cls:
        register = state.pop("cls_token")
        if positions is not None:
            register = register + positions[:, :1]
            state["pos_embed"] = positions[:, 1:]
        registers = [register, state["reg_token"]] if "reg_token" in state else [register]
        state["reg_token"] = torch.cat(registers, dim=1)


def add_omitted_parameters(state: dict[str, Tensor], config: ViTConfig) -> None:
    """Some libraries omit biases that are zero, or the last layer."""
    for name in [name for name in state if re.search(r"(qkv|proj)\.weight", name)]:
        zeros = torch.zeros_like(state[name]).flatten(1)[:, 0]
        state.setdefault(name.replace("weight", "bias"), zeros)
    if config.head == "mlp" and "head.weight" not in state:
        identity = torch.eye(config.width, dtype=state["norm.weight"].dtype)
        state |= {"head.weight": identity, "head.bias": torch.zeros_like(identity[0])}
