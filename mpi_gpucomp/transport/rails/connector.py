"""Connection setup: each rank listens on every rail and connects to higher ranks, again whenever a path is lost.

Both ends of a new connection prove that they belong to the job. The initiator sends a hello with a nonce. The responder
answers with its own nonce and a proof that it knows the job's secret; the initiator checks it and proves the same. Each
proof covers the whole exchange so far, so that none can be replayed. An unauthenticated peer can send a hello and a
wrong proof, of fixed lengths, before the connection is closed, within a time limit and a bounded number of connections.
What follows on the connection is not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket
import struct
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from mpi_gpucomp.transport.rails.backends import Handshake
    from mpi_gpucomp.transport.rails.discovery import Peers
    from mpi_gpucomp.transport.rails.loop import EventLoop

__all__ = [
    "MAX_ADDRESS_BYTES",
    "MAX_UNAUTHENTICATED",
    "SECRET_BYTES",
    "AddressExchange",
    "ConnectedPeer",
    "Connector",
    "HandshakeError",
    "Hello",
    "InitiatorHandshake",
    "ResponderHandshake",
]

MAGIC = b"GPCRAIL2"
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
_HELLO = struct.Struct(f"<8sIIIIQ{NONCE_BYTES}s")
HELLO_BYTES, ANSWER_BYTES = _HELLO.size, NONCE_BYTES + PROOF_BYTES
MAX_ADDRESS_BYTES = 1 << 14
_LENGTH = struct.Struct("<I")
MAX_UNAUTHENTICATED = 64
"""Connections that may be in the handshake, beyond those that the ranks themselves make."""
RETRY_SECONDS = 0.1, 1.0
"""Back-off between attempts to connect: initial and maximal."""

_log = logging.getLogger("mpi_gpucomp")


class HandshakeError(Exception):
    """The peer failed the handshake; the text gives the reason."""


class Hello(NamedTuple):
    """Who connects to whom, for which path and in which generation."""

    initiator: int
    responder: int
    path: int
    """The number of the rail; with several sockets for each, `rail * stripes + stripe`."""
    generation: int


def _proof(secret: bytes, role: bytes, *transcript: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(transcript), "sha256")


class InitiatorHandshake:
    """The initiator's end: feed it `needs` bytes at a time, and send what it returns."""

    needs, initiates = ANSWER_BYTES, True

    def __init__(self, secret: bytes, hello: Hello) -> None:
        """Start; `first` is to be sent."""
        self._secret, self.hello, self.done = secret, hello, False
        self.first = _HELLO.pack(MAGIC, *hello, 0, secrets.token_bytes(NONCE_BYTES))

    def feed(self, answer: bytes) -> bytes:
        """Check the answer, and return our proof."""
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"called", self.first, nonce)):
            raise HandshakeError("the responder does not know the job's secret")
        self.done = True
        return _proof(self._secret, b"caller", self.first, answer)


class ResponderHandshake:
    """The responder's end."""

    first, initiates = b"", False

    def __init__(self, secret: bytes, rank: int, rail: int, stripes: int = 1) -> None:
        """Expect a hello of a lower rank, on this rail."""
        self._secret, self._rank, self._rail, self._stripes = secret, rank, rail, stripes
        self.needs, self.done = HELLO_BYTES, False
        self.hello: Hello | None = None
        self._transcript = b""

    def feed(self, data: bytes) -> bytes:
        """Check a hello and return the answer, or check the proof that follows."""
        if self.hello is None:
            self.hello, self.needs = self._read(data), PROOF_BYTES
            nonce = secrets.token_bytes(NONCE_BYTES)
            answer = nonce + _proof(self._secret, b"called", data, nonce)
            self._transcript = data + answer
            return answer
        if not hmac.compare_digest(data, _proof(self._secret, b"caller", self._transcript)):
            raise HandshakeError("the initiator does not know the job's secret")
        self.done = True
        return b""

    def _read(self, data: bytes) -> Hello:
        magic, *numbers, _, _ = _HELLO.unpack(data)
        hello = Hello(*numbers)
        if magic != MAGIC:
            raise HandshakeError("not a hello of this protocol")
        rail = hello.path // self._stripes
        if hello.responder != self._rank or rail != self._rail or hello.initiator >= self._rank:
            raise HandshakeError(f"a hello for another rank or rail: {hello}")
        return hello


