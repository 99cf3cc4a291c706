"""A stand-in for the names of CuPy that the library and its tests use, on the simulated CUDA machine.

It keeps what CuPy documents and what programs come to depend on: `Device` as a context manager sets the previous
device at its end, `Event.done` is True only for a query that returns 0, memory of the pool is reused on its stream
without waiting, and each call of the runtime creates a context on the current device if there is none.

`install` puts it where `import cupy` finds it. Names that are not here raise AttributeError.
"""

from __future__ import annotations

import ctypes
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from mpi_gpucomp.device import cuda as cuda_device

from .machine import SETTINGS, CudaError, machine

__all__ = ["install", "installed"]

"""The version of the stand-in for NVRTC, which compiles nothing."""
RUNTIME_NAMES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "cudaErrorMemoryAllocation",
    "CUDA_ERROR_NOT_INITIALIZED": "cudaErrorInitializationError",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "cudaErrorDevicesUnavailable",
    "CUDA_ERROR_INVALID_CONTEXT": "cudaErrorDeviceUninitialized",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "cudaErrorECCUncorrectable",
    "CUDA_ERROR_INVALID_HANDLE": "cudaErrorInvalidResourceHandle",
    "CUDA_ERROR_LAUNCH_FAILED": "cudaErrorLaunchFailure",
    "CUDA_ERROR_NOT_FOUND": "cudaErrorSymbolNotFound",
}
"""Errors that the runtime calls otherwise than the driver does."""

ATTRIBUTES = {"MaxThreadsPerBlock": 1, "WarpSize": 10, "MultiProcessorCount": 16, "AsyncEngineCount": 40}
DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class CUDARuntimeError(RuntimeError):
    """A failed call of the runtime."""

    def __init__(self, error: CudaError) -> None:
        name = RUNTIME_NAMES.get(error.name)
        if name is None:
            name = "cudaError" + "".join(
                word.capitalize() for word in error.name.removeprefix("CUDA_ERROR_").split("_")
            )
        super().__init__(f"{name}: {error.text}")
        self.status = error.code


class CUDADriverError(RuntimeError):
    """A failed call of the driver."""

    def __init__(self, error: CudaError) -> None:
        super().__init__(f"{error.name}: {error.text}")
        self.status = error.code


class OutOfMemoryError(MemoryError):
    """The pool has no memory left."""


class _Thread(threading.local):
    """What the runtime and CuPy keep for each thread."""

    def __init__(self) -> None:
        self.generation = -1
        self.devices: list[int] = []
        self.streams: dict[int, list[BaseStream]] = {}


_thread = _Thread()
_retained: dict[tuple[int, int], int] = {}
_lock = threading.RLock()


def _driver(name: str, *args: Any) -> None:
    machine().call(name, *args)


def _select(ordinal: int) -> None:
    """Make the primary context of a device current in this thread; creates it."""
    key = (machine().generation, ordinal)
    with _lock:
        if key not in _retained:
            context = ctypes.c_void_p()
            _driver("cuInit", 0)
            _driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            _retained[key] = context.value or 0
    _driver("cuCtxSetCurrent", ctypes.c_void_p(_retained[key]))
    _thread.generation = machine().generation


def _call(name: str, *args: Any) -> None:
    """Call the driver as the runtime does: with a context, created if there is none."""
    try:
        if _thread.generation != machine().generation:
            context = ctypes.c_void_p()
            _driver("cuInit", 0)
            _driver("cuCtxGetCurrent", ctypes.byref(context))
            if not context.value:
                _select(0)
            _thread.generation = machine().generation
        _driver(name, *args)
    except CudaError as error:
        raise CUDARuntimeError(error) from None


