"""Hostile and broken files: refused in one line, no code runs, memory stays small."""

import io
import json
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from tests.zoo import samples
from tests.zoo.arrays import google_arrays
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.load import load_weights

CLS = "timm-cls"
LARGE = 300 << 20  # bytes that a bomb would fill


class Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


class Called:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def torch_zip(
    path: Path, pickled: bytes, storages: dict[str, bytes], squeeze: bool = False
) -> None:
    """An archive as torch.save writes it."""
    kind = zipfile.ZIP_DEFLATED if squeeze else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for name, content in storages.items():
            archive.writestr(f"archive/data/{name}", content)
        archive.writestr("archive/version", "3\n")


def tensor_pickle(size: tuple[int, ...], stride: tuple[int, ...], count: int) -> bytes:
    """A dict with one tensor over storage "0", which claims to hold `count` numbers."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: Any) -> Any:
            if isinstance(one, Storage):
                return ("storage", torch.FloatStorage, "0", "cpu", count)
            return None

    buffer = io.BytesIO()
    rebuilt = Called(torch._utils._rebuild_tensor_v2, Storage(), 0, size, stride, False, {})
    Pickler(buffer, protocol=2).dump({"patch_embed.proj.weight": rebuilt})
    return buffer.getvalue()


def payload(path: Path) -> None:
    torch_zip(path, pickle.dumps({"a": Payload(path.with_suffix(".ran"))}, protocol=2), {})


def bare_payload(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": Payload(path.with_suffix(".ran"))}, protocol=2))


def torch_bomb(path: Path) -> None:
    content = tensor_pickle((LARGE // 4,), (1,), LARGE // 4)
    torch_zip(path, content, {"0": bytes(LARGE)}, squeeze=True)


def bomb_of_names(path: Path) -> None:
    torch_zip(path, b"\x80\x02" + b"N0" * (LARGE // 2) + b".", {}, squeeze=True)


def numpy_bomb(path: Path) -> None:
    np.savez_compressed(path, **{"embedding/kernel": np.zeros(LARGE // 4, np.float32)})


def long_bytearray(path: Path) -> None:
    torch_zip(path, pickle.dumps({"a": Called(bytearray, LARGE)}, protocol=2), {})


def lying_storage(path: Path) -> None:
    torch_zip(path, tensor_pickle((LARGE // 4,), (1,), LARGE // 4), {"0": bytes(64)})


def endless_stride(path: Path) -> None:
    torch_zip(path, tensor_pickle((LARGE // 4,), (0,), 16), {"0": bytes(64)})


def sparse(path: Path) -> None:
    torch.save({"patch_embed.proj.weight": torch.ones(3, 3).to_sparse()}, path)


def shared_numbers(path: Path) -> None:
    state = samples.tensors(CLS)
    state["blocks.1.norm1.weight"] = state["blocks.0.norm1.weight"]
    torch.save(state, path)


def many_names_for_one(path: Path) -> None:
    torch.save({str(number): torch.ones(1)[:] for number in range(12_000)}, path)


def empty_things(path: Path) -> None:
    torch_zip(path, b"\x80\x02]q\x00(" + b"}" * (3 << 20) + b"e.", {})


def a_member_for_nothing(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(60_000):
            archive.writestr(str(number), b"")


def one_member_twice(path: Path) -> None:
    """Two entries of the list of members that lead to the same bytes."""
    arrays = {"embedding/kernel": np.ones((4, 4, 3, 8), np.float32)}
    np.savez(path, **arrays)
    content = bytearray(path.read_bytes())
    start = content.rindex(b"PK\1\2")
    entry = bytes(content[start : content.rindex(b"PK\5\6")])
    again = entry.replace(b"embedding/kernel", b"embedding/kernal")
    end = bytearray(content[content.rindex(b"PK\5\6") :])
    struct.pack_into("<HHI", end, 8, 2, 2, 2 * len(entry))
    path.write_bytes(bytes(content[:start]) + entry + again + bytes(end))


def array_of_objects(path: Path) -> None:
    np.savez(path, **{"embedding/kernel": np.array([{"a": 1}], dtype=object)})


def npy(header: dict[str, Any], content: bytes) -> bytes:
    text = repr(header).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def lying_array(path: Path) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (LARGE, LARGE)}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embedding/kernel.npy", npy(header, bytes(64)))


def negative_array(path: Path) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (-4, -4)}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embedding/kernel.npy", npy(header, bytes(64)))


def safetensors(path: Path, header: Any, content: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + content)


def entry(start: int, end: int, count: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [count], "data_offsets": [start, end]}


def header_beyond_the_file(path: Path) -> None:
    safetensors(path, {"a": entry(0, 4 * LARGE, LARGE)}, bytes(64))


def header_without_end(path: Path) -> None:
    safetensors(path, {"a": entry(0, 4, 1)}, bytes(4), length=1 << 60)


def header_of_the_wrong_shape(path: Path) -> None:
    safetensors(path, {"a": entry(0, 64, LARGE)}, bytes(64))


def overlap(path: Path) -> None:
    safetensors(path, {"a": entry(0, 64, 16), "b": entry(32, 96, 16)}, bytes(96))


def gap(path: Path) -> None:
    safetensors(path, {"a": entry(0, 64, 16), "b": entry(80, 144, 16)}, bytes(144))


def long_header(path: Path) -> None:
    safetensors(path, b'{"a":' + b"[" * (20 << 20), b"")


def deep_metadata(path: Path) -> None:
    deep = "[" * 100_000
    path.write_bytes(save({"a": torch.ones(1)}, {"vitrail": deep}))


def too_large_a_model(path: Path) -> None:
    metadata = {"format": 1, "vit": {"width": 64, "heads": 4, "depth": 10**9}}
    path.write_bytes(save({"a": torch.ones(1)}, {"vitrail": json.dumps(metadata)}))


def not_the_model_it_speaks_of(path: Path) -> None:
    metadata = {"format": 1, "vit": {"width": 6400, "heads": 4, "depth": 500}}
    path.write_bytes(save({"a": torch.ones(1)}, {"vitrail": json.dumps(metadata)}))


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {  # writer, part of the error message
    "payload": (payload, "wants to call"),
    "bare_payload": (bare_payload, "bare pickle"),
    "torch_bomb": (torch_bomb, "compressed"),
    "bomb_of_names": (bomb_of_names, "compressed"),
    "numpy_bomb": (numpy_bomb, "compressed"),
    "long_bytearray": (long_bytearray, "wants to call __builtin__.bytearray"),
    "lying_storage": (lying_storage, "and has 64"),
    "endless_stride": (endless_stride, "strided view"),
    "sparse": (sparse, "_rebuild_sparse_tensor"),
    "shared_numbers": (shared_numbers, "in the same bytes"),
    "many_names_for_one": (many_names_for_one, "more than weights"),
    "empty_things": (empty_things, "more than weights"),
    "a_member_for_nothing": (a_member_for_nothing, "more members than a model has"),
    "one_member_twice": (one_member_twice, "lists"),
    "array_of_objects": (array_of_objects, "as object"),
    "lying_array": (lying_array, "but its shape is"),
    "negative_array": (negative_array, "negative dimension"),
    "header_beyond_the_file": (header_beyond_the_file, "not a valid safetensors"),
    "header_without_end": (header_without_end, "header of"),
    "header_of_the_wrong_shape": (header_of_the_wrong_shape, "not a valid safetensors"),
    "overlap": (overlap, "not a valid safetensors"),
    "gap": (gap, "not a valid safetensors"),
    "long_header": (long_header, "header of"),
    "deep_metadata": (deep_metadata, "nested deeper"),
    "too_large_a_model": (too_large_a_model, "at most 1,000,000"),
    "not_the_model_it_speaks_of": (
        not_the_model_it_speaks_of,
        "the model that its metadata describes",
    ),
}
SUFFIX = {"numpy_bomb": "npz", "one_member_twice": "npz", "array_of_objects": "npz"}

MEASURE = """
import json, pathlib, sys
from vitrail.errors import UserError
from vitrail.zoo.load import load_weights
import numpy, torch

