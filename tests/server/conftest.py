"""A tiny model, servers in threads and in processes, and raw HTTP on real sockets."""

import asyncio
import http.client
import io
import json
import socket
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.exporting.traces import trace_once
from vitrail.exporting.engine import ENGINE_SUFFIXES
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.server.config import ServeConfig
from vitrail.server.lifecycle import run_server
from vitrail.server.model import load_served
from vitrail.server.serve import bind
from vitrail.zoo.file import save_model

__all__ = ["trace_once"]

CLASSES = ["cat", "dog", "heron", "newt"]


def write_model(path, seed=0, classes=CLASSES, source="/secret/place", **changes):
    """A model file with random weights that make no two logits alike."""
    torch.manual_seed(seed)
    settings = {"image": 32, "patch": 8, "width": 32, "depth": 2, "heads": 2, **changes}
    model = ViT(ViTConfig(classes=len(classes), **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    scores = {"accuracy": 0.75, "interval": [0.6, 0.9]}
    save_model(
        path,
        model,
        {
            "classes": classes,
            "preprocess": {"size": 32, "crop": 0.875, "mean": [0.4, 0.5, 0.6], "std": [0.2] * 3},
            "temperature": 1.5,
            "metrics": {"test": scores},
            "data": {"name": "zoo", "source": str(source)},
        },
    )
    return path


def picture(size=(50, 40), seed=0, format="JPEG", mode="RGB"):
    """The bytes of an encoded image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, format)
    return stream.getvalue()


class Answer(SimpleNamespace):
    """status, headers, body; and the JSON in it."""

    @property
    def json(self):
        return json.loads(self.body)


class Running:
    """A server: where it is, and how to talk to it."""

    def __init__(self, port, server=None, process=None):
        self.port, self.server, self.process = port, server, process
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path, body=None, method=None, timeout=20, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method or ("GET" if body is None else "POST"), path, body, names)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(status=response.status, headers=found, body=response.read())
        finally:
            connection.close()

    def connect(self, timeout=20):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def send(self, data, timeout=20):
        """All that comes back for raw bytes, until the server closes or stays silent."""
        with self.connect(timeout) as link:
            link.sendall(data)
            return read_all(link)


def read_all(link):
    received = b""
    try:
        while part := link.recv(65536):
            received += part
    except (TimeoutError, ConnectionResetError):
        pass
    return received


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("served") / "birds.safetensors")


@pytest.fixture(scope="module")
def start(model_file):
    """Starts servers in threads: `start(max_wait=2)`; all end with the module."""
    running = []

    def begin(path=model_file, engine=None, **settings):
        config, ready, box = ServeConfig(port=0, **settings), threading.Event(), []
        listener = bind(config.host, 0)
        load = partial(
            load_served,
            str(path),
            engine=engine,
            device="cpu",
            max_bytes=config.max_bytes,
            max_pixels=config.max_pixels,
        )

        def announce(server):
            box.append((server, asyncio.get_running_loop()))
            ready.set()

        def run():
            with listener:
                asyncio.run(run_server(config, load, listener, announce))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(120)
        running.append((*box[0], thread))
        found = Running(listener.getsockname()[1], box[0][0])
        found.loop = box[0][1]
        return found

    yield begin
    for server, _, _ in running:
        server.force_exit = server.should_exit = True
    for _, _, thread in running:
        thread.join(10)


@pytest.fixture(scope="module")
def server(start):
    """A server with default settings for all tests of a module."""
    return start()


@pytest.fixture
def launch(model_file, tmp_path):
    """Starts `vitrail serve` as a process of its own: `launch("--workers", 2)`."""
    running = []

    def begin(*flags, path=model_file, **environment):
        log = (tmp_path / f"log-{len(running)}.txt").open("w+")
        if "--engine" not in flags and path.suffix not in ENGINE_SUFFIXES:
            flags += ("--engine", "torch")  # auto would export and measure first
        process = subprocess.Popen(
            [sys.executable, "-m", "vitrail", "serve", path, "--port", "0", "--json"]
            + [str(flag) for flag in flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        running.append((process, log))
        line = process.stdout.readline()
        assert line, log.seek(0) or log.read()
        found = Running(int(json.loads(line)["url"].rpartition(":")[2]), process=process)
        found.log = lambda: (log.seek(0), log.read())[1]
        return found

    yield begin
    for process, log in running:
        process.kill()
        process.communicate()
        log.close()
