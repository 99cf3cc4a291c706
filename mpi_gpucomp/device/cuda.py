"""A CUDA GPU as a device: a thin layer over CuPy.

CuPy is imported when the first device is created. A thread without a context gets that of the first GPU that it uses,
and keeps it. One that uses another GPU has it back after each call.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.device import library
from mpi_gpucomp.device.base import Device, Event, Memory, Stream
from mpi_gpucomp.device.pool import Parking, Pool
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["CudaDevice", "CudaEvent", "CudaStream", "current_stream", "order_after", "ordinal_of"]

WARPS_PER_BLOCK = 4  # as in kernels/simt.h
THREADS_PER_BLOCK = 32 * WARPS_PER_BLOCK
BLOCKS_PER_MULTIPROCESSOR = 16
LEGACY_STREAM = 1  # CUDA's explicit handle of the legacy default stream, which 0 also names
NOT_READY = 600  # cudaErrorNotReady
DRIVER = "libcuda.so.1"
"""The library of CUDA's driver, whose functions the core calls."""


def _cupy(name: str) -> Any:
    """Import CuPy, or raise a DeviceError."""
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
    """A position in a CUDA stream."""

    def __init__(self, device: CudaDevice, event: Any, failures: list[BaseException]) -> None:
        """Wrap a recorded CuPy event; `failures` are those of its stream."""
        self._device, self.handle, self._failures = device, event, failures

    def done(self) -> bool:
        """Return True if the stream has passed this position or has failed, as `wait` then says; never blocks."""
        with self._device.current:
            # CuPy's own `done` is False for ever after a failure.
            return bool(self._device.cupy.cuda.runtime.eventQuery(self.handle.ptr) != NOT_READY)

    def wait(self) -> None:
        """Block until the stream has passed this position; raise if earlier work failed."""
        try:
            self.handle.synchronize()
        except Exception as error:  # CuPy's error types cannot be imported without CuPy
            raise DeviceError(
                f"stream of {self._device.name}",
                expected="work that completes",
                got=f"'{error}'",
                remedy="Run again with CUDA_LAUNCH_BLOCKING=1 (or compute-sanitizer) to find the kernel that failed.",
            ) from error
        if self._failures:
            raise self._failures.pop()


