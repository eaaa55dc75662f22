"""Weights from the Hugging Face hub: from its local cache, or downloaded into it."""

import errno
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.zoo.files.open import INDEX_SUFFIX, read_shard_index
from vitrail.zoo.locate import STANDARD_FILES

CONFIG_FILES = ("config.json", "preprocessor_config.json")
WEIGHT_FILES = [file for name in STANDARD_FILES for file in (name, f"{name}{INDEX_SUFFIX}")]
TIMEOUT = 5  # seconds until a hub that does not answer counts as unreachable
SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of a large file; that of a small one is a git hash


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


def import_hub(name: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError as error:
        raise UserError(
            f"hf:{name} needs the package huggingface_hub; pip install 'vitrail[hub]'"
        ) from error
    return huggingface_hub


def offline_error(name: str) -> UserError:
    return UserError(
        f"hf:{name} is not in the cache, and HF_HUB_OFFLINE is set; unset it to download"
    )


@contextmanager
def report_hub_errors(name: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into one line each."""
    from huggingface_hub import errors

    client: Any = errors.HfHubHTTPError.__bases__  # errors of the HTTP client that it uses
    try:
        yield
    except errors.HFValidationError as error:
        raise UserError(f"hf:{name} is not a valid hub name; write hf:owner/name") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise UserError(
            f"the hub has no hf:{name}, or it is private; check the name, or log in with `hf auth`"
        ) from error
    except (OSError, *client) as error:
        advice = "try again later"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space, or set HF_HOME to another disk"
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"hf:{name} cannot be downloaded: {reason}; {advice}") from error


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
    """One file, from the cache if it is there; None if the repository does not have it.

    An interrupted download is resumed. What was downloaded must have the hub's checksum.
    """
    from huggingface_hub import errors, hf_hub_download

    try:
        path = Path(hf_hub_download(repository, name, revision=revision, etag_timeout=TIMEOUT))
    except errors.LocalEntryNotFoundError as error:  # the hub does not answer
        raise ConnectionError(str(error.__cause__ or error)) from error
    except errors.EntryNotFoundError:
        return None
    verify_checksum(path)
    return path


def verify_checksum(path: Path) -> None:
    """Deletes a file of the cache that differs from its checksum, which is the name of its blob."""
    blob = path.resolve()
    if not SHA256.fullmatch(blob.name):
        return
    with blob.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != blob.name:
        blob.unlink()
        raise UserError(
            f"{path.name} from the hub has checksum {found}, expected {blob.name}; "
            f"it was deleted; try again"
        )


def list_shards(file: Path) -> list[str]:
    """The shards that an index lists; none for a weight file."""
    return sorted(set(read_shard_index(file).values())) if file.name.endswith(INDEX_SUFFIX) else []
