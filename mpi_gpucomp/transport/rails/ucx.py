"""A path over a UCX endpoint, on one device: RDMA where there is some, TCP otherwise.

A frame is a message with the header and, if it has a payload, a second one, which is received straight to its place.
UCX says little of a network that has fallen silent, and nothing of a peer that stands still. So the connection over
which the ends have proved themselves stays: it is asked when the path is, and breaks when the peer's process ends.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails.frames import HEADER_BYTES, PING, Header, broken
from mpi_gpucomp.transport.rails.link import Path
from mpi_gpucomp.transport.rails.tcp import confirmed
from mpi_gpucomp.transport.rails.ucx_endpoint import PlugError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.transport.rails.discovery import Rail
    from mpi_gpucomp.transport.rails.frames import Payload
    from mpi_gpucomp.transport.rails.link import RailLink
    from mpi_gpucomp.transport.rails.loop import Loop
    from mpi_gpucomp.transport.rails.sequence import Key
    from mpi_gpucomp.transport.rails.ucx_endpoint import Plug, Sent

__all__ = ["UcxPath"]

MOST_SENDS, MOST_BYTES = 64, 1 << 22
"""What UCX is given at once; what is urgent waits behind it."""
HEADERS_AHEAD = 16
"""Headers that there is room for before they arrive."""
MOST_ROUNDS = 32
"""How often a path is moved before the others have their turn."""
QUESTION, ANSWER = b"?", b"!"
MOST_ANSWERS = 8
"""That the peer's process may give beside UCX, and none over it, before UCX is taken to be stuck."""


class _Coming(NamedTuple):
    """A frame whose payload is on its way."""

    header: Header
    room: memoryview | None
    """Where it goes; None to throw it away."""
    payload: Sent | None


class UcxPath(Path):
    """An endpoint of a peer, and the connection beside it."""

    def __init__(self, key: Key, beside: socket.socket, plug: Plug, rail: Rail, link: RailLink, loop: Loop) -> None:
        """Take over a plug that is connected, and the connection over which both ends have proved themselves."""
        super().__init__(key)
        self._beside, self._plug, self._rail, self._link, self._loop = beside, plug, rail, link, loop
        self._heard, self._confirmed = time.monotonic(), 0.0
        self._answers = 0
        """Of the peer's process, since something was heard over UCX."""
        self._sends: deque[Sent] = deque()
        self._unsent = 0
        self._headers: deque[Sent] = deque()
        self._coming: deque[_Coming] = deque()
        self._quiet: Callable[[], None] | None = None
        self.open = True
        for _ in range(HEADERS_AHEAD):
            self._headers.append(plug.receive(bytearray(HEADER_BYTES), payload=False))
        loop.watch(beside, self._hear_beside)
        loop.watch(plug, self._ready)
        self.wake()

    # Out

    def wake(self) -> None:
        """Be flushed when the caller is through."""
        self._loop.to_flush(self)

    def urge(self, kind: int, payload: Payload = b"") -> None:
        """Send a frame out of sequence as soon as can be; a question goes both ways."""
        super().urge(kind, payload)
        if kind == PING:
            self._say_beside(QUESTION)

    def flush(self) -> None:
        """Give UCX as much as it may have at once."""
        try:
            while self.open and len(self._sends) < MOST_SENDS and self._unsent < MOST_BYTES:
                taken = self._link.next(self)
                if taken is None:
                    break
                header, payload = taken
                self._send(header, payload=False)
                if len(payload):
                    self._send(payload, payload=True)
        except PlugError as error:
            self._link.down(self, str(error))
        self._turn()

    def _send(self, memory: Payload, *, payload: bool) -> None:
        self._sends.append(self._plug.send(memory, payload=payload))
        self._unsent += len(memory)

    def _count_sent(self) -> None:
        full = len(self._sends) >= MOST_SENDS or self._unsent >= MOST_BYTES
        while self._sends and self._sends[0].over():
            self._unsent -= len(self._sends.popleft().memory)
        if full and len(self._sends) < MOST_SENDS and self._unsent < MOST_BYTES:
            self.wake()

    # In

    def _ready(self, readable: bool, writable: bool) -> None:
        if self.open:
            self._turn()
        else:
            self.fade()

    def _turn(self) -> None:
        """Let UCX work until it has nothing to do, or for a while, and take what has arrived."""
        try:
            rounds = 0
            while self.open and (self._take_some() or (self.open and not self._plug.idle())):
                rounds += 1
                if rounds == MOST_ROUNDS:
                    self._loop.again(self._turn)
                    break
        except PlugError as error:
            self._link.down(self, str(error))
        if self.open:
            self._link.answer(self)

    def _take_some(self) -> bool:
        """Let UCX work, and take what has arrived; say whether there may be more."""
        moved = self._plug.move()
        self._plug.check()
        self._count_sent()
        while self.open and (self._begin_frame() or self._end_frame()):
            pass
        return moved

    def _begin_frame(self) -> bool:
        """Take the next header, if it is there, and make room for its payload."""
        if not self._headers[0].over():
            return False
        memory = self._headers.popleft().memory
        header = Header.read(memory)
        self._heard, self._answers = time.monotonic(), 0
        if broken(header):
            raise PlugError("what arrives is not of this protocol")
        self._headers.append(self._plug.receive(memory, payload=False))
        room = self._link.accept(self, header)
        payload = None
        if header.length:
            where = room if room is not None else bytearray(header.length)
            payload = self._plug.receive(where, payload=True)
        self._coming.append(_Coming(header, room, payload))
        return True

    def _end_frame(self) -> bool:
        """Hand on the first frame that is on its way, if it is there as a whole."""
        if not self._coming or not (self._coming[0].payload is None or self._coming[0].payload.over()):
            return False
        header, room, _ = self._coming.popleft()
        self._heard, self._answers = time.monotonic(), 0
        self._link.take(self, header, room)
        return True

    # Beside

    def _say_beside(self, word: bytes) -> None:
        with suppress(OSError):  # it has broken, which shows when it is read
            self._beside.send(word)

    def _hear_beside(self, readable: bool, writable: bool) -> None:
        try:
            said = self._beside.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            self._link.down(self, (error.strerror or type(error).__name__).lower())
            return
        if not said:
            self._link.down(self, "the peer has closed it")
            return
        if QUESTION in said:
            self._say_beside(ANSWER)
        self._answers += said.count(ANSWER)

    # Health

    def heard(self, now: float) -> float:
        """Take the peer's kernel's word too, but not for a process that could have answered over UCX as well."""
        if self._answers >= MOST_ANSWERS:
            return self._heard
        if self.asked > max(self._heard, self._confirmed):
            known = confirmed(self._beside)
            if known is not None and not (known.unacked or known.unsent):
                self._confirmed = now
        return max(self._heard, self._confirmed)

    def fault(self) -> str | None:
        """Ask the device for its carrier."""
        return None if self._rail.has_carrier() else f"{self._rail.name} has no carrier"

    def close(self, quiet: Callable[[], None]) -> None:
        """Have UCX cancel what is on its way, which may take it a while."""
        self.open, self._quiet = False, quiet
        self._loop.forget(self._beside)
        self._beside.close()
        self._plug.cut()
        self.fade()

    def fade(self) -> None:
        """See whether UCX has let go of everything."""
        if self._quiet is None or not self._plug.is_quiet():
            return
        quiet, self._quiet = self._quiet, None
        self._loop.forget(self._plug)
        for kept in (self._sends, self._headers, self._coming):
            kept.clear()
        del self._plug  # and the worker with it
        quiet()
