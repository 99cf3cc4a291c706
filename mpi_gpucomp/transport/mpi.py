"""Messages over MPI, on duplicates of the caller's communicator, so that tags cannot collide with the caller's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from mpi_gpucomp.errors import RankFailedError
from mpi_gpucomp.transport.base import Transfer, Transport
from mpi_gpucomp.transport.segmented import LinkRate, SegmentChannel, SegmentedDiscard, SegmentedRecv, SegmentedSend

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from mpi_gpucomp.transport.segmented import PendingSegments, Segmentation

__all__ = ["MpiTransport", "dead_ranks", "lost", "means_death"]

_memory = MPI.memory.fromaddress

FAILURES = tuple(
    getattr(MPI, name)
    for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    if getattr(MPI, name, MPI.ERR_UNKNOWN) != MPI.ERR_UNKNOWN
)
"""Error classes of a process failure, in an MPI library with fault tolerance (ULFM)."""
NAMING_SECONDS = 1.0
"""How long to poll for the failed ranks: a rank that sees a revoked communicator may learn of the cause later."""


def means_death(error: MPI.Exception, comm: MPI.Intracomm) -> bool:
    """Return True if an MPI error is due to a failed rank; some ranks see only "another error"."""
    return error.Get_error_class() in FAILURES or bool(dead_ranks(comm))


def lost(error: MPI.Exception, rank: int, comm: MPI.Intracomm = MPI.COMM_SELF) -> RankFailedError:
    """Convert an MPI error into ours, which names the failed ranks of `comm`."""
    died, text = means_death(error, comm), f"MPI error: {error.Get_error_string()}"
    dead = _wait_for_dead_ranks(comm) if died and comm.size > 1 else []
    who = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))} dead ({text})"
    return RankFailedError(
        "communicator",
        expected="all ranks alive",
        got=who if dead else text,
        remedy="Continue without them: new = comm.Shrink()." if died else "See the errors of MPI on the other ranks.",
        rank=rank,
    )


def _wait_for_dead_ranks(comm: MPI.Intracomm) -> list[int]:
    deadline = time.monotonic() + NAMING_SECONDS
    while not (dead := dead_ranks(comm)) and time.monotonic() < deadline:
        MPI.COMM_SELF.Iprobe()  # drives MPI's progress
        time.sleep(1e-3)
    return dead


def dead_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks that MPI reports as failed; empty without fault tolerance."""
    try:
        failed = comm.Get_failed()
        return sorted(failed.Translate_ranks(range(failed.size), comm.Get_group()))
    except (MPI.Exception, NotImplementedError):
        return []


class _MpiSend(Transfer):
    def __init__(
        self, request: MPI.Request, nbytes: int, transport: MpiTransport, on_done: Callable[[], None] | None = None
    ) -> None:
        self._request, self.nbytes, self._transport, self._on_done = request, nbytes, transport, on_done

    def done(self) -> bool:
        """Test the MPI request."""
        try:
            done = self._request.Test()
        except MPI.Exception as error:
            self._transport.fail(error)
        if done and self._on_done:
            self._on_done()
            self._on_done = None
        return done

    def cancel(self) -> bool:
        """Refuse: MPI does not cancel sends."""
        return False


class _MpiRecv(Transfer):
    def __init__(self, request: MPI.Request, transport: MpiTransport, memory: bytearray | None = None) -> None:
        self._request, self._status, self._transport, self._memory = request, MPI.Status(), transport, memory
        self.nbytes = 0
        self._done = False

    def done(self) -> bool:
        """Test the MPI request; the status is read once."""
        try:
            if not self._done and self._request.Test(self._status):
                self._complete()
        except MPI.Exception as error:
            self._transport.fail(error)
        return self._done

    def _complete(self) -> None:
        self.nbytes, self._done = self._status.Get_count(MPI.BYTE), True
        self._transport.bytes_received += self.nbytes

    def cancel(self) -> bool:
        """Cancel the MPI request and wait for the outcome, which does not depend on the peer."""
        if self._done:
            return False
        try:
            self._request.Cancel()
            self._request.Wait(self._status)
        except MPI.Exception as error:
            self._transport.fail(error)
        if self._status.Is_cancelled():
            return True
        self._complete()
        return False


