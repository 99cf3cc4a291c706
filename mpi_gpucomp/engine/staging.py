"""Staging memory of a task: bounded slots for frames, and scratch chunks.

A slot is reference-counted and returned to its pool by its last user. Scratch chunks are neither input nor output of
the collective; there is one set for each loop in progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.device import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.codec.frame import FrameHeader
    from mpi_gpucomp.device import DType, Memory, Stream

__all__ = ["Scratch", "Slot", "Staging"]


class Slot:
    """Memory of a frame that is being filled, sent, forwarded or decoded; each of those holds it once."""

    __slots__ = ("_holders", "_staging", "header", "memory", "nbytes")

    def __init__(self, memory: Memory, staging: Staging | None = None) -> None:
        """Start with one holder; without staging it is the caller's memory, used in place."""
        self.memory, self.nbytes = memory, 0
        self.header: FrameHeader | None = None
        self._staging, self._holders = staging, 1

    def hold(self, times: int = 1) -> Slot:
        """Add holders."""
        self._holders += times
        return self

    def release(self) -> None:
        """Remove a holder; the last one returns the memory."""
        self._holders -= 1
        if self._holders == 0 and self._staging is not None:
            self._staging.give_back(self.memory)

    @property
    def in_place(self) -> bool:
        """Return True if it is the caller's memory."""
        return self._staging is None

    def filled(self) -> Memory:
        """Return the part of the memory that the frame occupies."""
        return self.memory.part(0, self.nbytes)


class Staging:
    """A bounded number of slots of one size, in memory that the wire and the device both access."""

    def __init__(self, allocate: Callable[[int], Memory], slot_bytes: int, slots: int) -> None:
        """Bound the slots; their memory is allocated from a pool on demand."""
        self._allocate, self._bytes, self._free = allocate, slot_bytes, slots
        self._out: set[Memory] = set()

    def available(self) -> bool:
        """Return True if a slot is free."""
        return self._free > 0

    def take(self) -> Slot:
        """Return an empty slot."""
        assert self._free > 0, "check `available` first"
        self._free -= 1
        memory = self._allocate(self._bytes)
        self._out.add(memory)
        return Slot(memory, self)

    def give_back(self, memory: Memory) -> None:
        """Return the memory of a slot without holders."""
        self._free += 1
        self._out.discard(memory)
        memory.release()

    def free(self) -> None:
        """Return the memory of all slots; their holders do not use it any more."""
        while self._out:
            self._out.pop().release()


class Scratch:
    """Chunks by loop and number, each with room for `chunk` elements."""

    def __init__(self, stream: Stream, dtype: DType, chunk: int) -> None:
        """Allocate from the stream's device on demand."""
        self._stream, self._dtype, self._chunk = stream, dtype, chunk
        self._chunks: dict[tuple[int, int], tuple[Memory, Buffer]] = {}

    def __bool__(self) -> bool:
        """Return True if any chunk is allocated."""
        return bool(self._chunks)

    def read(self, loop: int, number: int) -> Buffer:
        """Return a chunk that has been written."""
        return self._chunks[loop, number][1]

    def write(self, loop: int, number: int, count: int) -> Buffer:
        """Return a chunk for `count` elements."""
        known = self._chunks.get((loop, number))
        if known is not None and known[1].count == count:
            return known[1]
        memory = known[0] if known else self._stream.device.alloc(self._chunk * self._dtype.itemsize)
        buffer = Buffer(memory.address, self._dtype, (count,), device=memory.device.name)
        self._chunks[loop, number] = memory, buffer
        return buffer

    def end(self, loop: int) -> None:
        """Release the chunks of a loop in stream order."""
        for key in [key for key in self._chunks if key[0] == loop]:
            self._stream.release(self._chunks.pop(key)[0])

    def free(self) -> None:
        """Release everything at once: nothing uses it any more."""
        for memory, _ in self._chunks.values():
            memory.release()
        self._chunks.clear()
