"""Buffers, memory, streams and kernels of the host and of CUDA GPUs behind one contract."""

from mpi_gpucomp.device.base import DTYPES, Device, DType, Event, Memory, Stream, dtype_of_code, dtype_of_name
from mpi_gpucomp.device.buffer import Buffer, as_buffer, order_after
from mpi_gpucomp.device.registry import get_device

__all__ = [
    "DTYPES",
    "Buffer",
    "DType",
    "Device",
    "Event",
    "Memory",
    "Stream",
    "as_buffer",
    "dtype_of_code",
    "dtype_of_name",
    "get_device",
    "order_after",
]
