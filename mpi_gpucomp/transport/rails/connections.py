"""The control side of the TCP wire: connects the ranks, and connects them again whenever a path is lost.

The wire itself is C++ and moves the messages. This side runs in the thread of the event loop, which sleeps until a
connection or an event needs it: it hands authenticated sockets over to the wire, and learns from it which paths were
lost and which peers have left. It needs no lock of the wire's users.
"""

from __future__ import annotations

import ctypes
import logging
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.transport.rails import loop
from mpi_gpucomp.transport.rails.backends import UcxAddressExchange
from mpi_gpucomp.transport.rails.connector import Connector, HandshakeError
from mpi_gpucomp.transport.rails.discovery import check_connected, discover
from mpi_gpucomp.transport.rails.ucx import UcxBridge, UcxError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from mpi_gpucomp.transport.bootstrap import Bootstrap
    from mpi_gpucomp.transport.rails.backends import Handshake
    from mpi_gpucomp.transport.rails.connector import Hello
    from mpi_gpucomp.transport.rails.discovery import Peers, Rails
    from mpi_gpucomp.transport.rails.ucx import UcxEndpoint

__all__ = ["Copies", "Failover", "TcpConnections"]

POLL_SECONDS = 1e-3
BUSY_TICK, IDLE_TICK = 0.05, 1.0
"""Seconds between checks while paths are missing, and otherwise."""
PATH_DOWN, PEER_LEFT = 1, 2
IN_USE, DOWN = 1, 2
"""Bits of a rail's state."""
REASON_BYTES = 104
_log = logging.getLogger("mpi_gpucomp")


class _Event(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("generation", ctypes.c_uint64),
        ("reason", ctypes.c_char * REASON_BYTES),
    )


class _FailoverRecord(ctypes.Structure):
    _fields_ = (
        ("peer", ctypes.c_int32),
        ("rail", ctypes.c_int32),
        ("silence", ctypes.c_int64),
        ("downtime", ctypes.c_int64),
        ("reason", ctypes.c_char * REASON_BYTES),
    )


