"""Weights from the Hugging Face hub: from its local cache, or downloaded into it."""

from pathlib import Path

from vitrail.errors import UserError
from vitrail.zoo.files.open import INDEX_SUFFIX, read_shard_index
from vitrail.zoo.locate import STANDARD_FILES

CONFIG_FILES = ("config.json", "preprocessor_config.json")
WEIGHT_FILES = [file for name in STANDARD_FILES for file in (name, f"{name}{INDEX_SUFFIX}")]


def fetch_from_hub(name: str) -> Path:
    """The local folder of "owner/name" or "owner/name@revision", downloaded if not in the cache."""
    try:
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise UserError(
            f"hf:{name} needs the package huggingface_hub; pip install 'vitrail[hub]'"
        ) from error
    repository, _, revision = name.partition("@")
    try:
        folder = find_in_cache(repository, revision or None)
        if folder is None and constants.HF_HUB_OFFLINE:
            raise UserError(
                f"hf:{name} is not in the cache, and HF_HUB_OFFLINE is set; unset it to download"
            )
        return folder or download_repository(repository, revision or None)
    except errors.HFValidationError as error:
        raise UserError(f"hf:{name} is not a valid hub name; write hf:owner/name") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise UserError(
            f"the hub has no hf:{name}, or it is private; check the name, or log in with `hf auth`"
        ) from error
    except OSError as error:  # huggingface_hub's errors of network and disk
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"hf:{name} cannot be downloaded: {reason}; try again later") from error


def find_in_cache(repository: str, revision: str | None) -> Path | None:
    """The cached folder, if it has the weights and, unless offline, their config."""
    from huggingface_hub import constants, try_to_load_from_cache

    for name in WEIGHT_FILES:
        path = try_to_load_from_cache(repository, name, revision=revision)
        if not isinstance(path, str):
            continue
        folder = Path(path).parent
        complete = all((folder / shard).is_file() for shard in list_shards(Path(path)))
        if complete and (constants.HF_HUB_OFFLINE or (folder / CONFIG_FILES[0]).is_file()):
            return folder
    return None


def download_repository(repository: str, revision: str | None) -> Path:
    """The folder with the first weight file that the repository has, its shards and its config."""
    weights = next(
        (
            path
            for name in WEIGHT_FILES
            if (path := download_hub_file(repository, revision, name)) is not None
        ),
        None,
    )
    if weights is None:
        raise UserError(
            f"hf:{repository} has none of {', '.join(WEIGHT_FILES)}; "
            f"download its weight file and give its path"
        )
    for name in [*CONFIG_FILES, *list_shards(weights)]:
        download_hub_file(repository, revision, name)
    return weights.parent


def download_hub_file(repository: str, revision: str | None, name: str) -> Path | None:
    """One file, from the cache if it is there; None if the repository does not have it."""
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except errors.LocalEntryNotFoundError as error:  # the hub does not answer
        raise ConnectionError(str(error.__cause__ or error)) from error
    except errors.EntryNotFoundError:
        return None


def list_shards(file: Path) -> list[str]:
    """The shards that an index lists; none for a weight file."""
    return sorted(set(read_shard_index(file).values())) if file.name.endswith(INDEX_SUFFIX) else []
