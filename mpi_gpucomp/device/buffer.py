"""Describes the arrays of any library (numpy, CuPy, torch, DLPack, CUDA array interface) without copying them.

A `Buffer` holds address, type, shape and strides. Elements that are contiguous in C or in Fortran order count as
contiguous: the buffer is then the elements in memory order, as MPI sees them, and the shape of a Fortran-ordered array
is reversed. Any other layout keeps its shape and strides, and is packed by the kernels of `device.pack`.

Other libraries are looked up in `sys.modules` and never imported: an object of a library that was not imported cannot
have been passed.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_void_p
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.device.base import DTYPES, DType, dtype_of_name
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp.device.base import Event, Stream

__all__ = [
    "Buffer",
    "DlpackTensor",
    "ExportedArray",
    "as_buffer",
    "capsule_pointer",
    "coalesce_dimensions",
    "contiguous_layout",
    "may_overlap",
    "numpy_dtype",
    "order_after",
    "read_dlpack",
    "read_exported",
    "type_name",
]


class Buffer:
    """An immutable description of elements of one type on one device."""

    __slots__ = (
        "address",
        "count",
        "device",
        "dtype",
        "owner",
        "produced",
        "producer_stream",
        "readonly",
        "shape",
        "strides",
    )

    def __init__(
        self,
        address: int,
        dtype: DType,
        shape: tuple[int, ...],
        *,
        device: str = "host",
        strides: tuple[int, ...] | None = None,
        readonly: bool = False,
        owner: object = None,
        producer_stream: int | Callable[[int], object] | None = None,
        produced: Event | None = None,
    ) -> None:
        """Describe the elements at `address` (strides in bytes, None: contiguous), kept alive by `owner`.

        `producer_stream` is the handle of the CUDA stream that fills the buffer, or a function that takes the handle of
        our stream and orders it after the producer's. `produced` is an event behind which the elements may be accessed.
        """
        self.address, self.dtype, self.shape, self.strides = address, dtype, shape, strides
        self.device, self.readonly, self.owner = device, readonly, owner
        self.producer_stream, self.produced = producer_stream, produced
        self.count = shape[0] if len(shape) == 1 else prod(shape)

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if there are no gaps between the elements."""
        return self.strides is None

    def slice(self, start: int, count: int) -> Buffer:
        """Return `count` elements from `start` on as a one-dimensional buffer; contiguous buffers only."""
        if self.strides is not None or not 0 <= start <= start + count <= self.count:
            raise BufferSpecError(
                "slice of a buffer",
                expected=f"a range within the {self.count} elements of a contiguous buffer",
                got=f"elements {start} to {start + count} of a {'contiguous' if self.contiguous else 'strided'} one",
                remedy="Pack a strided buffer first, and stay within its count.",
            )
        return Buffer(
            self.address + start * self.dtype.itemsize,
            self.dtype,
            (count,),
            device=self.device,
            readonly=self.readonly,
            owner=self.owner,
            producer_stream=self.producer_stream,
            produced=self.produced,
        )

    def marked(self, produced: Event) -> Buffer:
        """Return the same elements, which may be accessed behind an event."""
        return Buffer(
            self.address,
            self.dtype,
            self.shape,
            device=self.device,
            strides=self.strides,
            readonly=self.readonly,
            owner=self.owner,
            producer_stream=self.producer_stream,
            produced=produced,
        )

    def __repr__(self) -> str:
        """Show shape, type, device and address."""
        form = "x".join(map(str, self.shape)) or "scalar"
        return f"<buffer {form} {self.dtype} on {self.device} at {self.address:#x}>"


def as_buffer(obj: object, *, writable: bool = False) -> Buffer:
    """Describe an array of numpy, CuPy or torch, or any object with DLPack, an array interface or a Python buffer."""
    if type(obj) is np.ndarray:
        buffer = _numpy_buffer(obj, obj)
    elif (array := None if isinstance(obj, np.ndarray) else read_exported(obj)) is not None:
        shape, strides = contiguous_layout(array.shape, array.strides, array.dtype.itemsize)
        buffer = Buffer(
            array.address,
            array.dtype,
            shape,
            device=array.device,
            strides=strides,
            readonly=array.readonly,
            owner=array.owner,
            producer_stream=array.producer_stream,
        )
    else:
        view = _numpy_view(obj)
        buffer = _numpy_buffer(view, view)  # the view keeps the memory in place: a bytearray cannot be resized
    if writable:
        _check_writable(buffer, obj)
    return buffer


