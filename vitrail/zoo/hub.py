"""Weights from the Hugging Face hub: from its local cache, or downloaded into it."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import UserError
from vitrail.hub import (
    SHA256,
    TIMEOUT,
    download_hub_file,
    import_hub,
    offline_error,
    report_hub_errors,
)
from vitrail.zoo.files.find import INDEX_SUFFIX, STANDARD_FILES, read_shard_index

CONFIG_FILES = ("config.json", "preprocessor_config.json")
WEIGHT_FILES = [file for name in STANDARD_FILES for file in (name, f"{name}{INDEX_SUFFIX}")]


@dataclass(frozen=True, kw_only=True)
class HubFile:
    size: int  # bytes
    sha256: str | None  # None: the hub does not say


def fetch_from_hub(name: str) -> Path:
    """The local folder of "owner/name" or "owner/name@revision", downloaded if not in the cache."""
    constants = import_hub(name).constants
    repository, _, revision = name.partition("@")
    with report_hub_errors(name):
        folder = find_in_cache(repository, revision or None)
        if folder is None and constants.HF_HUB_OFFLINE:
            raise offline_error(name)
        return folder or download_repository(repository, revision or None)


def find_cached(repository: str) -> Path | None:
    """The cached folder of "owner/name"; None if it is not there or huggingface_hub is missing."""
    try:
        import_hub(repository)
    except UserError:
        return None
    with report_hub_errors(repository):
        return find_in_cache(repository, None)


def inspect_hub_file(repository: str, name: str = STANDARD_FILES[0]) -> HubFile:
    """Size and checksum of a file on the hub, by one request."""
    hub = import_hub(repository)
    if hub.constants.HF_HUB_OFFLINE:
        raise offline_error(repository)
    with report_hub_errors(repository):
        url = hub.hf_hub_url(repository, name)
        found = hub.get_hf_file_metadata(url, timeout=TIMEOUT)
    return HubFile(
        size=found.size or 0,
        sha256=found.etag if SHA256.fullmatch(found.etag or "") else None,
    )


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


def list_shards(file: Path) -> list[str]:
    """The shards that an index lists; none for a weight file."""
    return sorted(set(read_shard_index(file).values())) if file.name.endswith(INDEX_SUFFIX) else []
