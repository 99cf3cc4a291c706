"""Messages over MPI, on duplicates of the caller's communicator, so that no tag meets the caller's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from mpi_gpucomp.errors import RankFailedError
from mpi_gpucomp.transport.base import Transfer, Transport
from mpi_gpucomp.transport.segmented import Channel, DiscardedPieces, LinkRate, ReceivedPieces, SentPieces

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from mpi_gpucomp.transport.segmented import Incoming, Segmentation

__all__ = ["MpiTransport", "dead_ranks", "lost", "means_death"]

_memory = MPI.memory.fromaddress

FAILURES = tuple(
    getattr(MPI, name)
    for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    if getattr(MPI, name, MPI.ERR_UNKNOWN) != MPI.ERR_UNKNOWN
)
"""What MPI says when a rank is dead, in an MPI that survives it (ULFM)."""
NAMING_SECONDS = 1.0
"""How long to ask MPI who is dead: those who only hear that others have given up may hear of the reason later."""


def means_death(error: MPI.Exception, comm: MPI.Intracomm) -> bool:
    """Say whether MPI's error is one of a rank that is dead; some that meet it are only told of "another error"."""
    return error.Get_error_class() in FAILURES or bool(dead_ranks(comm))


def lost(error: MPI.Exception, rank: int, comm: MPI.Intracomm = MPI.COMM_SELF) -> RankFailedError:
    """Make our error of MPI's; it names those who are dead of `comm`."""
    died, said = means_death(error, comm), f"MPI's error: {error.Get_error_string()}"
    dead = _named(comm) if died and comm.size > 1 else []
    who = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))} dead ({said})"
    return RankFailedError(
        "communicator",
        expected="all ranks to be there",
        got=who if dead else said,
        remedy="Go on with the others: new = comm.Shrink()." if died else "See what MPI says on the other ranks.",
        rank=rank,
    )


def _named(comm: MPI.Intracomm) -> list[int]:
    """Return who is dead, as soon as MPI knows."""
    deadline = time.monotonic() + NAMING_SECONDS
    while not (dead := dead_ranks(comm)) and time.monotonic() < deadline:
        MPI.COMM_SELF.Iprobe()  # lets MPI go on
        time.sleep(1e-3)
    return dead


