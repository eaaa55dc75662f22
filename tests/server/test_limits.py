"""Limits on real sockets: slow, huge, broken and pipelined requests harm only their sender."""

import io
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.server.conftest import picture, read_all
from vitrail.server import protocol

JPEG = picture()


def post(body, path="/predict", length=None, extra=""):
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{extra}\r\n"
    return head.encode() + body


@pytest.fixture(scope="module")
def small(start):
    return start(max_mb=0.25, max_megapixels=0.5, body_timeout=0.3)


def test_a_long_body_is_refused_by_its_length_and_by_counting(small):
    assert b" 413 " in small.send(post(b"", length=300_000))[:20]
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in small.send(head + 12 * chunk)[:20]
    assert small.call("/predict", JPEG).status == 200


def test_a_bomb_is_refused_by_its_pixels(small):
    stream = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(stream, "PNG")
    answer = small.call("/predict", stream.getvalue())
    assert answer.status == 413 and "100 megapixels" in answer.json["error"]
    array = io.BytesIO()
    np.save(array, np.zeros((1, 1, 3), np.uint8))
    lying = array.getvalue().replace(b"(1, 1, 3)", b"(99999, 99999, 3)", 1)
    assert small.call("/predict", lying[: len(lying)]).status in (413, 422)


@pytest.mark.parametrize("size", [(1, 1), (1, 20_000), (20_000, 1), (3, 2)])
def test_odd_shapes_are_answered(small, size):
    assert small.call("/predict", picture(size, format="PNG")).status == 200


def test_a_slow_body_times_out(small):
    start = time.monotonic()
    with small.connect() as link:
        link.sendall(post(b"x" * 10, length=100))
        assert b" 408 " in read_all(link)[:20]
    assert time.monotonic() - start < 3


def test_a_slow_head_is_closed(server, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    start = time.monotonic()
    with server.connect() as silent, server.connect() as slow:
        slow.sendall(b"GET /live HT")
        assert read_all(slow) == b"" and read_all(silent) == b""
    assert time.monotonic() - start < 3


def test_huge_heads_are_refused(server):
    assert b" 431 " in server.send(b"GET /live HTTP/1.1\r\nX: " + b"x" * 100_000)[:20]
    many = b"".join(b"X-%d: 1\r\n" % number for number in range(200))
    assert (
        b" 431 " in server.send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n")[:20]
    )
    query = b"GET /live?" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert b" 431 " in server.send(query)[:20]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Content-Length: 6\r\n\r\nhello",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    ],
)
def test_garbage_is_a_400(server, garbage, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    received = server.send(garbage, timeout=1)
    assert b" 400 " in received[:20] and b'{"error"' in received


def test_pipelined_requests_are_answered_in_order(server):
    get = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received = server.send(post(JPEG) + 3 * get + last)
    statuses = [part.split(b" ")[0] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200"] * 4 + [b"404"]


def test_pipelined_floods_are_refused(server):
    received = server.send(post(JPEG) + 500 * b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert received.count(b"HTTP/1.1") <= protocol.MAX_PIPELINED + 2


def test_the_rest_of_a_refused_body_is_not_read_for_ever(server, monkeypatch):
    monkeypatch.setattr(protocol, "DISCARD_SECONDS", 0.3)
    start = time.monotonic()
    with server.connect() as link:
        link.sendall(post(b"", "/nowhere", length=10**6))
        assert b" 404 " in read_all(link)[:20]  # and closed
    assert time.monotonic() - start < 3


def test_a_connection_is_reused_after_a_refusal(server):
    received = server.send(
        post(b"x" * 1000, "/nowhere") + post(JPEG, extra="Connection: close\r\n")
    )
    assert b" 404 " in received[:20] and b"HTTP/1.1 200" in received


def test_too_many_connections_are_refused_and_the_others_stay(server, monkeypatch):
    with server.connect() as first:
        time.sleep(0.1)
        monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 1)
        assert b" 503 " in server.send(b"")[:20]
        first.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in read_all(first)[:20]


def test_a_deflated_bomb_inside_a_png_is_refused(small):
    raw = zlib.compress(b"\0" * 50_000_000, 9)

    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = (100).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"zTXt", b"a\0\0" + raw)
    assert small.call("/predict", png + chunk(b"IDAT", raw) + chunk(b"IEND", b"")).status < 500
