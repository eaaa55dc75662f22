"""The life of one server process: start, reload on SIGHUP, drain on SIGTERM, end."""

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from vitrail.server.app import build_app
from vitrail.server.config import ServeConfig
from vitrail.server.drain import GRACE, SETTLE, refuse_handshakes
from vitrail.server.gate import Gate
from vitrail.server.model import ServedModel
from vitrail.server.protocol import LimitedProtocol
from vitrail.server.service import Service

log = logging.getLogger(__name__)

KEEP_ALIVE = 65  # seconds: longer than the 60 of nginx, which then closes first
BACKLOG = 1024


class DrainingServer(uvicorn.Server):
    """uvicorn's server; a signal makes it drain before it ends."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        on_ready: Callable[["DrainingServer"], None],
    ):
        super().__init__(config)
        self.service, self.on_ready = service, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready(self)  # now connections are accepted
        self.service.start_examples()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT and self.service.config.workers > 1:
            return  # the parent process gets it too, and ends all workers
        if self.service.draining:  # a second signal: the user does not want to wait
            self.force_exit = True
        self.service.draining = True  # /ready is 503, and every answer closes its connection
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers what was accepted, then closes the connections."""
        log.info("draining: accepted requests are answered, then the server ends")
        end = time.monotonic() + self.service.config.drain
        await self.sleep_while(GRACE, lambda: True)
        if self.service.config.workers == 1:  # else the parent process does it for all workers
            for server in self.servers:
                for listener in server.sockets:
                    refuse_handshakes(listener)
        await self.sleep_while(SETTLE, lambda: True)  # the loop accepts what the system has queued
        for server in self.servers:
            server.close()
        await self.sleep_while(SETTLE, lambda: True)
        await self.sleep_while(end - time.monotonic(), self.is_busy)
        await super().shutdown(sockets)

    async def sleep_while(self, seconds: float, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while condition() and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.01)

    def is_busy(self) -> bool:
        """Whether a request is being received or answered."""
        return bool(self.server_state.tasks) or any(
            connection.head_bytes  # type: ignore[union-attr]
            for connection in self.server_state.connections
        )


async def run_server(
    config: ServeConfig,
    load: Callable[[], ServedModel],
    listener: socket.socket,
    on_ready: Callable[[DrainingServer], None],
) -> None:
    """Loads the model and serves it until a signal ends the server."""
    service = Service(config, load(), load)
    await service.warm_up()
    server = build_server(service, on_ready)
    loop = asyncio.get_running_loop()
    if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGHUP, service.start_reload)
    try:
        await server.serve(sockets=[listener])
    finally:
        service.stop()


def build_server(service: Service, on_ready: Callable[[DrainingServer], None]) -> DrainingServer:
    """uvicorn with the routes and limits of a service."""
    config = uvicorn.Config(
        Gate(build_app(service), service),
        http=LimitedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="critical",  # `Gate` logs errors; the rest are mistakes of callers
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(service.config.drain)),
        backlog=BACKLOG,
    )
    return DrainingServer(config, service, on_ready)
