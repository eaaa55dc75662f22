"""Finds the weight file in a folder and the shards of an index, without importing torch."""

from pathlib import Path
from typing import Any

from vitrail.decoding import read_json
from vitrail.errors import UserError

STANDARD_FILES = ("model.safetensors", "pytorch_model.bin")  # of a folder with weights
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
INDEX_SUFFIX = ".index.json"  # of the file that lists the shards of a checkpoint
MAX_LISTED = 4  # files in a message


def collect_weight_files(path: Path) -> list[Path]:
    """The file or all shards of a checkpoint, given its folder, its weight file or its index."""
    main = find_weight_file(path) if path.is_dir() else path
    if not main.name.endswith(INDEX_SUFFIX):
        return [main]
    return [main, *(main.parent / name for name in sorted(set(read_shard_index(main).values())))]


def find_weight_file(folder: Path) -> Path:
    for name in STANDARD_FILES:
        for file in (folder / name, folder / f"{name}{INDEX_SUFFIX}"):
            if file.is_file():
                return file
    found = list_weight_files(folder)
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:MAX_LISTED])
        raise UserError(
            f"{folder} contains several weight files ({names}); give the path of one of them"
        )
    if not found:
        raise UserError(
            f"{folder} contains no weight file ({', '.join(WEIGHT_SUFFIXES)}); "
            f"give another folder or a file"
        )
    return found[0]


def list_weight_files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file()
    )


def read_shard_index(path: Path) -> dict[str, str]:
    """The file name of the shard that holds each tensor."""
    shard_of = read_json_object(path).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(x, str) for x in shard_of.values()):
        raise UserError(f"{path} has no weight_map from tensors to files; download it again")
    for shard in shard_of.values():
        if Path(shard).name != shard or "\0" in shard:
            raise UserError(f"{path} lists {shard!r}, which is not in the same folder")
    return shard_of


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if the file does not exist."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; correct or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not contain a JSON object; correct or remove it")
    return content
