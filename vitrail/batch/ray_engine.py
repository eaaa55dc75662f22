"""Computes the parts of a job on Ray Data: a pool of actors, each with a copy of the model.

Ray Data restarts an actor that dies and retries its part without limit. So attempts are counted:
from the second on, each image of the part is first decoded in another process, to find the one that
crashes the decoder; after `MAX_ATTEMPTS` the job fails.
"""

import importlib
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from vitrail.batch.folder import PartFolder
from vitrail.batch.manifest import Manifest, part_name
from vitrail.batch.parts import PartWriter
from vitrail.batch.rows import Array, load_rows
from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.inference.weight_files import collect_model_files, hash_files

CONNECT_SECONDS = 10
MAX_BLOCKS = 4096  # tasks of Ray; each has one part or more
MAX_ATTEMPTS = 5  # at a part; preempted machines use up some of them, too
PROBE_RETRIES = 1  # two crashes at the same image are not a coincidence


class Attempts:
    """An actor that counts how often workers have started each part."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def count(self, number: int) -> int:
        self.counts[number] += 1
        return self.counts[number]


class PartTask:
    """The actor: loads the model with its first part, and writes one part after the other."""

    def __init__(
        self,
        manifest: Manifest,
        folder: PartFolder,
        source: Any,
        attempts: Any,
        device: str,
        threads: int,
    ):
        self.manifest, self.folder, self.source = manifest, folder, source
        self.attempts, self.device, self.threads = attempts, device, threads
        self.writer: ProbingWriter | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import ray

        number = int(row["part"])
        attempt = ray.get(self.attempts.count.remote(number))
        if attempt > MAX_ATTEMPTS:
            raise UserError(
                f"{MAX_ATTEMPTS} workers died while computing {part_name(number)}; give them more "
                f"memory, or run with `on='local'` to see why; finished parts are kept"
            )
        if self.writer is None:
            self.writer = self.start()
        self.writer.probes = attempt > 1
        return {"part": number, "errors": self.writer.write(number)}

    def start(self) -> "ProbingWriter":
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
        writer = ProbingWriter(manifest, self.folder, ray.get(self.source), maker, self.threads)
        writer.stored_source = self.source
        return writer


class ProbingWriter(PartWriter):
    """With `probes`, decodes each image in another process before it decodes it itself."""

    stored_source: Any  # a reference of Ray to the source
    probes = False

    def load(self, item: int) -> Array | UserError:
        return (self.probe(item) if self.probes else None) or super().load(item)

    def probe(self, item: int) -> UserError | None:
        import ray

        decode = ray.remote(num_cpus=0, max_retries=PROBE_RETRIES)(decode_item)
        try:
            ray.get(decode.remote(self.stored_source, item, self.maker.preprocess))
        except ray.exceptions.WorkerCrashedError:
            return UserError("crashes the process that decodes it")
        return None


def decode_item(source: Source, item: int, preprocess: Preprocess) -> None:
    """Decodes an image; why it cannot be read is reported by the worker that needs it."""
    with suppress(UserError):
        load_image(source[item].content, preprocess.channels, preprocess.pixels)


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
        context.raise_original_map_exception = True  # otherwise Ray drops the original error
        attempts = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Attempts).remote()
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
                attempts,
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
    logging.getLogger("ray.data").setLevel("CRITICAL")  # its errors are raised as well
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
    while cause is not None:
        inner = getattr(cause, "cause", None)  # Ray's own error is a `UserError`, too, around one
        if isinstance(cause, UserError) and inner is None:
            return shorten_error(cause)
        cause = inner or cause.__cause__
    return f"Ray failed: {shorten_error(error)}"


def shorten_error(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
