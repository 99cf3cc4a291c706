"""Machines that run kernels: the host library at every supported instruction set, and a GPU if there is one.

A test allocates its arrays on the machine (`copy`, `zeros`), so that kernel and test use the same address, and calls
`launch` with the kernel's arguments behind the range of tiles: arrays, integers and floats.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpi_gpucomp.device.build import build, kernels_directory, library_directory
from mpi_gpucomp.device.cuda import THREADS_PER_BLOCK, WARPS_PER_BLOCK, CudaDevice
from mpi_gpucomp.device.library import arguments

__all__ = ["Gpu", "Host", "Machine", "address", "fresh_library"]


class Machine(ABC):
    name: str

    @abstractmethod
    def memory(self, nbytes: int) -> np.ndarray:
        """Return memory that kernels and the test access at the same address."""

    @abstractmethod
    def call(self, kernel: str, first: int, last: int, args: list[int | float]) -> None: ...

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        array: np.ndarray = self.memory(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
        array.fill(0)
        return array

    def copy(self, values: Any, dtype: Any = None) -> np.ndarray:
        values = np.asarray(values, dtype)
        array = self.zeros(values.shape, values.dtype)
        array[...] = values
        return array

    def launch(self, kernel: str, tiles: int, *args: np.ndarray | int | float, calls: int = 1) -> None:
        """Run the tiles in `calls` successive calls."""
        plain = [address(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        bounds = [tiles * i // calls for i in range(calls + 1)]
        for first, last in pairwise(bounds):
            self.call(kernel, first, last, plain)


def address(array: np.ndarray) -> int:
    start: int = array.__array_interface__["data"][0]
    return start


class Host(Machine):
    def __init__(self, name: str, library: Path) -> None:
        self.name, self.library = name, ctypes.CDLL(str(library))

    def memory(self, nbytes: int) -> np.ndarray:
        spare = np.empty(nbytes + 64, np.uint8)
        start = -address(spare) % 64
        return spare[start : start + nbytes]

    def call(self, kernel: str, first: int, last: int, args: list[int | float]) -> None:
        getattr(self.library, kernel)(*arguments([first, last, *args]))


class Gpu(Machine):
    name = "cuda"

    def __init__(self) -> None:
        self.device = CudaDevice(0)

    def memory(self, nbytes: int) -> np.ndarray:
        pinned = self.device.cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(pinned, np.uint8, nbytes)

    def call(self, kernel: str, first: int, last: int, args: list[int | float]) -> None:
        blocks = max(1, -(-(last - first) // WARPS_PER_BLOCK))
        with self.device.current:
            self.device.kernel(kernel)((blocks,), (THREADS_PER_BLOCK,), (first, last, *args))
            self.device.cupy.cuda.runtime.deviceSynchronize()


def fresh_library(level: str, spare: Path) -> Path:
    """Return the built library, or build it into `spare` if it is older than a kernel source."""
    built = library_directory() / f"libgpucomp-{level}.so"
    texts = [text.stat().st_mtime for text in kernels_directory().iterdir()]
    if built.exists() and built.stat().st_mtime >= max(texts):
        return built
    return build(kernels_directory(), spare, only=level)[0]
