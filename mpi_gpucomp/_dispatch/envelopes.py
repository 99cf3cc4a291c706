"""Message envelopes: matched by (source, tag), in order, by MPI, or emulated over the control messages of rails."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpi4py import MPI

from mpi_gpucomp.engine.control_messages import EnvelopeMessage, encode
from mpi_gpucomp.errors import ControlMessageError, SpecError
from mpi_gpucomp.transport.mpi import lost

if TYPE_CHECKING:
    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.engine.engine import Engine

__all__ = ["Envelope", "EnvelopeChannel", "MpiEnvelopes", "RailEnvelopes"]

_memory = MPI.memory.fromaddress


class Envelope(Protocol):
    """An envelope in flight."""

    @property
    def holds(self) -> bool:
        """Return True if its memory may still be accessed."""
        ...

    def completed(self, status: MPI.Status | None = None) -> bool:
        """Return True if it has completed; fill in a status."""
        ...

    def cancel(self) -> None:
        """Cancel a receive, unless it is matched; it completes, and its status tells."""
        ...


class EnvelopeChannel(Protocol):
    """Carries envelopes."""

    rank: int
    on_rails: bool

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> Envelope:
        """Start a send."""
        ...

    def receive(self, address: int, room: int, source: int, tag: int) -> Envelope:
        """Start a receive; MPI.ANY_SOURCE and MPI.ANY_TAG match any."""
        ...

    def close(self) -> None:
        """Close the channel: collective."""
        ...


class _MpiEnvelope:
    """A request of the MPI library."""

    def __init__(self, request: MPI.Request, rank: int) -> None:
        self._request, self._rank = request, rank

    @property
    def holds(self) -> bool:
        return self._request != MPI.REQUEST_NULL

    def completed(self, status: MPI.Status | None = None) -> bool:
        try:
            return self._request.Test(status)
        except MPI.Exception as error:
            raise lost(error, self._rank) from error

    def cancel(self) -> None:
        if self.holds:
            self._request.Cancel()


class MpiEnvelopes:
    """Envelopes sent by MPI under the caller's tags, on a communicator of their own."""

    on_rails = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Take over a communicator."""
        self._comm, self.rank = comm, comm.rank

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> Envelope:
        """Start a send."""
        return _MpiEnvelope(self._comm.Isend([_memory(address, nbytes), MPI.BYTE], peer, tag), self.rank)

    def receive(self, address: int, room: int, source: int, tag: int) -> Envelope:
        """Start a receive."""
        return _MpiEnvelope(self._comm.Irecv([_memory(address, room), MPI.BYTE], source, tag), self.rank)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


class _Received(NamedTuple):
    source: int
    tag: int
    data: bytes


class _SentEnvelope:
    """An envelope that was copied into a control message."""

    holds = False

    def completed(self, status: MPI.Status | None = None) -> bool:
        return True

    def cancel(self) -> None:
        pass


class _PostedRecv:
    """A posted receive of an envelope."""

    def __init__(self, channel: RailEnvelopes, address: int, room: int, source: int, tag: int) -> None:
        self._channel, self._address, self._room, self._source, self._tag = channel, address, room, source, tag
        self._got: _Received | None = None
        self.cancelled = False

    holds = False

    def matches(self, source: int, tag: int) -> bool:
        return self._source in (source, MPI.ANY_SOURCE) and self._tag in (tag, MPI.ANY_TAG)

    def fill(self, arrived: _Received) -> None:
        if len(arrived.data) > self._room:
            raise ControlMessageError(
                f"control message EnvelopeMessage from rank {arrived.source}",
                expected=f"at most {self._room} bytes",
                got=f"{len(arrived.data)}",
                remedy="Install the same version of mpi_gpucomp on every rank.",
                rank=self._channel.rank,
            )
        ctypes.memmove(self._address, arrived.data, len(arrived.data))
        self._got = arrived

    def completed(self, status: MPI.Status | None = None) -> bool:
        if self._got is None and not self.cancelled:
            return False
        if status is not None:
            source, tag, data = self._got or (MPI.ANY_SOURCE, MPI.ANY_TAG, b"")
            status.source, status.tag = source, tag
            status.Set_elements(MPI.BYTE, len(data))
            status.Set_cancelled(self.cancelled)
        return True

    def cancel(self) -> None:
        self._channel.withdraw(self)


class RailEnvelopes:
    """Envelopes sent as control messages over rails, matched here as MPI would."""

    on_rails = True

    def __init__(self, wire: Wire, engine: Engine) -> None:
        """Receive envelopes from the engine."""
        self.rank, self._wire = wire.rank, wire
        self._lock = threading.Lock()
        self._posted: deque[_PostedRecv] = deque()
        self._unexpected: deque[_Received] = deque()
        engine.handle(EnvelopeMessage, self._on_envelope)

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> Envelope:
        """Send at once, as a control message."""
        self._check(peer, tag, "Send")
        message = EnvelopeMessage(tag, ctypes.string_at(address, nbytes))
        if peer == self.rank:
            self._on_envelope(peer, message)
        else:
            self._wire.send_control(peer, encode(message))
        return _SentEnvelope()

    def receive(self, address: int, room: int, source: int, tag: int) -> Envelope:
        """Match the oldest unexpected envelope, or post the receive."""
        if source != MPI.ANY_SOURCE:
            self._check(source, 0 if tag == MPI.ANY_TAG else tag, "Recv")
        posted = _PostedRecv(self, address, room, source, tag)
        with self._lock:
            found = next((one for one in self._unexpected if posted.matches(one.source, one.tag)), None)
            if found is None:
                self._posted.append(posted)
            else:
                self._unexpected.remove(found)
                posted.fill(found)
        return posted

    def _on_envelope(self, source: int, message: EnvelopeMessage) -> None:
        arrived = _Received(source, message.tag, message.data)
        with self._lock:
            found = next((one for one in self._posted if one.matches(source, message.tag)), None)
            if found is None:
                self._unexpected.append(arrived)
            else:
                self._posted.remove(found)
                found.fill(arrived)

    def withdraw(self, posted: _PostedRecv) -> None:
        """Cancel a receive that is not matched."""
        with self._lock:
            if posted in self._posted:
                self._posted.remove(posted)
                posted.cancelled = True

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

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
