"""HTTP serving on loopback: throughput, latency, overload and start, beside LitServe and BentoML.

All servers have the same weights, preprocessing and threads; one process sends requests to them in
turn. Vitrail runs with its defaults. The peers run PyTorch, once as in their quick starts and once
with batches. `engine` is what Vitrail serves, called in this process on ready arrays, without HTTP.
"""

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from PIL import Image

from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.process import ROOT

MODEL, CLASSES = "Ti/16", 1000
SIDE = 500  # pixels of the JPEG files
BATCH = 16
CONNECTIONS = 32  # that send requests without pause, to find the throughput
SECONDS = 4.0  # of one measurement
OVERLOAD, OVERLOAD_SECONDS, OVERLOAD_CONNECTIONS = 10, 60.0, 300
PEERS = ("litserve", "litserve, batches", "bentoml", "bentoml, batches")


@dataclass
class Sample:
    """What came back in one measurement: seconds by status, and how long it took."""

    times: dict[int, list[float]]
    seconds: float

    def rate(self, status: int = 200) -> float:
        return len(self.times.get(status, ())) / self.seconds

    def percentile(self, percent: int, status: int = 200) -> float:
        values = self.times.get(status, [])
        return quantiles(values, n=100)[percent - 1] if len(values) > 1 else float("nan")


# --- requests -------------------------------------------------------------------------------------


