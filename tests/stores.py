"""A real S3 server in a process of its own, and a proxy before it that can fail in many ways."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
# What to do with a request: None to forward it, else what `Proxy.answer` gets.
Fault = Callable[[str, str], "tuple[str, int, bytes] | None"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def s3_server() -> Iterator[int]:
    """Starts moto's server; yields its port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | CREDENTIALS,
    )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the S3 server ended"
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


class Proxy:
    """Forwards requests to a server, unless `fault` says otherwise; counts them."""

    def __init__(self, port: int):
        self.target = port
        self.fault: Fault | None = None
        self.log: list[str] = []  # "GET /bucket/key bytes=0-99"
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        wanted = request.headers.get("Range", "")
        self.log.append(f"{request.command} {request.path} {wanted}".strip())
        found = self.fault(request.command, request.path) if self.fault else None
        kind, status, content = found or ("forward", 200, b"")
        if kind == "drop":
            request.close_connection = True
            return
        headers = {"Content-Type": "application/xml"}
        if kind != "answer":
            status, headers, content = self.forward(request, body)
        if kind == "change":
            headers["ETag"] = '"another"'
        request.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                request.send_header(name, value)
        length = headers.get("Content-Length") if request.command == "HEAD" else len(content)
        request.send_header("Content-Length", str(length))
        request.end_headers()
        if request.command != "HEAD":
            cut = len(content) // 2 if kind == "truncate" else len(content)
            request.wfile.write(content[:cut])
        request.close_connection = kind == "truncate"

    def forward(
        self, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
        headers = {k: v for k, v in request.headers.items() if k.lower() != "connection"}
        connection.request(request.command, request.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, dict(response.getheaders()), content

    def requests(self, text: str) -> list[str]:
        return [line for line in self.log if text in line]


def error_page(code: str, message: str = "no") -> bytes:
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


def upload(folder: Path, url: str) -> str:
    """Copies a folder to a bucket, which is made if needed."""
    import s3fs

    system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    bucket = url.removeprefix("s3://").partition("/")[0]
    if not system.exists(bucket):
        system.mkdir(bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            system.pipe_file(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return url
