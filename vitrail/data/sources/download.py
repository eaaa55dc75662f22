"""Downloads a file over https: resumed when interrupted, verified before use, atomic."""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from vitrail import __version__, files
from vitrail.data.sources.catalogue import Download
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError

MAX_FAILURES = 5  # consecutive attempts that received nothing
TIMEOUT = 30  # seconds without a response
CHUNK = 2**18  # bytes
RETRIABLE_STATUS = (408, 429)  # request timeout and too many requests, besides all server errors


class ConnectionLost(Exception):
    """The connection failed in a way that a retry may fix."""


def download_file(
    download: Download,
    folder: Path,
    *,
    progress: bool = True,
    schemes: tuple[str, ...] = ("https",),
    pause: float = 1.0,
) -> Path:
    """Downloads a file into `folder` unless it is there; resumes an interrupted download.

    Call it inside `lock_downloads(folder)`: two downloads of one file would overwrite each other.
    """
    target = folder / download.name
    partial = folder / f"{download.name}.part"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        download_and_verify(download, partial, progress, schemes, pause)
        files.fsync(partial)
        partial.replace(target)
        files.fsync(folder)
    except OSError as error:
        raise UserError(describe_write_error(target, error)) from error
    return target


@contextmanager
def lock_downloads(folder: Path) -> Iterator[None]:
    """Lets one process at a time download into a folder; the others wait."""
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(describe_write_error(folder, error)) from error
    try:
        yield
    finally:
        lock.release()


def describe_write_error(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror}; set VITRAIL_DATA to another folder"


def download_and_verify(
    download: Download, partial: Path, progress: bool, schemes: tuple[str, ...], pause: float
) -> None:
    """Completes the partial file and verifies its checksum."""
    partial.touch()
    if partial.stat().st_size > download.size:
        partial.write_bytes(b"")
    for resumed in (partial.stat().st_size > 0, False):
        download_with_retries(download, partial, progress, schemes, pause)
        with open(partial, "rb") as file:
            checksum = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        if checksum.hexdigest() == download.md5:
            return
        partial.write_bytes(b"")
        if not resumed:  # a resumed download may have started from another version; try once more
            break
    raise UserError(
        f"{download.url} has checksum {checksum.hexdigest()}, expected {download.md5}; "
        "the download was deleted; try again later"
    )


def download_with_retries(
    download: Download, partial: Path, progress: bool, schemes: tuple[str, ...], pause: float
) -> None:
    failures, received = 0, partial.stat().st_size
    with progress_bar(
        f"downloading {download.name}", download.size, show=progress, in_bytes=True
    ) as advance:
        advance(received)
        while received < download.size:
            before = received
            try:
                for start, chunk in request_chunks(download, received, schemes):
                    with open(partial, "r+b") as file:
                        file.truncate(start)
                        file.seek(start)
                        file.write(chunk)
                    advance(start + len(chunk) - received)
                    received = start + len(chunk)
                    if received > download.size:
                        break
                why = f"received only {received} of {download.size} bytes"
            except ConnectionLost as error:
                why = str(error)
            if received < download.size:
                failures = 0 if received > before else failures + 1
                if failures >= MAX_FAILURES:
                    raise UserError(describe_failure(download, partial, why))
                time.sleep(pause * failures)
    if received > download.size:
        partial.write_bytes(b"")
        raise UserError(
            f"{download.url} has more than {download.size} bytes; the download was deleted"
        )


def request_chunks(
    download: Download, received: int, schemes: tuple[str, ...]
) -> Iterator[tuple[int, bytes]]:
    """Chunks with their offsets, starting at `received`, or at 0 if the server ignores ranges."""
    check_scheme(download.url, schemes)
    request = urllib.request.Request(download.url, headers={"User-Agent": f"vitrail/{__version__}"})
    if received:
        request.add_header("Range", f"bytes={received}-")
    try:
        opener = urllib.request.build_opener(SafeRedirect(schemes))
        with opener.open(request, timeout=TIMEOUT) as response:
            start = received if supports_range(response, received) else 0
            while chunk := response.read(CHUNK):
                yield start, chunk
                start += len(chunk)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in RETRIABLE_STATUS:
            raise UserError(
                f"{download.url}: the server responded {error.code} {error.reason}"
            ) from error
        raise ConnectionLost(f"{error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise ConnectionLost(str(error.reason)) from error
    except (http.client.HTTPException, OSError) as error:
        raise ConnectionLost(str(error) or type(error).__name__) from error


def supports_range(response: Any, received: int) -> bool:
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return False
    if not response.headers.get("Content-Range", "").startswith(f"bytes {received}-"):
        raise ConnectionLost("the server sent a different range from the one requested")
    return True


class SafeRedirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but only to URLs with an allowed scheme."""

    def __init__(self, schemes: tuple[str, ...]):
        self.schemes = schemes

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        try:
            check_scheme(newurl, self.schemes)
        except UserError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_scheme(url: str, schemes: tuple[str, ...]) -> None:
    if url.split(":", 1)[0].lower() not in schemes:
        raise UserError(f"{url} is not {' or '.join(schemes)}; nothing was downloaded")


def describe_failure(download: Download, partial: Path, why: str) -> str:
    received = os.path.getsize(partial)
    hint = "; run the same command again to resume" if received else ""
    return (
        f"cannot download {download.url}: {why} "
        f"({received / 1e6:.0f} of {download.size / 1e6:.0f} MB received{hint}); "
        f"or put {download.name} into {partial.parent} yourself"
    )