class CudaStream(Stream):
    """A non-blocking CUDA stream: it does not synchronise with the default stream."""

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        """Create a stream of `device`."""
        self.device = device
        self._cuda = device.cupy.cuda
        self._failures: list[BaseException] = []
        self._parking = Parking(device.pool, device.pinned_pool)
        with device.current:
            self.handle = self._cuda.Stream(non_blocking=True)

    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Queue a kernel, one warp per tile; `split=False` limits it to one block."""
        blocks = -(-tiles // WARPS_PER_BLOCK) if split else 1
        grid = (max(1, min(blocks, self.device.max_blocks)),)
        numbers = [x if isinstance(x, float) else int(x) for x in args]  # CuPy would pass a bool as one byte
        with self.device.current:
            self.device.kernel(kernel)(grid, (THREADS_PER_BLOCK,), (0, tiles, *numbers), stream=self.handle)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between two addresses, host or device."""
        runtime = self._cuda.runtime
        with self.device.current:
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, self.handle.ptr)

    def fill(self, to: int, byte: int, nbytes: int) -> None:
        """Queue a memset."""
        with self.device.current:
            self._cuda.runtime.memsetAsync(to, byte, nbytes, self.handle.ptr)

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` with this stream as CuPy's current one."""
        with self.device.current, self.handle:
            work()

    def release(self, memory: Memory) -> None:
        """Return memory to its pool once the work queued so far has completed, which later calls poll for."""
        self._parking.add(self.record(), memory)

    def record(self) -> CudaEvent:
        """Record an event at the current end of the stream."""
        with self.device.current:
            event = self._cuda.Event(block=True, disable_timing=True)  # block: a waiting thread sleeps
            return CudaEvent(self.device, self.handle.record(event), self._failures)

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for `event`; does not block the caller."""
        with self.device.current:
            if isinstance(event, CudaEvent):
                self.handle.wait_event(event.handle)
            else:
                self.handle.launch_host_func(self._wait_on_host, event)

    def _wait_on_host(self, event: Event) -> None:
        try:
            event.wait()
        except BaseException as error:  # an exception in CUDA's callback thread would be lost
            self._failures.append(error)

    def synchronize(self) -> None:
        """Block until all work queued so far has completed; raise if any of it failed."""
        self.record().wait()
        self._parking.release_passed()

    def close(self) -> None:
        """Complete the queued work."""
        self.synchronize()


class CudaDevice(Device):
    """One GPU."""

    appends_in_place = False

    def __init__(self, ordinal: int) -> None:
        """Use the GPU with this ordinal."""
        self.name = f"cuda:{ordinal}"
        self.cupy = _cupy(self.name)
        _check_present(self.name, self.cupy.cuda.runtime, ordinal)
        self._ordinal = ordinal
        gpu = self.cupy.cuda.Device(ordinal)
        self.max_blocks = gpu.attributes["MultiProcessorCount"] * BLOCKS_PER_MULTIPROCESSOR
        self._capability = int(gpu.compute_capability)
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}
        self._streams: list[CudaStream] = []
        self.pool = Pool(self, lambda nbytes: self._allocate(self.cupy.cuda.Memory, nbytes))
        self.pinned_pool = Pool(self, lambda nbytes: self._allocate(self.cupy.cuda.PinnedMemory, nbytes))

    @property
    def current(self) -> _Current:
        """Context manager that makes this GPU current."""
        return _Current(self.cupy.cuda, self._ordinal)

    def alloc(self, nbytes: int) -> Memory:
        """Allocate GPU memory from the pool."""
        return self.pool.take(nbytes)

    def pinned(self, nbytes: int) -> Memory:
        """Allocate page-locked host memory from its pool."""
        return self.pinned_pool.take(nbytes)

    def stream(self) -> CudaStream:
        """Create a stream."""
        return CudaStream(self)

    def take_stream(self) -> CudaStream:
        """Return a stream that no other caller uses, one that was given back if possible."""
        return self._streams.pop() if self._streams else self.stream()

    def give_back_stream(self, stream: CudaStream) -> None:
        """Keep a stream for the next user."""
        self._streams.append(stream)

    def kernel(self, name: str) -> Any:
        """Return the kernel of this name; compiles and loads its family on first use."""
        function = self._kernels.get(name)
        if function is None:
            family = library.family_of(name)
            if family not in self._modules:
                self._modules[family] = self.cupy.RawModule(path=str(library.cubin_path(family, self._capability)))
            function = self._kernels[name] = self._modules[family].get_function(name).kernel
        return function

    def _allocate(self, kind: Any, nbytes: int) -> tuple[int, object]:
        with self.current:
            memory = kind(nbytes)
        return memory.ptr, memory


class _Current:
    """Makes a GPU current in this thread.

    CuPy's `Device` selects the previous GPU again at its end. In a thread that has used none this is GPU 0, where CUDA
    would create a context: half a gigabyte for every rank of a node. So such a thread keeps the GPU.
    """

    __slots__ = ("_cuda", "_ordinal", "_previous")

    def __init__(self, cuda: Any, ordinal: int) -> None:
        self._cuda, self._ordinal = cuda, ordinal
        self._previous: int | None = None

    def __enter__(self) -> None:
        runtime = self._cuda.runtime
        if not self._cuda.driver.ctxGetCurrent():
            runtime.setDevice(self._ordinal)
        elif (previous := runtime.getDevice()) != self._ordinal:
            runtime.setDevice(self._ordinal)
            self._previous = previous

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            self._cuda.runtime.setDevice(self._previous)


def _check_present(name: str, runtime: Any, ordinal: int) -> None:
    try:
        found = f"{runtime.getDeviceCount()} GPUs"
        if ordinal < runtime.getDeviceCount():
            return
    except runtime.CUDARuntimeError as error:
        found = f"'{error}'"
    raise DeviceError(
        f"device {name}",
        expected="a CUDA GPU with this ordinal",
        got=found,
        remedy="Check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES, or use the device 'host'.",
    )


def order_after(stream: CudaStream, producer: int | Callable[[int], object], ordinal: int) -> None:
    """Make later work of `stream` wait for the producer's stream, given as a handle or as the producer's function."""
    cuda = stream.device.cupy.cuda
    with _Current(cuda, ordinal):
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
    """Return the ordinal of the GPU that an address belongs to; of the current GPU for address 0."""
    runtime = _cupy("cuda").cuda.runtime
    try:
        return int(runtime.pointerGetAttributes(address).device if address else runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            "device cuda",
            expected="an address of a GPU",
            got=f"{address:#x}: '{error}'",
            remedy="Check the driver with nvidia-smi.",
        ) from error