def make_jpegs(count: int = 16) -> list[bytes]:
    """Photos of about 50 kB, always the same ones."""
    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        coarse = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        pixels = (smooth + rng.normal(0, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=85)
        files.append(stream.getvalue())
    return files


def make_arrays(count: int = 16) -> list[bytes]:
    """Ready pixels: .npy files of the model's size, which need no decoder."""
    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        stream = io.BytesIO()
        np.save(stream, rng.integers(0, 256, (224, 224, 3), dtype=np.uint8))
        files.append(stream.getvalue())
    return files


def raw_request(body: bytes, path: str = "/predict?top=1", kind: str = "image/jpeg") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def litserve_request(image: bytes) -> bytes:
    body = json.dumps({"image": base64.b64encode(image).decode()}).encode()
    return raw_request(body, "/predict", "application/json")


def bentoml_request(image: bytes) -> bytes:
    line = b"--boundary\r\n"
    head = b'Content-Disposition: form-data; name="image"; filename="a.jpg"\r\n'
    body = line + head + b"Content-Type: image/jpeg\r\n\r\n" + image + b"\r\n--boundary--\r\n"
    return raw_request(body, "/classify", "multipart/form-data; boundary=boundary")


async def exchange(reader: asyncio.StreamReader, writer: Any, request: bytes) -> tuple[int, bool]:
    """Sends one request; the status of its answer, and whether the connection stays open."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    if b"content-length: " in head:
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    else:
        while (size := int(await reader.readline(), 16)) or not await reader.readline():
            await reader.readexactly(size + 2)
    return status, b"connection: close" not in head


async def send_without_pause(
    port: int, requests: list[bytes], connections: int, seconds: float, count: int = 10**9
) -> Sample:
    """Every connection sends its next request when the last one is answered.

    After a refusal it waits for a second, which is what `Retry-After` says at this load.
    """
    times: dict[int, list[float]] = {}
    end, left = time.perf_counter() + seconds, count

    async def loop(number: int) -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end and left > 0:
            left -= 1
            number += 1
            start = time.perf_counter()
            status, stays = await exchange(reader, writer, requests[number % len(requests)])
            times.setdefault(status, []).append(time.perf_counter() - start)
            if status == 429:
                await asyncio.sleep(1.0)
            if not stays:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*map(loop, range(connections)))
    return Sample(times, time.perf_counter() - start)


async def send_at_rate(
    port: int, requests: list[bytes], rate: float, seconds: float, connections: int
) -> Sample:
    """Requests at a fixed rate, whatever the server does; a free connection takes the next one."""
    times: dict[int, list[float]] = {}
    start, sent = time.perf_counter(), 0

    async def loop() -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            due, sent = start + sent / rate, sent + 1
            if due > start + seconds:
                writer.close()
                return
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            status, _ = await exchange(reader, writer, requests[sent % len(requests)])
            times.setdefault(status, []).append(time.perf_counter() - began)

    await asyncio.gather(*(loop() for _ in range(connections)))
    return Sample(times, time.perf_counter() - start)


async def probe_live(port: int, seconds: float) -> list[float]:
    """Times of /live, asked twenty times a second."""
    times, end = [], time.perf_counter() + seconds
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        start = time.perf_counter()
        await exchange(reader, writer, b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        times.append(time.perf_counter() - start)
        await asyncio.sleep(0.05)
    writer.close()
    return times


# --- servers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    port: int
    process: subprocess.Popen[bytes]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


@contextmanager
def run_server(*command: str, port: int, ready: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that is ready; it ends with the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until_ready(process, port, ready, log)
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, path: str, log: Any) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
                link.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                if b" 200 " in link.recv(100):
                    return
        except OSError:
            pass
        time.sleep(0.02)
    log.seek(0)
    raise RuntimeError(f"the server did not start:\n{log.read().decode()[-2000:]}")


def vitrail_server(model: str, port: int) -> Any:
    command = ("-m", "vitrail", "serve", model, "--port", str(port))
    return run_server(*command, port=port, ready="/ready")


def peer_server(name: str, model: str, port: int) -> Any:
    framework, _, batches = name.partition(", ")
    batch = BATCH if batches else 1
    if framework == "litserve":
        command = ["-m", "bench.lit_service", model, str(port), str(batch)]
        return run_server(*command, port=port, ready="/health")
    os.environ |= {"BENTO_MODEL": model, "BENTOML_DO_NOT_TRACK": "True"}
    service = f"bench.bento_service:{'Batching' if batches else 'Classifier'}"
    command = ["-m", "bentoml", "serve", service, "--host", "127.0.0.1", "--port", str(port)]
    return run_server(*command, port=port, ready="/readyz")


def name_engine(predictor: Any) -> str:
    engine = getattr(predictor, "engine", None)
    return "torch" if engine is None else str(engine.name)


def write_model(folder: Path) -> str:
    """Random weights of the published size, as Vitrail's own file."""
    import torch

    from vitrail.model.vit import ViT
    from vitrail.zoo.file import save_model
    from vitrail.zoo.presets import preset

    torch.manual_seed(0)
    view = {"size": 224, "crop": 0.9, "mean": [0.5] * 3, "std": [0.5] * 3}
    names = [f"class {number}" for number in range(CLASSES)]
    path = folder / "model.safetensors"
    save_model(path, ViT(preset(MODEL)), {"classes": names, "preprocess": view})
    return str(path)


# --- measurements ---------------------------------------------------------------------------------


def time_engine(predictor: Any, batch: int, seconds: float) -> float:
    """Seconds per image of the model on ready arrays, without HTTP."""
    x = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), dtype=np.float32)
    predictor.logits(x)
    start, images = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        predictor.logits(x)
        images += batch
    return (time.perf_counter() - start) / images


@contextmanager
def only(servers: dict[str, Server], name: str = "") -> Iterator[None]:
    """Pauses all other servers, some of which take processor time while they wait."""
    others = [server.process.pid for other, server in servers.items() if other != name]
    for pid in others:
        os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.killpg(pid, signal.SIGCONT)


def time_servers(
    predictor: Any, servers: dict[str, Server], requests: dict[str, list[bytes]], budget: Budget
) -> Times:
    """Seconds per image: the engine and each server in turn, in every round."""
    times: dict[str, list[float]] = {name: [] for name in ("engine", *requests)}
    for _ in range(max(budget.min_rounds, 2)):
        with only(servers):
            times["engine"].append(time_engine(predictor, BATCH, SECONDS / 2))
        for name, images in requests.items():
            with only(servers, name):
                load = send_without_pause(servers[name].port, images, CONNECTIONS, SECONDS)
                times[name].append(1 / asyncio.run(load).rate())
    return times


