"""Memory that detects out-of-bounds access immediately, and streams that split tiles in unusual ways.

Every block, including the codecs' scratch memory, has exactly the requested size. On the `heap` it is between red zones
of the address sanitizer. In `pages` it ends at a protected page, which also tests the libraries as shipped. Released
memory may not be accessed.
"""

from __future__ import annotations

import ctypes
import mmap
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Protocol

from mpi_gpucomp.device import library
from mpi_gpucomp.device.base import Memory
from mpi_gpucomp.device.host import HostDevice, InlineStream

if TYPE_CHECKING:
    from mpi_gpucomp.device.base import Device

__all__ = ["CutStream", "GuardedDevice", "Heap", "Pages"]

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.malloc.restype = LIBC.mmap.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Source(Protocol):
    """A source of guarded memory."""

    def take(self, nbytes: int) -> int:
        """Return the address of exactly `nbytes`."""

    def give_back(self, address: int, nbytes: int) -> None:
        """Forbid further access."""


class Heap:
    """The C heap, with red zones of the address sanitizer."""

    def take(self, nbytes: int) -> int:
        return int(LIBC.malloc(nbytes))

    def give_back(self, address: int, nbytes: int) -> None:
        LIBC.free(address)


class Pages:
    """Blocks that end at a protected page; released blocks are unmapped."""

    ALIGNMENT = 4  # guaranteed for every stream; the padding is not guarded
    READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

    def take(self, nbytes: int) -> int:
        room = self._whole_pages(nbytes)
        start = LIBC.mmap(None, room + mmap.PAGESIZE, self.READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert start not in (None, ctypes.c_void_p(-1).value), "no memory"
        assert LIBC.mprotect(start + room, mmap.PAGESIZE, 0) == 0
        even = 2 if nbytes % 4 == 2 else self.ALIGNMENT  # an odd number of 16-bit elements
        return int(start) + (room - nbytes) // even * even

    def give_back(self, address: int, nbytes: int) -> None:
        room, end = self._whole_pages(nbytes), -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        assert LIBC.munmap(end - room, room + mmap.PAGESIZE) == 0

    @staticmethod
    def _whole_pages(nbytes: int) -> int:
        return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class ExactPool:
    """A pool without reuse."""

    def __init__(self, device: Device, source: Source) -> None:
        self._device, self._source = device, source

    def take(self, nbytes: int) -> Memory:
        return Memory(self._source.take(nbytes), nbytes, self._device, None, self._give_back)

    def _give_back(self, memory: Memory) -> None:
        self._source.give_back(memory.address, memory.nbytes)


class GuardedDevice(HostDevice):
    """The host, with guarded memory."""

    def __init__(self, source: Source) -> None:
        self.pool = ExactPool(self, source)  # type: ignore[assignment]


class CutStream(InlineStream):
    """A stream that runs each kernel as several ranges of tiles in random order, as busy workers would."""

    def __init__(self, device: HostDevice, random: Random) -> None:
        super().__init__(device)
        self._random = random

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        cuts = sorted(self._random.choices(range(tiles + 1), k=self._random.randrange(3))) if split else []
        ranges = list(pairwise([0, *cuts, tiles]))
        self._random.shuffle(ranges)
        for first, last in ranges:
            self._put(self._queue.work, library.kernel(kernel), *library.arguments([first, last, *args]))