def resident(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

found = {}
for path in map(pathlib.Path, sys.argv[1:]):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    try:
        load_weights(path)
        words = None
    except UserError as error:
        words = str(error)
    found[path.stem] = {"words": words, "bytes": resident("VmHWM") - before}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, Any]:
    """The error message and the memory for each of these files, from one process."""
    folder: Path = tmp_path_factory.mktemp("hostile")
    paths = [folder / f"{name}.{SUFFIX.get(name, 'pth')}" for name in HOSTILE]
    for path in paths:
        HOSTILE[path.stem][0](path)
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    for path in paths:
        found[path.stem] |= {"size": path.stat().st_size, "ran": path.with_suffix(".ran").exists()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line_and_runs_nothing(refused, name):
    words = refused[name]["words"]
    assert HOSTILE[name][1] in words and "\n" not in words and len(words) < 400
    assert not refused[name]["ran"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_takes_no_more_memory_than_twice_its_size(refused, name):
    noise = 8 << 20  # lazily imported code and the allocator's own pages
    assert refused[name]["bytes"] <= 2 * refused[name]["size"] + noise


@pytest.mark.slow
def test_the_zip_bombs_are_small_files(refused):
    assert refused["torch_bomb"]["size"] < LARGE // 100
    assert refused["numpy_bomb"]["size"] < LARGE // 100


def write_valid(path: Path) -> Path:
    """A valid file of the format that the suffix names."""
    if path.suffix == ".safetensors":
        save_file(samples.tensors(CLS), path)
    elif path.suffix == ".pth":
        torch.save(samples.tensors(CLS), path)
    else:
        model = ViT(ViTConfig(image=24, patch=6, classes=5, width=24, depth=2, heads=3))
        np.savez(path, **google_arrays(model, "original"))
    return path


FLAGS: dict[str, dict[str, Any]] = {".npz": {}}
FORMATS = ["safetensors", "pth", "npz"]


def attempt(path: Path) -> bool:
    """Whether it loads; any error but a UserError fails the test."""
    try:
        load_weights(path, vit=FLAGS.get(path.suffix, {"heads": 3, "image": (24, 30)}))
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, suffix, share):
    path = write_valid(tmp_path / f"whole.{suffix}")
    assert attempt(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert not attempt(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_with_flipped_bytes_loads_or_raises_a_user_error(tmp_path, suffix):
    path = write_valid(tmp_path / f"whole.{suffix}")
    content, rng = path.read_bytes(), random.Random(0)
    names = 3000  # bytes at both ends, where names and shapes are
    spots = [*range(min(names, len(content))), *range(max(0, len(content) - names), len(content))]
    for _ in range(150):
        broken = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 5])):
            broken[rng.choice(spots)] = rng.randrange(256)
        path.write_bytes(bytes(broken))
        attempt(path)


