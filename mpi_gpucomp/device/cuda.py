"""A CUDA GPU as a device, over CuPy; it adds no logic of its own.

CuPy is imported when the first device is made. Every call makes its device the current one for its own length, so that
several GPUs can be used from any thread.
"""

from __future__ import annotations

from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.device import library as nvrtc
from mpi_gpucomp.device.base import Device, Event, Memory, Stream
from mpi_gpucomp.device.pool import Pool
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CudaDevice", "CudaEvent", "CudaStream", "current_stream", "order_after", "ordinal_of"]

WARPS_PER_BLOCK = 4  # as in kernels/simt.h
THREADS_PER_BLOCK = 32 * WARPS_PER_BLOCK
BLOCKS_PER_MULTIPROCESSOR = 16
LEGACY_STREAM = 1  # CUDA's name for the stream that 0 stands for


def _cupy(name: str) -> Any:
    """Import CuPy for a device, or say what is missing."""
    try:
        return import_module("cupy")
    except ImportError as error:
        raise DeviceError(
            f"device {name}",
            expected="CuPy",
            got=f"'{error}'",
            remedy="Install it: 'pip install mpi_gpucomp[cuda13]' (or cuda12), and an NVIDIA driver.",
        ) from error


class CudaEvent(Event):
    """A place in a CUDA stream."""

    def __init__(self, event: Any, failures: list[BaseException]) -> None:
        """Wrap a recorded CuPy event; `failures` are those of its stream."""
        self.handle, self._failures = event, failures

    def done(self) -> bool:
        """Say whether the stream has passed this place; never waits."""
        return bool(self.handle.done)

    def wait(self) -> None:
        """Wait until the stream has passed this place; raise what went wrong before it."""
        try:
            self.handle.synchronize()
        except Exception as error:  # CuPy's error types are known only where CuPy is
            raise DeviceError(
                "stream of a GPU",
                expected="work that runs to its end",
                got=f"'{error}'",
                remedy="Run again with CUDA_LAUNCH_BLOCKING=1 (or compute-sanitizer) to see which kernel it was.",
            ) from error
        if self._failures:
            raise self._failures.pop()


class CudaStream(Stream):
    """A CUDA stream that does not wait for the default stream."""

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        """Make a non-blocking stream on `device`."""
        self.device = device
        self._cuda = device.cupy.cuda
        self._failures: list[BaseException] = []
        self._parting: deque[tuple[CudaEvent, Memory]] = deque()
        with device.current:
            self.handle = self._cuda.Stream(non_blocking=True)

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Queue a kernel, one warp for a tile; `split=False` keeps it to one block."""
        blocks = -(-tiles // WARPS_PER_BLOCK) if split else 1
        grid = (max(1, min(blocks, self.device.most_blocks)),)
        numbers = [x if isinstance(x, float) else int(x) for x in args]  # CuPy would pass a bool as one byte
        with self.device.current:
            self.device.kernel(kernel)(grid, (THREADS_PER_BLOCK,), (0, tiles, *numbers), stream=self.handle)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between two addresses, host or device."""
        runtime = self._cuda.runtime
        with self.device.current:
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, self.handle.ptr)

    def fill(self, to: int, byte: int, nbytes: int) -> None:
        """Queue the setting of bytes to one value."""
        with self.device.current:
            self._cuda.runtime.memsetAsync(to, byte, nbytes, self.handle.ptr)

    def run(self, work: Callable[[], None]) -> None:
        """Call `work`, whose CuPy work goes to this stream."""
        with self.device.current, self.handle:
            work()

    def release(self, memory: Memory) -> None:
        """Give memory back once what is queued so far is done, which is looked at from time to time."""
        self._parting.append((self.record(), memory))
        self._part()

    def _part(self) -> None:
        while self._parting and self._parting[0][0].done():
            self._parting.popleft()[1].release()

    def record(self) -> CudaEvent:
        """Mark this place in the stream."""
        with self.device.current:
            event = self._cuda.Event(block=True, disable_timing=True)  # a thread that waits sleeps
            return CudaEvent(self.handle.record(event), self._failures)

    def wait(self, event: Event) -> None:
        """Hold later work of this stream until `event` is done; the caller does not wait."""
        with self.device.current:
            if isinstance(event, CudaEvent):
                self.handle.wait_event(event.handle)
            else:
                self.handle.launch_host_func(self._hold, event)

    def _hold(self, event: Event) -> None:
        try:
            event.wait()
        except BaseException as error:  # CUDA's own thread would lose it
            self._failures.append(error)

    def synchronize(self) -> None:
        """Wait for everything queued so far; raise what went wrong."""
        self.record().wait()
        self._part()

    def close(self) -> None:
        """Finish what is queued."""
        self.synchronize()


