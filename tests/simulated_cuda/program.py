"""Calls of the driver, as a small program makes them, for the tests of the machine itself."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

from .machine import CudaError, Machine

__all__ = ["Program"]

TILE = 1024
"""Bytes of a tile of the kernels `sim_*`."""
Handle = ctypes.c_void_p


class Program:
    """A program on one machine; its first GPU is current."""

    def __init__(self, machine: Machine, device: int = 0) -> None:
        """Initialise CUDA and make the primary context of a device current."""
        self.machine = machine
        machine.call("cuInit", 0)
        self.contexts: dict[int, Handle] = {}
        self.modules: dict[int, Handle] = {}
        self.use(device)

    def call(self, name: str, *args: object) -> None:
        """Call the driver; raise a CudaError if it fails."""
        self.machine.call(name, *args)

    def code(self, name: str, *args: object) -> int:
        """Call the driver; return its code."""
        try:
            self.machine.call(name, *args)
        except CudaError as error:
            return error.code
        return 0

    def use(self, device: int) -> None:
        """Make the primary context of a device current."""
        if device not in self.contexts:
            self.contexts[device] = self._new("cuDevicePrimaryCtxRetain", device)
        self.device = device
        self.call("cuCtxSetCurrent", self.contexts[device])

    def _new(self, name: str, *args: object) -> Handle:
        made = Handle()
        self.call(name, ctypes.byref(made), *args)
        return made

    def alloc(self, nbytes: int) -> int:
        """Allocate device memory."""
        return self._new("cuMemAlloc_v2", ctypes.c_size_t(nbytes)).value or 0

    def pinned(self, nbytes: int) -> int:
        """Allocate page-locked memory."""
        return self._new("cuMemHostAlloc", ctypes.c_size_t(nbytes), 0).value or 0

    def free(self, address: int) -> None:
        """Free device memory."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def stream(self, *, blocking: bool = False) -> Handle:
        """Create a stream."""
        return self._new("cuStreamCreate", 0 if blocking else 1)

    def event(self) -> Handle:
        """Create an event."""
        return self._new("cuEventCreate", 2)

    def record(self, stream: Handle | None) -> Handle:
        """Record a new event."""
        event = self.event()
        self.call("cuEventRecord", event, stream)
        return event

    def wait(self, stream: Handle | None, event: Handle) -> None:
        """Make a stream wait for an event."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def module(self, image: bytes) -> Handle:
        """Load a module."""
        return self._new("cuModuleLoadData", image)

    def launch(
        self, kernel: str, stream: Handle | None, tiles: int, *args: float, module: Handle | None = None
    ) -> None:
        """Launch a kernel of a module, or of the family `sim`."""
        if module is None:
            if self.device not in self.modules:
                self.modules[self.device] = self.module(b"simulated module of family sim\n")
            module = self.modules[self.device]
        function = self._new("cuModuleGetFunction", module, kernel.encode())
        values: list[Any] = [ctypes.c_int64(0), ctypes.c_int64(tiles)]
        values += [ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x) for x in args]
        places = (Handle * len(values))(*(ctypes.addressof(value) for value in values))
        grid = max(1, -(-tiles // 4))
        self.call("cuLaunchKernel", function, grid, 1, 1, 128, 1, 1, 0, stream, places, None)

    def fill(self, to: int, nbytes: int, byte: int, stream: Handle | None) -> None:
        """Fill bytes by a kernel."""
        self.launch("sim_fill", stream, -(-nbytes // TILE), to, nbytes, byte)

    def add(self, to: int, source: int, nbytes: int, number: int, stream: Handle | None) -> None:
        """Add a number to bytes by a kernel."""
        self.launch("sim_add", stream, -(-nbytes // TILE), to, source, nbytes, number)

    def copy(self, to: int, source: int, nbytes: int, stream: Handle | None) -> None:
        """Queue a copy."""
        self.call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), stream)

    def synchronize(self, *streams: Handle | None) -> None:
        """Wait for streams, or for the device."""
        for stream in streams:
            self.call("cuStreamSynchronize", stream)
        if not streams:
            self.call("cuCtxSynchronize")

    def ready(self, event: Handle) -> bool:
        """Query an event."""
        code = self.machine.driver.cuEventQuery(event)
        if code not in (0, 600):
            raise self.machine.error("cuEventQuery", code)
        return bool(code == 0)

    def put(self, data: bytes) -> int:
        """Allocate device memory for these bytes and copy them to it."""
        address = self.alloc(len(data))
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        return address

    def bytes_at(self, address: int, nbytes: int) -> bytes:
        """Copy device memory to pageable memory, which waits."""
        to = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", to, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return to.raw

    def end(self) -> None:
        """Run what is queued, where the context still works."""
        with suppress(CudaError):
            self.synchronize()