def dead_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks that MPI knows to be dead, in an MPI that can tell."""
    try:
        failed = comm.Get_failed()
        return sorted(failed.Translate_ranks(range(failed.size), comm.Get_group()))
    except (MPI.Exception, NotImplementedError):
        return []


class _Sent(Transfer):
    def __init__(
        self, request: MPI.Request, nbytes: int, transport: MpiTransport, timer: Callable[[], None] | None = None
    ) -> None:
        self._request, self.nbytes, self._transport, self._timer = request, nbytes, transport, timer

    def done(self) -> bool:
        """Ask MPI."""
        try:
            done = self._request.Test()
        except MPI.Exception as error:
            self._transport.fail(error)
        if done and self._timer:
            self._timer()
            self._timer = None
        return done

    def cancel(self) -> bool:
        """Refuse: MPI does not take sends back."""
        return False


class _Received(Transfer):
    def __init__(self, request: MPI.Request, transport: MpiTransport, room: bytearray | None = None) -> None:
        self._request, self._status, self._transport, self._room = request, MPI.Status(), transport, room
        self.nbytes = 0
        self._done = False

    def done(self) -> bool:
        """Ask MPI; the status is read once."""
        try:
            if not self._done and self._request.Test(self._status):
                self._arrive()
        except MPI.Exception as error:
            self._transport.fail(error)
        return self._done

    def _arrive(self) -> None:
        self.nbytes, self._done = self._status.Get_count(MPI.BYTE), True
        self._transport.bytes_received += self.nbytes

    def cancel(self) -> bool:
        """Ask MPI to take the receive back, and wait for its answer, which does not depend on the peer."""
        if self._done:
            return False
        try:
            self._request.Cancel()
            self._request.Wait(self._status)
        except MPI.Exception as error:
            self._transport.fail(error)
        if self._status.Is_cancelled():
            return True
        self._arrive()
        return False


class MpiTransport(Transport):
    """The other ranks of an MPI communicator."""

    def __init__(self, comm: MPI.Intracomm, cut: Segmentation | None = None, far: Set[int] = frozenset()) -> None:
        """Duplicate the communicator, for messages and for letters: all its ranks do.

        Long messages to peers that are `far` are cut, and those from them come so.
        """
        self._caller, self.messages, self._post = comm, comm.Dup(), comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        largest = self.messages.Get_attr(MPI.TAG_UB)
        self.largest_tag = largest if isinstance(largest, int) else 32767
        self.derived_comms: list[MPI.Intracomm] = []
        """Further duplicates, which others have made and free, and which are revoked with these."""
        self._cut, self._far = cut, far
        self._paces: dict[int, LinkRate] = {}
        self.pieces = comm.Dup() if cut else self.messages
        self.latest: dict[tuple[int, int], Incoming] = {}
        """By peer and tag, the last message that comes in pieces and is not there yet."""
        self._posted: list[MPI.Request] = []
        self._status = MPI.Status()

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Start to send."""
        try:
            if self._cut and nbytes > self._cut.whole and peer in self._far:
                return self._send_far(Channel(self, peer, tag), self._cut, address, nbytes)
            self.bytes_sent += nbytes
            return _Sent(self.messages.Isend([_memory(address, nbytes), MPI.BYTE], peer, tag), nbytes, self)
        except MPI.Exception as error:
            self.fail(error)

    def _send_far(self, on: Channel, cut: Segmentation, address: int, nbytes: int) -> Transfer:
        """Send a long message, whole where the wire is known to be fast."""
        pace = self._paces.setdefault(on.peer, LinkRate())
        end = pace.begin(nbytes)
        if nbytes <= cut.piece or pace.slow():
            return SentPieces.of(on, cut, address, nbytes, end)
        self.bytes_sent += nbytes
        return _Sent(self.messages.Isend([_memory(address, nbytes), MPI.BYTE], on.peer, on.tag), nbytes, self, end)

    def receive(self, peer: int, tag: int, address: int, room: int) -> Transfer:
        """Start to receive."""
        try:
            if self._cut and room > self._cut.whole and peer in self._far:
                return ReceivedPieces(Channel(self, peer, tag), self._cut, address, room)
            return _Received(self.messages.Irecv([_memory(address, room), MPI.BYTE], peer, tag), self)
        except MPI.Exception as error:
            self.fail(error)

    def relay(self, received: Transfer, peer: int, tag: int) -> Transfer | None:
        """Send pieces on, to a peer that takes them."""
        if not isinstance(received, ReceivedPieces) or peer not in self._far:
            return None
        try:
            return received.relay(Channel(self, peer, tag))
        except MPI.Exception as error:
            self.fail(error)

    def probe_any(self) -> int | None:
        """Ask MPI."""
        try:
            found = self.messages.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
            return self._status.Get_tag() if found else None
        except MPI.Exception as error:
            self.fail(error)

    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Receive what MPI has found into memory of its own."""
        try:
            message = self.messages.Improbe(peer, tag, self._status)
            if message is None:
                return None
            nbytes = self._status.Get_count(MPI.BYTE)
            if self._cut and peer in self._far:
                return DiscardedPieces(Channel(self, peer, tag), self._cut, message, nbytes)
            room = bytearray(nbytes)
            return _Received(message.Irecv([room, MPI.BYTE]), self, room)
        except MPI.Exception as error:
            self.fail(error)

    def send_control(self, peer: int, letter: bytes) -> None:
        """Send a letter; it is kept until MPI has taken it."""
        try:
            self._posted = [request for request in self._posted if not request.Test()]
            self._posted.append(self._post.Isend([letter, MPI.BYTE], peer))
        except MPI.Exception as error:
            self.fail(error)

    def recv_control(self) -> tuple[int, bytes] | None:
        """Receive a letter that is there."""
        try:
            message = self._post.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
            if message is None:
                return None
            peer, letter = self._status.Get_source(), bytearray(self._status.Get_count(MPI.BYTE))
            message.Recv([letter, MPI.BYTE])
            return peer, bytes(letter)
        except MPI.Exception as error:
            self.fail(error)

    def revoke(self) -> None:
        """Revoke the duplicates, and the caller's own: its ranks may be waiting in calls straight to MPI.

        An MPI that does not know how leaves it to its launcher to end the job.
        """
        for comm in (self._caller, self.messages, self.pieces, self._post, *self.derived_comms):
            try:
                comm.Revoke()
            except (MPI.Exception, NotImplementedError):
                return

    def close(self) -> None:
        """Free the duplicates: all ranks do."""
        MPI.Request.Waitall(self._posted)
        if self.pieces is not self.messages:
            self.pieces.Free()
        self.messages.Free()
        self._post.Free()

    def fail(self, error: MPI.Exception) -> NoReturn:
        """Raise what MPI's error means."""
        raise lost(error, self.rank, self.messages) from error
