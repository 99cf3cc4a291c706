"""Buffers, memory, streams and kernels of the host and of CUDA GPUs behind one contract; devices by name."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
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
    "gpu_in_use",
    "order_after",
]

_devices: dict[str, Device] = {}
_lock = Lock()
_used_before_fork = ""
"""A GPU that an ancestor of this process used before the fork, if any."""


def get_device(name: str) -> Device:
    """Return the device of this name: `host`, or `cuda:N` for the GPU with ordinal N; one object per process."""
    device = _devices.get(name)
    if device is None:
        with _lock:
            device = _devices.get(name) or _devices.setdefault(name, _create(name))
    return device


def gpu_in_use() -> str | None:
    """Return the name of a GPU that this process uses, here, in torch or in CuPy; None if there is none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    cupy = sys.modules.get("cupy")
    with suppress(Exception):  # of a CuPy without a GPU, whose types cannot be imported without CuPy
        if cupy is not None and cupy.cuda.driver.ctxGetCurrent():
            return f"cuda:{cupy.cuda.runtime.getDevice()}"
    return next((name for name in _devices if name != "host"), None)


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
    if _used_before_fork:
        raise DeviceError(
            f"device {name}",
            expected="a process that was not forked from one that uses CUDA",
            got=f"a child of a process that had used {_used_before_fork} before the fork",
            remedy="Start processes with the method 'spawn' or 'forkserver' of multiprocessing, or fork before CUDA.",
        )
    from mpi_gpucomp.device.cuda import CudaDevice

    return CudaDevice(int(gpu[1]))


def _after_fork() -> None:
    """Let a forked child create its own devices: threads do not survive a fork, and CUDA cannot be used in a child."""
    global _lock, _used_before_fork
    _lock = Lock()
    _used_before_fork = _used_before_fork or next((name for name in _devices if name != "host"), "")
    _devices.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
