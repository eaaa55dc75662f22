"""Our model equals the published ones: same weights, same image, same answer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.parity.weights import image, weight
from vitrail.model import config as kinds
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

PATHS = sorted((Path(__file__).parent / "fixtures").glob("*.json"))
FIXTURES: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in PATHS}
PRECISIONS = [(name, kind) for name in FIXTURES for kind in FIXTURES[name]["outputs"]]
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

# What each peer calls a parameter, and what we do; the first line that fits is taken. Separate
# queries, keys and values are joined afterwards.
NAMES = {
    "timm": {
        r"fc_norm\.(.*)": r"norm.\1",
        r"(blocks\.\d+\.attn)\.(q|v)_bias": r"\1.\2.bias",  # from here Eva's
        r"(blocks\.\d+)\.gamma_(\d)": r"\1.ls\2.gamma",
        r"(.*)": r"\1",
    },
    "transformers": {
        r"embeddings\.mask_token": "",  # used in pretraining only
        r"embeddings\.cls_token": "cls_token",
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
        r"encoder\.layer\.(\d+)\.(norm\d)\.(.*)": r"blocks.\1.\2.\3",
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
    "vit-pytorch": {  # SimpleViT, and `fn` and other numbers in ViT
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
    """On models this small, two threads on a busy machine wait for each other ten times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "kind"), PRECISIONS)
def test_our_model_answers_as_the_published_one(name: str, kind: str):
    fixture, dtype = FIXTURES[name], getattr(torch, kind)
    model = ours(fixture, dtype)
    with torch.no_grad():
        answer = model(torch.from_numpy(image(**fixture["image"])).to(dtype))
    published = torch.tensor(fixture["outputs"][kind], dtype=dtype)
    torch.testing.assert_close(answer, published, rtol=0, atol=TOLERANCE[kind])


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("mlp", get_args(kinds.MlpKind)),
        ("positions", get_args(kinds.PositionKind)),
        ("pool", get_args(kinds.PoolKind)),
        ("head", get_args(kinds.HeadKind)),
        ("stem", get_args(kinds.StemKind)),
    ],
)
def test_every_kind_of_model_has_a_published_one(setting: str, values: tuple[str, ...]):
    compared = {getattr(ViTConfig(**fixture["config"]), setting) for fixture in FIXTURES.values()}
    assert compared == set(values)


def ours(fixture: dict[str, Any], dtype: torch.dtype) -> ViT:
    """Our model with the peer's weights, every one in its place."""
    config = ViTConfig(**fixture["config"])
    state = renamed(fixture, dtype)
    join_queries_keys_values(state)
    cut_patches(state, config)
    place_tokens(state, config)
    add_what_is_left_out(state, config)
    with torch.device("meta"):
        model = ViT(config)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def renamed(fixture: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    names = NAMES[fixture["peer"].split()[0]]
    state = {}
    for theirs, shape in fixture["shapes"].items():
        if name := rename(theirs.removeprefix("vit."), names):
            state[name] = torch.from_numpy(weight(theirs, shape)).to(dtype)
    return state


def rename(theirs: str, names: dict[str, str]) -> str:
    for pattern, name in names.items():
        if match := re.fullmatch(pattern, theirs):
            return match.expand(name)
    raise AssertionError(f"no place for {theirs}")


def join_queries_keys_values(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if ".attn.q." in name]:
        q, v = state.pop(name), state.pop(name.replace(".q.", ".v."))
        k = state.pop(name.replace(".q.", ".k."), torch.zeros_like(q))  # timm's Eva: no bias there
        state[name.replace(".q.", ".qkv.")] = torch.cat([q, k, v])


def cut_patches(state: dict[str, Tensor], config: ViTConfig) -> None:
    """vit-pytorch multiplies flat patches by a matrix; in them, the channel runs fastest."""
    matrix = state["patch_embed.proj.weight"]
    if matrix.ndim == 2:
        patch = (config.patch, config.patch, config.channels)
        state["patch_embed.proj.weight"] = matrix.unflatten(1, patch).permute(0, 3, 1, 2)


def place_tokens(state: dict[str, Tensor], config: ViTConfig) -> None:
    """A class token has a position here, and one that nobody reads is a register."""
    token, positions = state.get("cls_token"), state.get("pos_embed")
    if token is not None and positions is not None and positions.shape[1] == config.patches:
        positions = torch.cat([torch.zeros_like(token), positions], dim=1)
        state["pos_embed"] = positions
    if token is not None and config.pool != "cls":
        register = state.pop("cls_token")
        if positions is not None:
            register = register + positions[:, :1]
            state["pos_embed"] = positions[:, 1:]
        registers = [register, state["reg_token"]] if "reg_token" in state else [register]
        state["reg_token"] = torch.cat(registers, dim=1)


def add_what_is_left_out(state: dict[str, Tensor], config: ViTConfig) -> None:
    """Some peers have no bias where it would be zero, or no last layer."""
    for name in [name for name in state if re.search(r"(qkv|proj)\.weight", name)]:
        zeros = torch.zeros_like(state[name]).flatten(1)[:, 0]
        state.setdefault(name.replace("weight", "bias"), zeros)
    if config.head == "mlp" and "head.weight" not in state:
        identity = torch.eye(config.width, dtype=state["norm.weight"].dtype)
        state |= {"head.weight": identity, "head.bias": torch.zeros_like(identity[0])}
