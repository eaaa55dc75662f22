"""A client for `vitrail serve` on the standard library alone."""

import base64
import http.client
import json
import os
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload
from urllib.parse import quote, urlencode, urlsplit

from vitrail.arguments import check_arguments
from vitrail.errors import UserError

ImageBytes = str | Path | bytes  # a path, or the bytes of an encoded image
TOKEN_VARIABLE = "VITRAIL_TOKEN"
MAX_IMAGES = 32  # in one request


class Client:
    """Sends images to a server and returns what it answers.

    A busy server says how long to wait: the client waits and retries, for `patience` seconds in
    all. Connections are kept, one for each thread.

    >>> client = vitrail.client("http://127.0.0.1:8000")
    >>> client
    Client('http://127.0.0.1:8000')
    """

    def __init__(self, url: str, *, token: str | None, timeout: float, patience: float):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not an address; give one such as http://127.0.0.1:8000")
        try:
            self.port = parts.port
        except ValueError as error:
            raise UserError(f"{url!r} has no valid port; give one such as :8000") from error
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self.host, self.secure, self.base = (
            parts.hostname,
            parts.scheme == "https",
            parts.path.rstrip("/"),
        )
        self.timeout, self.patience = timeout, patience
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.local = threading.local()

    # a path is a Sequence[str] for the type checker, and yet one image
    @overload
    def predict(  # type: ignore[overload-overlap]
        self, images: ImageBytes, *, top: int = 5
    ) -> dict[str, Any]: ...
    @overload
    def predict(self, images: Sequence[ImageBytes], *, top: int = 5) -> list[dict[str, Any]]: ...
    def predict(
        self, images: ImageBytes | Sequence[ImageBytes], *, top: int = 5
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """What `vitrail predict --json` prints for an image, or for each of a list.

        An image of a list that cannot be read has the key `error` instead of a label.
        """
        if isinstance(images, str | Path | bytes):
            answer: dict[str, Any] = self.call("/predict", read_image(images), top=top)
            return answer
        answers: list[dict[str, Any]] = []
        for start in range(0, len(images), MAX_IMAGES):
            part = [read_image(image) for image in images[start : start + MAX_IMAGES]]
            body = json.dumps([base64.b64encode(image).decode("ascii") for image in part])
            answers += self.call("/predict", body.encode(), top=top)
        return answers

    def explain(
        self, image: ImageBytes, target: str | int | None = None, *, method: str = "best"
    ) -> dict[str, Any]:
        """Heatmaps of all methods with their faithfulness, for the predicted class or `target`."""
        wanted = {} if target is None else {"class": str(target)}
        answer: dict[str, Any] = self.call("/explain", read_image(image), method=method, **wanted)
        return answer

    def attention(
        self, image: ImageBytes, *, layer: int = -1, head: int | str = "mean", row: int | str = ""
    ) -> dict[str, Any]:
        """The attention map of one layer, head and query row."""
        answer: dict[str, Any] = self.call(
            "/attention", read_image(image), layer=layer, head=head, row=row
        )
        return answer

    def features(self, image: ImageBytes) -> list[float]:
        """The input of the head for one image."""
        features: list[float] = self.call("/features", read_image(image))["features"]
        return features

    def model(self) -> dict[str, Any]:
        """What the model file says, and the limits of the server."""
        answer: dict[str, Any] = self.call("/model")
        return answer

    def call(self, path: str, body: bytes | None = None, **query: object) -> Any:
        """The JSON answer of an endpoint; errors of the server raise `UserError`."""
        target = self.base + quote(path) + (f"?{urlencode(query)}" if query else "")
        end = time.monotonic() + self.patience
        while True:
            status, headers, content = self.request(target, body)
            wait = headers.get("retry-after", "")
            if status not in (429, 503) or not wait.isdecimal():
                break
            if time.monotonic() + int(wait) > end:
                break
            time.sleep(int(wait))
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise UserError(f"{self.url} answered {status} without JSON; is it Vitrail?") from error
        if status != 200:
            reason = answer.get("error", status) if isinstance(answer, dict) else status
            raise UserError(f"{self.url} refused the request: {reason}")
        return answer

    def request(self, target: str, body: bytes | None) -> tuple[int, dict[str, str], bytes]:
        """One request; a connection that the server closed meanwhile is opened again."""
        kept = getattr(self.local, "connection", None)
        for connection in ([kept] if kept is not None else []) + [None]:
            connection = connection or self.connect()
            self.local.connection = None
            try:
                return self.exchange(connection, target, body)
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                failed = error
                if isinstance(error, TimeoutError):
                    break
        raise UserError(f"cannot reach {self.url}: {failed or type(failed).__name__}") from failed

    def exchange(
        self, connection: http.client.HTTPConnection, target: str, body: bytes | None
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            connection.request("GET" if body is None else "POST", target, body, self.headers)
        except (BrokenPipeError, ConnectionResetError):
            if connection.sock is None:  # nothing can be read any more
                raise
        response = connection.getresponse()  # a server that refuses a body answers before its end
        content = response.read()
        if not response.will_close:
            self.local.connection = connection
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, content

    def connect(self) -> http.client.HTTPConnection:
        if self.secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=self.timeout, context=context
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def __del__(self) -> None:
        connection = getattr(getattr(self, "local", None), "connection", None)
        if connection is not None:
            connection.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"


@check_arguments
def client(
    url: str, *, token: str | None = None, timeout: float = 60.0, patience: float = 60.0
) -> Client:
    """A client for a server that `vitrail serve` started.

    Args:
        url: address of the server
        token: secret that the server wants; by default the environment variable VITRAIL_TOKEN
        timeout: seconds to wait for an answer
        patience: seconds to retry while the server is busy

    >>> vitrail.client("http://127.0.0.1:8000")
    Client('http://127.0.0.1:8000')
    """
    return Client(url, token=token, timeout=timeout, patience=patience)


def read_image(image: ImageBytes) -> bytes:
    """The bytes of an image as they are: the server decodes them."""
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {image}: {error.strerror}") from error
