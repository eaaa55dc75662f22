"""`vitrail serve`: loads a model and answers over HTTP until it is stopped."""

import asyncio
import json as as_json
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.arguments import check_arguments
from vitrail.errors import UserError
from vitrail.server.config import ServeConfig, read_token

if TYPE_CHECKING:
    from vitrail.server.model import ServedModel

Announce = Callable[[dict[str, Any]], None]  # called with what is served once the server is ready

log = logging.getLogger(__name__)

PACKAGES = ("starlette", "uvicorn", "httptools", "prometheus_client")


@check_arguments
def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    token: Path | None = None,
    no_token: bool = False,
    allowed_hosts: tuple[str, ...] = (),
    batch: int | None = None,
    max_wait: float = 0.8,
    max_mb: float = 20.0,
    max_megapixels: float = 50.0,
    drain: float = 30.0,
    examples: int = 8,
    engine: Literal["auto", "torch", "onnxruntime", "openvino"] = "auto",
    device: str = "auto",
    json: bool = False,
) -> None:
    """Serves a model over HTTP, with a page that explains its answers, until it is stopped.

    Args:
        model: run folder, weight file or folder, or exported model
        host: address to listen on; other than loopback, it needs `token` or `no_token`
        port: port to listen on; 0 is any free one
        workers: processes, each with a copy of the model
        token: file with a secret that requests present as `Authorization: Bearer`; by default the
            environment variable VITRAIL_TOKEN
        no_token: let everybody who reaches the host use the model
        allowed_hosts: names that requests may use besides localhost, such as that of a proxy
        batch: maximum batch size; by default 4 on a CPU and 32 on a GPU
        max_wait: seconds; a request that would wait longer is refused with 429 and Retry-After
        max_mb: megabytes of a request, at most
        max_megapixels: megapixels of an image, at most
        drain: seconds that accepted requests have to finish after SIGTERM
        examples: validation images of the run that the page offers
        engine: torch, onnxruntime or openvino; "auto" picks the fastest that is installed and
            proved equal to PyTorch, measured once for each model and machine; an exported file
            runs in its own
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        json: print one JSON document with the address when the server is ready

    >>> vitrail.serve("runs/digits-1", port=8080)  # doctest: +SKIP
    """
    check_packages()
    config = ServeConfig(
        host=host,
        port=port,
        workers=workers,
        token=None if no_token and token is None else read_token(token),
        no_token=no_token,
        allowed_hosts=tuple(allowed_hosts),
        batch=batch,
        max_wait=max_wait,
        max_mb=max_mb,
        max_megapixels=max_megapixels,
        drain=drain,
        examples=examples,
    )
    load = partial(
        load_model_to_serve,
        str(model),
        engine=engine,
        device=device,
        max_bytes=config.max_bytes,
        max_pixels=config.max_pixels,
    )
    url = ""

    def announce(served: dict[str, Any]) -> None:
        if json:
            print(as_json.dumps({"url": url, **served}), flush=True)
        log.info(f"serving {model} ({served['classes']} classes, {served['engine']}) at {url}")

    with bind(config.host, config.port) as listener:
        url = url_of(listener)
        if workers == 1:
            serve_in_process(config, load, listener, announce)
        else:
            from vitrail.server.workers import serve_in_processes

            serve_in_processes(config, load, listener, announce)


def load_model_to_serve(path: str, **settings: Any) -> "ServedModel":
    """`load_served`, imported where it is called: the parent of several workers needs no model."""
    from vitrail.server.model import load_served

    return load_served(path, **settings)


def serve_in_process(
    config: ServeConfig,
    load: Callable[[], "ServedModel"],
    listener: socket.socket,
    announce: Announce,
) -> None:
    """Loads the model and serves it in this process."""
    from vitrail.server.lifecycle import DrainingServer, run_server

    def announce_model(server: DrainingServer) -> None:
        model = server.service.model
        names = {"name": model.name, "sha256": model.sha256, "engine": model.engine}
        announce({**names, "classes": len(model.classifier.classes)})

    asyncio.run(run_server(config, load, listener, announce_model))


def bind(host: str, port: int) -> socket.socket:
    """A socket on this address; connections are accepted once the model is loaded."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # where it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}; "
            f"choose another `port`, or stop the program that uses it"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def check_packages() -> None:
    """Raises if a package of the extra `serve` is missing."""
    from importlib.util import find_spec

    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(
            f"{', '.join(missing)} not installed; install it with: pip install 'vitrail[serve]'"
        )
