"""Files behind URLs such as s3://bucket/photos: listed, read and written by fsspec, with retries.

A store that fails is asked again with growing pauses, for `VITRAIL_STORE_MINUTES`. What a retry
cannot fix (no such bucket, no rights, credentials that expired, a file that changed) is an error of
one line.
"""

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from vitrail.data.sources.places import cache_folder
from vitrail.errors import OutOfResources, UserError

SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://")
EXTRAS = {  # what installs the file system of a scheme
    **{"s3": "vitrail[s3]", "s3a": "vitrail[s3]", "gs": "vitrail[gcs]", "gcs": "vitrail[gcs]"},
    **{"hf": "vitrail[hub]", "http": "vitrail[http]", "https": "vitrail[http]"},
}
VERSION_KEYS = (  # of what fsspec tells about a file, the strongest first
    *("ETag", "etag", "blob_id", "md5Hash", "crc32c", "sha256", "xet_hash", "generation"),
    *("LastModified", "Last-Modified", "mtime", "updated", "created", "last_commit"),
)
OPTIONS = {"use_listings_cache": False, "skip_instance_cache": True}
SINGLE_ATTEMPT = {"retries": {"total_max_attempts": 1}}  # of botocore: `retry` does the others
PART = 1 << 20  # bytes of a range that are read from a connection at once
MINUTES = 10.0  # that a store may fail before a run ends
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds between attempts; doubled after each failure
REPORT_AFTER, REPORT_EVERY = 5.0, 60.0  # seconds of failures until they are reported, and again
# Libraries whose exceptions mean that a connection failed, if they are not OSErrors.
CLIENTS = (
    *("aiohttp", "botocore", "aiobotocore", "gcsfs", "google", "requests", "urllib3"),
    *("httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub", "fsspec"),
)

T = TypeVar("T")
log = logging.getLogger(__name__)
_lock, _systems = threading.Lock(), dict[tuple[int, str], Any]()
_services: list[Any] = []  # botocore's loader, if one was made


class StoreError(OutOfResources):
    """A store does not give what it has listed: the images themselves may be intact."""


class NotStored(StoreError):
    """Nothing is stored at a URL."""


