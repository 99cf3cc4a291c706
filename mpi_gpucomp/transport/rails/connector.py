"""How connections come about: each rank listens on every rail, and dials those above it, again whenever a path is lost.

Nobody gets further than the handshake who does not know the job's secret. Those who have not proved it yet have little
time, a fixed number of bytes, and so many places; whoever comes when all are taken is turned away.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails.sequence import Key
from mpi_gpucomp.transport.rails.tcp import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mpi_gpucomp.transport.rails.backends import Talk
    from mpi_gpucomp.transport.rails.discovery import Gathered
    from mpi_gpucomp.transport.rails.link import RailLink
    from mpi_gpucomp.transport.rails.loop import Loop

__all__ = ["MOST_CARD_BYTES", "SECRET_BYTES", "Answering", "Dialling", "Doors", "Hello", "Introducing", "Refused"]


# How the two ends of a new connection prove to each other that they belong to the job.
#
# Whoever dials says who it is, with a number that was never used before (a nonce). Whoever is called answers with a
# nonce
# of its own and a proof that it knows the job's secret; the dialler checks it and proves the same. Each proof
# covers all
# that was said before, so that none can be used again. A stranger can send no more than a hello and a wrong proof, of
# fixed lengths, before the connection is closed. What follows on the connection is not encrypted.

MAGIC = b"GPCRAIL1"
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
_HELLO = struct.Struct(f"<8sIIIIQ{NONCE_BYTES}s")
HELLO_BYTES, ANSWER_BYTES = _HELLO.size, NONCE_BYTES + PROOF_BYTES


class Refused(Exception):
    """The other end does not belong to the job, or not here; the text says why."""


class Hello(NamedTuple):
    """Who dials whom, on which rail, and for which time."""

    caller: int
    called: int
    rail: int
    generation: int


def _proof(secret: bytes, who: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, who + b"".join(said), "sha256")


class Dialling:
    """The end that has dialled: `wants` so many bytes, takes them, and returns what to send."""

    wants, calls = ANSWER_BYTES, True

    def __init__(self, secret: bytes, hello: Hello) -> None:
        """Begin; `first` is to be sent."""
        self._secret, self.hello, self.done = secret, hello, False
        self.first = _HELLO.pack(MAGIC, *hello, 0, secrets.token_bytes(NONCE_BYTES))

    def take(self, answer: bytes) -> bytes:
        """Check the answer, and return our proof."""
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"called", self.first, nonce)):
            raise Refused("whoever answers does not know the job's secret")
        self.done = True
        return _proof(self._secret, b"caller", self.first, answer)


class Answering:
    """The end that was called."""

    first, calls = b"", False

    def __init__(self, secret: bytes, rank: int, rail: int) -> None:
        """Listen for a hello of a rank below this one, on this rail."""
        self._secret, self._rank, self._rail = secret, rank, rail
        self.wants, self.done = HELLO_BYTES, False
        self.hello: Hello | None = None
        self._said = b""

    def take(self, data: bytes) -> bytes:
        """Check a hello and return an answer, or check the proof that follows."""
        if self.hello is None:
            self.hello, self.wants = self._read(data), PROOF_BYTES
            nonce = secrets.token_bytes(NONCE_BYTES)
            answer = nonce + _proof(self._secret, b"called", data, nonce)
            self._said = data + answer
            return answer
        if not hmac.compare_digest(data, _proof(self._secret, b"caller", self._said)):
            raise Refused("whoever calls does not know the job's secret")
        self.done = True
        return b""

    def _read(self, data: bytes) -> Hello:
        magic, *numbers, _, _ = _HELLO.unpack(data)
        hello = Hello(*numbers)
        if magic != MAGIC:
            raise Refused("not a hello of this protocol")
        if hello.called != self._rank or hello.rail != self._rail or hello.caller >= self._rank:
            raise Refused(f"a hello for somebody else: {hello}")
        return hello


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

    def __init__(
        self, rank: int, gathered: Gathered, links: Mapping[int, RailLink], loop: Loop, patience: float
    ) -> None:
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


# What two ends that have proved themselves tell each other before they are a path: a card each, of any form.

MOST_CARD_BYTES = 1 << 14
_LENGTH = struct.Struct("<I")


class Introducing:
    """A handshake that goes on with an exchange of cards; nobody's card is made or read before it is over."""

    def __init__(self, talk: Answering | Dialling, card: Callable[[], bytes]) -> None:
        """Begin as the handshake does."""
        self._talk, self._card = talk, card
        self.first, self.calls, self.done = talk.first, talk.calls, False
        self.theirs = b""
        """The other end's card."""
        self._length: int | None = None

    @property
    def hello(self) -> Hello | None:
        """Who dials whom, as far as that is known."""
        return self._talk.hello

    @property
    def wants(self) -> int:
        """Say how many bytes are to be read next."""
        if not self._talk.done:
            return self._talk.wants
        return _LENGTH.size if self._length is None else self._length

    def take(self, data: bytes) -> bytes:
        """Take what was read, and return what to send."""
        if not self._talk.done:
            said = self._talk.take(data)
            return said + self._own() if self._talk.done else said
        if self._length is None:
            (self._length,) = _LENGTH.unpack(data)
            if not 0 < self._length <= MOST_CARD_BYTES:
                raise Refused(f"a card of {self._length} bytes")
        else:
            self.theirs, self.done = data, True
        return b""

    def _own(self) -> bytes:
        card = self._card()
        return _LENGTH.pack(len(card)) + card
