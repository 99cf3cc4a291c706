"""The scratch of a task: chunks that are nobody's input or output, one set for each loop that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.device import Buffer

if TYPE_CHECKING:
    from mpi_gpucomp.device import DType, Memory, Stream

__all__ = ["Scratch"]


class Scratch:
    """Chunks by loop and number, each with room for `piece` elements."""

    def __init__(self, stream: Stream, dtype: DType, piece: int) -> None:
        """Take memory of the stream's device as it is needed."""
        self._stream, self._dtype, self._piece = stream, dtype, piece
        self._chunks: dict[tuple[int, int], tuple[Memory, Buffer]] = {}

    def __bool__(self) -> bool:
        """Say whether there is any."""
        return bool(self._chunks)

    def read(self, loop: int, number: int) -> Buffer:
        """Return a chunk that has been written."""
        return self._chunks[loop, number][1]

    def write(self, loop: int, number: int, count: int) -> Buffer:
        """Return a chunk for so many elements."""
        known = self._chunks.get((loop, number))
        if known is not None and known[1].count == count:
            return known[1]
        memory = known[0] if known else self._stream.device.alloc(self._piece * self._dtype.itemsize)
        buffer = Buffer(memory.address, self._dtype, (count,), device=memory.device.name)
        self._chunks[loop, number] = memory, buffer
        return buffer

    def end(self, loop: int) -> None:
        """Give the chunks of a loop back, behind what is queued."""
        for key in [key for key in self._chunks if key[0] == loop]:
            self._stream.release(self._chunks.pop(key)[0])

    def reclaim(self) -> None:
        """Give everything back at once: nothing uses it any more."""
        for memory, _ in self._chunks.values():
            memory.release()
        self._chunks.clear()