def measure_alone(predictor: Any, port: int, requests: list[bytes]) -> dict[str, float]:
    """One request at a time, against the forward pass of one image."""
    forward = time_engine(predictor, 1, SECONDS)
    sample = asyncio.run(send_without_pause(port, requests, 1, SECONDS))
    return {"forward_ms": 1e3 * forward, "request_ms": 1e3 * median(sample.times[200])}


def measure_overload(port: int, requests: list[bytes], peak: float) -> dict[str, float]:
    """Ten times the peak rate for a minute."""

    async def run() -> tuple[Sample, list[float]]:
        load = send_at_rate(port, requests, OVERLOAD * peak, OVERLOAD_SECONDS, OVERLOAD_CONNECTIONS)
        return await asyncio.gather(load, probe_live(port, OVERLOAD_SECONDS))

    sample, live = asyncio.run(run())
    others = sum(len(times) for status, times in sample.times.items() if status not in (200, 429))
    return {
        "offered_per_s": OVERLOAD * peak,
        "peak_per_s": peak,
        "goodput": sample.rate() / peak,
        "accepted_p99_s": sample.percentile(99),
        "refused": len(sample.times.get(429, ())),
        "refusal_p99_ms": 1e3 * sample.percentile(99, 429),
        "live_p99_ms": 1e3 * quantiles(live, n=100)[98],
        "live_max_ms": 1e3 * max(live),  # a second in which the machine stands still shows here
        "other_statuses": others,
    }


def measure_start(model: str) -> float:
    """Seconds from the command to the first answer of /ready."""
    port = free_port()
    start = time.perf_counter()
    with vitrail_server(model, port):
        return time.perf_counter() - start


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    """Throughput beside the peers, then one request alone, overload and the start."""
    import vitrail

    jpegs = make_jpegs()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_model(Path(folder))
        progress(0.0, "choosing the engine")
        predictor = vitrail.load(model, engine="auto").predictor
        exported: Any = vitrail.load(model, engine="onnxruntime")  # cached by the line before
        starts = {"auto": model, "onnxruntime": str(exported.path)}
        result: dict[str, Any] = {
            "start_s": {
                name: median(measure_start(one) for _ in range(3)) for name, one in starts.items()
            }
        }
        servers = {}
        for name in ("vitrail", *PEERS):
            port = free_port()
            start = vitrail_server if name == "vitrail" else partial(peer_server, name)
            servers[name] = Server(port, stack.enter_context(start(model, port)))
        make = {"vitrail": raw_request, "litserve": litserve_request, "bentoml": bentoml_request}
        requests = {
            name: [make[name.partition(",")[0]](one) for one in jpegs]  # type: ignore[operator]
            for name in servers
        }
        arrays = {"vitrail": [raw_request(one) for one in make_arrays()]}
        cases = [
            Case(
                label=f"{SIDE}-pixel JPEGs",
                unit="images/s",
                images=1,
                measure=partial(time_servers, predictor, servers, requests),
            ),
            Case(
                label="ready pixels (.npy)",
                unit="images/s",
                images=1,
                measure=partial(time_servers, predictor, servers, arrays),
            ),
        ]
        result["cases"] = measure(cases, budget, progress)
        peak = 1 / result["cases"][0]["rows"]["vitrail"]["median"]
        with only(servers, "vitrail"):
            port = servers["vitrail"].port
            progress(0.7, "one request alone")
            result["alone"] = measure_alone(predictor, port, arrays["vitrail"])
            progress(0.75, "overload")
            result["overload"] = measure_overload(port, requests["vitrail"], peak)
        result["engine"] = name_engine(predictor)
    result["note"] = (
        f"{MODEL}, {CONNECTIONS} connections. `engine`, without HTTP, and `vitrail` run in "
        f"{result['engine']}, which `auto` chose; the peers in PyTorch, as in their quick starts "
        f"and with batches of {BATCH}."
    )
    return result
