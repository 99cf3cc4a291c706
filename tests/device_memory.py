"""Copies bytes to and from device memory."""

from __future__ import annotations

import ctypes

import numpy as np

from mpi_gpucomp.device import Device, Memory, Stream


def view(memory: Memory) -> np.ndarray:
    """Return a view of host or pinned memory as bytes."""
    return np.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.address), np.uint8)


def upload(data: np.ndarray, device: Device, stream: Stream) -> Memory:
    """Copy an array to a device and wait for it."""
    staging, memory = device.pinned(data.nbytes), device.alloc(data.nbytes)
    view(staging)[:] = data.reshape(-1).view(np.uint8)
    stream.copy(memory.address, staging.address, data.nbytes)
    stream.synchronize()
    staging.release()
    return memory


def download(memory: Memory, stream: Stream) -> np.ndarray:
    """Copy bytes back from a device, after the work queued on `stream`."""
    with memory.device.pinned(memory.nbytes) as staging:
        stream.copy(staging.address, memory.address, memory.nbytes)
        stream.synchronize()
        return view(staging).copy()
