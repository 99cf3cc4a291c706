"""A path over a TCP socket, bound to one device.

Frames are sent from the caller's memory and received into it: the kernel's copies are the only ones. The kernel is kept
from taking much more than the wire does, so that what is urgent is not behind megabytes of what is not.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails.frames import HEADER_BYTES, Header, broken
from mpi_gpucomp.transport.rails.link import Path

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.transport.rails.discovery import Rail
    from mpi_gpucomp.transport.rails.link import RailLink
    from mpi_gpucomp.transport.rails.loop import Loop
    from mpi_gpucomp.transport.rails.sequence import Key

__all__ = ["Confirmed", "TcpPath", "confirmed", "prepare"]


# What the kernel knows of a connection: what the other kernel has confirmed, whatever its process does.

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


UNSENT_BYTES = 1 << 20
"""What the kernel takes beyond what is on the wire."""
BATCH_FRAMES, BATCH_BYTES = 16, 1 << 20
"""What is handed to the kernel at once."""
READ_BYTES = 1 << 22
"""What is read from one path before the others have their turn."""
SLACK = 0.01
"""Seconds that the kernel's clocks may be behind."""
_NOTHING = memoryview(bytearray())


def prepare(connection: socket.socket) -> None:
    """Set what a connection needs to be a path."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class TcpPath(Path):
    """A connection to a peer."""

    def __init__(self, key: Key, connection: socket.socket, rail: Rail, link: RailLink, loop: Loop) -> None:
        """Take over a connection whose both ends know each other; it is read from now on."""
        super().__init__(key)
        self._socket, self._rail, self._link, self._loop = connection, rail, link, loop
        self._heard = time.monotonic()
        self._leaving: list[memoryview] = []
        self._blocked = False
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._got = 0
        self._header: Header | None = None
        self._room: memoryview | None = None
        """Where the payload goes that is being read; None to throw it away."""
        self._left = _NOTHING
        loop.watch(connection, self._ready)

    @property
    def open(self) -> bool:
        """Say whether it has not been closed."""
        return self._socket.fileno() >= 0

    # Out

    def wake(self) -> None:
        """Be flushed when the caller is through."""
        self._loop.to_flush(self)

    def flush(self) -> None:
        """Send as much as the kernel takes."""
        try:
            while self.open and not self._blocked and (self._leaving or self._batch()):
                self._leaving = _behind(self._leaving, self._socket.sendmsg(self._leaving))
        except BlockingIOError:
            self._blocked = True
            self._loop.watch(self._socket, self._ready, writing=True)
        except OSError as error:
            self._link.down(self, _said(error))

    def _batch(self) -> bool:
        """Collect frames to be sent at once; say whether there are any."""
        total = 0
        while len(self._leaving) < BATCH_FRAMES and total < BATCH_BYTES:
            taken = self._link.next(self)
            if taken is None:
                break
            header, payload = taken
            self._leaving.append(memoryview(header))
            if len(payload):
                self._leaving.append(memoryview(payload))
            total += len(payload)
        return bool(self._leaving)

    # In

    def _ready(self, readable: bool, writable: bool) -> None:
        if writable and self._blocked:
            self._blocked = False
            self._loop.watch(self._socket, self._ready)
            self.wake()
        if readable:
            try:
                self._read()
            except BlockingIOError:
                pass
            except OSError as error:
                self._link.down(self, _said(error))
            self._link.answer(self)

    def _read(self) -> None:
        budget = READ_BYTES
        while budget > 0 and self.open:
            # What is behind the payload is the next header: read both at once.
            count, *_ = self._socket.recvmsg_into([self._left, self._head[self._got :]])
            if not count:
                self._link.down(self, "the peer has closed it")
                return
            self._heard = time.monotonic()
            budget -= count
            taken = min(count, len(self._left))
            self._left = self._left[taken:]
            self._got += count - taken
            if self._header is not None and not self._left:
                self._end_frame()
            if self._header is None and self._got == HEADER_BYTES and self.open:
                self._begin_frame()

    def _begin_frame(self) -> None:
        header = Header.read(self._head)
        self._got = 0
        if broken(header):
            self._link.down(self, "what arrives is not of this protocol")
            return
        self._header, self._room = header, self._link.accept(self, header)
        self._left = self._room if self._room is not None else memoryview(bytearray(header.length))
        if not header.length:
            self._end_frame()

    def _end_frame(self) -> None:
        header, room, self._header, self._room = self._header, self._room, None, None
        assert header is not None
        self._link.take(self, header, room)

    # Health

    def heard(self, now: float) -> float:
        """Take the kernel's word too: what it has confirmed has crossed the network, whatever its process does."""
        known = confirmed(self._socket)
        if known is None:
            return self._heard
        if not (known.unacked or known.unsent or self._leaving or self.urgent) and self.asked > self._heard:
            self._heard = now  # the question has got there
        elif known.unacked:
            self._heard = max(self._heard, min(now, now - known.last_ack / 1000 + SLACK))
        return self._heard

    def fault(self) -> str | None:
        """Ask the device for its carrier."""
        return None if self._rail.has_carrier() else f"{self._rail.name} has no carrier"

    def close(self, quiet: Callable[[], None]) -> None:
        """Close the socket: it is quiet at once, and what the kernel has not sent yet is thrown away."""
        if self.open:
            self._loop.forget(self._socket)
            self._socket.close()
        self._leaving, self._left, self._header = [], _NOTHING, None
        quiet()


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers when so many bytes are taken off."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
    return buffers


def _said(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