def order_after(buffer: Buffer, stream: Stream) -> None:
    """Make later work of `stream` wait for the producer of `buffer`; does not block.

    That is the event that the buffer has, in any thread; without one the producer's stream is read now, as its protocol
    prescribes.
    """
    producer = buffer.producer_stream
    if producer is None and buffer.produced is None:
        return
    from mpi_gpucomp.device import cuda

    if not isinstance(stream, cuda.CudaStream):
        raise BufferSpecError(
            "buffer",
            expected=f"a stream of {buffer.device}, the buffer's device",
            got=f"a stream of {stream.device.name}",
            remedy=f"Use a stream of get_device('{buffer.device}').",
        )
    if buffer.produced is not None:
        stream.wait(buffer.produced)
    elif producer is not None:
        cuda.order_after(stream, producer, int(buffer.device.removeprefix("cuda:")))


def type_name(obj: object) -> str:
    """Return the qualified name of an object's type, for error messages."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _check_writable(buffer: Buffer, obj: object) -> None:
    if buffer.readonly:
        raise BufferSpecError(
            "buffer",
            expected="a writable buffer",
            got=f"a read-only {type_name(obj)}",
            remedy="Pass a writable copy.",
        )
    strides = buffer.strides
    if strides is None:
        return
    if may_overlap(buffer.shape, strides, buffer.dtype.itemsize) or min(strides) < 0:
        raise BufferSpecError(
            "buffer",
            expected="a writable buffer with non-negative strides and no overlapping elements",
            got=f"strides {strides} for shape {buffer.shape}",
            remedy="Pass a contiguous array, and copy the result from there.",
        )


_NUMPY_DTYPES = {np.dtype(known.name): known for known in DTYPES if known.name != "bfloat16"}


def numpy_dtype(dtype: np.dtype[Any]) -> DType:
    """Return the DType of a numpy type; ml_dtypes adds bfloat16 to numpy's own."""
    known = _NUMPY_DTYPES.get(dtype)
    if known is None:
        if not dtype.isnative:
            raise BufferSpecError(
                "buffer",
                expected="elements in native byte order",
                got=f"{dtype.name} in the opposite order ({dtype.str})",
                remedy="Convert it: array.astype(array.dtype.newbyteorder('=')).",
            )
        known = _NUMPY_DTYPES[dtype] = _dtype_named(dtype.name)
    return known


def _dtype_named(name: str) -> DType:
    dtype = dtype_of_name(name)
    if dtype is None:
        raise BufferSpecError(
            "buffer",
            expected=f"elements of type {', '.join(known.name for known in DTYPES)}",
            got=name,
            remedy="Convert the array, or pass a view of it as uint8.",
        )
    return dtype


# Taken by index, not by attribute: an attribute would be the same object for every library in the process.
capsule_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule_is_valid = ctypes.pythonapi["PyCapsule_IsValid"]
_capsule_is_valid.restype, _capsule_is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)

_DATA_OFFSET = 40  # of `data` in the C struct behind __array_struct__, on every 64-bit platform


def _numpy_buffer(array: np.ndarray[Any, Any], owner: object) -> Buffer:
    dtype, flags = numpy_dtype(array.dtype), array.flags
    # The fastest access to the address: `array.ctypes` and `__array_interface__` build whole objects for it.
    address = c_void_p.from_address(capsule_pointer(array.__array_struct__, None) + _DATA_OFFSET).value or 0
    shape: tuple[int, ...] = array.shape
    strides = None
    if not flags.c_contiguous:
        shape, strides = contiguous_layout(shape, array.strides, dtype.itemsize)
    return Buffer(address, dtype, shape, strides=strides, readonly=not flags.writeable, owner=owner)


def _numpy_view(obj: Any) -> np.ndarray[Any, Any]:
    """Return a numpy view of an object with an array interface or the buffer protocol."""
    try:
        if not isinstance(obj, np.ma.MaskedArray):  # its mask would be lost
            return np.asarray(obj if hasattr(obj, "__array_interface__") else memoryview(obj))
    except (TypeError, ValueError):
        pass
    raise BufferSpecError(
        "buffer",
        expected="an array of numpy, CuPy or torch, or an object with DLPack, an array interface or a buffer",
        got=type_name(obj),
        remedy="Convert it to an array first, for example with numpy.asarray.",
    )


