"""The settings of a server, checked before anything is loaded."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from vitrail import files
from vitrail.data.config import MAX_WORKERS
from vitrail.errors import UserError

TOKEN_VARIABLE = "VITRAIL_TOKEN"
MIN_TOKEN = 16  # characters: shorter ones can be guessed
MAX_TOKEN = 4096  # bytes of its file
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
MAX_LIMIT = 1_000_000  # seconds, megabytes, megapixels or images; larger ones are mistakes
MAX_IMAGES = 32  # in the JSON list of one request


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where the server listens, who may use it, and its limits."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0: any free port
    workers: int = 1  # processes, each with a copy of the model
    token: str | None = None  # that requests must present; None: no token
    no_token: bool = False  # serve other hosts than this one without a token
    allowed_hosts: tuple[str, ...] = ()  # names that requests may use besides localhost
    batch: int | None = None  # images in one forward pass, at most; None: 4 on a CPU, 32 on a GPU
    max_wait: float = 0.8  # seconds; a request that would wait longer is refused
    max_mb: float = 20.0  # megabytes of a request
    max_megapixels: float = 50.0  # of an image
    body_timeout: float = 10.0  # seconds without a byte of the body
    drain: float = 30.0  # seconds for accepted requests to finish after SIGTERM
    examples: int = 8  # images of the run's validation split that the page offers

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"`port` is {self.port}; give a number from 0 to 65535")
        for name, most in (("workers", MAX_WORKERS), ("batch", MAX_LIMIT)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise UserError(f"`{name}` is {value}; give a number from 1 to {most:,}")
        for name in ("max_wait", "max_mb", "max_megapixels", "body_timeout", "drain"):
            if not 0 < getattr(self, name) <= MAX_LIMIT:
                raise UserError(
                    f"`{name}` is {getattr(self, name):g}; give a number above 0, at most "
                    f"{MAX_LIMIT:,}"
                )
        if self.examples < 0:
            raise UserError(f"`examples` is {self.examples}; give 0 or more")
        if self.token is not None and self.no_token:
            raise UserError("`token` and `no_token` exclude each other; give one of them")
        if self.token is None and not self.no_token and not is_loopback(self.host):
            raise UserError(
                f"{self.host} is reachable from other machines; give `token`, a file with a "
                f"secret, set {TOKEN_VARIABLE}, or allow everybody with `no_token=True`"
            )

    @property
    def max_bytes(self) -> int:
        return int(self.max_mb * 2**20)

    @property
    def max_pixels(self) -> int:
        return int(self.max_megapixels * 1e6)

    @property
    def host_names(self) -> frozenset[str]:
        """The names that a Host header may have; empty: any."""
        if not is_loopback(self.host) and not self.allowed_hosts:
            return frozenset()
        own = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset(name.lower() for name in (*LOOPBACK_NAMES, own, *self.allowed_hosts))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a name"
        raise UserError(
            f"`host` is {host!r:.60}, which is not an address of this machine ({why}); "
            f"give 127.0.0.1 or 0.0.0.0"
        ) from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def read_token(path: str | Path | None) -> str | None:
    """The token in a file, or in the environment; None if there is neither."""
    if path is None:
        token, source = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
        if token is None:
            return None
    else:
        source = str(path)
        try:
            token = files.read_regular(Path(path).expanduser(), MAX_TOKEN).decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UserError(
                f"cannot read the file {source} of `token`: {reason}; the token itself is not an "
                f"argument, because other users could see it: write it to a file, or set "
                f"{TOKEN_VARIABLE}"
            ) from error
    token = token.strip()
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"the token in {source} has {len(token)} characters; give at least {MIN_TOKEN} "
            f"letters and digits, such as those that `openssl rand -hex 32` prints"
        )
    return token
