"""Weights from the Hugging Face hub: out of its cache, or fetched into it."""

from pathlib import Path

from vitrail.errors import UserError
from vitrail.zoo.beside import read_json
from vitrail.zoo.files.place import INDEX, USUAL

CONFIGS = ("config.json", "preprocessor_config.json")
WEIGHTS = [name for usual in USUAL for name in (usual, f"{usual}{INDEX}")]


def fetch(name: str) -> Path:
    """The folder of "owner/name" or "owner/name@revision"; the cache is asked before the net."""
    try:
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise UserError(
            f"hf:{name} needs the package huggingface_hub; pip install 'vitrail[hub]'"
        ) from error
    repository, _, revision = name.partition("@")
    try:
        found = cached(repository, revision or None)
        if found is None and constants.HF_HUB_OFFLINE:
            raise UserError(
                f"hf:{name} is not in the cache, and HF_HUB_OFFLINE is set; unset it to fetch it"
            )
        return found or download(repository, revision or None)
    except errors.HFValidationError as error:
        raise UserError(f"hf:{name} is no name on the hub; write hf:owner/name") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise UserError(
            f"the hub has no hf:{name}, or it is private; check the name, or log in with `hf auth`"
        ) from error
    except OSError as error:  # all that can go wrong on the way, in the words of the package
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"hf:{name} cannot be fetched: {reason}; try again later") from error


def cached(repository: str, revision: str | None) -> Path | None:
    """The folder in the cache, if it holds weights and their config, or if the net is forbidden."""
    from huggingface_hub import constants, try_to_load_from_cache

    for name in WEIGHTS:
        path = try_to_load_from_cache(repository, name, revision=revision)
        if not isinstance(path, str):
            continue
        folder = Path(path).parent
        whole = all((folder / shard).is_file() for shard in shards(Path(path)))
        if whole and (constants.HF_HUB_OFFLINE or (folder / CONFIGS[0]).is_file()):
            return folder
    return None


def download(repository: str, revision: str | None) -> Path:
    weights = next(
        (path for name in WEIGHTS if (path := part(repository, revision, name)) is not None), None
    )
    if weights is None:
        raise UserError(
            f"hf:{repository} has none of {', '.join(WEIGHTS)}; fetch its file yourself"
        )
    for name in [*CONFIGS, *shards(weights)]:
        part(repository, revision, name)
    return weights.parent


def part(repository: str, revision: str | None, name: str) -> Path | None:
    """One file, fetched unless it is there; none if the repository has no such file."""
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except errors.LocalEntryNotFoundError as error:  # the net does not answer
        raise ConnectionError(str(error.__cause__ or error)) from error
    except errors.EntryNotFoundError:
        return None


def shards(file: Path) -> list[str]:
    """The files that an index names; none, if it is no index."""
    if not file.name.endswith(INDEX):
        return []
    listed = read_json(file).get("weight_map")
    return sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
