"""Closing a port without losing connections that clients believe to be established."""

import ctypes
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

GRACE = 0.5  # seconds after SIGTERM in which connections are still accepted
SETTLE = 0.1  # seconds in which queued connections are accepted and deliver their requests

ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, which Python does not name
# Classic BPF on a segment that starts with its TCP header: drops SYN, passes everything else.
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone: go on; else: skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)


def refuse_handshakes(listener: Any) -> None:
    """Makes the system ignore new connections, while those that it has queued can be accepted.

    Closing a listening socket resets the connections in its queue. Without new ones the queue can
    be emptied first; who connects now repeats the SYN after a second, and is refused. Only Linux
    has such filters; elsewhere a connection that arrives at the last moment is reset.

    Args:
        listener: a socket, or asyncio's wrapper of one
    """
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in DROP_SYN))
    with suppress(OSError):  # a sandbox without filters
        listener.setsockopt(
            socket.SOL_SOCKET,
            ATTACH_FILTER,
            struct.pack("HL", len(DROP_SYN), ctypes.addressof(code)),
        )
