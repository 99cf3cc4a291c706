"""Pooled memory: what was given back serves the next request of its size class.

A size class is a power of two or one of three steps between it and the next, so that a request above one kilobyte
wastes less than a quarter of its size. The pool keeps at most `limit` bytes for later; beyond it the size classes that
were used longest ago go first. Give back only what no queued work still touches: the next one who asks gets it at once.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.device.base import Memory
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.device.base import Device

__all__ = ["ALIGNMENT", "Pool", "Statistics", "size_class"]

ALIGNMENT = 256
"""Every span starts at a multiple of this many bytes."""


class Statistics(NamedTuple):
    """What a pool has done: allocations made and requests served from what was there; bytes out and kept.

    Memory that was dropped without `release` stays counted as in use.
    """

    allocations: int
    hits: int
    in_use: int
    retained: int


def size_class(nbytes: int) -> int:
    """Return the bytes really taken for a request: the next of four steps per power of two."""
    step = max(ALIGNMENT, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(ALIGNMENT, -(-nbytes // step) * step)


class Pool:
    """Memory of one kind, kept for reuse; safe to use from any thread."""

    def __init__(self, device: Device, allocate: Callable[[int], tuple[int, object]], limit: int = 1 << 30) -> None:
        """Take new memory from `allocate`, which gives an aligned address and the object that keeps it alive."""
        self._device, self._allocate, self._limit = device, allocate, limit
        self._lock = Lock()
        self._free: dict[int, list[tuple[int, object]]] = {}
        self._allocations = self._hits = self._in_use = self._retained = 0

    @property
    def limit(self) -> int:
        """The bytes that the pool may keep for later."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._limit = nbytes
        self.trim(nbytes)

    @property
    def statistics(self) -> Statistics:
        """What the pool has done so far."""
        with self._lock:
            return Statistics(self._allocations, self._hits, self._in_use, self._retained)

    def take(self, nbytes: int) -> Memory:
        """Return memory for `nbytes`, with contents that mean nothing."""
        if nbytes < 0:
            raise BufferSpecError(
                f"memory of {self._device.name}",
                expected="a size of at least 0 bytes",
                got=str(nbytes),
                remedy="Check the size that was computed.",
            )
        size = size_class(nbytes)
        address, owner = self._reuse(size) or self._new(size)
        return Memory(address, nbytes, self._device, owner, self._give_back)

    def trim(self, keep: int = 0) -> None:
        """Let go of kept memory until no more than `keep` bytes are left."""
        dropped = []  # freed after the lock is let go: freeing may be slow
        with self._lock:
            while self._free and self._retained > keep:
                size = next(iter(self._free))
                spans = self._free[size]
                dropped.append(spans.pop())
                self._retained -= size
                if not spans:
                    del self._free[size]

    def _reuse(self, size: int) -> tuple[int, object] | None:
        with self._lock:
            spans = self._free.pop(size, None)
            if not spans:
                return None
            span = spans.pop()
            if spans:
                self._free[size] = spans  # put back as the one used last: dictionaries keep their order
            self._hits += 1
            self._retained -= size
            self._in_use += size
            return span

    def _new(self, size: int) -> tuple[int, object]:
        try:
            span = self._allocate(size)
        except Exception:
            if not self._retained:
                raise
            self.trim()
            span = self._allocate(size)
        with self._lock:
            self._allocations += 1
            self._in_use += size
        return span

    def _give_back(self, memory: Memory) -> None:
        size = size_class(memory.nbytes)
        with self._lock:
            spans = self._free.pop(size, [])
            spans.append((memory.address, memory.owner))
            self._free[size] = spans
            self._in_use -= size
            self._retained += size
        if self._retained > self._limit:
            self.trim(self._limit)
