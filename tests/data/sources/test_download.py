"""Downloads survive cut connections, hostile servers and each other, against a local server."""

import errno
import hashlib
import multiprocessing
import ssl
import threading
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vitrail.data.sources.catalogue import Download
from vitrail.data.sources.download import download_file, lock_downloads
from vitrail.errors import UserError

CONTENT = bytes(range(256)) * 4000  # about a megabyte


class Server(ThreadingHTTPServer):
    """Serves one file the way a test asks for, and remembers what was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.cuts: list[int] = []  # bytes after which each of the next answers breaks off
        self.errors: list[int] = []  # codes of the next answers
        self.ranges = True
        self.redirect = ""
        self.asked: list[str] = []
        self.sent = 0  # bytes, about

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        asked = self.headers.get("Range", "")
        self.server.asked.append(asked)
        if self.server.redirect:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
            return
        if self.server.errors:
            self.send_error(self.server.errors.pop(0))
            return
        start = int(asked[len("bytes=") : -1]) if asked and self.server.ranges else 0
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            total = len(self.server.content)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else len(body)
        for at in range(0, cut, 2**18):
            try:
                self.wfile.write(body[at : min(at + 2**18, cut)])
                self.server.sent += 2**18
            except ConnectionError:
                return

    def log_message(self, *anything):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def get(server, folder):
    md5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    download = Download(url=server.url, size=len(CONTENT), md5=md5)
    return download_file(download, folder, schemes=("http",), pause=0)


def why(server, folder) -> str:
    with pytest.raises(UserError) as error:
        get(server, folder)
    return str(error.value)


def test_a_file_is_downloaded_completely(server, tmp_path):
    path = get(server, tmp_path / "new")
    assert path == tmp_path / "new" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]


def test_an_existing_file_is_not_downloaded(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"mine")
    assert get(server, tmp_path).read_bytes() == b"mine"
    assert server.asked == []


def test_an_interrupted_download_is_resumed(server, tmp_path):
    server.cuts = [300_000, 200_000, 1]
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == ["", "bytes=300000-", "bytes=500000-", "bytes=500001-"]


@pytest.mark.parametrize(
    "failure", [ssl.SSLError("record layer failure"), OSError(errno.EHOSTUNREACH, "No route")]
)
def test_a_network_failure_is_retried(server, tmp_path, monkeypatch, failure):
    read, failures = HTTPResponse.read, [None, failure]

    def unsteady(self, *size):
        if failures and (error := failures.pop(0)):
            raise error
        return read(self, *size)

    monkeypatch.setattr(HTTPResponse, "read", unsteady)
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == ["", f"bytes={2**18}-"]


def test_a_later_command_resumes_where_the_first_gave_up(server, tmp_path):
    server.cuts = [400_000, 0, 0, 0, 0, 0]
    found = why(server, tmp_path)
    assert "received only 400000 of 1024000 bytes" in found
    assert "run the same command again to resume" in found
    assert not (tmp_path / "file.bin").exists()
    server.asked.clear()
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=400000-"]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.cuts, server.ranges = [300_000], False
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_partial_file_of_another_version_is_discarded(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"something else" * 100)
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=1400-", ""]


def test_a_partial_file_that_is_too_long_is_discarded(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"x")
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    server.content = CONTENT[:-1] + b"x"
    assert "has checksum" in why(server, tmp_path)
    assert len(server.asked) == 1
    assert not (tmp_path / "file.bin").exists()
    server.content = CONTENT
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_file_that_is_too_long_is_aborted(server, tmp_path):
    server.content = CONTENT * 50
    assert "has more than 1024000 bytes" in why(server, tmp_path)
    assert server.sent < len(server.content) / 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


@pytest.mark.parametrize("code", [500, 503, 429])
def test_server_errors_are_retried(server, tmp_path, code):
    server.errors = [code] * 3
    assert get(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("code", [403, 404])
def test_a_missing_file_is_not_retried(server, tmp_path, code):
    server.errors = [code]
    assert f"responded {code}" in why(server, tmp_path)
    assert len(server.asked) == 1


def test_no_network_says_where_to_put_the_file(tmp_path):
    download = Download(url="http://127.0.0.1:1/file.bin", size=1, md5="")
    with pytest.raises(UserError) as error:
        download_file(download, tmp_path, schemes=("http",), pause=0)
    assert "refused" in str(error.value)
    assert f"put file.bin into {tmp_path} yourself" in str(error.value)


def test_nothing_is_downloaded_without_encryption(server, tmp_path):
    with pytest.raises(UserError, match="is not https; nothing was downloaded"):
        download_file(Download(url=server.url, size=1, md5=""), tmp_path)
    assert server.asked == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("ftp://127.0.0.1/x", "ftp://127.0.0.1/x is not http; nothing was downloaded"),
        ("file:///etc/passwd", "responded 302"),
    ],
)
def test_a_redirection_cannot_leave_the_allowed_schemes(server, tmp_path, target, words):
    server.redirect = target
    assert words in why(server, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").touch()
    assert "set VITRAIL_DATA to another folder" in why(server, tmp_path / "file" / "data")


def hold(folder, started, finished):
    with lock_downloads(folder):
        started.set()
        finished.wait(10)


def test_a_second_process_waits_for_the_first(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    started, finished = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold, args=(tmp_path, started, finished))
    other.start()
    assert started.wait(30)
    entered = threading.Event()

    def enter():
        with lock_downloads(tmp_path):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.2)
    finished.set()
    assert entered.wait(10)
    thread.join()
    other.join()
