"""A chunked-chain broadcast, compressed once at the root: each chunk is encoded, forwarded as it came, decoded beside.

The ranks form a chain that starts at the root. While one chunk is on the wire the root encodes the next; a rank in the
middle passes a frame on before it decodes its own copy. No more than `DEPTH` chunks are in flight on a rank.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.codec import find, frame
from mpi_gpucomp.device import as_buffer, get_device

if TYPE_CHECKING:
    import numpy as np

    from mpi_gpucomp.codec import Pending
    from mpi_gpucomp.device import Buffer, Memory

__all__ = ["ChainBroadcast"]

DEPTH = 3


class _Slot:
    """Staging memory for one frame, and what still uses it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.request: MPI.Request = MPI.REQUEST_NULL
        self.pending: Pending | None = None

    def message(self, nbytes: int | None = None) -> list[Any]:
        """Describe the memory, or its first bytes, to MPI."""
        size = self.memory.nbytes if nbytes is None else nbytes
        return [MPI.memory.fromaddress(self.memory.address, size), MPI.BYTE]

    def free(self) -> None:
        """Wait until the frame has been passed on and decoded."""
        self.request.Wait()
        if self.pending is not None:
            self.pending.size()
            self.pending = None


class ChainBroadcast:
    """Broadcasts of arrays on the host with one codec and one chunk size."""

    def __init__(self, comm: MPI.Intracomm, codec: str, chunk: int = 1 << 20) -> None:
        """Work on a duplicate of `comm`; chunks are of `chunk` plain bytes."""
        self._comm, self._codec, self._chunk = comm.Dup(), find(codec), chunk
        self._stream = get_device("host").stream()
        self.wire_bytes = 0
        """Bytes that the last broadcast put on each link of the chain."""

    def __call__(self, values: np.ndarray[Any, Any], root: int = 0) -> None:
        """Broadcast `values` from the root; the other ranks' arrays are filled."""
        rank, size = self._comm.rank, self._comm.size
        place = (rank - root) % size
        following = (rank + 1) % size if place + 1 < size else MPI.PROC_NULL
        chunks = self._cut(as_buffer(values, writable=place > 0))
        capacity = max((frame.room(self._codec, part.count, part.dtype) for part in chunks), default=0)
        slots = [_Slot(get_device("host").alloc(capacity)) for _ in range(min(DEPTH, len(chunks)))]
        self.wire_bytes = 0
        if place == 0:
            self._send(chunks, slots, following)
        else:
            self._pass_on(chunks, slots, (rank - 1) % size, following)
        for slot in slots:
            slot.free()
            slot.memory.release()

    def close(self) -> None:
        """End the stream and free the communicator; called by all ranks."""
        self._stream.close()
        self._comm.Free()

    def _cut(self, buffer: Buffer) -> list[Buffer]:
        step = max(1, self._chunk // buffer.dtype.itemsize)
        return [buffer.slice(at, min(step, buffer.count - at)) for at in range(0, buffer.count, step)]

    def _send(self, chunks: list[Buffer], slots: list[_Slot], following: int) -> None:
        def start(number: int) -> Pending | None:
            if number == len(chunks):
                return None
            slot = slots[number % len(slots)]
            slot.free()
            return frame.encode(self._codec, chunks[number], slot.memory, number, self._stream)

        ahead = start(0)
        for number in range(len(chunks)):
            current, ahead = ahead, start(number + 1)
            nbytes = current.size() if current else None
            assert nbytes is not None
            self.wire_bytes += nbytes
            slot = slots[number % len(slots)]
            slot.request = self._comm.Isend(slot.message(nbytes), following)

    def _pass_on(self, chunks: list[Buffer], slots: list[_Slot], previous: int, following: int) -> None:
        def listen(number: int) -> MPI.Request:
            if number == len(chunks):
                return MPI.REQUEST_NULL
            slot = slots[number % len(slots)]
            slot.free()
            return self._comm.Irecv(slot.message(), previous)

        status, ahead = MPI.Status(), listen(0)
        for number, part in enumerate(chunks):
            ahead.Wait(status)
            ahead = listen(number + 1)
            slot, nbytes = slots[number % len(slots)], status.Get_count(MPI.BYTE)
            self.wire_bytes += nbytes
            slot.request = self._comm.Isend(slot.message(nbytes), following)
            slot.pending = self._decode(number, slot.memory.part(0, nbytes), part, previous)

    def _decode(self, number: int, received: Memory, part: Buffer, previous: int) -> Pending:
        where = f"rank {self._comm.rank}: chunk {number} of a broadcast, from rank {previous}"
        start = ctypes.string_at(received.address, min(received.nbytes, frame.HEADER_BYTES))
        header = frame.parse(start, where=where)
        return frame.decode(self._codec, header, received, part, self._stream, sequence=number, where=where)
