"""Messages over rails: the transport interface on redundant paths, with transparent failover.

MPI is used to discover the peers, and not afterwards.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpi_gpucomp.errors import GpucompError, RankFailedError
from mpi_gpucomp.transport.base import Transport
from mpi_gpucomp.transport.rails import loop
from mpi_gpucomp.transport.rails.connector import Connector
from mpi_gpucomp.transport.rails.discovery import check_connected, discover
from mpi_gpucomp.transport.rails.link import RailLink
from mpi_gpucomp.transport.rails.messages import TagMatcher
from mpi_gpucomp.transport.rails.sequence import ABORT, BYE, CONTROL, Outgoing

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.transport.base import Transfer
    from mpi_gpucomp.transport.rails.discovery import Rails
    from mpi_gpucomp.transport.rails.link import Failover
    from mpi_gpucomp.transport.rails.messages import Copies

__all__ = ["RailsTransport"]

ABANDON_SECONDS = 0.5
"""How long `abandon` waits for acknowledgements of peers that may be gone."""
POLL_SECONDS = 1e-3
TICKS = 0.01, 0.25
"""Seconds between checks of the paths: the bounds of an eighth of the timeout."""

_log = logging.getLogger("mpi_gpucomp")
_memory = MPI.memory.fromaddress


class RailsTransport(Transport):
    """Messages with the other ranks of an MPI communicator over rails."""

    largest_tag = (1 << 31) - 1

    def __init__(self, comm: MPI.Intracomm, settings: Rails) -> None:
        """Connect all ranks of a communicator; all raise if one cannot. Collective."""
        self.rank, self.size, self._settings, self._caller = comm.rank, comm.size, settings, comm
        self.derived_comms: list[MPI.Intracomm] = []
        """Communicators that are revoked with the caller's after a failure."""
        self._failure: GpucompError | None = None
        self._closed = False
        found = discover(comm, settings)
        self._rails, self._loop = found.rails, loop.acquire()
        self._matcher = TagMatcher(self.rank, self._post, self._wake, self._loop.locked)
        self._matcher.fault = self._fault
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._links = {peer: RailLink(peer, found.tiers, self._matcher, settings.timeout) for peer in peers}
        for link in self._links.values():
            link.on_path_down = self._log_path_down
        self._connector = Connector(self.rank, found, self._links, self._loop, max(1.0, settings.timeout))
        try:
            self._connect(comm)
        except BaseException:
            self._release()
            raise

    def _connect(self, comm: MPI.Intracomm) -> None:
        """Wait for paths to every peer on every rail, or at least on one."""
        with self._loop.locked():
            self._loop.on_error.append(self._on_loop_error)
            self._loop.call_every(min(TICKS[1], max(TICKS[0], self._settings.timeout / 8)), self._tick)
            self._connector.open()
        links, rails = self._links.values(), len(self._rails)
        self._wait(lambda: all(len(link.paths) == rails for link in links), max(1.0, 2 * self._settings.timeout))
        self._wait(lambda: all(link.paths for link in links), self._settings.limit)
        check_connected(comm, self._settings, [link.peer for link in links if not link.paths])
        for link in links:
            for number in set(range(rails)) - link.paths.keys():
                _log.warning("rank %d: no path to rank %d over %s yet", self.rank, link.peer, self._rails[number].name)

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Post a send."""
        self._check(peer)
        self.bytes_sent += nbytes
        with self._loop.locked():
            return self._matcher.send(peer, tag, _view(address, nbytes))

    def receive(self, peer: int, tag: int, address: int, capacity: int) -> Transfer:
        """Post a receive."""
        self._check()
        with self._loop.locked():
            return self._matcher.receive(peer, tag, _view(address, capacity))

    def probe_any(self) -> int | None:
        """Return the tag of an unexpected message."""
        self._check()
        with self._loop.lock:
            return self._matcher.probe_any()

    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Receive an unexpected message into temporary memory."""
        self._check()
        with self._loop.locked():
            return self._matcher.discard(peer, tag)

    def send_control(self, peer: int, message: bytes) -> None:
        """Send a control message, unless the peer has left."""
        self._check()
        with self._loop.locked():
            if not self._links[peer].peer_left:
                self._post(peer, Outgoing(CONTROL, message))

    def recv_control(self) -> tuple[int, bytes] | None:
        """Return the next control message; after the last one, raise the transport's error."""
        if not self._matcher.control:
            self._check()
            return None
        found = self._matcher.control.popleft()
        if isinstance(found, str):
            self._failure = self._failure or self._lost(found)
            raise self._failure
        return found

    def revoke(self) -> None:
        """Broadcast the failure, if there is one, also to ranks in native MPI calls where MPI can revoke."""
        if self._failure is None or self._closed:
            return
        with self._loop.locked():
            for link in self._links.values():
                link.post(Outgoing(ABORT, self._failure.got.encode()))
        for comm in (self._caller, *self.derived_comms):
            try:
                comm.Revoke()
            except (MPI.Exception, NotImplementedError):
                return

    def close(self) -> None:
        """Close the connections once everything sent has arrived."""
        self._leave(self._settings.limit)

    def abandon(self) -> None:
        """Close the connections after a short wait for the peers that are alive."""
        self._leave(ABANDON_SECONDS)

    def _leave(self, seconds: float) -> None:
        if self._closed:
            return
        with self._loop.locked():
            for link in self._links.values():
                link.post(Outgoing(BYE))
        links = self._links.values()
        self._wait(lambda: all(link.all_acked or (link.peer_left and not link.paths) for link in links), seconds)
        self._release()

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        """Of all messages so far."""
        return self._matcher.bytes_received

    @property
    def copies(self) -> Copies:
        """Return the number and bytes of copies made within this rank."""
        return self._matcher.copies

    def rail(self, peer: int) -> str:
        """Return the devices that carry the traffic to a peer now: eth0, eth0+eth1, or empty while all are down."""
        if peer == self.rank:
            return ""
        with self._loop.lock:
            return "+".join(self._rails[number].name for number in self._links[peer].in_use)

    def down(self) -> list[tuple[int, str]]:
        """Return the peers and devices without a path, or with one that is not in use again yet."""
        with self._loop.lock:
            return [(one.peer, self._rails[rail].name) for one in self._links.values() for rail in sorted(one.down)]

    def failovers(self) -> list[Failover]:
        """Return the paths that were lost so far."""
        with self._loop.lock:
            return [lost for link in self._links.values() for lost in link.failovers]

    def _post(self, peer: int, item: Outgoing) -> None:
        self._links[peer].post(item)

    def _wake(self, peer: int) -> None:
        self._links[peer].wake()

    def _check(self, peer: int | None = None) -> None:
        """Raise if the transport has failed, or if this peer has left."""
        fault = self._failure if peer is None else self._fault(peer)
        if fault is not None:
            raise fault

    def _fault(self, peer: int) -> GpucompError | None:
        if self._failure is None and peer != self.rank and self._links[peer].peer_left:
            return self._lost(f"rank {peer} has left")
        return self._failure

    def _lost(self, got: str) -> RankFailedError:
        return RankFailedError(
            "rails",
            expected="all ranks reachable",
            got=got,
            remedy="Check the network and that rank. This communicator cannot be used any more.",
            rank=self.rank,
        )

    def _tick(self, now: float) -> None:
        """Check paths and peers."""
        if not self._closed:
            self._connector.connect_missing(now)
        for link in self._links.values():
            link.check_paths(now)
            if self._failure is None and not self._closed and not link.peer_left:
                self._check_peer(link, now)

    def _check_peer(self, link: RailLink, now: float) -> None:
        """Fail if a peer has been unreachable for too long, or its process has ended."""
        if link.closing and now - min(link.closing.values()) > self._settings.limit:
            self._failure = self._lost(f"a path from rank {self.rank} to rank {link.peer} that does not close")
        if link.paths:
            return
        disconnected = now - link.disconnected_since
        gone = self._connector.is_gone(link.peer, now - self._settings.timeout)
        if disconnected > self._settings.limit or gone:
            why = "its ports refuse connections" if gone else f"all paths down for {disconnected:.1f} s"
            self._failure = self._lost(f"no path from rank {self.rank} to rank {link.peer}: {why}")

    def _log_path_down(self, link: RailLink, rail: int, why: str) -> None:
        left = [self._rails[number].name for number in link.paths]
        then = f"continuing over {', '.join(left)}" if left else "no other path is left"
        _log.warning("rank %d: %s to rank %d is down (%s); %s", self.rank, self._rails[rail].name, link.peer, why, then)

    def _on_loop_error(self, error: Exception) -> None:
        self._failure = self._failure or self._lost(f"{type(error).__name__}: {error}")

    def _all_closed(self) -> bool:
        return not any(link.closing for link in self._links.values())

    def _release(self) -> None:
        """Close everything of this rank."""
        if self._closed:
            return
        self._closed = True
        with self._loop.locked():
            self._loop.on_error.remove(self._on_loop_error)
            self._connector.close()
            for link in self._links.values():
                link.close()
        self._wait(self._all_closed, self._settings.limit)
        with self._loop.lock:
            self._loop.cancel_timer(self._tick)
        loop.release(self._loop)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview(_memory(address, nbytes)).cast("B") if nbytes else memoryview(bytearray())  # type: ignore[arg-type]
