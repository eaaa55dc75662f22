"""Fetches a file over https: resumed after a cut, checked before use, never half there."""

import fcntl
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

from vitrail import __version__, files
from vitrail.data.sources.catalogue import Download
from vitrail.display.progress import bar
from vitrail.errors import UserError

TRIES = 5  # in a row without a new byte
TIMEOUT = 30  # seconds without an answer
CHUNK = 2**18  # bytes


class Cut(Exception):
    """The connection failed in a way that may pass."""


def fetch(
    download: Download,
    folder: Path,
    *,
    progress: bool = True,
    schemes: tuple[str, ...] = ("https",),
    pause: float = 1.0,
) -> Path:
    """The file in `folder`, fetched unless it is there; a cut download goes on where it stopped.

    Hold `locked(folder)` around it: two downloads of one file would write into each other.
    """
    target = folder / download.name
    part = folder / f"{download.name}.part"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        complete(download, part, progress, schemes, pause)
        files.sync(part)
        part.rename(target)
        files.sync(folder)
    except OSError as error:
        raise UserError(cannot_write(target, error)) from error
    return target


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time downloads into a folder; the others wait."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def cannot_write(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror}; VITRAIL_DATA can name another folder"


def complete(
    download: Download, part: Path, progress: bool, schemes: tuple[str, ...], pause: float
) -> None:
    """Fills `part` until it has all bytes and the right checksum."""
    part.touch()
    if part.stat().st_size > download.size:
        part.write_bytes(b"")
    for begun in (part.stat().st_size > 0, False):
        fill(download, part, progress, schemes, pause)
        with open(part, "rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        if found.hexdigest() == download.md5:
            return
        part.write_bytes(b"")
        if not begun:  # an old beginning may be to blame; a fresh download is not
            break
    raise UserError(
        f"{download.url} has checksum {found.hexdigest()}, not {download.md5}; it was thrown away"
    )


def fill(
    download: Download, part: Path, progress: bool, schemes: tuple[str, ...], pause: float
) -> None:
    failures, have = 0, part.stat().st_size
    with bar(f"downloading {download.name}", download.size, show=progress, sizes=True) as advance:
        advance(have)
        while have < download.size:
            before = have
            try:
                for start, chunk in chunks(download, have, schemes):
                    with open(part, "r+b") as file:
                        file.truncate(start)
                        file.seek(start)
                        file.write(chunk)
                    advance(start + len(chunk) - have)
                    have = start + len(chunk)
                    if have > download.size:
                        break
                why = f"only {have} of {download.size} bytes came"
            except Cut as error:
                why = str(error)
            if have < download.size:
                failures = 0 if have > before else failures + 1
                if failures >= TRIES:
                    raise UserError(gave_up(download, part, why))
                time.sleep(pause * failures)
    if have > download.size:
        part.write_bytes(b"")
        raise UserError(f"{download.url} is larger than its {download.size} bytes; thrown away")


def chunks(download: Download, have: int, schemes: tuple[str, ...]) -> Iterator[tuple[int, bytes]]:
    """Pieces of the file and where each begins: at `have`, or at 0 if the server cannot go on."""
    check_scheme(download.url, schemes)
    request = urllib.request.Request(download.url, headers={"User-Agent": f"vitrail/{__version__}"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        opener = urllib.request.build_opener(SafeRedirect(schemes))
        with opener.open(request, timeout=TIMEOUT) as response:
            start = have if answers_range(response, have) else 0
            while chunk := response.read(CHUNK):
                yield start, chunk
                start += len(chunk)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in (408, 429):
            raise UserError(f"{download.url} answers {error.code} {error.reason}") from error
        raise Cut(f"{error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise Cut(str(error.reason)) from error
    except (http.client.HTTPException, OSError) as error:
        raise Cut(str(error) or type(error).__name__) from error


def answers_range(response: Any, have: int) -> bool:
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return False
    if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        raise Cut("the server sent another part than asked for")
    return True


class SafeRedirect(urllib.request.HTTPRedirectHandler):
    """Follows a redirection, but never to a place without encryption."""

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
        raise UserError(f"{url} is not {' or '.join(schemes)}; nothing was fetched")


def gave_up(download: Download, part: Path, why: str) -> str:
    have = os.path.getsize(part)
    again = "; the same command goes on from there" if have else ""
    return (
        f"cannot download {download.url}: {why} ({have / 1e6:.0f} of {download.size / 1e6:.0f} MB "
        f"came{again}); or put {download.name} into {part.parent} yourself"
    )
