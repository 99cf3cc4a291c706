"""How connections come about: each rank listens on every rail, and dials those above it, again whenever a path is lost.

Nobody gets further than the handshake who does not know the job's secret. Those who have not proved it yet have little
time, a fixed number of bytes, and so many places; whoever comes when all are taken is turned away.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

from mpi_gpucomp.transport.rails.handshake import Answering, Dialling, Hello, Refused
from mpi_gpucomp.transport.rails.pointers import Key
from mpi_gpucomp.transport.rails.tcp import prepare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.transport.rails.gathering import Gathered
    from mpi_gpucomp.transport.rails.link import Link
    from mpi_gpucomp.transport.rails.loop import Loop
    from mpi_gpucomp.transport.rails.wires import Talk

__all__ = ["Doors"]

MOST_STRANGERS = 64
"""Connections that may be in the middle of the handshake, beyond those that the ranks themselves would make."""
RETRY_SECONDS = 0.1, 1.0
"""Between attempts to dial a peer: at first, and when many have failed."""

_log = logging.getLogger("mpi_gpucomp")


class _Meeting:
    """A connection whose ends do not know each other yet."""

    def __init__(self, doors: Doors, connection: socket.socket, talk: Talk, rail: int) -> None:
        self._doors, self.connection, self.talk, self.rail = doors, connection, talk, rail
        self.until = time.monotonic() + doors.patience
        self._heard, self._leaving = b"", talk.first
        self._connected = not talk.calls
        doors.loop.watch(connection, self._ready, writing=bool(self._leaving))

    def _ready(self, readable: bool, writable: bool) -> None:
        try:
            if writable and not self._connected:
                self._check_connected()
            if self._connected and self._leaving:
                self._send()
            if readable:
                self._read()
        except BlockingIOError:
            pass
        except (OSError, Refused) as error:
            self._doors.part(self, error)

    def _check_connected(self) -> None:
        code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "error"))
        self._connected = True

    def _send(self) -> None:
        self._leaving = self._leaving[self.connection.send(self._leaving) :]
        self._doors.loop.watch(self.connection, self._ready, writing=bool(self._leaving))

    def _read(self) -> None:
        while not self.talk.done:
            data = self.connection.recv(self.talk.wants - len(self._heard))
            if not data:
                raise Refused("closed before the handshake was over")
            self._heard += data
            if len(self._heard) == self.talk.wants:
                said, self._heard = self._heard, b""
                self._leaving += self.talk.take(said)
                if self._leaving:
                    self._send()
        self._doors.welcome(self)

    @property
    def through(self) -> bool:
        """Say whether all that had to be said has left."""
        return not self._leaving


class Doors:
    """The listeners and the dialling of one rank."""

    def __init__(self, rank: int, gathered: Gathered, links: Mapping[int, Link], loop: Loop, patience: float) -> None:
        """Serve the links to all peers; a handshake may take `patience` seconds."""
        self.rank, self._links, self.loop, self.patience = rank, links, loop, patience
        self.rails, self._wires, self._listeners = gathered.rails, gathered.wires, gathered.listeners
        self._secret, self._addresses = gathered.secret, gathered.addresses
        self._meetings: dict[socket.socket, _Meeting] = {}
        self._dialling: dict[tuple[int, int], _Meeting] = {}
        self._generations: dict[tuple[int, int], int] = {}
        self._next_try: dict[tuple[int, int], tuple[float, float]] = {}
        self._refused: dict[tuple[int, int], float] = {}
        """Since when a peer's port refuses connections."""

    def open(self) -> None:
        """Let peers in from now on, and dial those above this rank."""
        self.dial(time.monotonic())
        for number, listener in enumerate(self._listeners):
            self.loop.watch(listener, partial(self._answer, number))

    def _answer(self, rail: int, readable: bool, writable: bool) -> None:
        """Let those in who knock."""
        while True:
            try:
                connection, _ = self._listeners[rail].accept()
            except OSError:
                return
            if len(self._meetings) >= MOST_STRANGERS + len(self._addresses) * len(self.rails):
                connection.close()
                continue
            prepare(connection)
            talk = self._wires[rail].meet(Answering(self._secret, self.rank, rail))
            self._meetings[connection] = _Meeting(self, connection, talk, rail)

    def dial(self, now: float) -> None:
        """Dial peers that a path is missing to, and end handshakes that take too long."""
        for meeting in [meeting for meeting in self._meetings.values() if now > meeting.until]:
            self.part(meeting, Refused("the handshake takes too long"))
        for peer, link in self._links.items():
            for rail in range(len(self.rails)):
                missing = rail not in link.paths and (peer, rail) not in self._dialling
                # One below is only asked whether it is still there: it lets nobody in from above.
                wanted = self.rank < peer or (not link.paths and now > link.bare_since + self.patience)
                if wanted and missing and not link.peer_left and self._is_due(peer, rail, now):
                    self._call(peer, rail)

    def _is_due(self, peer: int, rail: int, now: float) -> bool:
        if not self.rails[rail].has_carrier():
            self._next_try.pop((peer, rail), None)  # when the cable is back, so is this rank, at once
            return False
        return now >= self._next_try.get((peer, rail), (0.0, 0.0))[0]

    def _call(self, peer: int, rail: int) -> None:
        generation = self._generations.get((peer, rail), 0) + 1
        self._generations[peer, rail] = generation
        talk = self._wires[rail].meet(Dialling(self._secret, Hello(self.rank, peer, rail, generation)))
        connection = self.rails[rail].socket()
        prepare(connection)
        try:
            connection.bind((self.rails[rail].address, 0))
            code = connection.connect_ex(self._addresses[peer][rail])
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, errno.errorcode.get(code, "error"))
        except OSError as error:
            connection.close()
            self._try_later(peer, rail, error)
            return
        meeting = self._meetings[connection] = _Meeting(self, connection, talk, rail)
        self._dialling[peer, rail] = meeting

    def _try_later(self, peer: int, rail: int, error: Exception) -> None:
        now = time.monotonic()
        first, most = RETRY_SECONDS
        pause = min(most, 2 * self._next_try.get((peer, rail), (0.0, first / 2))[1])
        self._next_try[peer, rail] = now + pause, pause
        if isinstance(error, ConnectionRefusedError):
            self._refused.setdefault((peer, rail), now)
        else:
            self._refused.pop((peer, rail), None)

    def is_gone(self, peer: int, since: float) -> bool:
        """Say whether a peer's process is gone: all its ports have refused connections since then."""
        refused = [self._refused.get((peer, rail)) for rail in range(len(self.rails))]
        return all(begun is not None and begun < since for begun in refused)

    def part(self, meeting: _Meeting, error: Exception) -> None:
        """End a connection whose ends do not get to know each other."""
        self._forget(meeting)
        meeting.connection.close()
        hello = meeting.talk.hello
        if meeting.talk.calls and hello is not None:
            self._try_later(hello.called, hello.rail, error)
        else:
            _log.info("rank %d: a connection on %s was refused: %s", self.rank, self.rails[meeting.rail].name, error)

    def _forget(self, meeting: _Meeting) -> None:
        self.loop.forget(meeting.connection)
        self._meetings.pop(meeting.connection, None)
        for key in [key for key, one in self._dialling.items() if one is meeting]:
            del self._dialling[key]

    def welcome(self, meeting: _Meeting) -> None:
        """Make a path of a connection whose ends know each other."""
        hello = meeting.talk.hello
        assert hello is not None and meeting.talk.done and meeting.through, "a few bytes always find room"
        self._forget(meeting)
        peer = hello.caller if hello.called == self.rank else hello.called
        link, rail = self._links[peer], hello.rail
        current = link.paths.get(rail)
        if hello.generation <= max(link.given_up[rail], current.key.generation if current else 0):
            meeting.connection.close()  # an old one that comes late
            return
        try:
            key = Key(rail, hello.generation)
            path = self._wires[rail].path(key, meeting.connection, meeting.talk, link, self.loop)
        except Refused as error:
            self.part(meeting, error)
            return
        self._next_try.pop((peer, rail), None)
        self._refused.pop((peer, rail), None)
        link.up(path)

    def close(self) -> None:
        """Let nobody in any more."""
        for meeting in list(self._meetings.values()):
            self._forget(meeting)
            meeting.connection.close()
        for listener in self._listeners:
            self.loop.forget(listener)
            listener.close()