class AddressExchange:
    """A handshake followed by an exchange of address blobs, which are made and read only after authentication."""

    def __init__(self, handshake: InitiatorHandshake | ResponderHandshake, make_address: Callable[[], bytes]) -> None:
        """Start with the handshake."""
        self._handshake, self._make_address = handshake, make_address
        self.first, self.initiates, self.done = handshake.first, handshake.initiates, False
        self.peer_address = b""
        self._length: int | None = None

    @property
    def hello(self) -> Hello | None:
        """Return the handshake's hello, once known."""
        return self._handshake.hello

    @property
    def needs(self) -> int:
        """Return the number of bytes to read next."""
        if not self._handshake.done:
            return self._handshake.needs
        return _LENGTH.size if self._length is None else self._length

    def feed(self, data: bytes) -> bytes:
        """Handle the bytes read, and return the bytes to send."""
        if not self._handshake.done:
            answer = self._handshake.feed(data)
            return answer + self._address() if self._handshake.done else answer
        if self._length is None:
            (self._length,) = _LENGTH.unpack(data)
            if not 0 < self._length <= MAX_ADDRESS_BYTES:
                raise HandshakeError(f"an address blob of {self._length} bytes")
        else:
            self.peer_address, self.done = data, True
        return b""

    def _address(self) -> bytes:
        address = self._make_address()
        return _LENGTH.pack(len(address)) + address


class ConnectedPeer(Protocol):
    """What the connector needs to know of a peer."""

    @property
    def paths(self) -> Collection[int]:
        """Return the numbers of the paths that exist."""

    @property
    def peer_left(self) -> bool:
        """Return True if the peer has left."""

    @property
    def disconnected_since(self) -> float:
        """Return since when there is no path, if there is none."""


class PendingConnection:
    """A connection whose handshake has not completed."""

    def __init__(
        self, connector: Connector, connection: socket.socket, handshake: Handshake, rail: int, host: str = ""
    ) -> None:
        """Start the handshake; `host` is the address of a rank, or a stranger, that has connected to this one."""
        self.host = host
        self._connector, self.connection, self.handshake, self.rail = connector, connection, handshake, rail
        self.deadline = time.monotonic() + connector.handshake_timeout
        self._received, self._unsent = b"", handshake.first
        self._connected = not handshake.initiates
        connector.loop.register(connection, self._on_ready, writing=bool(self._unsent))

    def _on_ready(self, readable: bool, writable: bool) -> None:
        try:
            if writable and not self._connected:
                self._check_connected()
            if self._connected and self._unsent:
                self._send()
            if readable:
                self._read()
        except BlockingIOError:
            pass
        except (OSError, HandshakeError) as error:
            self._connector.reject(self, error)

    def _check_connected(self) -> None:
        code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "error"))
        self._connected = True

    def _send(self) -> None:
        self._unsent = self._unsent[self.connection.send(self._unsent) :]
        self._connector.loop.register(self.connection, self._on_ready, writing=bool(self._unsent))

    def _read(self) -> None:
        while not self.handshake.done:
            data = self.connection.recv(self.handshake.needs - len(self._received))
            if not data:
                raise HandshakeError("closed during the handshake")
            self._received += data
            if len(self._received) == self.handshake.needs:
                complete, self._received = self._received, b""
                self._unsent += self.handshake.feed(complete)
                if self._unsent:
                    self._send()
        self._connector.on_handshake_done(self)

    @property
    def all_sent(self) -> bool:
        """Return True if nothing is left to send."""
        return not self._unsent


