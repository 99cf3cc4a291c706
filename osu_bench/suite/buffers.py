"""The memory that messages are in: numpy's, CuPy's or torch's, on the GPU that belongs to this rank of its host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["KINDS", "Memory", "memory"]

Array = np.ndarray[Any, Any]


class Memory:
    """Buffers of numpy's."""

    name = "numpy"
    on_gpu = False

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Make a buffer."""
        return np.empty(count, dtype)

    def write(self, buffer: Any, values: Array) -> None:
        """Copy values from the host into a buffer."""
        buffer[...] = values

    def host(self, buffer: Any) -> Array:
        """Return what is in a buffer, on the host: the buffer itself if it is there."""
        array: Array = buffer
        return array

    def as_bytes(self, buffer: Any) -> Any:
        """Return the same memory as bytes."""
        return buffer.view(np.uint8)

    def synchronise(self) -> None:
        """Wait until the GPU has done everything that it was told, where there is one."""


class _Torch(Memory):
    """Tensors, on a GPU if torch has one."""

    name = "torch"

    def __init__(self, local_rank: int) -> None:
        import torch

        self._torch, self.on_gpu = torch, torch.cuda.is_available()
        self._device = f"cuda:{local_rank % torch.cuda.device_count()}" if self.on_gpu else "cpu"
        if self.on_gpu:
            torch.cuda.set_device(self._device)

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Make a tensor of the type of the same name."""
        return self._torch.empty(count, dtype=getattr(self._torch, str(dtype)), device=self._device)

    def write(self, buffer: Any, values: Array) -> None:
        """Copy by bytes, which every type has."""
        source = np.ascontiguousarray(values).view(np.uint8)
        buffer.view(self._torch.uint8).copy_(self._torch.from_numpy(source))

    def host(self, buffer: Any) -> Array:
        """Read by bytes too."""
        name = str(buffer.dtype).removeprefix("torch.")
        array: Array = buffer.view(self._torch.uint8).cpu().numpy()
        return array.view(_dtype(name))

    def as_bytes(self, buffer: Any) -> Any:
        """Ask torch for it."""
        return buffer.view(self._torch.uint8)

    def synchronise(self) -> None:
        """Wait for the whole GPU: whatever stream the work is on."""
        if self.on_gpu:
            self._torch.cuda.synchronize()


class _Cupy(Memory):
    """Arrays of CuPy's."""

    name, on_gpu = "cupy", True

    def __init__(self, local_rank: int) -> None:
        import cupy

        self._cupy = cupy
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Make an array."""
        return self._cupy.empty(count, dtype)

    def write(self, buffer: Any, values: Array) -> None:
        """Copy, and wait for it."""
        buffer.set(np.ascontiguousarray(values))

    def host(self, buffer: Any) -> Array:
        """Copy, and wait for it."""
        array: Array = self._cupy.asnumpy(buffer)
        return array

    def synchronise(self) -> None:
        """Wait for the whole GPU."""
        self._cupy.cuda.Device().synchronize()


def _dtype(name: str) -> np.dtype[Any]:
    from osu_bench.suite.data import bfloat16

    return bfloat16() if name == "bfloat16" else np.dtype(name)


KINDS: dict[str, Any] = {"numpy": lambda _: Memory(), "cupy": _Cupy, "torch": _Torch}


def memory(kind: str, comm: MPI.Intracomm) -> Memory:
    """Return the memory of a kind, with each rank bound to a GPU by its place among the ranks of its host."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = node.rank
    node.Free()
    try:
        made: Memory = KINDS[kind](local_rank)
    except Exception as error:
        raise DeviceError(
            f"option --buffer {kind}",
            expected=f"{kind}, and for cupy a GPU",
            got=f"{type(error).__name__}: {error}".partition("\n")[0],
            remedy="Install it (pip install mpi_gpucomp[cuda13] or [torch]), or use --buffer numpy.",
            rank=comm.rank,
        ) from error
    return made
