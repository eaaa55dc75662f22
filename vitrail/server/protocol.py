"""HTTP connections with limits: on the size of a head, on time, on pipelined requests."""

import asyncio
import json
from typing import Any, TypeAlias

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

Headers: TypeAlias = list[tuple[bytes, bytes]]
Answer: TypeAlias = tuple[int, Headers, bytes]  # status, headers and body

MAX_HEAD = 16 * 1024  # bytes of request line and headers
MAX_HEADERS = 64
HEAD_SECONDS = 10.0  # for the head to arrive, from the connection or from its first byte
DISCARD_SECONDS = 5.0  # for the rest of a body that was answered before it arrived
DISCARD_BYTES = 2**20  # of such a body; more closes the connection
MAX_PIPELINED = 16  # requests on one connection that wait for an earlier one
MAX_CONNECTIONS = 1000
CLOSE = (b"connection", b"close")


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol; what a caller does wrong costs him his own connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timer: asyncio.TimerHandle | None = None
        self.head_bytes = 0  # of an incomplete head, roughly
        self.in_head = self.in_body = False
        self.discarded = 0
        if len(self.connections) > MAX_CONNECTIONS:
            self.refuse(503, "too many connections; retry later")
        else:
            self.set_timer(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.clear_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        after_body = self.in_body
        super().data_received(data)
        if self.in_head:  # after a body, the chunk may be mostly that body
            self.head_bytes += 1 if after_body else len(data)
            if self.head_bytes > MAX_HEAD:
                self.refuse(431, f"the headers are longer than {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_head = True
        self.set_timer(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self.clear_timer()
        self.in_head, self.in_body, self.head_bytes, self.discarded = False, True, 0, 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD or len(self.headers) > MAX_HEADERS:
            return self.refuse(431, "the headers are too long, or too many")
        if len(self.pipeline) >= MAX_PIPELINED:
            return self.refuse(400, "too many pipelined requests; wait for the answers")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle.response_complete:
            self.discarded += len(body)
            if self.discarded > DISCARD_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.clear_timer()
        self.in_body = False
        if self.cycle is not None:
            super().on_message_complete()
            if self.cycle.response_complete and not self.transport.is_closing():
                self.set_timer(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.in_body and not self.transport.is_closing():
            self.set_timer(DISCARD_SECONDS)

    def set_timer(self, seconds: float) -> None:
        self.clear_timer()
        self.timer = self.loop.call_later(seconds, self.transport.close)

    def clear_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Writes a refusal at once: under load most answers are refusals, and tasks cost more."""
        answer = None if self.flow.write_paused else app.refuse(cycle.scope)
        if answer is None:
            return super()._start_asgi_task(cycle, app)
        if not cycle.keep_alive and CLOSE not in answer[1]:
            answer[1].append(CLOSE)
        self.write(*answer)
        cycle.response_started = cycle.response_complete = True
        if CLOSE in answer[1]:
            self.transport.close()
        self.on_response_complete()

    def refuse(self, status: int, message: str) -> None:
        """Answers without asking the application, and closes the connection."""
        if self.transport.is_closing():
            return
        self.write(status, *describe_error(message, [CLOSE]))
        self.transport.close()

    def write(self, status: int, headers: Headers, body: bytes) -> None:
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "this is not a valid HTTP request")


def describe_error(message: str, headers: Headers) -> tuple[Headers, bytes]:
    """The headers and the body of an error."""
    body = json.dumps({"error": message}).encode()
    kind = (b"content-type", b"application/json")
    return [kind, (b"content-length", str(len(body)).encode()), *headers], body