class Connector:
    """The listeners and outgoing connections of one rank."""

    def __init__(
        self,
        rank: int,
        found: Peers,
        peers: Mapping[int, ConnectedPeer],
        loop: EventLoop,
        handshake_timeout: float,
        on_connected: Callable[[int, Hello, socket.socket, Handshake], None],
        stripes: int = 1,
    ) -> None:
        """Hand each authenticated connection of a peer over to `on_connected`, which may raise HandshakeError."""
        self.rank, self._peers, self.loop, self.handshake_timeout = rank, peers, loop, handshake_timeout
        self.rails, self._backends, self._listeners = found.rails, found.backends, found.listeners
        self._secret, self._addresses = found.secret, found.addresses
        self._on_connected, self._stripes = on_connected, stripes
        self._paths = range(len(self.rails) * stripes)
        self._pending: dict[socket.socket, PendingConnection] = {}
        self._connecting: dict[tuple[int, int], PendingConnection] = {}
        self._generations: dict[tuple[int, int], int] = {}
        self._next_try: dict[tuple[int, int], tuple[float, float]] = {}
        self._refused: dict[tuple[int, int], float] = {}
        """Since when a peer's port refuses connections."""

    def open(self) -> None:
        """Connect to higher ranks, and accept connections of lower ones."""
        self.connect_missing(time.monotonic())
        for number, listener in enumerate(self._listeners):
            self.loop.register(listener, partial(self._accept, number))

    def _accept(self, rail: int, readable: bool, writable: bool) -> None:
        while True:
            try:
                connection, (host, *_) = self._listeners[rail].accept()
            except OSError:
                return
            if len(self._pending) >= MAX_UNAUTHENTICATED + len(self._addresses) * len(self._paths):
                self._make_room()
            connection.setblocking(False)
            handshake = self._backends[rail].handshake(ResponderHandshake(self._secret, self.rank, rail, self._stripes))
            self._pending[connection] = PendingConnection(self, connection, handshake, rail, host)

    def _make_room(self) -> None:
        """Reject the oldest connection from the host that has most of them: strangers must not keep peers out."""
        accepted = [pending for pending in self._pending.values() if not pending.handshake.initiates]
        if accepted:
            (crowd, _), *_ = Counter(pending.host for pending in accepted).most_common(1)
            oldest = next(pending for pending in accepted if pending.host == crowd)
            self.reject(oldest, HandshakeError("a newer connection needs its place"))

    def connect_missing(self, now: float) -> None:
        """Connect to peers without a path, and reject handshakes that exceed the time limit."""
        for pending in [pending for pending in self._pending.values() if now > pending.deadline]:
            self.reject(pending, HandshakeError("the handshake timed out"))
        for peer, state in self._peers.items():
            for path in self._paths:
                missing = path not in state.paths and (peer, path) not in self._connecting
                # A connection to a lower rank only tests whether it is alive: it accepts none from above.
                timed_out = not state.paths and now > state.disconnected_since + self.handshake_timeout
                wanted = self.rank < peer or timed_out
                if wanted and missing and not state.peer_left and self._is_due(peer, path, now):
                    self._connect(peer, path)

    def _is_due(self, peer: int, path: int, now: float) -> bool:
        if not self.rails[path // self._stripes].has_carrier():
            self._next_try.pop((peer, path), None)  # reconnect at once when the carrier is back
            return False
        return now >= self._next_try.get((peer, path), (0.0, 0.0))[0]

    def _connect(self, peer: int, path: int) -> None:
        generation, rail = self._generations.get((peer, path), 0) + 1, path // self._stripes
        self._generations[peer, path] = generation
        hello = Hello(self.rank, peer, path, generation)
        handshake = self._backends[rail].handshake(InitiatorHandshake(self._secret, hello))
        connection = self.rails[rail].socket()
        connection.setblocking(False)
        try:
            connection.bind((self.rails[rail].address, 0))
            code = connection.connect_ex(self._addresses[peer][rail])
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, errno.errorcode.get(code, "error"))
        except OSError as error:
            connection.close()
            self._back_off(peer, path, error)
            return
        pending = self._pending[connection] = PendingConnection(self, connection, handshake, rail)
        self._connecting[peer, path] = pending

    def _back_off(self, peer: int, path: int, error: Exception) -> None:
        now = time.monotonic()
        first, longest = RETRY_SECONDS
        pause = min(longest, 2 * self._next_try.get((peer, path), (0.0, first / 2))[1])
        self._next_try[peer, path] = now + pause, pause
        if isinstance(error, ConnectionRefusedError):
            self._refused.setdefault((peer, path), now)
        else:
            self._refused.pop((peer, path), None)

    def is_gone(self, peer: int, since: float) -> bool:
        """Return True if a peer's process has ended: all its ports have refused connections since then."""
        refused = [self._refused.get((peer, path)) for path in self._paths]
        return all(begun is not None and begun < since for begun in refused)

    def reject(self, pending: PendingConnection, error: Exception) -> None:
        """Close a connection whose handshake failed."""
        self._forget(pending)
        pending.connection.close()
        hello = pending.handshake.hello
        if pending.handshake.initiates and hello is not None:
            self._back_off(hello.responder, hello.path, error)
        else:
            _log.info("rank %d: rejected a connection on %s: %s", self.rank, self.rails[pending.rail].name, error)

    def _forget(self, pending: PendingConnection) -> None:
        self.loop.unregister(pending.connection)
        self._pending.pop(pending.connection, None)
        for key in [key for key, one in self._connecting.items() if one is pending]:
            del self._connecting[key]

    def on_handshake_done(self, pending: PendingConnection) -> None:
        """Hand an authenticated connection over."""
        hello = pending.handshake.hello
        assert hello is not None and pending.handshake.done and pending.all_sent, "a socket buffers a few bytes"
        self._forget(pending)
        peer = hello.initiator if hello.responder == self.rank else hello.responder
        try:
            self._on_connected(peer, hello, pending.connection, pending.handshake)
        except HandshakeError as error:
            self.reject(pending, error)
            return
        self._next_try.pop((peer, hello.path), None)
        self._refused.pop((peer, hello.path), None)

    @property
    def has_pending(self) -> bool:
        """Return True if there are connections in the handshake."""
        return bool(self._pending)

    def close(self) -> None:
        """Close the listeners and the pending connections."""
        for pending in list(self._pending.values()):
            self._forget(pending)
            pending.connection.close()
        for listener in self._listeners:
            self.loop.unregister(listener)
            listener.close()