def _declare(library: ctypes.CDLL) -> None:
    """Set the types of the functions: pointers would be cut to 32 bits."""
    pointer, number, wide, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p
    numbers, bytes_, events = ctypes.POINTER(number), ctypes.POINTER(ctypes.c_uint8), ctypes.POINTER(_Event)
    records, wides = ctypes.POINTER(_FailoverRecord), ctypes.POINTER(wide)
    declared: dict[str, tuple[object, list[object]]] = {
        "gc_tcp_new": (pointer, [number, number, number, numbers, text, text, number, wide, wide]),
        "gc_tcp_free": (None, [pointer]),
        "gc_tcp_poll": (number, [pointer]),
        "gc_tcp_close": (None, [pointer, number]),
        "gc_tcp_add_path": (None, [pointer, number, number, ctypes.c_uint64, number]),
        "gc_tcp_drop_path": (None, [pointer, number, number, text]),
        "gc_tcp_seen": (None, [pointer, number, number]),
        "gc_tcp_fail": (None, [pointer, text]),
        "gc_tcp_event_fd": (number, [pointer]),
        "gc_tcp_next_event": (number, [pointer, events]),
        "gc_tcp_rails": (None, [pointer, number, bytes_]),
        "gc_tcp_failovers": (wide, [pointer, records, wide]),
        "gc_tcp_copies": (None, [pointer, wides]),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class _PeerState:
    """The paths to a peer, as far as this side knows."""

    def __init__(self) -> None:
        self.paths: dict[int, int] = {}
        """The generation of each path that was handed over and not lost since."""
        self.peer_left = False
        self.disconnected_since = time.monotonic()


class _EventDescriptor:
    """The descriptor of the wire's events."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._descriptor


class TcpConnections:
    """A TCP wire between the ranks of a job."""

    def __init__(self, bootstrap: Bootstrap, settings: Rails, library: ctypes.CDLL) -> None:
        """Connect all ranks; all raise if one cannot. Collective."""
        self.rank, self.size, self._settings, self._library = bootstrap.rank, bootstrap.size, settings, library
        _declare(library)
        found = discover(bootstrap, settings)
        self._rails = found.rails
        self.handle = self._make_wire(found)
        """The wire, for the core's functions; 0 once it is freed."""
        self._peers = {peer: _PeerState() for peer in range(self.size) if peer != self.rank}
        self._bridges: dict[Hello, UcxBridge] = {}
        """Of the paths over UCX, until they have closed."""
        self._closed, self._period = False, BUSY_TICK
        self._loop = loop.acquire()
        self._events = _EventDescriptor(library.gc_tcp_event_fd(self.handle))
        handshake_timeout = max(1.0, settings.timeout)
        self._connector = Connector(
            self.rank, found, self._peers, self._loop, handshake_timeout, self._on_connected, settings.stripes
        )
        try:
            self._connect(bootstrap)
        except BaseException:
            self._library.gc_tcp_close(self.handle, 1)
            self._stop()
            self.free()
            raise

    def _make_wire(self, found: Peers) -> int:
        tier_of = list(chain.from_iterable([number] * len(tier) for number, tier in enumerate(found.tiers)))
        count = len(tier_of)
        made: int | None = self._library.gc_tcp_new(
            self.rank,
            self.size,
            count,
            (ctypes.c_int32 * count)(*tier_of),
            "\n".join(rail.name for rail in found.rails).encode(),
            "\n".join(rail.device or "" for rail in found.rails).encode(),
            self._settings.stripes,
            int(self._settings.timeout * 1e9),
            int(self._settings.limit * 1e9),
        )
        assert made, "the settings are checked"
        return made

    def _connect(self, bootstrap: Bootstrap) -> None:
        """Wait for paths to every peer on every rail, or at least on one."""
        with self._loop.lock:
            self._loop.on_error.append(self._on_loop_error)
            self._loop.register(self._events, self._on_events)
            self._connector.open()
            self._loop.call_every(self._period, self._tick)
        peers, paths = self._peers.values(), len(self._rails) * self._settings.stripes
        self._wait(lambda: all(len(peer.paths) == paths for peer in peers), max(1.0, 2 * self._settings.timeout))
        self._wait(lambda: all(peer.paths for peer in peers), self._settings.limit)
        check_connected(bootstrap, self._settings, [peer for peer, state in self._peers.items() if not state.paths])
        self._library.gc_tcp_poll(self.handle)  # takes the sockets over
        for peer, state in self._peers.items():
            for rail in sorted({path // self._settings.stripes for path in set(range(paths)) - state.paths.keys()}):
                _log.warning("rank %d: no path to rank %d over %s yet", self.rank, peer, self._rails[rail].name)

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    # In the thread of the event loop

    def _on_connected(self, peer: int, hello: Hello, connection: socket.socket, handshake: Handshake) -> None:
        """Hand an authenticated socket over to the wire."""
        state = self._peers[peer]
        if hello.generation <= state.paths.get(hello.path, 0):
            raise HandshakeError("an old connection, delayed")
        if isinstance(handshake, UcxAddressExchange):
            connection = self._make_bridge(peer, hello, connection, handshake.connect())
        state.paths[hello.path] = hello.generation
        self._library.gc_tcp_add_path(self.handle, peer, hello.path, hello.generation, connection.detach())

    def _make_bridge(
        self, peer: int, hello: Hello, side_channel: socket.socket, endpoint: UcxEndpoint
    ) -> socket.socket:
        """Return a socket whose bytes go over UCX."""
        # Its faults and signs of life would be taken for those of the new path.
        for older in [one for former, one in self._bridges.items() if former[:3] == hello[:3]]:
            older.close()

        def on_broken(reason: str) -> None:
            self._library.gc_tcp_drop_path(self.handle, peer, hello.path, reason.encode())

        try:
            bridge = UcxBridge(
                endpoint,
                side_channel,
                self._loop,
                self._settings.timeout,
                on_life=partial(self._library.gc_tcp_seen, self.handle, peer, hello.path),
                on_broken=on_broken,
                on_closed=partial(self._bridges.pop, hello),
            )
        except UcxError as error:
            raise HandshakeError(str(error)) from error
        self._bridges[hello] = bridge
        return bridge.wire_socket

    def _on_events(self, readable: bool, writable: bool) -> None:
        event = _Event()
        while self._library.gc_tcp_next_event(self.handle, ctypes.byref(event)):
            if event.kind == PEER_LEFT:
                self._peers[event.peer].peer_left = True
            elif event.kind == PATH_DOWN:
                self._on_path_down(event.peer, event.path, event.generation, event.reason.decode(errors="replace"))
        self._tick(time.monotonic())

    def _on_path_down(self, peer: int, path: int, generation: int, why: str) -> None:
        state, stripes = self._peers[peer], self._settings.stripes
        if state.paths.get(path) == generation:
            del state.paths[path]
            if not state.paths:
                state.disconnected_since = time.monotonic()
        left = sorted({number // stripes for number in state.paths})
        then = f"continuing over {', '.join(self._rails[rail].name for rail in left)}" if left else "no path is left"
        name = self._rails[path // stripes].name
        _log.warning("rank %d: %s to rank %d is down (%s); %s", self.rank, name, peer, why, then)

    def _tick(self, now: float) -> None:
        """Reconnect lost paths, and find out which peers have ended."""
        self._connector.connect_missing(now)
        paths, missing = len(self._rails) * self._settings.stripes, False
        for peer, state in self._peers.items():
            missing |= len(state.paths) < paths and not state.peer_left
            gone = not state.paths and self._connector.is_gone(peer, now - self._settings.timeout)
            if gone and not state.peer_left:
                text = f"no path from rank {self.rank} to rank {peer}: its ports refuse connections"
                self._library.gc_tcp_fail(self.handle, text.encode())
        period = BUSY_TICK if missing or self._connector.has_pending else IDLE_TICK
        if period != self._period:
            self._period = period
            self._loop.call_every(period, self._tick)

    def _on_loop_error(self, error: Exception) -> None:
        self._library.gc_tcp_fail(self.handle, f"{type(error).__name__}: {error}".encode())

    # Statistics

    @property
    def copies(self) -> Copies:
        """Return the number and bytes of copies made within this rank."""
        counts = (ctypes.c_int64 * 2)()
        self._library.gc_tcp_copies(self.handle, counts)
        return Copies(*counts)

    def _rail_states(self, peer: int) -> bytes:
        states = (ctypes.c_uint8 * len(self._rails))()
        self._library.gc_tcp_rails(self.handle, peer, states)
        return bytes(states)

    def rail(self, peer: int) -> str:
        """Return the devices that carry the traffic to a peer now: eth0, eth0+eth1, or empty while all are down."""
        states = self._rail_states(peer)
        return "+".join(rail.name for rail, state in zip(self._rails, states, strict=True) if state & IN_USE)

    def down(self) -> list[tuple[int, str]]:
        """Return the peers and devices without a path, or with one that is not in use again yet."""
        found = ((peer, zip(self._rails, self._rail_states(peer), strict=True)) for peer in self._peers)
        return [(peer, rail.name) for peer, states in found for rail, state in states if state & DOWN]

    def failovers(self) -> list[Failover]:
        """Return the paths that were lost so far."""
        count = self._library.gc_tcp_failovers(self.handle, None, 0)
        records = (_FailoverRecord * count)()
        self._library.gc_tcp_failovers(self.handle, records, count)
        return [
            Failover(
                one.peer,
                one.rail,
                one.reason.decode(errors="replace"),
                one.silence / 1e9,
                one.downtime / 1e9 if one.downtime >= 0 else None,
            )
            for one in records
        ]

    # The end

    def close(self) -> None:
        """Close the connections once everything sent has arrived; blocks, and no other thread may use the wire."""
        self._leave(abandon=False)

    def abandon(self) -> None:
        """Close the connections after a short wait for the peers that are alive."""
        self._leave(abandon=True)

    def _leave(self, *, abandon: bool) -> None:
        if not self._closed:
            self._library.gc_tcp_close(self.handle, abandon)
            self._stop()

    def _stop(self) -> None:
        self._closed = True
        with self._loop.lock:
            self._loop.on_error.remove(self._on_loop_error)
            self._loop.unregister(self._events)
            self._loop.cancel_timer(self._tick)
            self._connector.close()
            for bridge in list(self._bridges.values()):
                bridge.close()
        self._wait(lambda: not self._bridges, self._settings.limit)
        loop.release(self._loop)

    def free(self) -> None:
        """Free a closed wire, and its transfers."""
        if self.handle:
            self._library.gc_tcp_free(self.handle)
            self.handle = 0


class Copies(NamedTuple):
    """Copies of messages made within a rank."""

    times: int
    nbytes: int


class Failover(NamedTuple):
    """A path that was lost, and the time it cost."""

    peer: int
    rail: int
    reason: str
    silence: float
    """Seconds from the last sign of life to the detection."""
    downtime: float | None
    """Seconds from the last sign of life until both ends had resynchronised; None if they have not yet."""