class MpiTransport(Transport):
    """Messages with the other ranks of an MPI communicator."""

    def __init__(
        self, comm: MPI.Intracomm, segmentation: Segmentation | None = None, remote: Set[int] = frozenset()
    ) -> None:
        """Duplicate the communicator for messages and for control messages; collective.

        Long messages to and from `remote` peers are segmented.
        """
        self._caller, self.messages, self._control = comm, comm.Dup(), comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        largest = self.messages.Get_attr(MPI.TAG_UB)
        self.largest_tag = largest if isinstance(largest, int) else 32767
        self.derived_comms: list[MPI.Intracomm] = []
        """Further duplicates, made and freed by others, that are revoked together with these."""
        self._segmentation, self._remote = segmentation, remote
        self._rates: dict[int, LinkRate] = {}
        self.segments = comm.Dup() if segmentation else self.messages
        self.latest: dict[tuple[int, int], PendingSegments] = {}
        """By peer and tag, the last segmented message that has not arrived yet."""
        self._control_sends: list[MPI.Request] = []
        self._status = MPI.Status()

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Post a send."""
        try:
            if self._segmentation and nbytes > self._segmentation.max_whole and peer in self._remote:
                return self._send_remote(SegmentChannel(self, peer, tag), self._segmentation, address, nbytes)
            self.bytes_sent += nbytes
            return _MpiSend(self.messages.Isend([_memory(address, nbytes), MPI.BYTE], peer, tag), nbytes, self)
        except MPI.Exception as error:
            self.fail(error)

    def _send_remote(self, channel: SegmentChannel, segmentation: Segmentation, address: int, nbytes: int) -> Transfer:
        """Send a long message; unsegmented where the link is known to be fast."""
        rate = self._rates.setdefault(channel.peer, LinkRate())
        end = rate.begin(nbytes)
        if nbytes <= segmentation.segment_bytes or rate.slow():
            return SegmentedSend.of(channel, segmentation, address, nbytes, end)
        self.bytes_sent += nbytes
        request = self.messages.Isend([_memory(address, nbytes), MPI.BYTE], channel.peer, channel.tag)
        return _MpiSend(request, nbytes, self, end)

    def receive(self, peer: int, tag: int, address: int, capacity: int) -> Transfer:
        """Post a receive."""
        try:
            if self._segmentation and capacity > self._segmentation.max_whole and peer in self._remote:
                return SegmentedRecv(SegmentChannel(self, peer, tag), self._segmentation, address, capacity)
            return _MpiRecv(self.messages.Irecv([_memory(address, capacity), MPI.BYTE], peer, tag), self)
        except MPI.Exception as error:
            self.fail(error)

    def relay(self, received: Transfer, peer: int, tag: int) -> Transfer | None:
        """Forward the segments of a message to a remote peer as they arrive."""
        if not isinstance(received, SegmentedRecv) or peer not in self._remote:
            return None
        try:
            return received.relay(SegmentChannel(self, peer, tag))
        except MPI.Exception as error:
            self.fail(error)

    def probe_any(self) -> int | None:
        """Probe for an unexpected message from any peer."""
        try:
            found = self.messages.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
            return self._status.Get_tag() if found else None
        except MPI.Exception as error:
            self.fail(error)

    def discard(self, peer: int, tag: int) -> Transfer | None:
        """Receive an unexpected message into temporary memory."""
        try:
            message = self.messages.Improbe(peer, tag, self._status)
            if message is None:
                return None
            nbytes = self._status.Get_count(MPI.BYTE)
            if self._segmentation and peer in self._remote:
                return SegmentedDiscard(SegmentChannel(self, peer, tag), self._segmentation, message, nbytes)
            memory = bytearray(nbytes)
            return _MpiRecv(message.Irecv([memory, MPI.BYTE]), self, memory)
        except MPI.Exception as error:
            self.fail(error)

    def send_control(self, peer: int, message: bytes) -> None:
        """Send a control message; it is kept alive until MPI has completed the send."""
        try:
            self._control_sends = [request for request in self._control_sends if not request.Test()]
            self._control_sends.append(self._control.Isend([message, MPI.BYTE], peer))
        except MPI.Exception as error:
            self.fail(error)

    def recv_control(self) -> tuple[int, bytes] | None:
        """Receive a control message that has arrived."""
        try:
            found = self._control.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
            if found is None:
                return None
            peer, message = self._status.Get_source(), bytearray(self._status.Get_count(MPI.BYTE))
            found.Recv([message, MPI.BYTE])
            return peer, bytes(message)
        except MPI.Exception as error:
            self.fail(error)

    def revoke(self) -> None:
        """Revoke the duplicates and the caller's communicator, in which peers may be blocked in native MPI calls.

        An MPI library without fault tolerance leaves it to its launcher to end the job.
        """
        for comm in (self._caller, self.messages, self.segments, self._control, *self.derived_comms):
            try:
                comm.Revoke()
            except (MPI.Exception, NotImplementedError):
                return

    def close(self) -> None:
        """Free the duplicates; collective."""
        MPI.Request.Waitall(self._control_sends)
        if self.segments is not self.messages:
            self.segments.Free()
        self.messages.Free()
        self._control.Free()

    def fail(self, error: MPI.Exception) -> NoReturn:
        """Raise our error for an MPI error."""
        raise lost(error, self.rank, self.messages) from error
