"""Reading requests: bodies within their limits, query parameters, and callers who hang up."""

import asyncio
import base64
import binascii
import json
import re
import time
from collections.abc import Awaitable, Collection
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from vitrail.data.image import READABLE, can_decode, detect_format
from vitrail.display.text import printable
from vitrail.errors import TooLarge, UserError
from vitrail.server.config import MAX_IMAGES, ServeConfig
from vitrail.server.model import ImageOptions

Result = TypeVar("Result")

BODY_SECONDS = 60.0  # for a whole body, however steadily it arrives
MAX_MESSAGE = 200  # characters of an error
ADDRESS = re.compile(r"<[^>]*>|0x[0-9a-f]+")  # of a Python object, in another library's message
CURL = "curl --data-binary @cat.jpg URL"


class HttpError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, **headers: str):
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


async def read_body(request: Request, config: ServeConfig) -> bytes:
    """The body, counted while it arrives."""
    check_body_headers(request, config.max_bytes)
    chunks, size = [], 0
    end = time.monotonic() + BODY_SECONDS
    try:
        while True:
            seconds = min(config.body_timeout, end - time.monotonic())
            async with asyncio.timeout(seconds):
                message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > config.max_bytes:
                raise too_many_bytes(config.max_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                break
    except TimeoutError as error:
        raise HttpError(
            408, "the body did not arrive in time; send it again", connection="close"
        ) from error
    if not size:
        raise HttpError(400, f"the request has no body; send an image: {CURL}")
    return b"".join(chunks)


def check_body_headers(request: Request, limit: int) -> None:
    """Refuses a body that cannot be an image before it is read."""
    kind = request.headers.get("content-type", "").lower()
    if kind.startswith("multipart/"):
        raise HttpError(415, f"multipart forms are not supported; send the image itself: {CURL}")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise HttpError(415, "compressed bodies are not supported; send the image as it is")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:18]) > limit:
        raise too_many_bytes(limit)


def too_many_bytes(limit: int) -> HttpError:
    return HttpError(413, f"the body is over the limit of {limit / 2**20:g} MB", connection="close")


def split_images(body: bytes) -> list[bytes | UserError] | None:
    """The images of a JSON list of base64 strings; None if the body is one image."""
    if not body[:64].lstrip().startswith(b"["):
        return None
    try:
        items = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "the body starts with [ but is not a JSON list") from error
    if not 1 <= len(items) <= MAX_IMAGES:
        raise HttpError(400, f"{len(items)} images; give 1 to {MAX_IMAGES} in one request")
    return [decode_base64(item) for item in items]


def decode_base64(item: object) -> bytes | UserError:
    """One image of a list; a data URI is accepted too."""
    if not isinstance(item, str):
        return UserError(f"a {type(item).__name__}; wanted an image as a base64 string")
    try:
        _, _, text = item[:64].rpartition("base64,")
        start = len(item[:64]) - len(text)
        return base64.b64decode(item[start:], validate=True) or UserError("empty")
    except (binascii.Error, ValueError):
        return UserError("not valid base64")


def check_image(body: bytes) -> None:
    """Refuses what is not an image before it is queued."""
    format = detect_format(body)
    if not can_decode(format):
        kind = format or ("a video" if body[4:8] == b"ftyp" else "not an image")
        raise HttpError(415, f"{kind}; send {READABLE}")


def image_error(error: Exception) -> HttpError:
    """The answer to an image that cannot be decoded."""
    status = 413 if isinstance(error, TooLarge) else 422
    return HttpError(status, f"cannot use this image: {clean(error)}")


def clean(error: Exception) -> str:
    """One line without names of objects or addresses in memory."""
    text = printable(ADDRESS.sub("...", " ".join(str(error).split())))
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of the work, which is cancelled if the caller hangs up."""

    async def wait() -> Result:
        return await work

    task = asyncio.create_task(wait())
    watcher = asyncio.create_task(wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        task.cancel()


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- query parameters -----------------------------------------------------------------------------


def check_parameters(request: Request, known: Collection[str]) -> None:
    """Refuses parameters that would be ignored."""
    if unknown := sorted(set(request.query_params) - set(known)):
        raise HttpError(
            400, f"unknown parameter {clean(ValueError(unknown[0]))!r}; known: {', '.join(known)}"
        )


def number_parameter(request: Request, name: str, default: int, lowest: int, highest: int) -> int:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII) or not lowest <= int(text) <= highest:
        raise HttpError(400, f"{name} must be a whole number from {lowest} to {highest}")
    return int(text)


def switch_parameter(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "")
    if text not in ("", "0", "1", "false", "true"):
        raise HttpError(400, f"{name} must be 0 or 1")
    return text in ("1", "true")


def image_options(request: Request) -> ImageOptions:
    """`cropped` and `mask`."""
    text = request.query_params.get("mask", "")
    if text and not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise HttpError(400, "mask must be patch numbers separated by commas, such as 0,1,17")
    mask = tuple(int(number) for number in text.split(",")) if text else ()
    return ImageOptions(cropped=switch_parameter(request, "cropped"), mask=mask)
