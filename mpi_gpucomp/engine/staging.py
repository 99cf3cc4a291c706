"""Frames in staging memory: bounded, pooled, and given back when the last who uses one is done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.device import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.codec.frame import FrameHeader
    from mpi_gpucomp.device import DType, Memory, Stream

__all__ = ["Frame", "Scratch", "Staging"]


class Frame:
    """A frame that is being filled, sent, forwarded or decoded; each of those holds it once."""

    __slots__ = ("_holders", "_staging", "header", "memory", "nbytes")

    def __init__(self, memory: Memory, staging: Staging | None = None) -> None:
        """Start with one holder; without staging it is memory of the caller's, filled where it belongs."""
        self.memory, self.nbytes = memory, 0
        self.header: FrameHeader | None = None
        self._staging, self._holders = staging, 1

    def hold(self, times: int = 1) -> Frame:
        """Count further holders."""
        self._holders += times
        return self

    def release(self) -> None:
        """Let go once; the last one gives the memory back."""
        self._holders -= 1
        if self._holders == 0 and self._staging is not None:
            self._staging.give_back(self.memory)

    @property
    def in_place(self) -> bool:
        """Say whether it is the caller's own memory."""
        return self._staging is None

    def filled(self) -> Memory:
        """Return the part of the memory that the frame takes."""
        return self.memory.part(0, self.nbytes)


class Staging:
    """Room for so many frames of one size, on memory that the wire and the device both reach."""

    def __init__(self, allocate: Callable[[int], Memory], frame_bytes: int, frames: int) -> None:
        """Bound the frames; memory is taken from a pool as it is needed."""
        self._allocate, self._bytes, self._free = allocate, frame_bytes, frames
        self._out: set[Memory] = set()

    def available(self) -> bool:
        """Say whether another frame can be had."""
        return self._free > 0

    def take(self) -> Frame:
        """Return an empty frame."""
        assert self._free > 0, "ask `available` first"
        self._free -= 1
        memory = self._allocate(self._bytes)
        self._out.add(memory)
        return Frame(memory, self)

    def give_back(self, memory: Memory) -> None:
        """Take the memory of a frame that nobody holds."""
        self._free += 1
        self._out.discard(memory)
        memory.release()

    def reclaim(self) -> None:
        """Take back what is out, from holders that will not use it any more."""
        while self._out:
            self._out.pop().release()


# The scratch of a task: chunks that are nobody's input or output, one set for each loop that is under way.


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
