"""Who may enter: Host and Origin headers, the token, and the headers of every answer."""

import asyncio
import hmac
import logging
import time
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.server.admission import Refusal
from vitrail.server.protocol import CLOSE, Answer, describe_error
from vitrail.server.service import Service

log = logging.getLogger(__name__)

REQUEST_SECONDS = 120.0  # for a whole request: body, queue, model, and a caller who reads slowly
PUBLIC = {"/", "/live", "/ready", "/v2/health/live", "/v2/health/ready"}  # without a token
ASSETS = "/assets/"  # likewise
QUEUED = ("/predict", "/infer")  # ends of the paths whose images wait in the model's queue
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Gate:
    """An ASGI application around the routes."""

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service
        self.names = service.config.host_names
        token = service.config.token
        self.token = None if token is None else f"Bearer {token}".encode()
        self.endpoints = {
            route.path for route in getattr(app, "routes", []) if "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start, status = time.monotonic(), 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *self.extra_headers()]
            await send(message)

        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                if (refusal := self.check(scope)) is not None:
                    await send_error(send_marked, *refusal)
                else:
                    await self.app(scope, receive, send_marked)
        except TimeoutError:
            if not status:  # otherwise, uvicorn closes the connection
                await send_error(send_marked, 504, "the request took too long", [])
        except Exception as error:  # Starlette has answered, and raises it again for the log
            log.error(f"{scope['method']} {scope['path'][:80]!r} failed", exc_info=error)
        finally:
            self.count(scope["path"], status, time.monotonic() - start)

    def refuse(self, scope: Scope) -> Answer | None:
        """The answer to a request that may not enter, without the tasks that others need."""
        if scope["method"] != "POST" or (refusal := self.check(scope)) is None:
            return None
        status, message, headers = refusal
        head, body = describe_error(message, headers)
        self.count(scope["path"], status, 0.0)
        return status, [*head, *self.extra_headers()], body

    def count(self, path: str, status: int, seconds: float) -> None:
        endpoint = path if path in self.endpoints else "other"
        self.service.metrics.observe_request(endpoint, status, seconds)

    def check(self, scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """Why this request may not enter: status, message and headers."""
        headers: MutableMapping[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"authorization") and name in headers:
                return 400, f"several {name.decode()} headers", []
            headers[name] = value
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.names:
            if name_of(host) not in self.names:
                return 421, "this server does not answer to that Host; use localhost", []
            origin = headers.get(b"origin", b"").decode("latin-1").lower()
            if origin and name_of(urlsplit_host(origin)) not in self.names:
                return 403, "requests from pages of other sites are not allowed", []
        path = scope["path"]
        if self.token is None or path in PUBLIC or path.startswith(ASSETS):
            return self.check_queue(scope)
        if hmac.compare_digest(headers.get(b"authorization", b""), self.token):
            return self.check_queue(scope)
        return (
            401,
            "a token is required: Authorization: Bearer ...",
            [(b"www-authenticate", b"Bearer")],
        )

    def check_queue(self, scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """Refuses early what would wait too long: a busy server must spend little on refusals."""
        if scope["method"] == "POST" and scope["path"].endswith(QUEUED):
            try:
                self.service.admission.admit()
            except Refusal as error:
                return 429, str(error), [(b"retry-after", str(error.retry_after).encode())]
        return None

    def extra_headers(self) -> list[tuple[bytes, bytes]]:
        model = (b"vitrail-model", self.service.model.sha256.encode())
        closing = [CLOSE] if self.service.draining else []
        return [*HEADERS, model, *closing]


def name_of(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def urlsplit_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.rpartition("@")[2]
    except ValueError:
        return ""


async def send_error(
    send: Any, status: int, message: str, headers: list[tuple[bytes, bytes]]
) -> None:
    head, body = describe_error(message, headers)
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
