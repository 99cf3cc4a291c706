"""Memory that says at once when a kernel touches what is not its own, and streams that share tiles in awkward ways.

Every span, the codecs' scratch memory included, has exactly the size that was asked for. On the `heap` it lies between
the red zones of the address sanitizer; in `pages` it ends where a page begins that nobody may touch, which
shows what the libraries as they are shipped do. What is given back may not be touched any more.
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
    """Where guarded memory comes from."""

    def take(self, nbytes: int) -> int:
        """Return the address of exactly `nbytes`."""

    def give_back(self, address: int, nbytes: int) -> None:
        """Let nobody touch them any more."""


class Heap:
    """The C library's heap, which the address sanitizer surrounds with red zones."""

    def take(self, nbytes: int) -> int:
        return int(LIBC.malloc(nbytes))

    def give_back(self, address: int, nbytes: int) -> None:
        LIBC.free(address)


class Pages:
    """Spans that end where a forbidden page begins; what was given back is no memory any more."""

    ALIGNMENT = 4  # what kernels may expect of any stream; the bytes up to it are not guarded
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
    """Gives every request memory of its own."""

    def __init__(self, device: Device, source: Source) -> None:
        self._device, self._source = device, source

    def take(self, nbytes: int) -> Memory:
        return Memory(self._source.take(nbytes), nbytes, self._device, None, self._give_back)

    def _give_back(self, memory: Memory) -> None:
        self._source.give_back(memory.address, memory.nbytes)


class GuardedDevice(HostDevice):
    """The processor, with memory that is watched."""

    def __init__(self, source: Source) -> None:
        self.pool = ExactPool(self, source)  # type: ignore[assignment]


class CutStream(InlineStream):
    """Runs each kernel that may be shared as several ranges of tiles, in any order, as busy workers would."""

    def __init__(self, device: HostDevice, random: Random) -> None:
        super().__init__(device)
        self._random = random

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        cuts = sorted(self._random.choices(range(tiles + 1), k=self._random.randrange(3))) if split else []
        ranges = list(pairwise([0, *cuts, tiles]))
        self._random.shuffle(ranges)
        for first, last in ranges:
            self._put(self._queue.work, library.kernel(kernel), *library.arguments([first, last, *args]))
