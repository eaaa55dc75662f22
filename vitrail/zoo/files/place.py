"""Where weights lie: a file, a folder, shards with their index, or a name on the hub."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import UserError
from vitrail.zoo.beside import Beside, look_beside, read_json
from vitrail.zoo.files.open import open_file
from vitrail.zoo.files.stored import Contents, Stored

USUAL = ("model.safetensors", "pytorch_model.bin")  # what a folder's weights are called
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
INDEX = ".index.json"


@dataclass(frozen=True, kw_only=True)
class Place:
    file: Path  # of weights, or the index of several
    beside: Beside
    names: tuple[str, ...]  # by which the table of published weights may know them


def locate(path: Path, *names: str) -> Place:
    try:
        return place_of(path, *names)
    except OSError as error:
        raise UserError(f"cannot look into {path}: {error.strerror or error}") from error


def place_of(path: Path, *names: str) -> Place:
    if path.is_dir():
        return Place(file=weights_in(path), beside=look_beside(path), names=(*names, path.name))
    if not path.exists():
        raise UserError(
            f"there is no file or folder {path}; give a path, or hf:owner/name for the hub"
        )
    belongs = path.name.removesuffix(INDEX) in USUAL or len(weight_files(path.parent)) == 1
    beside = look_beside(path.parent) if belongs else Beside()
    folder = (path.parent.resolve().name,) if belongs else ()
    return Place(file=path, beside=beside, names=(*names, path.name, *folder))


def weights_in(folder: Path) -> Path:
    for name in USUAL:
        for file in (folder / name, folder / f"{name}{INDEX}"):
            if file.is_file():
                return file
    found = weight_files(folder)
    if len(found) != 1:
        held = f"several weight files ({', '.join(one.name for one in found[:4])})"
        raise UserError(f"{folder} holds {held if found else 'no weights'}; give the file itself")
    return found[0]


def weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def open_place(place: Place) -> Contents:
    """What the file holds, or all the files that an index names."""
    if not place.file.name.endswith(INDEX):
        return open_file(place.file)
    listed = read_json(place.file).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(one, str) for one in listed.values()):
        raise UserError(f"{place.file} has no weight_map that names files; fetch it again")
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(listed.values())):
        if Path(shard).name != shard:
            raise UserError(f"{place.file} names {shard!r}, which is not beside it")
        held = open_file(place.file.parent / shard).tensors
        if held.keys() != {name for name, file in listed.items() if file == shard}:
            raise UserError(f"{shard} does not hold what {place.file} says; fetch both again")
        tensors |= held
    return Contents(tensors=tensors)
