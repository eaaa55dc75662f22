"""Several processes that share one socket, each with a copy of the model."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from vitrail.errors import UserError
from vitrail.exporting.engine import thread_count
from vitrail.server.config import ServeConfig
from vitrail.server.drain import GRACE, refuse_handshakes
from vitrail.server.serve import Announce, serve_in_process

log = logging.getLogger(__name__)

Load = Callable[[], Any]  # the model; sent to the workers, so it is a partial of a function

SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported
RESTART_SECONDS = 1.0  # between the end of a worker and its restart
KILL_SECONDS = 5.0  # for a worker to end after its drain time is over
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP")


class Workers:
    """Starts, restarts and ends the processes."""

    def __init__(self, config: ServeConfig, load: Load, listener: socket.socket):
        self.config, self.listener, self.arguments = config, listener, (config, load, listener)
        self.context = multiprocessing.get_context("spawn")  # torch does not survive a fork
        self.processes: dict[SpawnProcess, Connection] = {}
        self.ended_by: int | None = None  # a signal

    def start_one(self) -> tuple[SpawnProcess, Connection]:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=run_child, args=(*self.arguments, theirs))
        # Ctrl-C reaches every process of a terminal; workers leave it to this one
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()
        self.processes[process] = ours
        return process, ours

    def start(self) -> dict[str, Any]:
        """Starts all; what the first one serves. Raises what keeps a worker from starting."""
        started = [self.start_one() for _ in range(self.config.workers)]
        announced = [self.await_ready(process, pipe) for process, pipe in started]
        return announced[0]

    def await_ready(self, process: SpawnProcess, pipe: Connection) -> dict[str, Any]:
        try:
            message: dict[str, Any] = pipe.recv()
        except EOFError:
            process.join()
            message = {"error": f"a worker ended with exit code {process.exitcode}"}
        if "error" in message:
            for other in self.processes:
                other.kill()
            raise UserError(message["error"])
        return message

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Makes all workers reload, or drain."""
        if number == getattr(signal, "SIGHUP", None):
            self.send(number)
        else:
            self.ended_by = number
            self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def watch(self) -> None:
        """Restarts workers that die, until a signal ends all."""
        while self.ended_by is None:
            wait([process.sentinel for process in self.processes], timeout=0.5)
            for process in [one for one in self.processes if not one.is_alive()]:
                if self.ended_by is not None:
                    break
                code = process.exitcode
                log.error(f"worker {process.pid} died (exit code {code}); starting another")
                self.processes.pop(process).close()
                time.sleep(RESTART_SECONDS)
                self.start_one()
        self.end()

    def end(self) -> None:
        """Waits for all to end; those that do not end in time are killed."""
        end = time.monotonic() + self.config.drain + KILL_SECONDS
        time.sleep(GRACE)
        refuse_handshakes(self.listener)
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def serve_in_processes(
    config: ServeConfig, load: Load, listener: socket.socket, announce: Announce
) -> None:
    """Serves in several processes until a signal ends them."""
    with tempfile.TemporaryDirectory(prefix="vitrail-metrics-") as folder:
        os.environ[SHARED_METRICS] = folder
        os.environ["OMP_NUM_THREADS"] = str(max(1, thread_count() // config.workers))
        workers = Workers(config, load, listener)
        for name in FORWARDED:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), workers.forward)
        announce(workers.start())
        workers.watch()
    if workers.ended_by is not None:
        sys.exit(128 + workers.ended_by)


def run_child(config: ServeConfig, load: Load, listener: socket.socket, pipe: Connection) -> None:
    """The main function of a worker process."""
    logging.basicConfig(format=f"worker {os.getpid()}: %(message)s", level="WARNING")
    logging.getLogger("vitrail").setLevel("INFO")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        serve_in_process(config, load, listener, pipe.send)
    except UserError as error:
        pipe.send({"error": str(error)})
        sys.exit(1)