class URL(PurePosixPath):
    """The address of a folder or file in a store, with the methods that a source's path needs."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> "URL":
        return self

    def resolve(self) -> "URL":
        return self


Location = Path | URL  # of a data set


@dataclass(frozen=True)
class StoreFile:
    """A file of a store as it was listed: any other version is another file."""

    url: str
    size: int  # bytes
    version: str  # its ETag, or whatever the store has that changes with the content


def is_url(path: object) -> bool:
    return isinstance(path, URL) or (isinstance(path, str) and bool(SCHEME.match(path)))


def parse_url(text: str | Path) -> URL:
    """The URL in a text, which may end in /."""
    url = str(text)
    if "::" in url or "?" in url or "#" in url:
        raise UserError(f"{url} is not a plain URL; write it like s3://bucket/photos")
    if url.startswith("file://"):
        raise UserError(f"{url} is on this machine; write the path without file://")
    if url.partition("://")[2].strip("/") == "":
        raise UserError(f"{url} does not name a bucket or host; write it like s3://bucket/photos")
    return URL(url)


def list_files(url: URL) -> dict[str, StoreFile]:
    """All files below a folder, by their path from there."""
    root = str(url).rstrip("/")

    def find() -> dict[str, StoreFile]:
        system, path = open_system(root)
        system.invalidate_cache()
        listed = system.find(path, detail=True)
        if not listed:
            system.info(path)  # raises if the bucket or folder does not exist
        start = f"{path.rstrip('/')}/"
        found = {}
        for full, about in listed.items():
            if full.startswith(start) and about.get("type") != "directory":
                about = about if has_details(about) else system.info(full)
                found[full[len(start) :]] = make_file(f"{root}/{full[len(start) :]}", about)
        return found

    return retry(root, find)


def list_names(url: URL) -> set[str]:
    """The paths of all files below a folder, which exists once something is below it."""
    try:
        return set(list_files(url))
    except NotStored:
        return set()


def find_file(url: str) -> StoreFile:
    """The current version of a file."""

    def ask() -> StoreFile:
        system, path = open_system(url)
        if url.startswith("hf://"):  # else it would list the whole folder for every file
            return make_file(url, system.info(path, refresh=True, expand_info=True))
        system.invalidate_cache()
        return make_file(url, system.info(path))

    return retry(url, ask)


def read_bytes(file: StoreFile, start: int, end: int) -> bytes:
    """A range of a file, complete and of the version that was listed."""
    return b"".join(read_pieces(file, start, end))


def read_pieces(file: StoreFile, start: int, end: int) -> list[bytes]:
    """The same in pieces: after an interruption, only the rest of the range is requested."""
    parts: list[bytes] = []

    def read() -> bool:
        tells_version = False
        while (begin := start + sum(map(len, parts))) < end:
            system, path = open_system(file.url)
            if tells_version := hasattr(system, "_call_s3"):
                stream_from_s3(system, path, file, begin, end, parts)
            else:
                parts.append(read_part(system, path, file, begin, end))
        return tells_version

    if not retry(file.url, read):
        check_unchanged_file(file)
    return parts


def read_part(system: Any, path: str, file: StoreFile, begin: int, end: int) -> bytes:
    part: bytes = system.cat_file(path, start=begin, end=end)
    if len(part) > end - begin and len(part) == file.size:
        part = part[begin:end]  # a server that ignores ranges sends everything
    if not 0 < len(part) <= end - begin:
        raise ConnectionError(f"received {len(part)} bytes instead of {end - begin}")
    return part


def stream_from_s3(
    system: Any, path: str, file: StoreFile, begin: int, end: int, parts: list[bytes]
) -> None:
    """Adds a range to `parts` as it arrives.

    The response states the version of the file, which saves a second request.
    """
    from fsspec.asyn import sync

    bucket, key, _ = system.split_path(path)

    async def stream() -> str:
        wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={begin}-{end - 1}"}
        answer = await system._call_s3("get_object", **wanted)
        with closing(answer["Body"]) as body:
            if (version := answer["ETag"].strip('"')) != file.version:
                return str(version)
            if (length := answer["ContentLength"]) != end - begin:
                raise ConnectionError(f"received {length} bytes instead of {end - begin}")
            while part := await body.read(PART):
                parts.append(part)
        return file.version

    if sync(system.loop, stream) != file.version:
        check_unchanged_file(file)
        raise ConnectionError("received another version than the current one")


def read_whole(url: str) -> bytes:
    """The content of a file."""
    file = find_file(url)
    return read_bytes(file, 0, file.size)


def check_unchanged_file(file: StoreFile) -> None:
    """Raises if the store has another version of a file by now."""
    current = find_file(file.url)
    if (current.size, current.version) != (file.size, file.version):
        raise StoreError(
            f"{file.url} changed after it was listed: version {current.version} of "
            f"{current.size:,} bytes, expected {file.version} of {file.size:,}; restore it, or "
            f"start again with the new data"
        )


def put_bytes(url: str, content: bytes) -> None:
    """Writes a small file."""

    def write() -> None:
        system, path = open_system(url)
        system.pipe_file(path, content)

    retry(url, write, writing=True)


def upload_file(source: Path, url: str) -> None:
    """Copies a file of this machine to a store."""

    def upload() -> None:
        system, path = open_system(url)
        system.put_file(str(source), path)

    retry(url, upload, writing=True)


def open_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, one for each process, and the path in it."""
    import fsspec

    scheme = url.partition("://")[0]
    host = url.partition("://")[2].partition("/")[0] if scheme not in EXTRAS else ""
    key = os.getpid(), f"{scheme}://{host}"
    with _lock:
        if key not in _systems:
            try:
                options = OPTIONS | (s3_options() if scheme in ("s3", "s3a") else {})
                _systems[key] = fsspec.core.url_to_fs(url, **options)[0]
                _systems[key].retries = 1  # of s3fs and gcsfs: `retry` does it, and reports it
            except ImportError as error:
                what = EXTRAS.get(scheme)
                extra = f"pip install '{what}'" if what else str(error)
                raise UserError(f"{url} needs another package; {extra}") from error
            except ValueError as error:
                raise UserError(f"{url} cannot be opened: {error}") from error
        return _systems[key], _systems[key]._strip_protocol(url)


