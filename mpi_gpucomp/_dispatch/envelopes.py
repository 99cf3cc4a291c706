"""Message envelopes: matched by (source, tag), in order, by MPI, or emulated over the control messages of rails.

A receive is matched with MPI's matched probes, so that the size of a message is known before there is memory for it,
and a receive that is cancelled leaves nothing behind. Messages that mpi4py's other calls sent are matched too; they
are no envelopes, and a long one stays with MPI until its receiver takes it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from mpi4py import MPI

from mpi_gpucomp.engine.control_messages import EnvelopeMessage, encode
from mpi_gpucomp.errors import ControlMessageError, SpecError
from mpi_gpucomp.transport.mpi import lost, means_death

if TYPE_CHECKING:
    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.engine.engine import Engine

__all__ = ["Arrival", "EnvelopeChannel", "MpiEnvelopes", "PostedRecv", "RailEnvelopes", "SentEnvelope"]

_memory = MPI.memory.fromaddress


class SentEnvelope(Protocol):
    """An envelope that is being sent."""

    @property
    def holds(self) -> bool:
        """Return True if its memory may still be accessed."""
        ...

    def completed(self) -> bool:
        """Return True if it has completed."""
        ...


class Arrival:
    """A message that was matched: its bytes, or the MPI library's handle of a message longer than any envelope."""

    def __init__(self, source: int, tag: int, data: bytes = b"", nbytes: int | None = None) -> None:
        """Take the bytes of an envelope; `nbytes` if they are still with MPI."""
        self.source, self.tag, self.data = source, tag, data
        self.nbytes = len(data) if nbytes is None else nbytes
        self.message: MPI.Message | None = None

    def done(self) -> bool:
        """Return True if the bytes are there."""
        return True


class _MpiArrival(Arrival):
    """A message that was matched by MPI."""

    def __init__(self, message: MPI.Message, status: MPI.Status, longest: int, rank: int) -> None:
        super().__init__(status.source, status.tag, nbytes=status.count)
        self._request: _MpiRequest | None = None
        if self.nbytes > longest:
            self.message = message
        else:
            self._bytes = bytearray(self.nbytes)
            self._request = _MpiRequest(message.Irecv([self._bytes, MPI.BYTE]), rank)

    def done(self) -> bool:
        if self._request is not None and self._request.completed():
            self._request, self.data = None, bytes(self._bytes)
        return self._request is None


class PostedRecv:
    """A posted receive."""

    def __init__(self, channel: EnvelopeChannel, source: int, tag: int, arrival: Arrival | None = None) -> None:
        """Match a source and a tag, unless a message is passed."""
        self._channel, self.source, self.tag, self.arrival = channel, source, tag, arrival
        self.cancelled = False

    def matches(self, arrival: Arrival) -> bool:
        """Return True if it may receive a message."""
        return self.source in (arrival.source, MPI.ANY_SOURCE) and self.tag in (arrival.tag, MPI.ANY_TAG)

    def completed(self, status: MPI.Status) -> bool:
        """Return True if it has a message, or was cancelled; fill in a status, with the size of the envelope."""
        if self.arrival is None and not self.cancelled:
            self._channel.poll(self.source, self.tag)
        if self.arrival is None and not self.cancelled:
            return False
        found = self.arrival or Arrival(MPI.ANY_SOURCE, MPI.ANY_TAG)
        if not found.done():
            return False
        status.source, status.tag = found.source, found.tag
        status.Set_elements(MPI.BYTE, found.nbytes)
        status.Set_cancelled(self.cancelled)
        return True

    def cancel(self) -> None:
        """Cancel it, unless it is matched."""
        self._channel.withdraw(self)


