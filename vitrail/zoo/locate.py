"""Finds a checkpoint: the weight file and its config files, in a folder or on the hub."""

from dataclasses import dataclass
from pathlib import Path

from vitrail import files
from vitrail.errors import UserError
from vitrail.zoo.files.find import (
    INDEX_SUFFIX,
    STANDARD_FILES,
    find_weight_file,
    list_weight_files,
    read_json_object,
)
from vitrail.zoo.layouts.layout import CheckpointConfig
from vitrail.zoo.layouts.mapping import LAYOUTS
from vitrail.zoo.weights import find_published


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    weights: Path  # the weight file, or the index of several shards
    config: CheckpointConfig
    names: tuple[str, ...]  # under which the table of published weights may list them


def locate_checkpoint(path: str | Path) -> CheckpointFiles:
    """Finds "hf:owner/name", a name from the table of weights, a folder or a file."""
    text = str(path)
    if text.startswith("hf:"):
        from vitrail.zoo.hub import fetch_from_hub

        name = text.removeprefix("hf:")
        return locate_local(fetch_from_hub(name), name.partition("@")[0])
    published = find_published(text)
    if (
        published is not None
        and published.name == text
        and published.hub
        and not Path(path).exists()
    ):
        return locate_checkpoint(f"hf:{published.hub}")
    return locate_local(files.expand_user(path))


def locate_local(path: Path, *names: str) -> CheckpointFiles:
    try:
        if path.is_dir():
            return CheckpointFiles(
                weights=find_weight_file(path), config=read_config(path), names=(*names, path.name)
            )
        if not path.exists():
            raise UserError(
                f"{path} does not exist; give a file or folder, or hf:owner/name for the hub"
            )
        files.check_regular(path)
        folder = path.parent
        owns_config = (
            path.name.removesuffix(INDEX_SUFFIX) in STANDARD_FILES
            or len(list_weight_files(folder)) == 1
        )
        if not owns_config:  # the config files may belong to another weight file
            return CheckpointFiles(
                weights=path, config=CheckpointConfig(), names=(*names, path.name)
            )
        return CheckpointFiles(
            weights=path,
            config=read_config(folder),
            names=(*names, path.name, folder.resolve().name),
        )
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def read_config(folder: Path) -> CheckpointConfig:
    """What config.json and its companions say; empty without a known config.json."""
    path = folder / "config.json"
    config = read_json_object(path)
    for layout in LAYOUTS.values():
        if layout.parse_config is None or layout.config_key not in config:
            continue
        try:
            return layout.parse_config(config, folder)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is malformed: {error!r}; correct or remove it") from error
    return CheckpointConfig()