def s3_options() -> dict[str, Any]:
    """A session for s3fs, with the descriptions of services that an earlier one has parsed.

    A worker process inherits these. Parsing them again would take it half a second.
    """
    try:
        from aiobotocore.session import AioSession
    except ImportError:  # `open_system` says what to install
        return {}
    session = AioSession()
    if _services:
        session.register_component("data_loader", _services[0])
    else:
        _services.append(session.get_component("data_loader"))
    return {"session": session, "config_kwargs": SINGLE_ATTEMPT}


def make_file(url: str, about: dict[str, Any]) -> StoreFile:
    version = next((str(about[key]) for key in VERSION_KEYS if about.get(key)), "")
    return StoreFile(url, int(about.get("size") or 0), version.strip('"'))


def has_details(about: dict[str, Any]) -> bool:
    """Whether a listing tells the size and version of a file; those of web servers do not."""
    return about.get("size") is not None and any(about.get(key) for key in VERSION_KEYS)


def retry(url: str, action: Callable[[], T], *, writing: bool = False) -> T:
    """Does something with a store; repeats it with growing pauses as long as the store fails."""
    limit, start, failures = patience(), time.monotonic(), 0
    while True:
        try:
            return action()
        except (StoreError, UserError):
            raise
        except Exception as error:
            if problem := describe_store_problem(url, error, writing):
                missing = isinstance(error, FileNotFoundError)
                raise (NotStored if missing else StoreError)(problem) from error
            if not isinstance(error, OSError | TimeoutError) and not is_client_error(error):
                raise
            waited, reason = time.monotonic() - start, describe_reason(error)
            if waited >= limit:
                raise StoreError(
                    f"{url} failed for {waited / 60:.1f} minutes: {reason}; try again later, or "
                    f"raise VITRAIL_STORE_MINUTES (now {limit / 60:g})"
                ) from error
            if waited > REPORT_AFTER:
                report_failure(url, reason, limit - waited)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**failures, max(0.0, limit - waited))
        # forked processes have the same state of `random`, and should not come back together
        time.sleep(pause * random.SystemRandom().uniform(0.5, 1.0))
        failures += 1


def patience() -> float:
    """Seconds that a store may fail."""
    return 60 * read_number("VITRAIL_STORE_MINUTES", MINUTES)


def read_number(variable: str, default: float) -> float:
    """A number of at least 0 from the environment."""
    text = os.environ.get(variable)
    try:
        number = default if not text else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UserError(f"{variable} is {text!r}; give a number of at least 0")
    return number


def report_failure(url: str, reason: str, left: float) -> None:
    """Logs that a store fails, once a minute in all processes together."""
    stamp = cache_folder() / "store" / "reported"
    with _lock:
        with suppress(OSError):  # it does not exist
            if time.time() - stamp.stat().st_mtime < REPORT_EVERY:
                return
        with suppress(OSError):  # then it is reported more often
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
    # only the first rank logs warnings, but any rank may be the one that waits
    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.ERROR
    log.log(level, f"{url} fails ({reason}); trying again for up to {left / 60:.1f} minutes")


def describe_store_problem(url: str, error: Exception, writing: bool) -> str:
    """What is wrong and what to do, if a retry cannot help; "" if it can."""
    name, reason = type(error).__name__, describe_reason(error)
    texts = re.sub(r"\S*/\S*", "", f"{name} {reason} {error.__cause__!r}")  # without URLs
    do = "write" if writing else "read"
    if "Expired" in texts or "expired" in texts:
        return f"the credentials for {url} have expired; renew them and try again"
    if name in ("NoCredentialsError", "DefaultCredentialsError", "ProfileNotFound"):
        return f"no credentials for {url}: {reason}; log in, or set those of a service account"
    if isinstance(error, PermissionError) or re.search(r"\b40[13]\b|Forbidden", texts):
        return f"no right to {do} {url} ({reason}); check the credentials and the bucket's rights"
    if isinstance(error, FileNotFoundError) or name in ("RepositoryNotFoundError",):
        return f"{url} does not exist; check the bucket and the path"
    if isinstance(error, NotImplementedError):
        return f"{url}: this store cannot {do} files"
    return ""


def is_client_error(error: Exception) -> bool:
    return any(kind.__module__.partition(".")[0] in CLIENTS for kind in type(error).__mro__)


def describe_reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text.strip().split("\n")[0] or type(error).__name__
