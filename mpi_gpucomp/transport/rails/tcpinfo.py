"""What the kernel knows of a connection: what the other kernel has confirmed, whatever its process does."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

__all__ = ["Confirmed", "confirmed"]

_INFO = struct.Struct("<24xI28xI84xI")
"""Where the three are in struct tcp_info."""


class Confirmed(NamedTuple):
    """How far what was sent has got."""

    unacked: int
    """Segments that the other kernel has not confirmed."""
    last_ack: int
    """Milliseconds since it confirmed something."""
    unsent: int
    """Bytes that have not left yet."""


def confirmed(connection: socket.socket) -> Confirmed | None:
    """Ask; None of a connection that is closed."""
    if connection.fileno() < 0:
        return None
    try:
        return Confirmed(*_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)))
    except OSError:
        return None