class CudaDevice(Device):
    """One GPU."""

    appends_in_place = False

    def __init__(self, ordinal: int) -> None:
        """Use the GPU with this number."""
        self.name = f"cuda:{ordinal}"
        self.cupy = _cupy(self.name)
        _check_present(self.name, self.cupy.cuda.runtime, ordinal)
        self._ordinal = ordinal
        self.most_blocks = self.current.attributes["MultiProcessorCount"] * BLOCKS_PER_MULTIPROCESSOR
        self._capability = int(self.current.compute_capability)
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}
        self.pool = Pool(self, lambda nbytes: self._allocate(self.cupy.cuda.Memory, nbytes))
        self.pinned_pool = Pool(self, lambda nbytes: self._allocate(self.cupy.cuda.PinnedMemory, nbytes))

    @property
    def current(self) -> Any:
        """Make this GPU the current one for the length of a `with`."""
        return self.cupy.cuda.Device(self._ordinal)

    def alloc(self, nbytes: int) -> Memory:
        """Take memory of the GPU from its pool."""
        return self.pool.take(nbytes)

    def pinned(self, nbytes: int) -> Memory:
        """Take page-locked host memory from its pool."""
        return self.pinned_pool.take(nbytes)

    def stream(self) -> CudaStream:
        """Make a new stream."""
        return CudaStream(self)

    def kernel(self, name: str) -> Any:
        """Return the kernel of this name, compiled and loaded once."""
        found = self._kernels.get(name)
        if found is None:
            family = nvrtc.family_of(name)
            if family not in self._modules:
                self._modules[family] = self.cupy.RawModule(path=str(nvrtc.compiled(family, self._capability)))
            found = self._kernels[name] = self._modules[family].get_function(name).kernel
        return found

    def _allocate(self, kind: Any, nbytes: int) -> tuple[int, object]:
        with self.current:
            memory = kind(nbytes)
        return memory.ptr, memory


def _check_present(name: str, runtime: Any, ordinal: int) -> None:
    try:
        found = f"{runtime.getDeviceCount()} of them"
        if ordinal < runtime.getDeviceCount():
            return
    except runtime.CUDARuntimeError as error:
        found = f"'{error}'"
    raise DeviceError(
        f"device {name}",
        expected="a CUDA GPU of this number",
        got=found,
        remedy="Check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES, or use the device 'host'.",
    )


def order_after(stream: CudaStream, producer: int | Callable[[int], object], ordinal: int) -> None:
    """Hold later work of `stream` for what is queued on a producer's stream (a handle), or let the producer do it."""
    cuda = stream.device.cupy.cuda
    with cuda.Device(ordinal):
        if callable(producer):
            producer(stream.handle.ptr)
            return
        event = cuda.Event(disable_timing=True)
        cuda.runtime.eventRecord(event.ptr, producer)
    with stream.device.current:
        stream.handle.wait_event(event)


def current_stream(ordinal: int) -> int:
    """Return the handle of CuPy's current stream on a GPU."""
    return int(_cupy(f"cuda:{ordinal}").cuda.get_current_stream(ordinal).ptr) or LEGACY_STREAM


def ordinal_of(address: int) -> int:
    """Return the number of the GPU that an address belongs to: the current one where there is no address."""
    runtime = _cupy("cuda").cuda.runtime
    try:
        return int(runtime.pointerGetAttributes(address).device if address else runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            "device cuda",
            expected=f"a GPU that address {address:#x} belongs to",
            got=f"'{error}'",
            remedy="Check the driver with nvidia-smi.",
        ) from error
