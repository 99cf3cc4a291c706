"""How ranks exchange the addresses they connect with: all that a wire needs before it can send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Bootstrap", "MpiBootstrap"]


class Bootstrap(Protocol):
    """A group of ranks that can exchange bytes, slowly."""

    @property
    def rank(self) -> int:
        """Return this rank."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, of any length; collective and blocking."""


class MpiBootstrap:
    """The ranks of an MPI communicator."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Use a communicator; nothing from a peer is unpickled."""
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank."""
        own = np.frombuffer(data, np.uint8)
        lengths = np.empty(self.size, np.int32)
        self._comm.Allgather(np.array([own.size], np.int32), lengths)
        gathered = np.empty(int(lengths.sum()), np.uint8)
        self._comm.Allgatherv(own, [gathered, lengths])
        ends = np.cumsum(lengths)
        return [gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]