class ExportedArray(NamedTuple):
    """An array as another library exports it; strides in bytes, None for C order."""

    address: int
    dtype: DType
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool
    owner: object
    producer_stream: int | Callable[[int], object] | None = None
    """As in `Buffer`."""


def read_exported(obj: Any) -> ExportedArray | None:
    """Describe an object of torch or CuPy, or one with DLPack or a CUDA array interface; None for any other."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _read_torch(obj, torch)
    if cupy is not None and isinstance(obj, cupy.ndarray):
        return _read_cupy(obj)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _read_dlpack_object(obj)
    interface = getattr(obj, "__cuda_array_interface__", None)
    return None if interface is None else _read_cuda_interface(obj, interface)


def _read_torch(tensor: Any, torch: Any) -> ExportedArray:
    if tensor.layout is not torch.strided:
        raise _wrong_tensor(f"one with layout {tensor.layout}", "tensor.to_dense()")
    if tensor.is_conj():
        raise _wrong_tensor("one with a pending conjugation", "tensor.resolve_conj()")
    if tensor.is_neg():
        raise _wrong_tensor("one with a pending negation", "tensor.resolve_neg()")
    dtype = _dtype_named(str(tensor.dtype).removeprefix("torch."))
    strides = None if tensor.is_contiguous() else tuple(x * dtype.itemsize for x in tensor.stride())
    array = ExportedArray(tensor.data_ptr(), dtype, "host", tuple(tensor.shape), strides, False, tensor)
    if tensor.device.type == "cpu":
        return array
    if tensor.device.type != "cuda":
        raise _unsupported_device(f"a torch tensor on {tensor.device}")
    ordinal = tensor.device.index
    # torch calls the legacy default stream 0, which the protocols name 1.
    producer = torch.cuda.current_stream(ordinal).cuda_stream or 1
    return array._replace(device=f"cuda:{ordinal}", producer_stream=producer)


def _wrong_tensor(got: str, instead: str) -> BufferSpecError:
    return BufferSpecError(
        "buffer", expected="a strided torch tensor whose memory holds its values", got=got, remedy=f"Pass {instead}."
    )


def _unsupported_device(got: str) -> BufferSpecError:
    return BufferSpecError(
        "buffer",
        expected="memory of the host or of a CUDA GPU",
        got=got,
        remedy="Move the array to a supported device.",
    )


def _read_cupy(array: Any) -> ExportedArray:
    from mpi_gpucomp.device.cuda import current_stream

    ordinal = array.device.id
    dtype = numpy_dtype(array.dtype)
    return ExportedArray(
        array.data.ptr, dtype, f"cuda:{ordinal}", array.shape, array.strides, False, array, current_stream(ordinal)
    )


def _read_cuda_interface(obj: object, interface: dict[str, Any]) -> ExportedArray:
    from mpi_gpucomp.device.cuda import ordinal_of

    version, producer = interface["version"], interface.get("stream")
    if version < 2:
        raise _wrong_interface("version 2 or later", f"version {version}")
    if interface.get("mask") is not None:
        raise _wrong_interface("no mask", "a mask")
    if producer == 0:
        raise _wrong_interface("a stream handle other than 0, which the protocol forbids", "stream 0")
    address, readonly = interface["data"]
    dtype = numpy_dtype(np.dtype(interface["typestr"]))
    ordinal = ordinal_of(address)
    if ordinal < 0:
        raise _wrong_interface("memory that CUDA knows", f"{address:#x}, which is unregistered memory of the host")
    device = f"cuda:{ordinal}"
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    return ExportedArray(address, dtype, device, shape, strides, readonly, obj, producer)


def _wrong_interface(expected: str, got: str) -> BufferSpecError:
    return BufferSpecError(
        "CUDA array interface", expected=expected, got=got, remedy="Update the library that the array comes from."
    )


class DlpackTensor(NamedTuple):
    """The contents of a DLPack capsule: address, (device kind, ordinal), type name, layout (strides in bytes)."""

    address: int
    device: tuple[int, int]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool


DLPACK_VERSION = (1, 0)
DLPACK_READ_ONLY = 1
DLPACK_NO_SYNC = -1
"""DLPack's stream for "do not synchronise": `order_after` does that once our stream is known."""

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_DLPACK_TYPES = {0: "int{}", 1: "uint{}", 2: "float{}", 4: "bfloat{}", 5: "complex{}", 6: "bool{}"}


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def _read_dlpack_object(obj: Any) -> ExportedArray:
    kind, ordinal = obj.__dlpack_device__()
    if kind not in (_CPU, _CUDA_HOST, _CUDA, _CUDA_MANAGED):
        raise _unsupported_device(f"a DLPack device of kind {int(kind)}")
    on_gpu = kind in (_CUDA, _CUDA_MANAGED)
    capsule = _export_dlpack(obj, DLPACK_NO_SYNC if on_gpu else None)
    tensor = read_dlpack(capsule)
    # A capsule that is not consumed calls the producer's deleter when it is destroyed: keeping it keeps the memory.
    owner, dtype = (obj, capsule), _dtype_named(tensor.dtype)
    array = ExportedArray(tensor.address, dtype, "host", tensor.shape, tensor.strides, tensor.readonly, owner)
    if not on_gpu:
        return array
    return array._replace(device=f"cuda:{ordinal}", producer_stream=lambda stream: _export_dlpack(obj, stream))


