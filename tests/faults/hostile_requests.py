"""Hostile HTTP requests, each made from a seed: bodies, heads, connections and times."""

import io
import json
import random
import socket
import struct
import zlib

import numpy as np
from PIL import Image


def valid_images() -> list[bytes]:
    """One small image of each format."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    files = []
    for format in ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"):
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, format)
        files.append(stream.getvalue())
    stream = io.BytesIO()
    np.save(stream, pixels)
    return [*files, stream.getvalue()]


VALID = valid_images()
PATHS = ("/predict", "/explain", "/attention", "/features", "/v2/models/birds/infer", "/model")
QUERIES = (
    "",
    "?top=-1",
    "?top=9999999999",
    "?class=%00",
    "?mask=1,",
    "?layer=x",
    "?" + "a=1&" * 99,
)


def png(width: int, height: int, data: bytes) -> bytes:
    """A PNG of any declared size with any pixel data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def make_body(rng: random.Random) -> bytes:
    """A bomb, a truncated or mutated image, a wrong type, or nothing."""
    kind, image = rng.randrange(9), rng.choice(VALID)
    if kind == 0:
        return image[: rng.randrange(len(image))]
    if kind == 1:
        mutated = bytearray(image)
        for _ in range(rng.randrange(1, 30)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        return bytes(mutated)
    if kind == 2:
        sides = rng.choice(
            [(1, 1), (1, 20_000), (20_000, 1), (60_000, 60_000), (0, 5), (2**31 - 1, 9)]
        )
        return png(*sides, zlib.compress(b"\0" * rng.choice([0, 10, 60_001, 100_000])))
    if kind == 3:
        return png(3000, 3000, zlib.compress(b"\0" * 1000))
    if kind == 4:
        return rng.randbytes(rng.randrange(2000))
    if kind == 5:
        return rng.choice(
            [b"[", b"[]", b"[1,null]", b'["' + b"A" * 3000 + b'"]', b"[" * 5000, b"{}"]
        )
    if kind == 6:
        return image + rng.randbytes(500)
    if kind == 7:
        return image[:20] + image
    tensor = {
        "name": "image",
        "datatype": rng.choice(["BYTES", "FP32", 7]),
        "shape": [1],
        "data": [],
    }
    return json.dumps({"inputs": [tensor] * rng.randrange(3)}).encode()


def attack(port: int, seed: int) -> int:
    """Sends one hostile request; the status of the answer, 0 if the connection just ended."""
    rng = random.Random(seed)
    body, path = make_body(rng), rng.choice(PATHS) + rng.choice([""] * 30 + [*QUERIES])
    length = rng.choice([len(body)] * 12 + [len(body) + 50, 10**8, 0])
    extra = rng.choice([""] * 12 + ["Expect: 100-continue\r\n", "Transfer-Encoding: chunked\r\n"])
    extra += rng.choice([""] * 12 + ["X: " + "x" * 20_000 + "\r\n", "Y: 1\r\n" * 100, "\0: 1\r\n"])
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{extra}\r\n"
    data = head.encode("latin-1") + body
    data += rng.choice([b""] * 8 + [b"GET / HTTP/1.1\r\n\r\n" * 30, rng.randbytes(300)])
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))]  # and then silence, or the end
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        try:
            if rng.random() < 0.1:  # in several parts
                cut = rng.randrange(len(data) + 1)
                link.sendall(data[:cut])
                data = data[cut:]
            link.sendall(data)
            if rng.random() < 0.5:
                link.shutdown(socket.SHUT_WR)  # half-open
            elif rng.random() < 0.2:
                return 0  # hangs up without waiting
            link.settimeout(3)
            answer = link.recv(65536)
            while answer.startswith(b"HTTP/1.1 100"):
                answer = answer.partition(b"\r\n\r\n")[2] or link.recv(65536)
        except (OSError, TimeoutError):
            return 0
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
