"""A local server that answers like the Hugging Face hub, for tests of downloads."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that a download needs; its attributes make it fail."""

    folder: Path
    requests: list[str]
    name: str  # of the only repository
    status = 200  # of all answers
    pause = 0.0  # seconds before an answer
    cut = 0  # bytes after which the first download ends
    flip = False  # damage what is sent

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        start = self.headers.get("Range", "")
        if "/resolve/" not in self.path:  # telemetry
            self.send_error(404)
            return
        self.requests.append(f"{self.command} {self.path} {start}")
        time.sleep(self.pause)
        owner, repository, _, _, name = self.path.strip("/").split("/", 4)
        file = self.folder / name
        known = f"{owner}/{repository}" == self.name
        first = int(start.removeprefix("bytes=").partition("-")[0] or 0) if start else 0
        found = 206 if first else 200
        self.send_response(
            self.status if self.status != 200 else found if known and file.is_file() else 404
        )
        if not known or self.status in (401, 404):
            self.send_header("X-Error-Code", "RepoNotFound")
        elif not file.is_file():
            self.send_header("X-Error-Code", "EntryNotFound")
        content = file.read_bytes() if file.is_file() else b""
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.send_content(content[first:])

    def send_content(self, content: bytes) -> None:
        if self.flip:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if self.cut and len(content) > self.cut:
            content, type(self).cut = content[: self.cut], 0
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


class DatasetHub(Hub):
    """Lists the files of a data set, and serves them."""

    def answer(self, body: bool) -> None:
        if self.path.startswith("/api/datasets/"):
            return self.list_files()
        self.path = self.path.replace("/datasets/", "/", 1)
        super().answer(body)

    def list_files(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        known = self.path.startswith(f"/api/datasets/{self.name}") and "convert" not in self.path
        files = [file for file in self.folder.rglob("*") if file.is_file()] if known else []
        names = [{"rfilename": file.relative_to(self.folder).as_posix()} for file in files]
        content = json.dumps({"id": self.name, "sha": "a" * 40, "siblings": names}).encode()
        self.send_response(200 if known else 404)
        missing = "RevisionNotFound" if "convert" in self.path else "RepoNotFound"
        if not known:
            self.send_header("X-Error-Code", missing)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def run_hub(kind: type[Hub], folder: Path, name: str) -> Iterator[ThreadingHTTPServer]:
    """Serves the files of `folder` as the repository `name`, in a handler class of its own."""
    handler = type("Handler", (kind,), {"folder": folder, "requests": [], "name": name})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, server: ThreadingHTTPServer, cache: Path) -> Any:
    """Lets this process use the server and a cache of its own; the server's handler class."""
    from huggingface_hub import constants

    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    return server.RequestHandlerClass
