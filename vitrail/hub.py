"""The Hugging Face hub: downloads checked by their checksums, and its errors as one line each."""

import errno
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import UserError

TIMEOUT = 5  # seconds until a hub that does not answer counts as unreachable
SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of a large file; that of a small one is a git hash

RepositoryKind = Literal["model", "dataset"]


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


def download_hub_file(
    repository: str, revision: str | None, name: str, kind: RepositoryKind = "model"
) -> Path | None:
    """One file, from the cache if it is there; None if the repository does not have it.

    An interrupted download is resumed. What was downloaded must have the hub's checksum.
    """
    from huggingface_hub import errors, hf_hub_download

    try:
        path = Path(
            hf_hub_download(
                repository, name, revision=revision, repo_type=kind, etag_timeout=TIMEOUT
            )
        )
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
