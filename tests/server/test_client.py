"""The client: what a server answers as Python objects, and errors as one line."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import vitrail
from tests.server.conftest import CLASSES, picture
from vitrail.errors import UserError

JPEG = picture()
TOKEN = "0123456789abcdef0123"


def test_predict_takes_a_path_bytes_or_a_list(server, model_file, tmp_path):
    (tmp_path / "cat.jpg").write_bytes(JPEG)
    client, expected = vitrail.client(server.url), vitrail.load(model_file).predict(JPEG)
    assert client.predict(str(tmp_path / "cat.jpg"))["label"] == expected.label
    assert client.predict(JPEG, top=2)["top"][1]["label"] == expected.top[1].label
    many = client.predict([JPEG] * 40)
    assert len(many) == 40 and {one["label"] for one in many} == {expected.label}
    assert "error" in client.predict([b"hello"])[0]


def test_the_other_endpoints(server):
    client = vitrail.client(server.url.removeprefix("http://"))
    assert client.model()["classes"] == CLASSES
    assert client.explain(JPEG, "dog")["class"]["label"] == "dog"
    assert client.attention(JPEG, layer=0, head=1, row=3)["layer"] == 0
    assert len(client.features(JPEG)) == 32


def test_errors_are_one_line(server, start, tmp_path):
    client = vitrail.client(server.url)
    with pytest.raises(UserError, match="not an image"):
        client.predict(b"hello")
    with pytest.raises(UserError, match="No such file"):
        client.predict(tmp_path / "nothing.jpg")
    with pytest.raises(UserError, match="cannot reach"):
        vitrail.client("http://127.0.0.1:9").predict(JPEG)
    for wrong in ("ftp://x", "http://", "http://x:y"):
        with pytest.raises(UserError, match=r"is not an address|no valid port"):
            vitrail.client(wrong)
    guarded = start(token=TOKEN)
    with pytest.raises(UserError, match="a token is required"):
        vitrail.client(guarded.url).predict(JPEG)
    assert "label" in vitrail.client(guarded.url, token=TOKEN).predict(JPEG)


def test_a_busy_server_is_asked_again():
    asked = []

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(429 if len(asked) == 1 else 200)
            self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(b'{"label": "cat"}')

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Busy) as busy:
        threading.Thread(target=busy.serve_forever, daemon=True).start()
        client = vitrail.client(f"http://127.0.0.1:{busy.server_port}")
        assert client.predict(JPEG) == {"label": "cat"} and asked == [JPEG] * 2
        busy.shutdown()


def test_the_client_needs_neither_torch_nor_the_extra():
    code = (
        "import sys, vitrail; vitrail.client('http://localhost:1');"
        "assert not {'torch', 'numpy', 'starlette', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
