"""Messages over rails: the same contract as over MPI, and what breaks is mended underneath.

MPI serves to make the ranks known to each other, and is not used from then on.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpi_gpucomp.errors import GpucompError, RankFailedError
from mpi_gpucomp.transport.base import Transport
from mpi_gpucomp.transport.rails import loop
from mpi_gpucomp.transport.rails.connector import Doors
from mpi_gpucomp.transport.rails.discovery import check_reached, gather
from mpi_gpucomp.transport.rails.frames import BYE, LETTER, LOST, Item
from mpi_gpucomp.transport.rails.link import RailLink
from mpi_gpucomp.transport.rails.messages import Messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.transport.base import Transfer
    from mpi_gpucomp.transport.rails.link import Failover
    from mpi_gpucomp.transport.rails.messages import Copies
    from mpi_gpucomp.transport.rails.settings import Rails

__all__ = ["RailsTransport"]

ABANDON_SECONDS = 0.5
"""How long what has been sent may take to arrive where the others may not be there."""
NAP = 1e-3
TICKS = 0.01, 0.25
"""Seconds between looks at the paths: the least and the most, an eighth of the timeout otherwise."""

_log = logging.getLogger("mpi_gpucomp")
_memory = MPI.memory.fromaddress


class RailsTransport(Transport):
    """The other ranks of an MPI communicator, on rails."""

    largest_tag = (1 << 31) - 1

    def __init__(self, comm: MPI.Intracomm, settings: Rails) -> None:
        """Let all ranks of a communicator find each other: all raise if one cannot."""
        self.rank, self.size, self._settings, self._caller = comm.rank, comm.size, settings, comm
        self.derived_comms: list[MPI.Intracomm] = []
        """Communicators that are revoked when the ranks have lost each other, beside the caller's."""
        self._failure: GpucompError | None = None
        self._closed = False
        gathered = gather(comm, settings)
        self._rails, self._loop = gathered.rails, loop.shared()
        self._messages = Messages(self.rank, self._post, self._wake, self._loop.held)
        self._messages.fault = self._fault
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._links = {peer: RailLink(peer, gathered.tiers, self._messages, settings.timeout) for peer in peers}
        for link in self._links.values():
            link.when_down = self._say_down
        self._doors = Doors(self.rank, gathered, self._links, self._loop, max(1.0, settings.timeout))
        try:
            self._connect(comm)
        except BaseException:
            self._let_go()
            raise

    def _connect(self, comm: MPI.Intracomm) -> None:
        """Make the paths; wait until every peer is reached on every rail, or at least on one."""
        with self._loop.held():
            self._loop.when_broken.append(self._break)
            self._loop.every(min(TICKS[1], max(TICKS[0], self._settings.timeout / 8)), self._tick)
            self._doors.open()
        links, rails = self._links.values(), len(self._rails)
        self._wait(lambda: all(len(link.paths) == rails for link in links), max(1.0, 2 * self._settings.timeout))
        self._wait(lambda: all(link.paths for link in links), self._settings.limit)
        check_reached(comm, self._settings, [link.peer for link in links if not link.paths])
        for link in links:
            for number in set(range(rails)) - link.paths.keys():
                _log.warning("rank %d: no way to rank %d over %s yet", self.rank, link.peer, self._rails[number].name)

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not ready() and time.monotonic() < until:
            time.sleep(NAP)

    # The contract

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Start to send."""
        self._check(peer)
        self.bytes_sent += nbytes
        with self._loop.held():
            return self._messages.send(peer, tag, _view(address, nbytes))

    def receive(self, peer: int, tag: int, address: int, room: int) -> Transfer:
        """Start to receive."""
        self._check()
        with self._loop.held():
            return self._messages.receive(peer, tag, _view(address, room))

    def probe_any(self) -> int | None:
        """Look for a message that nobody has asked for."""
        self._check()
        with self._loop.lock:
            return self._messages.probe_any()

    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Receive a message into memory of its own."""
        self._check()
        with self._loop.held():
            return self._messages.discard(peer, tag)

    def send_control(self, peer: int, letter: bytes) -> None:
        """Send a letter; one who has left reads none."""
        self._check()
        with self._loop.held():
            if not self._links[peer].peer_left:
                self._post(peer, Item(LETTER, letter))

    def recv_control(self) -> tuple[int, bytes] | None:
        """Return the next letter; behind the last one, raise what has gone wrong."""
        if not self._messages.letters:
            self._check()
            return None
        found = self._messages.letters.popleft()
        if isinstance(found, str):
            self._failure = self._failure or self._lost(found)
            raise self._failure
        return found

    def revoke(self) -> None:
        """Let the others hear that a rank is lost, if it is; those in calls of MPI's own too, where MPI can do that."""
        if self._failure is None or self._closed:
            return
        with self._loop.held():
            for link in self._links.values():
                link.post(Item(LOST, self._failure.got.encode()))
        for comm in (self._caller, *self.derived_comms):
            try:
                comm.Revoke()
            except (MPI.Exception, NotImplementedError):
                return

    def close(self) -> None:
        """Say goodbye, and close the connections once all that was sent has arrived."""
        self._leave(self._settings.limit)

    def abandon(self) -> None:
        """Say goodbye to those who are there, and close the connections."""
        self._leave(ABANDON_SECONDS)

    def _leave(self, seconds: float) -> None:
        if self._closed:
            return
        with self._loop.held():
            for link in self._links.values():
                link.post(Item(BYE))
        links = self._links.values()
        self._wait(lambda: all(link.all_acked or (link.peer_left and not link.paths) for link in links), seconds)
        self._let_go()

    # What is known of the rails

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        """Of all messages so far."""
        return self._messages.bytes_received

    @property
    def copies(self) -> Copies:
        """Return how often messages were copied on their way within this rank, and how many bytes."""
        return self._messages.copies

    def rail(self, peer: int) -> str:
        """Name the devices that carry what is sent to a peer now: eth0, eth0+eth1, or none while all are dead."""
        if peer == self.rank:
            return ""
        with self._loop.lock:
            return "+".join(self._rails[number].name for number in self._links[peer].in_use)

    def missing(self) -> list[tuple[int, str]]:
        """Return the peers and devices without a path now, or with one that is not in use again yet."""
        with self._loop.lock:
            return [(one.peer, self._rails[rail].name) for one in self._links.values() for rail in sorted(one.missing)]

    def failovers(self) -> list[Failover]:
        """Return the paths that were lost so far."""
        with self._loop.lock:
            return [lost for link in self._links.values() for lost in link.failovers]

    # Inside

    def _post(self, peer: int, item: Item) -> None:
        self._links[peer].post(item)

    def _wake(self, peer: int) -> None:
        self._links[peer].wake()

    def _check(self, peer: int | None = None) -> None:
        """Raise if the ranks have lost each other, or if this peer has left."""
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
            expected="all ranks to be there",
            got=got,
            remedy="See to the network or to the rank; this communicator cannot be used any more.",
            rank=self.rank,
        )

    def _tick(self, now: float) -> None:
        """Look after paths and peers."""
        if not self._closed:
            self._doors.dial(now)
        for link in self._links.values():
            link.look(now)
            if self._failure is None and not self._closed and not link.peer_left:
                self._judge(link, now)

    def _judge(self, link: RailLink, now: float) -> None:
        """Give a peer up that has not been reached for too long, or whose process is gone."""
        if link.fading and now - min(link.fading.values()) > self._settings.limit:
            self._failure = self._lost(f"a path from rank {self.rank} to rank {link.peer} that does not let go")
        if link.paths:
            return
        bare = now - link.bare_since
        gone = self._doors.is_gone(link.peer, now - self._settings.timeout)
        if bare > self._settings.limit or gone:
            why = "nobody listens on its ports any more" if gone else f"all paths are dead for {bare:.1f} s"
            self._failure = self._lost(f"no way from rank {self.rank} to rank {link.peer}: {why}")

    def _say_down(self, link: RailLink, rail: int, why: str) -> None:
        left = [self._rails[number].name for number in link.paths]
        on = f"going on over {', '.join(left)}" if left else "no other is left for now"
        _log.warning("rank %d: %s to rank %d is dead (%s); %s", self.rank, self._rails[rail].name, link.peer, why, on)

    def _break(self, error: Exception) -> None:
        self._failure = self._failure or self._lost(f"{type(error).__name__}: {error}")

    def _all_quiet(self) -> bool:
        return not any(link.fading for link in self._links.values())

    def _let_go(self) -> None:
        """Close everything here."""
        if self._closed:
            return
        self._closed = True
        with self._loop.held():
            self._loop.when_broken.remove(self._break)
            self._doors.close()
            for link in self._links.values():
                link.close()
        self._wait(self._all_quiet, self._settings.limit)
        with self._loop.lock:
            self._loop.no_more(self._tick)
        loop.leave(self._loop)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview(_memory(address, nbytes)).cast("B") if nbytes else memoryview(bytearray())  # type: ignore[arg-type]
