"""Computes the parts of a job on Ray Data: a pool of actors, each with a copy of the model.

Ray Data restarts an actor that dies, and gives its part to another one.
"""

import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from vitrail.batch.folder import PartFolder
from vitrail.batch.manifest import Manifest
from vitrail.batch.parts import PartWriter
from vitrail.batch.rows import load_rows
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.inference.weight_files import collect_model_files, hash_files

CONNECT_SECONDS = 10
MAX_BLOCKS = 4096  # tasks of Ray; each has one part or more


class PartTask:
    """The actor: loads the model with its first part, and writes one part after the other."""

    def __init__(
        self, manifest: Manifest, folder: PartFolder, source: Any, device: str, threads: int
    ):
        self.manifest, self.folder, self.source = manifest, folder, source
        self.device, self.threads = device, threads
        self.writer: PartWriter | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        number = int(row["part"])
        if self.writer is None:
            self.writer = self.start()
        return {"part": number, "errors": self.writer.write(number)}

    def start(self) -> PartWriter:
        import ray
        import torch

        torch.set_num_threads(self.threads)
        manifest = self.manifest
        node = ray.get_runtime_context().get_node_id()[:8]
        try:
            if hash_files(collect_model_files(manifest.model)) != manifest.sha256:
                raise UserError("another sha256 than on the machine that started the job")
            maker = load_rows(manifest, self.device)
        except UserError as error:
            raise UserError(f"{manifest.model} on node {node}: {error}") from error
        return PartWriter(manifest, self.folder, ray.get(self.source), maker, self.threads)


def write_on_ray(
    manifest: Manifest,
    folder: PartFolder,
    source: Source,
    numbers: list[int],
    device: str,
    report: Callable[[int], None],
) -> int:
    """Writes these parts; returns how many images have no result."""
    with connect_to_ray() as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        resources = choose_resources(nodes, device)
        workers = min(resources.pop("workers"), len(numbers))
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        parts = ray.data.from_items(
            [{"part": number} for number in numbers],
            override_num_blocks=min(len(numbers), MAX_BLOCKS),
        )
        done = parts.map(
            PartTask,
            fn_constructor_args=(
                manifest,
                folder,
                ray.put(source),
                device,
                int(resources["num_cpus"]),
            ),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers, initial_size=workers),
            **resources,
        )
        errors = 0
        for row in done.iter_rows():
            errors += row["errors"]
            report(row["part"])
        return errors


def choose_resources(nodes: list[dict[str, float]], device: str) -> dict[str, Any]:
    """The number of workers, and what each has: a GPU and its share of the cores, or a core."""
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if with_gpus and device != "cpu":
        gpus = sum(int(node["GPU"]) for node in with_gpus)
        cores = min(int(node.get("CPU", 1)) // int(node["GPU"]) for node in with_gpus)
        return {"workers": gpus, "num_gpus": 1, "num_cpus": max(1, cores)}
    return {"workers": max(1, sum(int(node.get("CPU", 0)) for node in nodes)), "num_cpus": 1}


@contextmanager
def connect_to_ray() -> Iterator[Any]:
    """Ray on the cluster of RAY_ADDRESS, else started here; its errors in one line."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends them home
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # of the C++ part, to stderr
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise UserError(f"`on='ray'` needs Ray; pip install 'vitrail[ray]' ({error})") from error
    logging.getLogger("ray.data").setLevel("ERROR")
    address = os.environ.get("RAY_ADDRESS") or "local"
    own = not ray.is_initialized()
    if own:
        check_reachable(address)
    with redirect_stdout(sys.stderr):  # where Ray reports workers that died, even while it ends
        try:
            if own:
                local = {"include_dashboard": False} if address == "local" else {}
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = shorten_error(error)
            raise UserError(f"cannot connect to Ray at {address}: {reason}") from error
        try:
            yield ray
        except ray.exceptions.RayError as error:
            raise UserError(describe_ray_error(error)) from error
        finally:
            if own:
                ray.shutdown()


def check_reachable(address: str) -> None:
    """Raises if nothing listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # local, auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot connect to Ray at {address}: {error}; is RAY_ADDRESS that of its head node?"
        ) from error


def describe_ray_error(error: BaseException) -> str:
    """The mistake in a worker, or what Ray says about its end."""
    cause: Any = error
    while cause is not None and not isinstance(cause, UserError):
        cause = getattr(cause, "cause", None) or cause.__cause__
    return shorten_error(cause) if cause is not None else f"Ray failed: {shorten_error(error)}"


def shorten_error(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
