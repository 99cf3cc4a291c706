"""Memory pool: a released block serves the next request of its size class.

There are four size classes per power of two, so that a request above one kilobyte wastes less than a quarter of its
size. The pool caches at most `limit` bytes and evicts the least recently used size classes first. Release a block only
when no queued work accesses it: it may be handed out again immediately. Where work is still queued, `Parking` keeps the
block until an event has passed. A pool that can allocate no more first frees what it caches, then waits for what is
parked.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from mpi_gpucomp.device.base import Memory
from mpi_gpucomp.errors import BufferSpecError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.device.base import Device, Event

__all__ = ["ALIGNMENT", "Parking", "Pool", "PoolStatistics", "size_class"]

ALIGNMENT = 256
"""Alignment of every block in bytes."""


class PoolStatistics(NamedTuple):
    """Counters of a pool: allocations made, requests served from the cache, bytes in use, bytes cached.

    Memory that was dropped without `release` stays counted as in use.
    """

    allocations: int
    hits: int
    in_use: int
    retained: int


def size_class(nbytes: int) -> int:
    """Return the block size that serves a request: the next of four steps per power of two."""
    step = max(ALIGNMENT, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(ALIGNMENT, -(-nbytes // step) * step)


class Parking:
    """Memory that returns to its pools behind events of one stream; thread-safe."""

    def __init__(self, *pools: Pool) -> None:
        """Let these pools take the memory back early, at the price of a wait."""
        self._waiting: deque[tuple[Event, Memory]] = deque()
        self._lock = Lock()
        for pool in pools:
            pool.watch(self)

    def add(self, event: Event, memory: Memory) -> None:
        """Park a block until an event has passed, which later calls poll for."""
        with self._lock:
            self._waiting.append((event, memory))
        self.release_passed()

    def release_passed(self) -> None:
        """Release the blocks whose events have passed."""
        passed = []
        with self._lock:
            while self._waiting and self._waiting[0][0].done():
                passed.append(self._waiting.popleft()[1])
        for memory in passed:
            memory.release()

    def wait(self) -> bool:
        """Wait for the oldest block and release it; return False if there is none."""
        with self._lock:
            oldest = self._waiting.popleft() if self._waiting else None
        if oldest is None:
            return False
        event, memory = oldest
        event.wait()
        memory.release()
        return True


class Pool:
    """Reusable memory of one kind; thread-safe."""

    def __init__(self, device: Device, allocate: Callable[[int], tuple[int, object]], limit: int = 1 << 30) -> None:
        """Get new blocks from `allocate`, which returns an aligned address and the object that keeps it alive."""
        self._device, self._allocate, self._limit = device, allocate, limit
        self._lock = Lock()
        self._free: dict[int, list[tuple[int, object]]] = {}
        self._allocations = self._hits = self._in_use = self._retained = 0
        self._parkings: WeakSet[Parking] = WeakSet()

    @property
    def limit(self) -> int:
        """Maximum number of cached bytes."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._limit = nbytes
        self.trim(nbytes)

    @property
    def statistics(self) -> PoolStatistics:
        """Counters since the pool was created."""
        with self._lock:
            return PoolStatistics(self._allocations, self._hits, self._in_use, self._retained)

    def take(self, nbytes: int) -> Memory:
        """Return uninitialised memory for `nbytes`."""
        if nbytes < 0:
            raise BufferSpecError(
                f"memory of {self._device.name}",
                expected="a size of at least 0 bytes",
                got=str(nbytes),
                remedy="Check how the size is computed.",
            )
        size = size_class(nbytes)
        address, owner = self._reuse(size) or self._allocate_new(size)
        return Memory(address, nbytes, self._device, owner, self._put_back)

    def watch(self, parking: Parking) -> None:
        """Take back blocks from there, as long as it exists, when there is no other memory."""
        with self._lock:
            self._parkings.add(parking)

    def trim(self, keep: int = 0) -> None:
        """Free cached blocks until at most `keep` bytes are left."""
        evicted = []  # freed after the lock is released: freeing may be slow
        with self._lock:
            while self._free and self._retained > keep:
                size = next(iter(self._free))
                blocks = self._free[size]
                evicted.append(blocks.pop())
                self._retained -= size
                if not blocks:
                    del self._free[size]

    def _reuse(self, size: int) -> tuple[int, object] | None:
        with self._lock:
            blocks = self._free.pop(size, None)
            if not blocks:
                return None
            block = blocks.pop()
            if blocks:
                self._free[size] = blocks  # reinserted as the most recently used: dictionaries keep their order
            self._hits += 1
            self._retained -= size
            self._in_use += size
            return block

    def _allocate_new(self, size: int) -> tuple[int, object]:
        block = self._allocate_or_reclaim(size)
        with self._lock:
            self._allocations += 1
            self._in_use += size
        return block

    def _allocate_or_reclaim(self, size: int) -> tuple[int, object]:
        """Allocate; while there is no memory, free what is cached, and wait for what is parked."""
        while True:
            try:
                return self._allocate(size)
            except Exception as error:  # of a type that only the device knows
                if not self._retained and not self._wait_for_parked():
                    raise self._out_of_memory(size, error) from error
                self.trim()

    def _wait_for_parked(self) -> bool:
        """Wait for one block that is parked; return False if there is none."""
        with self._lock:
            parkings = list(self._parkings)
        return any(parking.wait() for parking in parkings)

    def _out_of_memory(self, size: int, error: Exception) -> DeviceError:
        return DeviceError(
            f"memory of {self._device.name}",
            expected=f"{size} bytes more than the {self._in_use} in use by the library",
            got=f"'{type(error).__name__}: {error}'",
            remedy="Free memory there, or pass a smaller chunk= or fewer slots= to the communicator.",
        )

    def _put_back(self, memory: Memory) -> None:
        size = size_class(memory.nbytes)
        with self._lock:
            blocks = self._free.pop(size, [])
            blocks.append((memory.address, memory.owner))
            self._free[size] = blocks
            self._in_use -= size
            self._retained += size
        if self._retained > self._limit:
            self.trim(self._limit)
