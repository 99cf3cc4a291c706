"""A GPU as the core uses it: handles of its kernels and context, and memory from the pools of its device."""

from __future__ import annotations

import ctypes
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mpi_gpucomp.core.library import GiveBack, Take, core
from mpi_gpucomp.device import cuda
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.device import Memory

__all__ = ["CoreGpu", "core_gpu"]

REASON_BYTES = 512


class CoreGpu:
    """The core's object of a GPU; it lives as long as the process."""

    def __init__(self, device: cuda.CudaDevice) -> None:
        """Load the functions of the driver, and the kernels of frames."""
        self.device = device
        self._memory: dict[int, Memory] = {}
        self._named: set[int] = set()
        self._callbacks = (*self._memory_callbacks(device.alloc), *self._memory_callbacks(device.pinned))
        reason = ctypes.create_string_buffer(REASON_BYTES)
        with device.current:
            self.handle = core().gc_cuda_new(
                *(cuda.DRIVER.encode(), device.name.encode()),
                *(device.kernel("frame_seal").ptr, device.kernel("frame_verify").ptr, device.max_blocks),
                *self._callbacks,
                *(reason, REASON_BYTES),
            )
        if not self.handle:
            raise DeviceError(
                f"device {device.name}",
                expected=f"CUDA's driver, {cuda.DRIVER}",
                got=reason.value.decode(),
                remedy="Install an NVIDIA driver for CUDA 12 or later.",
            )
        for name in ("frame_seal", "frame_verify"):
            self.kernel(name)

    def kernel(self, name: str) -> int:
        """Return the handle of a kernel, which errors can name from now on."""
        with self.device.current:
            handle = int(self.device.kernel(name).ptr)
        if handle not in self._named:
            self._named.add(handle)
            core().gc_cuda_name_kernel(self.handle, handle, name.encode())
        return handle

    def _memory_callbacks(self, allocate: Callable[[int], Memory]) -> tuple[object, object]:
        def take(nbytes: int) -> int:
            try:
                memory = allocate(nbytes)
            except Exception:  # out of memory: the core tries again without what it has kept, and then reports it
                return 0
            self._memory[memory.address] = memory
            return memory.address

        def give_back(address: int, nbytes: int) -> None:
            self._memory.pop(address).release()

        return Take(take), GiveBack(give_back)


_gpus: WeakKeyDictionary[cuda.CudaDevice, CoreGpu] = WeakKeyDictionary()
_lock = Lock()


def core_gpu(device: cuda.CudaDevice) -> CoreGpu:
    """Return the core's object of a device."""
    with _lock:
        if device not in _gpus:
            _gpus[device] = CoreGpu(device)
        return _gpus[device]