class EnvelopeChannel:
    """Matches messages with receives, as MPI would."""

    on_rails: bool

    def __init__(self, rank: int, comm: MPI.Intracomm | None, longest: int) -> None:
        """Take over the communicator of the messages, if there is one; envelopes have at most `longest` bytes."""
        self.rank, self._comm, self._longest = rank, comm, longest
        self._lock = threading.RLock()
        self._posted: deque[PostedRecv] = deque()
        self._unexpected: deque[Arrival] = deque()

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> SentEnvelope:
        """Start a send."""
        raise NotImplementedError

    def receive(self, source: int, tag: int) -> PostedRecv:
        """Match the oldest message that has no receive, or post the receive; MPI's wildcards match any."""
        posted = PostedRecv(self, source, tag)
        with self._lock:
            posted.arrival = next((one for one in self._unexpected if posted.matches(one)), None)
            if posted.arrival is not None:
                self._unexpected.remove(posted.arrival)
            else:
                self._posted.append(posted)
                try:
                    self.poll(source, tag)
                except Exception:
                    self.withdraw(posted)
                    raise
        return posted

    def peek(self, source: int, tag: int) -> Arrival | None:
        """Return the oldest envelope that has no receive, and keep it for one."""
        wanted = PostedRecv(self, source, tag)
        with self._lock:
            if self._comm is not None and not any(wanted.matches(one) for one in self._unexpected):
                self._match(self._comm, source, tag)
            return next((one for one in self._unexpected if wanted.matches(one)), None)

    def take(self, arrival: Arrival) -> None:
        """Take a message that `peek` has returned: it matches no receive any more."""
        with self._lock:
            self._unexpected.remove(arrival)

    def withdraw(self, posted: PostedRecv) -> None:
        """Cancel a receive that is not matched."""
        with self._lock:
            if posted in self._posted:
                self._posted.remove(posted)
                posted.cancelled = True

    def poll(self, source: int, tag: int) -> None:
        """Let MPI match a message from a source with a tag that is expected."""
        if self._comm is not None:
            with self._lock:
                self._match(self._comm, source, tag)

    def _match(self, comm: MPI.Intracomm, source: int, tag: int) -> None:
        status = MPI.Status()
        try:
            message = comm.Improbe(source, tag, status)
        except MPI.Exception as error:
            if means_death(error, comm):
                raise lost(error, self.rank, comm) from error
            raise
        if message is not None:
            self._deliver(_MpiArrival(message, status, self._longest, self.rank))

    def _deliver(self, arrival: Arrival) -> None:
        """Give a message to the first receive that matches, or keep it."""
        with self._lock:
            posted = next((one for one in self._posted if one.matches(arrival)), None)
            if posted is None:
                self._unexpected.append(arrival)
            else:
                self._posted.remove(posted)
                posted.arrival = arrival

    def close(self) -> None:
        """Free the communicator: collective."""
        if self._comm is not None:
            self._comm.Free()


class _MpiRequest:
    """A request of the MPI library."""

    def __init__(self, request: MPI.Request, rank: int) -> None:
        self._request, self._rank = request, rank

    @property
    def holds(self) -> bool:
        return self._request != MPI.REQUEST_NULL

    def completed(self) -> bool:
        try:
            return self._request.Test()
        except MPI.Exception as error:
            raise lost(error, self._rank) from error


class MpiEnvelopes(EnvelopeChannel):
    """Envelopes sent by MPI under the caller's tags, on a communicator of their own."""

    on_rails = False

    def __init__(self, comm: MPI.Intracomm, longest: int) -> None:
        """Duplicate a communicator: collective."""
        self.comm = comm.Dup()
        super().__init__(comm.rank, self.comm, longest)

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> SentEnvelope:
        """Start a send."""
        return _MpiRequest(self.comm.Isend([_memory(address, nbytes), MPI.BYTE], peer, tag), self.rank)


class _Copied:
    """An envelope that was copied into a control message."""

    holds = False

    def completed(self) -> bool:
        return True


class RailEnvelopes(EnvelopeChannel):
    """Envelopes sent as control messages over rails, matched here as MPI would."""

    on_rails = True

    def __init__(self, wire: Wire, engine: Engine, longest: int) -> None:
        """Receive envelopes from the engine."""
        super().__init__(wire.rank, None, longest)
        self._wire = wire
        engine.handle(EnvelopeMessage, self._on_envelope)

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> SentEnvelope:
        """Send at once, as a control message."""
        self._check(peer, tag, "Send")
        message = EnvelopeMessage(tag, ctypes.string_at(address, nbytes))
        if peer == self.rank:
            self._on_envelope(peer, message)
        else:
            self._wire.send_control(peer, encode(message))
        return _Copied()

    def receive(self, source: int, tag: int) -> PostedRecv:
        """Check source and tag."""
        if source != MPI.ANY_SOURCE:
            self._check(source, 0 if tag == MPI.ANY_TAG else tag, "Recv")
        return super().receive(source, tag)

    def _on_envelope(self, source: int, message: EnvelopeMessage) -> None:
        if len(message.data) > self._longest:
            raise ControlMessageError(
                f"control message EnvelopeMessage from rank {source}",
                expected=f"at most {self._longest} bytes",
                got=f"{len(message.data)}",
                remedy="Install the same version of mpi_gpucomp on every rank.",
                rank=self.rank,
            )
        self._deliver(Arrival(source, message.tag, message.data))

    def _check(self, peer: int, tag: int, method: str) -> None:
        if 0 <= peer < self._wire.size and 0 <= tag <= self._wire.largest_tag:
            return
        raise SpecError(
            method,
            expected=f"a rank from 0 to {self._wire.size - 1} and a tag from 0 to {self._wire.largest_tag}",
            got=f"rank {peer}, tag {tag}",
            remedy="Name a rank of this communicator.",
            rank=self.rank,
        )