def _handle(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def _new(name: str, *args: Any) -> int:
    made = ctypes.c_void_p()
    _call(name, ctypes.byref(made), *args)
    return made.value or 0


# cupy.cuda.runtime


def get_device_count() -> int:
    number = ctypes.c_int()
    try:
        _driver("cuInit", 0)
        _driver("cuDeviceGetCount", ctypes.byref(number))
    except CudaError as error:
        raise CUDARuntimeError(error) from None
    return number.value


def get_device() -> int:
    context, ordinal = ctypes.c_void_p(), ctypes.c_int()
    try:
        _driver("cuInit", 0)
        _driver("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            return 0
        _driver("cuCtxGetDevice", ctypes.byref(ordinal))
    except CudaError as error:
        raise CUDARuntimeError(error) from None
    return ordinal.value


def set_device(ordinal: int) -> None:
    try:
        _select(ordinal)
    except CudaError as error:
        raise CUDARuntimeError(error) from None


def _attribute(number: int, ordinal: int) -> int:
    value = ctypes.c_int()
    try:
        _driver("cuInit", 0)
        _driver("cuDeviceGetAttribute", ctypes.byref(value), number, ordinal)
    except CudaError as error:
        raise CUDARuntimeError(error) from None
    return value.value


def get_device_properties(ordinal: int) -> dict[str, Any]:
    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    _attribute(1, ordinal)
    _driver("cuDeviceGetName", name, 256, ordinal)
    _driver("cuDeviceTotalMem_v2", ctypes.byref(total), ordinal)
    return {
        "name": name.value,
        "totalGlobalMem": total.value,
        "multiProcessorCount": _attribute(16, ordinal),
        "major": _attribute(75, ordinal),
        "minor": _attribute(76, ordinal),
    }


def memcpy_async(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    _call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), _size(nbytes), _handle(stream))


def memcpy(to: int, source: int, nbytes: int, kind: int) -> None:
    _call("cuMemcpy", ctypes.c_uint64(to), ctypes.c_uint64(source), _size(nbytes))


def memset_async(to: int, byte: int, nbytes: int, stream: int) -> None:
    _call("cuMemsetD8Async", ctypes.c_uint64(to), ctypes.c_ubyte(byte), _size(nbytes), _handle(stream))


def memset(to: int, byte: int, nbytes: int) -> None:
    memset_async(to, byte, nbytes, 0)


def malloc(nbytes: int) -> int:
    return _new("cuMemAlloc_v2", _size(nbytes))


def free(address: int) -> None:
    _call("cuMemFree_v2", ctypes.c_uint64(address))


def malloc_async(nbytes: int, stream: int) -> int:
    return _new("cuMemAllocAsync", _size(nbytes), _handle(stream))


def free_async(address: int, stream: int) -> None:
    _call("cuMemFreeAsync", ctypes.c_uint64(address), _handle(stream))


def malloc_managed(nbytes: int, flags: int = 1) -> int:
    return _new("cuMemAllocManaged", _size(nbytes), flags)


def host_alloc(nbytes: int, flags: int = 0) -> int:
    return _new("cuMemHostAlloc", _size(nbytes), flags)


def free_host(address: int) -> None:
    _call("cuMemFreeHost", _handle(address))


def host_register(address: int, nbytes: int, flags: int) -> None:
    _call("cuMemHostRegister_v2", _handle(address), _size(nbytes), flags)


def host_unregister(address: int) -> None:
    _call("cuMemHostUnregister", _handle(address))


def event_create_with_flags(flags: int) -> int:
    return _new("cuEventCreate", flags)


def event_destroy(event: int) -> None:
    _call("cuEventDestroy_v2", _handle(event))


def event_record(event: int, stream: int) -> None:
    _call("cuEventRecord", _handle(event), _handle(stream))


def event_query(event: int) -> int:
    """Return the status as it is: CuPy does not check it."""
    return int(machine().driver.cuEventQuery(_handle(event)))


def event_synchronize(event: int) -> None:
    _call("cuEventSynchronize", _handle(event))


def stream_create_with_flags(flags: int) -> int:
    return _new("cuStreamCreate", flags)


def stream_destroy(stream: int) -> None:
    _call("cuStreamDestroy_v2", _handle(stream))


def stream_query(stream: int) -> int:
    with suppress(CUDARuntimeError):
        _call("cuCtxGetDevice", ctypes.byref(ctypes.c_int()))
    return int(machine().driver.cuStreamQuery(_handle(stream)))


def stream_synchronize(stream: int) -> None:
    _call("cuStreamSynchronize", _handle(stream))


def stream_wait_event(stream: int, event: int, flags: int = 0) -> None:
    _call("cuStreamWaitEvent", _handle(stream), _handle(event), flags)


def stream_begin_capture(stream: int, mode: int = 1) -> None:
    _call("cuStreamBeginCapture_v2", _handle(stream), mode)


def stream_end_capture(stream: int) -> int:
    return _new_last("cuStreamEndCapture", stream)


def stream_is_capturing(stream: int) -> bool:
    status = ctypes.c_int()
    _call("cuStreamIsCapturing", _handle(stream), ctypes.byref(status))
    return status.value == 1


def _new_last(name: str, stream: int) -> int:
    made = ctypes.c_void_p()
    _call(name, _handle(stream), ctypes.byref(made))
    return made.value or 0


def device_synchronize() -> None:
    _call("cuCtxSynchronize")


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_host_calls: dict[int, tuple[Callable[[Any], object], Any]] = {}
_host_numbers = count(1)


def _run_host_call(number: int) -> None:
    function, argument = _host_calls.pop(number)
    function(argument)


_HOST_CALL = _HOST_FUNCTION(_run_host_call)


def launch_host_func(stream: int, function: Callable[[Any], object], argument: Any) -> None:
    number = next(_host_numbers)
    _host_calls[number] = (function, argument)
    _call("cuLaunchHostFunc", _handle(stream), _HOST_CALL, _handle(number))


class PointerAttributes(SimpleNamespace):
    """The fields of cudaPointerAttributes."""


def pointer_get_attributes(address: int) -> PointerAttributes:
    numbers = (2, 9, 3, 4, 8)  # type, ordinal, device pointer, host pointer, managed
    values = [ctypes.c_uint64() for _ in numbers]
    places = (ctypes.c_void_p * len(numbers))(*(ctypes.addressof(value) for value in values))
    _call(
        "cuPointerGetAttributes",
        len(numbers),
        (ctypes.c_int * len(numbers))(*numbers),
        places,
        ctypes.c_uint64(address),
    )
    kind, ordinal, device, host, managed = (value.value for value in values)
    ordinal = ctypes.c_int(ordinal & 0xFFFFFFFF).value
    return PointerAttributes(type=3 if managed else kind, device=ordinal, devicePointer=device, hostPointer=host)


# cupy.cuda


def context_get_current() -> int:
    """Return the handle of this thread's context, 0 if it has none."""
    context = ctypes.c_void_p()
    machine().call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


class Device:
    """A GPU; as a context manager it sets the previous device at its end, as CuPy does."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = get_device() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __enter__(self) -> Device:
        before = get_device()
        _thread.devices.append(before)
        if before != self.id:
            set_device(self.id)
        return self

    def __exit__(self, *error: object) -> None:
        set_device(_thread.devices.pop())

    def use(self) -> Device:
        set_device(self.id)
        return self

    def synchronize(self) -> None:
        with self:
            device_synchronize()

    @property
    def attributes(self) -> dict[str, int]:
        return {name: _attribute(number, self.id) for name, number in ATTRIBUTES.items()}

    @property
    def compute_capability(self) -> str:
        return f"{_attribute(75, self.id)}{_attribute(76, self.id)}"

    @property
    def mem_info(self) -> tuple[int, int]:
        free_bytes, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self:
            _call("cuMemGetInfo_v2", ctypes.byref(free_bytes), ctypes.byref(total))
        return free_bytes.value, total.value


class _Handle:
    """An object of the driver that ends with its Python object."""

    ptr = 0
    _generation = -1

    def _made(self) -> None:
        self._generation = machine().generation

    def _end(self, destroy: Callable[[int], None]) -> None:
        """Destroy the object, unless the process ends or the machine started again."""
        ptr, self.ptr = self.ptr, 0
        if ptr and sys is not None and not sys.is_finalizing() and self._generation == machine().generation:
            with suppress(CUDARuntimeError):
                destroy(ptr)


class Event(_Handle):
    """A CUDA event."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = event_create_with_flags(block | disable_timing << 1 | interprocess << 2)
        self._made()

    def __del__(self) -> None:
        self._end(event_destroy)

    @property
    def done(self) -> bool:
        return event_query(self.ptr) == 0

    def record(self, stream: Stream | None = None) -> None:
        event_record(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        event_synchronize(self.ptr)


class BaseStream(_Handle):
    """What all streams do."""

    device_id = -1

    @property
    def done(self) -> bool:
        return stream_query(self.ptr) == 0

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event_record(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        stream_wait_event(self.ptr, event.ptr)

    def launch_host_func(self, function: Callable[[Any], object], argument: Any) -> None:
        launch_host_func(self.ptr, function, argument)

    def synchronize(self) -> None:
        stream_synchronize(self.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        stream_begin_capture(self.ptr)

    def end_capture(self) -> int:
        return stream_end_capture(self.ptr)

    def is_capturing(self) -> bool:
        return stream_is_capturing(self.ptr)

    def use(self) -> BaseStream:
        stack = _thread.streams.setdefault(get_device(), [])
        stack[:] = [self]
        return self

    def __enter__(self) -> BaseStream:
        _thread.streams.setdefault(get_device(), []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        for stack in _thread.streams.values():
            if stack and stack[-1] is self:
                stack.pop()
                return


class Stream(BaseStream):
    """A CUDA stream."""

    null: Stream
    ptds: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        if null or ptds:
            self.ptr = 0 if null else 2
            return
        self.device_id = get_device()
        self.ptr = stream_create_with_flags(int(non_blocking))
        self._made()

    def __del__(self) -> None:
        if self.ptr > 2:
            self._end(stream_destroy)


class ExternalStream(BaseStream):
    """A stream that another library has made."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr, self.device_id = ptr, device_id


Stream.null, Stream.ptds = Stream(null=True), Stream(ptds=True)


def get_current_stream(device_id: int = -1) -> BaseStream:
    stack = _thread.streams.get(get_device() if device_id < 0 else device_id)
    if stack:
        return stack[-1]
    return Stream.ptds if os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM") == "1" else Stream.null


class Memory(_Handle):
    """Memory of the current device, by cudaMalloc."""

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, get_device()
        if size:
            self.ptr = malloc(size)
        self._made()

    def __del__(self) -> None:
        self._end(self._free)

    def _free(self, ptr: int) -> None:
        free(ptr)


class ManagedMemory(Memory):
    """Memory by cudaMallocManaged."""

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, get_device()
        self.ptr = malloc_managed(size)
        self._made()


class MemoryAsync(Memory):
    """Memory by cudaMallocAsync, freed on the same stream."""

    def __init__(self, size: int, stream: BaseStream) -> None:
        self.size, self.device_id, self._stream = size, get_device(), stream
        self.ptr = malloc_async(size, stream.ptr)
        self._made()

    def _free(self, ptr: int) -> None:
        free_async(ptr, self._stream.ptr)


class UnownedMemory:
    """Memory that another library has allocated."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = ptr, size, owner
        self.device_id = pointer_get_attributes(ptr).device if device_id < 0 else device_id


class _Pooled(Memory):
    """A block of the pool: it returns there, and is used again on the same stream without waiting."""

    blocks: dict[tuple[int, int, int, int], list[int]] = {}  # noqa: RUF012 - one pool for all

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, get_device()
        stream = get_current_stream(self.device_id).ptr
        self._key = (machine().generation, self.device_id, stream, -(-max(size, 1) // 512) * 512)
        blocks = self.blocks.get(self._key)
        try:
            self.ptr = blocks.pop() if blocks else malloc(self._key[3])
        except CUDARuntimeError as error:
            if error.status == 2:
                raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes.") from error
            raise
        self._made()

    def _free(self, ptr: int) -> None:
        self.blocks.setdefault(self._key, []).append(ptr)


class MemoryPointer:
    """An address in memory that it keeps alive."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def __int__(self) -> int:
        return int(self.ptr)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(_Pooled(size), 0)


class PinnedMemory(_Handle):
    """Page-locked host memory."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self.size = size
        if size:
            self.ptr = host_alloc(size, flags)
        self._made()

    def __del__(self) -> None:
        self._end(free_host)


def alloc_pinned_memory(size: int) -> Any:
    """Return page-locked memory with the buffer protocol."""
    memory = PinnedMemory(size)
    kind = type("PinnedMemoryPointer", (ctypes.c_ubyte * size,), {"__module__": "cupy.cuda.pinned_memory"})
    pointer = kind.from_address(memory.ptr)  # type: ignore[attr-defined]
    pointer.mem, pointer.ptr = memory, memory.ptr
    return pointer


class Function:
    """A kernel of a module on one device."""

    def __init__(self, handle: int, module: RawModule) -> None:
        self.ptr, self._module = handle, module

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        values = [self._convert(arg) for arg in args]
        places = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        sizes = [*grid, 1, 1][:3] + [*block, 1, 1][:3]
        handle = get_current_stream().ptr if stream is None else stream.ptr
        try:
            _driver("cuLaunchKernel", _handle(self.ptr), *sizes, shared_mem, _handle(handle), places, None)
        except CudaError as error:
            raise CUDADriverError(error) from None

    @staticmethod
    def _convert(arg: Any) -> Any:
        if isinstance(arg, (bool, np.bool_)):
            raise TypeError("the kernels take no bool: CuPy would pass one byte")
        if isinstance(arg, (float, np.float64)):
            return ctypes.c_double(float(arg))
        return ctypes.c_int64(arg.data.ptr if isinstance(arg, ndarray) else int(arg))


class RawKernel:
    """A kernel by name; loaded for each device on first use."""

    def __init__(self, name: str, module: RawModule) -> None:
        self.name, self._module = name, module

    @property
    def kernel(self) -> Function:
        return self._module.function(self.name)

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
        self.kernel(grid, block, args, **options)


class RawModule:
    """A module of a file, loaded for each device on first use."""

    def __init__(self, *, path: str | None = None, code: str | None = None, **options: Any) -> None:
        self._path, self._code = path, code
        self._modules: dict[tuple[int, int], int] = {}

    def get_function(self, name: str) -> RawKernel:
        kernel = RawKernel(name, self)
        _ = kernel.kernel  # a name that is not there is an error here
        return kernel

    def function(self, name: str) -> Function:
        key, made = (machine().generation, get_device()), ctypes.c_void_p()
        try:
            if key not in self._modules:
                _call("cuCtxGetDevice", ctypes.byref(ctypes.c_int()))
                if self._path is None:
                    _driver("cuModuleLoadData", ctypes.byref(made), (self._code or "").encode())
                else:
                    _driver("cuModuleLoad", ctypes.byref(made), self._path.encode())
                self._modules[key] = made.value or 0
            _driver("cuModuleGetFunction", ctypes.byref(made), _handle(self._modules[key]), name.encode())
        except CudaError as error:
            raise CUDADriverError(error) from None
        return Function(made.value or 0, self)


# cupy.ndarray


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DlManaged(ctypes.Structure):
    _fields_ = (("tensor", _DlTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _DlVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DlTensor),
    )


_exported: dict[int, tuple[Any, ...]] = {}
_new_capsule = ctypes.pythonapi["PyCapsule_New"]
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = ctypes.pythonapi["PyCapsule_IsValid"]
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer_of = ctypes.pythonapi["PyCapsule_GetPointer"]
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
_DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


def _delete(address: int) -> None:
    _exported.pop(address, None)


def _end_capsule(capsule: int) -> None:
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            _exported.pop(_pointer_of(capsule, name), None)


_DELETE, _END_CAPSULE = _DELETER(_delete), _DELETER(_end_capsule)


class ndarray:
    """An array in GPU memory; its arithmetic is done on the host, behind the current stream."""

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        lengths = (shape,) if isinstance(shape, (int, np.integer)) else shape
        self.shape: tuple[int, ...] = tuple(int(x) for x in lengths)
        self.dtype = np.dtype(dtype)
        if strides is None:
            steps, step = [], self.dtype.itemsize
            for length in reversed(self.shape):
                steps.append(step)
                step *= length
            strides = tuple(reversed(steps))
        self.strides: tuple[int, ...] = strides
        self.size = int(np.prod(self.shape))
        self.nbytes, self.ndim, self.itemsize = self.size * self.dtype.itemsize, len(self.shape), self.dtype.itemsize
        self.data = alloc(self.nbytes) if memptr is None else memptr

    @property
    def device(self) -> Device:
        return Device(self.data.device_id)

    @property
    def flags(self) -> Any:
        return self._model().flags

    @property
    def T(self) -> ndarray:
        return self._view(self._model().T)

    def _model(self) -> np.ndarray[Any, Any]:
        """Return a numpy array of the same layout at the same address, which the host cannot read."""
        interface = {"shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "version": 3}
        holder = SimpleNamespace(__array_interface__={**interface, "strides": self.strides})
        return np.asarray(holder)

    def _view(self, model: np.ndarray[Any, Any]) -> ndarray:
        offset = model.__array_interface__["data"][0] - self.data.mem.ptr
        return ndarray(model.shape, model.dtype, MemoryPointer(self.data.mem, offset), model.strides)

    def _span(self) -> tuple[int, int]:
        """Return the lowest offset from the address, and the number of bytes to the highest."""
        if not self.size:
            return 0, 0
        reach = [(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(x for x in reach if x < 0)
        return low, sum(x for x in reach if x > 0) - low + self.itemsize

    def _read(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the bytes of the whole span, and the elements in them."""
        low, length = self._span()
        raw = np.empty(length, np.uint8)
        if length:
            stream = get_current_stream(self.data.device_id).ptr
            memcpy_async(raw.ctypes.data, self.data.ptr + low, length, 4, stream)
            stream_synchronize(stream)
        return raw, np.ndarray(self.shape, self.dtype, raw, -low, self.strides) if length else np.empty(
            self.shape, self.dtype
        )

    def get(self) -> np.ndarray[Any, Any]:
        with _on(self.data.device_id):
            return self._read()[1].copy()

    def set(self, values: Any) -> None:
        self[...] = values

    def fill(self, value: Any) -> None:
        self[...] = value

    def copy(self) -> ndarray:
        return asarray(self.get())

    def astype(self, dtype: Any) -> ndarray:
        return asarray(self.get().astype(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return self._view(self._model().reshape(wanted))

    def view(self, dtype: Any) -> ndarray:
        return self._view(self._model().view(dtype))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> ndarray:
        model = self._model()[key if isinstance(key, tuple) else (key,)]
        if isinstance(model, np.ndarray) and model.base is not None:
            return self._view(model)
        return asarray(self.get()[key])

    def __setitem__(self, key: Any, values: Any) -> None:
        part = self._view(
            self._model()[(*key, ...) if isinstance(key, tuple) else (key,) if key is ... else (key, ...)]
        )
        if not part.size:
            return
        values = values.get() if isinstance(values, ndarray) else values
        with _on(self.data.device_id):
            stream = get_current_stream(self.data.device_id).ptr
            low, length = part._span()
            if length == part.nbytes and part.flags.c_contiguous:
                raw = np.ascontiguousarray(np.broadcast_to(np.asarray(values).astype(part.dtype), part.shape))
            else:
                raw, elements = part._read()
                elements[...] = values
            memcpy_async(part.data.ptr + low, raw.ctypes.data, length, 4, stream)

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def _with(self, function: Callable[..., Any], *others: Any) -> Any:
        with _on(self.data.device_id):
            return asarray(function(self.get(), *(x.get() if isinstance(x, ndarray) else x for x in others)))

    def sum(self) -> Any:
        return self._with(np.sum)

    def all(self) -> Any:
        return self._with(np.all)

    def any(self) -> Any:
        return self._with(np.any)

    def max(self) -> Any:
        return self._with(np.max)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self._model().flags.c_contiguous else self.strides
        stream = get_current_stream(self.data.device_id).ptr or 1
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": stream,
            "version": 3,
            "strides": strides,
            "data": (self.data.ptr, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 13 if isinstance(self.data.mem, ManagedMemory) else 2, self.data.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: Any = None,
        copy: bool | None = None,
    ) -> object:
        if stream == 0:
            raise ValueError("0 is not allowed as a stream: it is ambiguous")
        if stream != -1:
            with Device(self.data.device_id):
                event = get_current_stream(self.data.device_id).record(Event(disable_timing=True))
                stream_wait_event(1 if stream is None else stream, event.ptr)
        versioned = max_version is not None and max_version[0] >= 1
        managed = _DlVersioned() if versioned else _DlManaged()
        shape = (ctypes.c_int64 * max(self.ndim, 1))(*self.shape)
        strides = (ctypes.c_int64 * max(self.ndim, 1))(*(x // self.itemsize for x in self.strides))
        kind, ordinal = self.__dlpack_device__()
        code, bits = DLPACK_CODES[self.dtype.kind], 8 * self.itemsize
        managed.tensor = _DlTensor(self.data.ptr, kind, ordinal, self.ndim, code, bits, 1, shape, strides, 0)
        managed.deleter = ctypes.cast(_DELETE, ctypes.c_void_p).value
        if versioned:
            managed.major, managed.minor = 1, 0
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, strides, self)
        return _new_capsule(
            address, b"dltensor_versioned" if versioned else b"dltensor", ctypes.cast(_END_CAPSULE, ctypes.c_void_p)
        )


def _add_operators() -> None:
    binary = "add sub mul truediv floordiv mod pow and or xor lshift rshift lt le eq ne gt ge matmul"
    for name in binary.split():
        function = getattr(operator, f"__{name}__")
        setattr(ndarray, f"__{name}__", lambda self, other, function=function: self._with(function, other))
        if name not in ("lt", "le", "eq", "ne", "gt", "ge"):

            def swapped(self: ndarray, other: Any, function: Any = function) -> Any:
                return self._with(lambda a, b: function(b, a), other)

            setattr(ndarray, f"__r{name}__", swapped)

            def in_place(self: ndarray, other: Any, function: Any = function) -> ndarray:
                self[...] = self._with(function, other)
                return self

            setattr(ndarray, f"__i{name}__", in_place)
    for name in ("neg", "invert", "abs"):
        function = getattr(operator, f"__{name}__")
        setattr(ndarray, f"__{name}__", lambda self, function=function: self._with(function))
    ndarray.__hash__ = None  # type: ignore[assignment]


_add_operators()


@contextmanager
def _on(ordinal: int) -> Iterator[None]:
    """Select a device, if another one is current; sets it back."""
    if get_device() == ordinal:
        yield
        return
    with Device(ordinal):
        yield


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    array = ndarray(shape, np.asarray(value).dtype if dtype is None else dtype)
    array.fill(value)
    return array


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    array = ndarray(shape, dtype)
    if array.nbytes:
        memset_async(array.data.ptr, 0, array.nbytes, get_current_stream(array.data.device_id).ptr)
    return array


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def arange(*args: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*args, dtype=dtype))


def asarray(values: Any, dtype: Any = None) -> ndarray:
    if isinstance(values, ndarray) and dtype in (None, values.dtype):
        return values
    host = np.asarray(values.get() if isinstance(values, ndarray) else values, dtype)
    array = ndarray(host.shape, host.dtype)
    array[...] = host
    return array


def asnumpy(values: Any) -> np.ndarray[Any, Any]:
    return values.get() if isinstance(values, ndarray) else np.asarray(values)


def array_equal(a: Any, b: Any) -> bool:
    return bool(np.array_equal(asnumpy(a), asnumpy(b)))


# cupy_backends.cuda.libs.nvrtc


class NVRTCError(RuntimeError):
    """A failed compilation: there is none here."""


def _binary(program: SimpleNamespace) -> bytes:
    """Return the module that `cuModuleLoad` of the machine takes: the family's name."""
    return f"simulated module of family {program.family}\n".encode()


def _interpreted() -> bool:
    """Return True if kernels are interpreted from the PTX that NVRTC makes of them."""
    settings = dict(part.partition("=")[::2] for part in os.environ.get(SETTINGS, "").split(",") if part)
    return int(settings.get("ptx", 0)) > 0


def _real_nvrtc() -> ModuleType:
    """Return NVRTC, which needs no GPU, with one change: what it compiles for an architecture is PTX for it."""
    real: Any = import_module("cupy_backends.cuda.libs.nvrtc")
    real.getVersion()  # loads NVRTC, for which it imports CuPy
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupyx")]:
        del sys.modules[name]
    module = ModuleType(real.__name__)
    module.__dict__.update({name: value for name, value in vars(real).items() if not name.startswith("__")})

    def compile_program(program: Any, options: tuple[str, ...]) -> None:
        real.compileProgram(program, tuple(option.replace("=sm_", "=compute_") for option in options))

    module.__dict__.update(
        simulated=True,
        compileProgram=compile_program,
        getCUBIN=real.getPTX,
        getVersion=lambda: (*real.getVersion(), "PTX"),
    )
    return module


def _nvrtc() -> ModuleType:
    if _interpreted():
        return _real_nvrtc()
    module = ModuleType("cupy_backends.cuda.libs.nvrtc")
    module.__dict__.update(
        NVRTCError=NVRTCError,
        simulated=True,
        getVersion=lambda: (0, 0),
        getSupportedArchs=lambda: [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121],
        createProgram=lambda source, name, headers, includes: SimpleNamespace(family=Path(name).stem),
        compileProgram=lambda program, options: None,
        getCUBIN=_binary,
        getPTX=_binary,
        getProgramLog=lambda program: "",
        destroyProgram=lambda program: None,
    )
    return module


RUNTIME = {
    "getDeviceCount": get_device_count,
    "getDevice": get_device,
    "setDevice": set_device,
    "getDeviceProperties": get_device_properties,
    "memcpyAsync": memcpy_async,
    "memcpy": memcpy,
    "memsetAsync": memset_async,
    "memset": memset,
    "malloc": malloc,
    "free": free,
    "mallocAsync": malloc_async,
    "freeAsync": free_async,
    "mallocManaged": malloc_managed,
    "hostAlloc": host_alloc,
    "freeHost": free_host,
    "hostRegister": host_register,
    "hostUnregister": host_unregister,
    "eventCreateWithFlags": event_create_with_flags,
    "eventDestroy": event_destroy,
    "eventRecord": event_record,
    "eventQuery": event_query,
    "eventSynchronize": event_synchronize,
    "streamCreateWithFlags": stream_create_with_flags,
    "streamDestroy": stream_destroy,
    "streamQuery": stream_query,
    "streamSynchronize": stream_synchronize,
    "streamWaitEvent": stream_wait_event,
    "streamBeginCapture": stream_begin_capture,
    "streamEndCapture": stream_end_capture,
    "streamIsCapturing": stream_is_capturing,
    "deviceSynchronize": device_synchronize,
    "launchHostFunc": launch_host_func,
    "pointerGetAttributes": pointer_get_attributes,
    "driverGetVersion": lambda: 13000,
    "runtimeGetVersion": lambda: 13000,
    "CUDARuntimeError": CUDARuntimeError,
    "memcpyHostToHost": 0,
    "memcpyHostToDevice": 1,
    "memcpyDeviceToHost": 2,
    "memcpyDeviceToDevice": 3,
    "memcpyDefault": 4,
    "memoryTypeUnregistered": 0,
    "memoryTypeHost": 1,
    "memoryTypeDevice": 2,
    "memoryTypeManaged": 3,
    "eventDefault": 0,
    "eventBlockingSync": 1,
    "eventDisableTiming": 2,
    "streamNonBlocking": 1,
}
CUDA: list[Any] = [
    Device,
    Event,
    Stream,
    ExternalStream,
    Memory,
    ManagedMemory,
    MemoryAsync,
    UnownedMemory,
    MemoryPointer,
]
CUDA += [PinnedMemory, alloc, alloc_pinned_memory, get_current_stream, Function]
CUPY: list[Any] = [ndarray, empty, full, zeros, ones, arange, asarray, asnumpy, array_equal, RawModule, RawKernel]
TYPES = "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"


def _modules() -> dict[str, ModuleType]:
    names = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "cupy.cuda.nvtx", "cupy.cuda.driver")
    cupy, cuda, runtime, nvtx, driver = (ModuleType(name) for name in names)
    runtime.__dict__.update(RUNTIME)
    nvtx.__dict__.update(RangePush=lambda message, id_color=-1: None, RangePop=lambda: None, Mark=lambda message: None)
    driver.__dict__.update(CUDADriverError=CUDADriverError, ctxGetCurrent=context_get_current)
    for kind in CUDA:
        cuda.__dict__[kind.__name__] = kind
    cuda.__dict__.update(runtime=runtime, nvtx=nvtx, driver=driver)
    cuda.__dict__["memory"] = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    for kind in CUPY:
        cupy.__dict__[kind.__name__] = kind
    cupy.__dict__.update({name: getattr(np, name) for name in TYPES.split()}, array=asarray, cuda=cuda)
    cupy.__dict__["__version__"], cupy.__dict__["__path__"], cuda.__dict__["__path__"] = "0 (simulated)", [], []
    made = {module.__name__: module for module in (cupy, cuda, runtime, nvtx, driver)}
    made["cupy_backends.cuda.libs.nvrtc"] = _nvrtc()
    return made


def installed() -> bool:
    """Return True if `import cupy` finds the stand-in."""
    return getattr(sys.modules.get("cupy"), "RawModule", None) is RawModule


def install() -> None:
    """Make the stand-in what `import cupy` finds; before anything has imported CuPy."""
    if installed():
        return
    assert "cupy" not in sys.modules, "CuPy has been imported"
    cuda_device.DRIVER = str(machine().path)
    sys.modules.update(_modules())
