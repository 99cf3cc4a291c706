"""A path over a TCP socket, bound to one device.

Packets are sent from the caller's memory and received into it: the kernel's copies are the only ones. The unsent bytes
in the kernel are limited, so that urgent packets do not queue behind megabytes of data.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails.link import Path
from mpi_gpucomp.transport.rails.sequence import HEADER_BYTES, PacketHeader

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.transport.rails.discovery import Rail
    from mpi_gpucomp.transport.rails.link import RailLink
    from mpi_gpucomp.transport.rails.loop import EventLoop
    from mpi_gpucomp.transport.rails.sequence import PathId

__all__ = ["TcpInfo", "TcpPath", "set_socket_options", "tcp_info"]

UNSENT_BYTES = 1 << 20
"""What the kernel accepts beyond the bytes in flight."""
BATCH_BUFFERS, BATCH_BYTES = 16, 1 << 20
"""What is handed to the kernel in one call."""
READ_BYTES = 1 << 22
"""What is read from one path before the others are served."""
CLOCK_SLACK = 0.01
"""Seconds that the kernel's clock may lag."""
_EMPTY = memoryview(bytearray())
_INFO = struct.Struct("<24xI28xI84xI")
"""The fields of `TcpInfo` in struct tcp_info."""


class TcpInfo(NamedTuple):
    """What the peer's kernel has acknowledged, independent of its process."""

    unacked: int
    """TCP segments in flight."""
    last_ack: int
    """Milliseconds since the last acknowledgement."""
    unsent: int
    """Bytes that have not left yet."""


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Query the kernel; return None for a closed connection."""
    if connection.fileno() < 0:
        return None
    try:
        return TcpInfo(*_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)))
    except OSError:
        return None


def set_socket_options(connection: socket.socket) -> None:
    """Set the options of a path's socket."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class TcpPath(Path):
    """A socket to a peer."""

    def __init__(self, path_id: PathId, connection: socket.socket, rail: Rail, link: RailLink, loop: EventLoop) -> None:
        """Take over an authenticated connection and start to read it."""
        super().__init__(path_id)
        self._socket, self._rail, self._link, self._loop = connection, rail, link, loop
        self._last_seen = time.monotonic()
        self._unsent: list[memoryview] = []
        self._blocked = False
        self._header_buffer = memoryview(bytearray(HEADER_BYTES))
        self._header_got = 0
        self._header: PacketHeader | None = None
        self._payload: memoryview | None = None
        """The buffer of the payload being read; None to discard it."""
        self._left = _EMPTY
        loop.register(connection, self._on_ready)

    @property
    def open(self) -> bool:
        """Return True if it has not been closed."""
        return self._socket.fileno() >= 0

    # Sending

    def wake(self) -> None:
        """Schedule a flush."""
        self._loop.schedule_flush(self)

    def flush(self) -> None:
        """Send as much as the kernel accepts."""
        try:
            while self.open and not self._blocked and (self._unsent or self._batch()):
                self._unsent = _advance(self._unsent, self._socket.sendmsg(self._unsent))
        except BlockingIOError:
            self._blocked = True
            self._loop.register(self._socket, self._on_ready, writing=True)
        except OSError as error:
            self._link.drop_path(self, _reason(error))

    def _batch(self) -> bool:
        """Collect packets for one call; return False if there are none."""
        total = 0
        while len(self._unsent) < BATCH_BUFFERS and total < BATCH_BYTES:
            taken = self._link.next_packet(self)
            if taken is None:
                break
            header, payload = taken
            self._unsent.append(memoryview(header))
            if len(payload):
                self._unsent.append(memoryview(payload))
            total += len(payload)
        return bool(self._unsent)

    # Receiving

    def _on_ready(self, readable: bool, writable: bool) -> None:
        if writable and self._blocked:
            self._blocked = False
            self._loop.register(self._socket, self._on_ready)
            self.wake()
        if readable:
            try:
                self._read()
            except BlockingIOError:
                pass
            except OSError as error:
                self._link.drop_path(self, _reason(error))
            self._link.send_ack(self)

    def _read(self) -> None:
        budget = READ_BYTES
        while budget > 0 and self.open:
            # The next header follows the payload: read both in one call.
            count, *_ = self._socket.recvmsg_into([self._left, self._header_buffer[self._header_got :]])
            if not count:
                self._link.drop_path(self, "closed by the peer")
                return
            self._last_seen = time.monotonic()
            budget -= count
            taken = min(count, len(self._left))
            self._left = self._left[taken:]
            self._header_got += count - taken
            if self._header is not None and not self._left:
                self._end_packet()
            if self._header is None and self._header_got == HEADER_BYTES and self.open:
                self._begin_packet()

    def _begin_packet(self) -> None:
        header = PacketHeader.unpack(self._header_buffer)
        self._header_got = 0
        if header.malformed:
            self._link.drop_path(self, "malformed packet header")
            return
        self._header, self._payload = header, self._link.accept(self, header)
        self._left = self._payload if self._payload is not None else memoryview(bytearray(header.length))
        if not header.length:
            self._end_packet()

    def _end_packet(self) -> None:
        header, payload, self._header, self._payload = self._header, self._payload, None, None
        assert header is not None
        self._link.on_packet(self, header, payload)

    # Liveness

    def last_seen(self, now: float) -> float:
        """Count acknowledgements of the peer's kernel too: they prove the path, whatever the peer's process does."""
        info = tcp_info(self._socket)
        if info is None:
            return self._last_seen
        if not (info.unacked or info.unsent or self._unsent or self.urgent) and self.probed > self._last_seen:
            self._last_seen = now  # the probe has arrived
        elif info.unacked:
            self._last_seen = max(self._last_seen, min(now, now - info.last_ack / 1000 + CLOCK_SLACK))
        return self._last_seen

    def fault(self) -> str | None:
        """Check the device's carrier."""
        return None if self._rail.has_carrier() else f"{self._rail.name} has no carrier"

    def close(self, on_closed: Callable[[], None]) -> None:
        """Close the socket, which takes effect at once; unsent bytes are dropped."""
        if self.open:
            self._loop.unregister(self._socket)
            self._socket.close()
        self._unsent, self._left, self._header = [], _EMPTY, None
        on_closed()


def _advance(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
    return buffers


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
