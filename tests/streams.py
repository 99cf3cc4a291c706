"""Streams for kernel tests: the host library at each instruction set, and a GPU."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.build import LIBRARIES, library_directory
from mpi_gpucomp.device.host import InlineStream
from mpi_gpucomp.device.library import arguments, cpu_flags, select_library

if TYPE_CHECKING:
    from mpi_gpucomp.device import Stream
    from mpi_gpucomp.device.host import HostDevice


class LevelStream(InlineStream):
    """An inline stream with the library of one instruction set; each kernel runs in `ranges` ranges of tiles."""

    def __init__(self, level: str, ranges: int = 1) -> None:
        """Load the library."""
        super().__init__(cast("HostDevice", get_device("host")))
        self._library = ctypes.CDLL(str(select_library(library_directory(), cpu_flags(), level).path))
        self._ranges = ranges

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Run a kernel over all its tiles, cut as workers would cut them."""
        ranges = self._ranges if split else 1
        for first, last in pairwise(tiles * index // ranges for index in range(ranges + 1)):
            self._put(self._queue.work, self._library[kernel], *arguments([first, last, *args]))


def open_stream(machine: str) -> Stream:
    """Return a stream of the machine: an instruction set of the host library, or a GPU."""
    return LevelStream(machine) if machine in LIBRARIES else get_device(machine).stream()
