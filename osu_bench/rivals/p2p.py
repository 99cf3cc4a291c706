"""Compression per message: what a point-to-point layer that compresses gives to collectives built on top of it.

Each hop encodes what it sends and decodes what it receives, knowing nothing of the hops before. With a lossy codec the
error may add up, once for each hop that coded the values again, so ranks far from the root get worse values; the
benchmark's caller decides what is still right.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp import Communicator

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI

    from mpi_gpucomp import Request

    Array = np.ndarray[Any, Any]

__all__ = ["PerMessage", "PerMessageChain"]

TAG = 1
AHEAD = 3
"""Messages of a chain that are received ahead of the one that is waited for, and that may still be leaving behind it.

With more, MPI would share the wire among them, and each would arrive later.
"""


WHOLE = 1 << 30


class PerMessage:
    """Collectives of whole messages: the broadcast is MPI's usual binomial tree, the others are rings."""

    def __init__(self, comm: MPI.Intracomm, codec: str, *, chunk: int = WHOLE) -> None:
        """Let all ranks of `comm` make one.

        A message is encoded as a whole and then sent, as in the layers that this stands for, or in chunks beside the
        wire if they are shorter than it.
        """
        self._codec, self._chunk = codec, chunk
        self._comm = Communicator(comm, codec, chunk=chunk)
        self._rank, self._size = comm.rank, comm.size

    def __enter__(self) -> PerMessage:
        """Close it at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close it as the communicator would be closed."""
        self._comm.__exit__(kind, error, at)

    def close(self) -> None:
        """Let all ranks free the communicator."""
        self._comm.Free()

    def stats(self) -> tuple[int, int]:
        """Return the bytes that were sent and received in frames so far; those of `none` are MPI's own."""
        stats = self._comm.stats()
        return stats.bytes_sent, stats.bytes_received

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast by a binomial tree: receive from the parent, then send to each child, the farthest first."""
        flat, rank = array.reshape(-1), (self._rank - root) % self._size
        reach = 1
        while reach < self._size and not rank & reach:
            reach *= 2
        if rank:
            self._comm.Recv(flat, (rank - reach + root) % self._size, TAG, codec=self._codec)
        while reach > 1:
            reach //= 2
            if rank + reach < self._size:
                self._comm.Send(flat, (rank + reach + root) % self._size, TAG, codec=self._codec)

    def allgather(self, send: Array, recv: Array) -> None:
        """Pass every rank's array around a ring."""
        blocks = np.split(recv.reshape(-1), self._size)
        blocks[self._rank][:] = send.reshape(-1)
        self._pass_around(blocks, self._rank)

    def allreduce(self, send: Array, recv: Array) -> None:
        """Add up by a ring, in which each block collects the ranks' values and is then passed around.

        With a lossy codec the ranks' results differ: only who added up a block has it as it was added up.
        """
        flat = recv.reshape(-1)
        if send is not recv:
            flat[:] = send.reshape(-1)
        blocks = np.array_split(flat, self._size)
        arriving = np.empty_like(blocks[0])
        for step in range(self._size - 1):
            own = blocks[(self._rank - step - 1) % self._size]
            self._exchange(blocks[(self._rank - step) % self._size], arriving[: own.size])
            np.add(own, arriving[: own.size], out=own)
        self._pass_around(blocks, self._rank + 1)

    def _pass_around(self, blocks: list[Array], first: int) -> None:
        """Give all ranks all blocks around a ring; this one has its `first` already."""
        for step in range(self._size - 1):
            self._exchange(blocks[(first - step) % self._size], blocks[(first - step - 1) % self._size])

    def _exchange(self, send: Array, recv: Array) -> None:
        """Send to the next rank of the ring while receiving from the one before."""
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        self._comm.Sendrecv(send, after, TAG, recv, before, TAG, codec=self._codec)


class PerMessageChain(PerMessage):
    """The stronger form: a broadcast along a chain of ranks in many messages, several of them under way at a time."""

    def __init__(self, comm: MPI.Intracomm, codec: str, *, chunk: int = 1 << 20, message: int = 4 << 20) -> None:
        """Let all ranks of `comm` make one, for messages of so many bytes; each is encoded in chunks as any other."""
        super().__init__(comm, codec, chunk=chunk)
        self._message = message

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast message by message: receive and decode one, encode it again for the next rank, and so on."""
        rank = (self._rank - root) % self._size
        messages = self._messages(array.reshape(-1))
        before, after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        arriving: deque[Request] = deque()
        leaving: deque[Request] = deque()
        for number, message in enumerate(messages):
            if rank:
                for later in messages[number + len(arriving) : number + AHEAD]:
                    arriving.append(self._comm.Irecv(later, before, TAG, codec=self._codec))
                arriving.popleft().Wait()
            if rank + 1 < self._size:
                if len(leaving) == AHEAD:
                    leaving.popleft().Wait()
                leaving.append(self._comm.Isend(message, after, TAG, codec=self._codec))
        for request in leaving:
            request.Wait()

    def _messages(self, flat: Array) -> list[Array]:
        piece = max(1, self._message // flat.itemsize)
        return [flat[start : start + piece] for start in range(0, flat.size, piece)]