def _export_dlpack(obj: Any, stream: int | None) -> object:
    """Return the DLPack capsule of an object without copying; `stream` is None for host memory."""
    try:
        return obj.__dlpack__(stream=stream, max_version=DLPACK_VERSION, copy=False)
    except TypeError:  # a producer older than version 1.0
        return obj.__dlpack__() if stream is None else obj.__dlpack__(stream=stream)


def read_dlpack(capsule: object) -> DlpackTensor:
    """Read a DLPack capsule, versioned or not, without consuming it; keep it alive while the memory is in use."""
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != DLPACK_VERSION[0]:
            raise BufferSpecError(
                "buffer",
                expected=f"a DLPack tensor of version {DLPACK_VERSION[0]}",
                got=f"version {managed.major}.{managed.minor}",
                remedy="Pass a numpy, CuPy or torch array.",
            )
        return _describe_dlpack(managed.tensor, bool(managed.flags & DLPACK_READ_ONLY))
    return _describe_dlpack(_DLTensor.from_address(capsule_pointer(capsule, b"dltensor")), False)


def _describe_dlpack(tensor: _DLTensor, readonly: bool) -> DlpackTensor:
    ndim, itemsize = tensor.ndim, tensor.dtype.bits * tensor.dtype.lanes // 8
    return DlpackTensor(
        (tensor.data or 0) + tensor.byte_offset,
        (tensor.device.kind, tensor.device.ordinal),
        _dlpack_dtype_name(tensor.dtype),
        tuple(tensor.shape[:ndim]) if ndim else (),
        tuple(x * itemsize for x in tensor.strides[:ndim]) if tensor.strides else None,
        readonly,
    )


def _dlpack_dtype_name(dtype: _DLDataType) -> str:
    name = _DLPACK_TYPES.get(dtype.code, f"DLPack type {dtype.code} of {{}} bits").format(dtype.bits)
    name = "bool" if name == "bool8" else name
    return name if dtype.lanes == 1 else f"{name} with {dtype.lanes} lanes"


Shape = tuple[int, ...]


def contiguous_layout(shape: Shape, strides: Shape | None, itemsize: int) -> tuple[Shape, Shape | None]:
    """Return shape and byte strides, with None for the strides if the elements are contiguous.

    Fortran order is contiguous, too: its shape is returned reversed, as the memory has it.
    """
    if strides is None or 0 in shape or _is_c_contiguous(shape, strides, itemsize):
        return shape, None
    if _is_c_contiguous(shape[::-1], strides[::-1], itemsize):
        return shape[::-1], None
    return shape, strides


def _is_c_contiguous(shape: Shape, strides: Shape, itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def may_overlap(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Return True if two elements share a byte; conservative, so True also for interleaved layouts that share none."""
    if prod(shape) < 2:
        return False
    reach = itemsize
    steps = [(abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1]
    for stride, length in sorted(steps):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def coalesce_dimensions(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[Shape, Shape]:
    """Return the shape and byte strides of the same elements in the same (C) order with the fewest dimensions.

    There is always at least one: a scalar becomes one element, an empty array becomes a row of none.
    """
    if 0 in shape:
        return (0,), (itemsize,)
    merged: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if merged and merged[-1][1] == length * stride:
            length *= merged.pop()[0]
        merged.append((length, stride))
    lengths, steps = zip(*merged or [(1, itemsize)], strict=True)
    return lengths, steps
