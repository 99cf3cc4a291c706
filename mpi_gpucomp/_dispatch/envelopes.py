"""The first parts of messages: matched by source and tag, in order, by MPI itself, or among the letters of rails."""

from __future__ import annotations

import ctypes
import pickle
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpi4py import MPI

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.mpi import lost

if TYPE_CHECKING:
    from mpi_gpucomp.engine.engine import Engine
    from mpi_gpucomp.transport.base import Transport

__all__ = ["First", "Firsts", "LetterFirsts", "MpiFirsts"]

LETTER = "first"
_memory = MPI.memory.fromaddress


class First(Protocol):
    """A first part on its way."""

    @property
    def holds(self) -> bool:
        """Say whether its memory may still be read or written."""
        ...

    def over(self, status: MPI.Status | None = None) -> bool:
        """Say whether it is there, or has left; fill a status."""
        ...

    def cancel(self) -> None:
        """Take a receive back, unless something is there for it; it is over then, and its status says so."""
        ...


class Firsts(Protocol):
    """The way that first parts take."""

    rank: int
    railed: bool

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> First:
        """Start to send."""
        ...

    def receive(self, address: int, room: int, source: int, tag: int) -> First:
        """Start to receive, from any rank and with any tag if MPI's names for that are given."""
        ...

    def close(self) -> None:
        """End it: all ranks do."""
        ...


class _Request:
    """MPI's own request."""

    def __init__(self, request: MPI.Request, rank: int) -> None:
        self._request, self._rank = request, rank

    @property
    def holds(self) -> bool:
        return self._request != MPI.REQUEST_NULL

    def over(self, status: MPI.Status | None = None) -> bool:
        try:
            return self._request.Test(status)
        except MPI.Exception as error:
            raise lost(error, self._rank) from error

    def cancel(self) -> None:
        if self.holds:
            self._request.Cancel()


class MpiFirsts:
    """By MPI, under the caller's tags, on a communicator of their own."""

    railed = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Take over a communicator."""
        self._comm, self.rank = comm, comm.rank

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> First:
        """Start to send."""
        return _Request(self._comm.Isend([_memory(address, nbytes), MPI.BYTE], peer, tag), self.rank)

    def receive(self, address: int, room: int, source: int, tag: int) -> First:
        """Start to receive."""
        return _Request(self._comm.Irecv([_memory(address, room), MPI.BYTE], source, tag), self.rank)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


class _Arrived(NamedTuple):
    source: int
    tag: int
    data: bytes


class _Left:
    """A first part that has been copied into a letter."""

    holds = False

    def over(self, status: MPI.Status | None = None) -> bool:
        return True

    def cancel(self) -> None:
        pass


class _Waiting:
    """Room for a first part."""

    def __init__(self, firsts: LetterFirsts, address: int, source: int, tag: int) -> None:
        self._firsts, self._address, self._source, self._tag = firsts, address, source, tag
        self._got: _Arrived | None = None
        self.cancelled = False

    holds = False

    def wants(self, source: int, tag: int) -> bool:
        return self._source in (source, MPI.ANY_SOURCE) and self._tag in (tag, MPI.ANY_TAG)

    def fill(self, arrived: _Arrived) -> None:
        ctypes.memmove(self._address, arrived.data, len(arrived.data))
        self._got = arrived

    def over(self, status: MPI.Status | None = None) -> bool:
        if self._got is None and not self.cancelled:
            return False
        if status is not None:
            source, tag, data = self._got or (MPI.ANY_SOURCE, MPI.ANY_TAG, b"")
            status.source, status.tag = source, tag
            status.Set_elements(MPI.BYTE, len(data))
            status.Set_cancelled(self.cancelled)
        return True

    def cancel(self) -> None:
        self._firsts.withdraw(self)


class LetterFirsts:
    """In letters, which travel on rails: matched here as MPI would."""

    railed = True

    def __init__(self, transport: Transport, engine: Engine) -> None:
        """Let the engine hand over the letters."""
        self.rank, self._transport = transport.rank, transport
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._arrived: deque[_Arrived] = deque()
        engine.listen(LETTER, self._hear)

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> First:
        """Send at once, in a letter."""
        self._check(peer, tag, "Send")
        data = ctypes.string_at(address, nbytes)
        if peer == self.rank:
            self._hear(peer, tag, data)
        else:
            self._transport.send_control(peer, pickle.dumps((LETTER, tag, data)))
        return _Left()

    def receive(self, address: int, room: int, source: int, tag: int) -> First:
        """Take the oldest that is there, or wait in line."""
        if source != MPI.ANY_SOURCE:
            self._check(source, 0 if tag == MPI.ANY_TAG else tag, "Recv")
        waiting = _Waiting(self, address, source, tag)
        with self._lock:
            found = next((one for one in self._arrived if waiting.wants(one.source, one.tag)), None)
            if found is None:
                self._waiting.append(waiting)
            else:
                self._arrived.remove(found)
                waiting.fill(found)
        return waiting

    def _hear(self, source: int, tag: int, data: bytes) -> None:
        arrived = _Arrived(source, tag, data)
        with self._lock:
            found = next((one for one in self._waiting if one.wants(source, tag)), None)
            if found is None:
                self._arrived.append(arrived)
            else:
                self._waiting.remove(found)
                found.fill(arrived)

    def withdraw(self, waiting: _Waiting) -> None:
        """Take a receive back that nothing has come for."""
        with self._lock:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                waiting.cancelled = True

    def _check(self, peer: int, tag: int, method: str) -> None:
        if 0 <= peer < self._transport.size and 0 <= tag <= self._transport.largest_tag:
            return
        raise SpecError(
            method,
            expected=f"a rank from 0 to {self._transport.size - 1} and a tag from 0 to {self._transport.largest_tag}",
            got=f"rank {peer}, tag {tag}",
            remedy="Name a rank of this communicator.",
            rank=self.rank,
        )

    def close(self) -> None:
        """Need nothing."""
