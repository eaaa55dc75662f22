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
from urllib.parse import parse_qs, unquote

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
        content = file.read_bytes() if file.is_file() else b""
        first, _, last = start.removeprefix("bytes=").partition("-")
        begin, end = int(first or 0), min(int(last) + 1, len(content)) if last else len(content)
        found = 206 if start else 200
        self.send_response(
            self.status if self.status != 200 else found if known and file.is_file() else 404
        )
        if not known or self.status in (401, 404):
            self.send_header("X-Error-Code", "RepoNotFound")
        elif not file.is_file():
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(end - begin))
        if start:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.send_content(content[begin:end])

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
        self.send_json({"id": self.name, "sha": COMMIT, "siblings": names}, known)

    def send_json(self, answer: Any, known: bool) -> None:
        content = json.dumps(answer if known else {"error": "not found"}).encode()
        self.send_response(200 if known else 404)
        if not known:
            missing = {"convert": "RevisionNotFound", "/tree/": "EntryNotFound"}
            names = (name for text, name in missing.items() if text in self.path)
            self.send_header("X-Error-Code", next(names, "RepoNotFound"))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class TreeHub(DatasetHub):
    """Lists folders of a data set too, as the file system of `hf://` asks for them."""

    def list_files(self) -> None:
        path, _, query = unquote(self.path).partition("?")
        _, tree, folder = path.partition("/tree/main")
        if not tree:
            return super().list_files()
        self.requests.append(f"{self.command} {self.path}")
        pattern = "**/*" if "recursive=true" in query else "*"
        found = sorted((self.folder / folder.strip("/")).glob(pattern))
        self.send_json([self.describe(file) for file in found], bool(found))

    def do_POST(self) -> None:
        """Describes the paths that are asked for, those that exist."""
        self.requests.append(f"{self.command} {self.path}")
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = [self.folder / path for path in form["paths"] if (self.folder / path).exists()]
        self.send_json([self.describe(file) for file in found], True)

    def describe(self, file: Path) -> dict[str, Any]:
        path = file.relative_to(self.folder).as_posix()
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": COMMIT}
        content = file.read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": oid}


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