ODD = [None, -1, 0, 10**30, 1e400, "x", [], {"a": 1}, True, ["a", "b"]]


def leaves(tree: dict[str, Any], front: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [(*front, key) for key in tree]
    for key, inside in tree.items():
        found += leaves(inside, (*front, key)) if isinstance(inside, dict) else []
    return found


def changed(tree: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(place) == 1:
        return {**tree, place[0]: value}
    return {**tree, place[0]: changed(tree[place[0]], place[1:], value)}


TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "global_pool": "token",
    "model_args": {"num_heads": 3, "img_size": [24, 30]},
    "label_names": list("abcdefg"),
    "pretrained_cfg": {
        "input_size": [3, 24, 30],
        "crop_pct": 0.9,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    },
}
HUGGING_FACE = {
    "model_type": "vit",
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": [24, 30],
    "id2label": {str(number): f"kind {number}" for number in range(7)},
}
PROCESSOR = {
    "size": {"shortest_edge": 256},
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "config"),
    [
        (CLS, "config.json", TIMM),
        ("transformers-cls", "config.json", HUGGING_FACE),
        ("transformers-cls", "preprocessor_config.json", PROCESSOR),
    ],
)
def test_an_odd_config_loads_or_raises_a_user_error(tmp_path, name, file, config):
    save_file(samples.tensors(name), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    for place in leaves(config):
        for value in ODD:
            (tmp_path / file).write_text(json.dumps(changed(config, place, value)))
            try:
                load_weights(tmp_path)
            except UserError as error:
                assert "\n" not in str(error)
