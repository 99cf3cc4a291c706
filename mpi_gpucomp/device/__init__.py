"""Buffers, memory, streams and kernels of the host and of CUDA GPUs behind one contract; devices by name."""

from __future__ import annotations

import os
import re
from threading import Lock

from mpi_gpucomp.device.base import DTYPES, Device, DType, Event, Memory, Stream, dtype_of_code, dtype_of_name
from mpi_gpucomp.device.buffer import Buffer, as_buffer, order_after
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.errors import DeviceError

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

_devices: dict[str, Device] = {}
_lock = Lock()


def get_device(name: str) -> Device:
    """Return the device of this name: `host`, or `cuda:N` for the GPU with ordinal N; one object per process."""
    device = _devices.get(name)
    if device is None:
        with _lock:
            device = _devices.get(name) or _devices.setdefault(name, _create(name))
    return device


def _create(name: str) -> Device:
    if name == "host":
        return HostDevice()
    gpu = re.fullmatch(r"cuda:(0|[1-9][0-9]*)", name)
    if gpu is None:
        raise DeviceError(
            f"device '{name}'",
            expected="host or cuda:N",
            got=f"'{name}'",
            remedy="Name the first GPU cuda:0.",
        )
    from mpi_gpucomp.device.cuda import CudaDevice

    return CudaDevice(int(gpu[1]))


def _after_fork() -> None:
    """Let a forked child create its own devices: neither threads nor CUDA contexts survive a fork."""
    global _lock
    _lock = Lock()
    _devices.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
