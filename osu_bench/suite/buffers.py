"""Message buffers: numpy, CuPy or torch, on the GPU of this local rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["KINDS", "Memory", "memory"]

Array = np.ndarray[Any, Any]


class Memory:
    """numpy arrays in host memory."""

    name = "numpy"
    on_gpu = False

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Allocate a buffer."""
        return np.empty(count, dtype)

    def write(self, buffer: Any, values: Array) -> None:
        """Copy values from the host into a buffer."""
        buffer[...] = values

    def host(self, buffer: Any) -> Array:
        """Return a buffer's content in host memory, without a copy if it is there."""
        array: Array = buffer
        return array

    def as_bytes(self, buffer: Any) -> Any:
        """Return a view of a buffer as bytes."""
        return buffer.view(np.uint8)

    def synchronise(self) -> None:
        """Wait for the GPU, if there is one."""


class _Torch(Memory):
    """torch tensors, on a GPU if torch has one."""

    name = "torch"

    def __init__(self, local_rank: int) -> None:
        import torch

        self._torch, self.on_gpu = torch, torch.cuda.is_available()
        self._device = f"cuda:{local_rank % torch.cuda.device_count()}" if self.on_gpu else "cpu"
        if self.on_gpu:
            torch.cuda.set_device(self._device)

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Allocate a tensor of the same type."""
        return self._torch.empty(count, dtype=getattr(self._torch, str(dtype)), device=self._device)

    def write(self, buffer: Any, values: Array) -> None:
        """Copy as bytes, which works for every type."""
        source = np.ascontiguousarray(values).view(np.uint8)
        buffer.view(self._torch.uint8).copy_(self._torch.from_numpy(source))

    def host(self, buffer: Any) -> Array:
        """Copy as bytes."""
        name = str(buffer.dtype).removeprefix("torch.")
        array: Array = buffer.view(self._torch.uint8).cpu().numpy()
        return array.view(_dtype(name))

    def as_bytes(self, buffer: Any) -> Any:
        """Return a view as torch.uint8."""
        return buffer.view(self._torch.uint8)

    def synchronise(self) -> None:
        """Wait for all streams of the GPU."""
        if self.on_gpu:
            self._torch.cuda.synchronize()


class _Cupy(Memory):
    """CuPy arrays on a GPU."""

    name, on_gpu = "cupy", True

    def __init__(self, local_rank: int) -> None:
        import cupy

        self._cupy = cupy
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Allocate an array."""
        return self._cupy.empty(count, dtype)

    def write(self, buffer: Any, values: Array) -> None:
        """Copy synchronously."""
        buffer.set(np.ascontiguousarray(values))

    def host(self, buffer: Any) -> Array:
        """Copy synchronously."""
        array: Array = self._cupy.asnumpy(buffer)
        return array

    def synchronise(self) -> None:
        """Wait for all streams of the GPU."""
        self._cupy.cuda.Device().synchronize()


def _dtype(name: str) -> np.dtype[Any]:
    from osu_bench.suite.data import bfloat16

    return bfloat16() if name == "bfloat16" else np.dtype(name)


KINDS: dict[str, Any] = {"numpy": lambda _: Memory(), "cupy": _Cupy, "torch": _Torch}


def memory(kind: str, comm: MPI.Intracomm) -> Memory:
    """Return the memory of a kind; each rank uses the GPU of its local rank."""
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
