"""`vitrail serve`: answers over HTTP, with a page that shows why."""

from typing import Annotated, Literal

import tyro

import vitrail
from vitrail.cli.flags import Device, Model, OptionalInt, OptionalPath, Switch


def serve(
    model: Model,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    token: OptionalPath = None,
    no_token: Switch = False,
    allowed_hosts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (),
    batch: OptionalInt = None,
    max_wait: float = 0.8,
    max_mb: float = 20.0,
    max_megapixels: float = 50.0,
    drain: float = 30.0,
    examples: int = 8,
    engine: Literal["auto", "torch", "onnxruntime", "openvino"] = "auto",
    device: Device = "auto",
    json: Switch = False,
) -> None:
    """Serve a model over HTTP, with a page.

    Try `curl --data-binary @cat.jpg localhost:8000/predict`, or open the address in a browser.
    SIGHUP loads the model again, SIGTERM answers what was accepted and ends the server.

    Args:
        host: address to listen on; other than loopback, it needs --token or --no-token
        port: port to listen on; 0 is any free one
        workers: processes, each with a copy of the model
        token: file with a secret that requests must present (default: the environment variable
            VITRAIL_TOKEN)
        no_token: let everybody who reaches the host use the model
        allowed_hosts: names that requests may use besides localhost, such as that of a proxy
        batch: maximum batch size (default: 4 on a CPU, 32 on a GPU)
        max_wait: seconds; a request that would wait longer is refused with 429
        max_mb: maximum size of a request in megabytes
        max_megapixels: maximum size of an image in megapixels
        drain: seconds that accepted requests have to finish after SIGTERM
        examples: number of the run's validation images that the page offers
        engine: what computes predictions; auto measures once which engine is the fastest, an
            exported file runs in its own
        json: print one JSON document with the address when the server is ready
    """
    vitrail.serve(
        model,
        host=host,
        port=port,
        workers=workers,
        token=token,
        no_token=no_token,
        allowed_hosts=allowed_hosts,
        batch=batch,
        max_wait=max_wait,
        max_mb=max_mb,
        max_megapixels=max_megapixels,
        drain=drain,
        examples=examples,
        engine=engine,
        device=device,
        json=json,
    )
