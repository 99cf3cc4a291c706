"""Takes the arrays of any library as they are, and never copies.

A `Buffer` says where elements lie. Elements without gaps in C or in Fortran order count as contiguous: the buffer is
then the elements in the order of memory, as MPI sees them, and a Fortran-ordered array's shape is reversed. Anything
else keeps its shape and strides, for the pack kernels to gather.
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

    from mpi_gpucomp.device.base import Stream

__all__ = [
    "CPU",
    "CUDA",
    "CUDA_HOST",
    "CUDA_MANAGED",
    "Buffer",
    "Facts",
    "Tensor",
    "as_buffer",
    "capsule_pointer",
    "coalesce",
    "dense",
    "dlpack_export",
    "dlpack_read",
    "find",
    "kind_of",
    "numpy_dtype",
    "order_after",
    "overlaps",
    "simplify",
    "unsupported",
]


# Shapes and strides: which are contiguous, and which let every element be written on its own.

Shape = tuple[int, ...]


def dense(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Say whether the elements lie one behind the other, the last dimension fastest."""
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def simplify(shape: Shape, strides: Shape | None, itemsize: int) -> tuple[Shape, Shape | None]:
    """Return the shape, and strides in bytes or None where the elements are contiguous in memory.

    Elements in Fortran's order are contiguous too: their shape is returned reversed, as the memory has it.
    """
    if strides is None or 0 in shape or dense(shape, strides, itemsize):
        return shape, None
    if dense(shape[::-1], strides[::-1], itemsize):
        return shape[::-1], None
    return shape, strides


def overlaps(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Say whether two elements may share a byte; layouts that interleave without sharing count as if they did."""
    if prod(shape) < 2:
        return False
    reach = itemsize
    steps = [(abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1]
    for stride, length in sorted(steps):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


# Strided arrays as the pack kernels want them: few dimensions, each as long as possible.


def coalesce(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and byte strides of the same elements in the same (C) order with as few dimensions as will do.

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


# Reads DLPack capsules, old (`dltensor`) and versioned (`dltensor_versioned`), without taking them over.
#
# A capsule that nobody takes over calls the producer's deleter when it goes: keeping the capsule keeps the memory.

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
VERSION = (1, 0)
READ_ONLY = 1

_NAMES = {0: "int{}", 1: "uint{}", 2: "float{}", 4: "bfloat{}", 5: "complex{}", 6: "bool{}"}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class Tensor(NamedTuple):
    """What a capsule says: where, on which device, the name of its type, its layout (strides in bytes)."""

    address: int
    device: tuple[int, int]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool


# Taken by index, not by attribute: an attribute would be the same object for every library in the process.
capsule_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi["PyCapsule_IsValid"]
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def dlpack_export(obj: Any, stream: int | None) -> object:
    """Ask an object for its capsule, never for a copy; `stream` is for GPUs: -1 orders nothing."""
    try:
        return obj.__dlpack__(stream=stream, max_version=VERSION, copy=False)
    except TypeError:  # a producer from before version 1.0
        return obj.__dlpack__() if stream is None else obj.__dlpack__(stream=stream)


def dlpack_read(capsule: object) -> Tensor:
    """Read a capsule that stays alive for as long as the memory is used."""
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != VERSION[0]:
            raise BufferSpecError(
                "buffer",
                expected=f"a DLPack tensor of version {VERSION[0]}",
                got=f"version {managed.major}.{managed.minor}",
                remedy="Pass a numpy, CuPy or torch array.",
            )
        return _described(managed.tensor, bool(managed.flags & READ_ONLY))
    return _described(_Tensor.from_address(capsule_pointer(capsule, b"dltensor")), False)


def _described(tensor: _Tensor, readonly: bool) -> Tensor:
    ndim, itemsize = tensor.ndim, tensor.dtype.bits * tensor.dtype.lanes // 8
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        (tensor.device.kind, tensor.device.ordinal),
        _name(tensor.dtype),
        tuple(tensor.shape[:ndim]) if ndim else (),
        tuple(x * itemsize for x in tensor.strides[:ndim]) if tensor.strides else None,
        readonly,
    )


def _name(dtype: _Type) -> str:
    name = _NAMES.get(dtype.code, f"DLPack type {dtype.code} of {{}} bits").format(dtype.bits)
    name = "bool" if name == "bool8" else name
    return name if dtype.lanes == 1 else f"{name} in groups of {dtype.lanes}"


# How the objects of other libraries say where their elements lie: torch, CuPy, DLPack, CUDA's array interface.
#
# Each reader returns `Facts` and copies nothing. No library is imported for this: an object of a library that was never
# imported cannot be there.

NO_ORDER = -1  # DLPack's word for "do not synchronise": it is done later, when our stream is known


class Facts(NamedTuple):
    """Where the elements of an object are; strides in bytes, None for C order."""

    address: int
    dtype: DType
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool
    owner: object
    producer: int | Callable[[int], object] | None = None
    """The CUDA stream of whoever fills it, or what tells them to order our stream (its handle) after theirs."""


def kind_of(obj: object) -> str:
    """Name an object's type for an error."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def unsupported(dtype: object) -> BufferSpecError:
    """Make the error for an element type that kernels do not know."""
    return BufferSpecError(
        "buffer",
        expected=f"elements of type {', '.join(known.name for known in DTYPES)}",
        got=str(dtype),
        remedy="Convert the array, or pass a view of it as uint8.",
    )


def _named(name: str) -> DType:
    dtype = dtype_of_name(name)
    if dtype is None:
        raise unsupported(name)
    return dtype


_NUMPY = {np.dtype(known.name): known for known in DTYPES if known.name != "bfloat16"}


def numpy_dtype(dtype: np.dtype[Any]) -> DType:
    """Return the type for one of numpy's (or of ml_dtypes, which adds bfloat16)."""
    known = _NUMPY.get(dtype)
    if known is None:
        if not dtype.isnative:
            raise BufferSpecError(
                "buffer",
                expected="elements in the byte order of this machine",
                got=f"{dtype.name} in the other ({dtype.str})",
                remedy="Convert it: array.astype(array.dtype.newbyteorder('=')).",
            )
        known = _NUMPY[dtype] = _named(dtype.name)
    return known


def find(obj: Any) -> Facts | None:
    """Ask an object for its facts in the ways that are not numpy's; None if it knows none of them."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _of_torch(obj, torch)
    if cupy is not None and isinstance(obj, cupy.ndarray):
        return _of_cupy(obj)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _of_dlpack(obj)
    interface = getattr(obj, "__cuda_array_interface__", None)
    return None if interface is None else _of_cuda_interface(obj, interface)


def _of_torch(tensor: Any, torch: Any) -> Facts:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise BufferSpecError(
            "buffer",
            expected="a torch tensor whose elements are in memory as they are",
            got="a sparse one" if tensor.layout is not torch.strided else "one with a pending conjugate or minus sign",
            remedy="Pass tensor.to_dense(), tensor.resolve_conj() or tensor.resolve_neg().",
        )
    dtype = _named(str(tensor.dtype).removeprefix("torch."))
    strides = None if tensor.is_contiguous() else tuple(x * dtype.itemsize for x in tensor.stride())
    facts = Facts(tensor.data_ptr(), dtype, "host", tuple(tensor.shape), strides, False, tensor)
    if tensor.device.type == "cpu":
        return facts
    if tensor.device.type != "cuda":
        raise _elsewhere(f"a torch tensor on {tensor.device}")
    ordinal = tensor.device.index
    # torch calls the legacy default stream 0, which the protocols name 1.
    producer = torch.cuda.current_stream(ordinal).cuda_stream or 1
    return facts._replace(device=f"cuda:{ordinal}", producer=producer)


def _of_cupy(array: Any) -> Facts:
    from mpi_gpucomp.device.cuda import current_stream

    ordinal = array.device.id
    dtype = numpy_dtype(array.dtype)
    return Facts(
        array.data.ptr, dtype, f"cuda:{ordinal}", array.shape, array.strides, False, array, current_stream(ordinal)
    )


def _of_dlpack(obj: Any) -> Facts:
    kind, ordinal = obj.__dlpack_device__()
    if kind not in (CPU, CUDA_HOST, CUDA, CUDA_MANAGED):
        raise _elsewhere(f"a DLPack device of kind {int(kind)}")
    on_gpu = kind in (CUDA, CUDA_MANAGED)
    capsule = dlpack_export(obj, NO_ORDER if on_gpu else None)
    tensor = dlpack_read(capsule)
    facts = Facts(
        tensor.address, _named(tensor.dtype), "host", tensor.shape, tensor.strides, tensor.readonly, (obj, capsule)
    )
    if not on_gpu:
        return facts
    return facts._replace(device=f"cuda:{ordinal}", producer=lambda stream: dlpack_export(obj, stream))


def _of_cuda_interface(obj: object, interface: dict[str, Any]) -> Facts:
    from mpi_gpucomp.device.cuda import ordinal_of

    producer = interface.get("stream")
    if interface["version"] < 2 or producer == 0 or interface.get("mask") is not None:
        raise BufferSpecError(
            "buffer",
            expected="a CUDA array interface of version 2 or later, with no mask, and no stream or one that is not 0",
            got=f"version {interface['version']}, mask {interface.get('mask')}, stream {producer}",
            remedy="Update the library that the array comes from.",
        )
    address, readonly = interface["data"]
    dtype = numpy_dtype(np.dtype(interface["typestr"]))
    device = f"cuda:{ordinal_of(address)}"
    return Facts(address, dtype, device, tuple(interface["shape"]), interface.get("strides"), readonly, obj, producer)


def _elsewhere(got: str) -> BufferSpecError:
    return BufferSpecError(
        "buffer", expected="memory of the host or of a CUDA GPU", got=got, remedy="Move the array to one of them."
    )


class Buffer:
    """Elements of one type at one place; a description that is not changed after it is made."""

    __slots__ = ("address", "count", "device", "dtype", "owner", "producer_stream", "readonly", "shape", "strides")

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
    ) -> None:
        """Describe the elements at `address` (strides in bytes, None: contiguous), kept alive by `owner`."""
        self.address, self.dtype, self.shape, self.strides = address, dtype, shape, strides
        self.device, self.readonly, self.owner, self.producer_stream = device, readonly, owner, producer_stream
        self.count = shape[0] if len(shape) == 1 else prod(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one behind the other."""
        return self.strides is None

    def slice(self, start: int, count: int) -> Buffer:
        """Return the `count` elements from `start` on, in one dimension; only of a contiguous buffer."""
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
        )

    def __repr__(self) -> str:
        """Show what and where."""
        form = "x".join(map(str, self.shape)) or "scalar"
        return f"<buffer {form} {self.dtype} on {self.device} at {self.address:#x}>"


def as_buffer(obj: object, *, writable: bool = False) -> Buffer:
    """Describe an array of numpy, CuPy or torch, or what speaks DLPack, an array interface or the buffer protocol."""
    if type(obj) is np.ndarray:
        buffer = _of_numpy(obj, obj)
    elif (facts := None if isinstance(obj, np.ndarray) else find(obj)) is not None:
        shape, strides = simplify(facts.shape, facts.strides, facts.dtype.itemsize)
        buffer = Buffer(
            facts.address,
            facts.dtype,
            shape,
            device=facts.device,
            strides=strides,
            readonly=facts.readonly,
            owner=facts.owner,
            producer_stream=facts.producer,
        )
    else:
        buffer = _of_numpy(_viewed(obj), obj)
    if writable:
        _check_writable(buffer, obj)
    return buffer


_DATA = 40  # where `data` stands in the C struct behind __array_struct__ on every 64-bit machine


def _of_numpy(array: np.ndarray[Any, Any], owner: object) -> Buffer:
    dtype, flags = numpy_dtype(array.dtype), array.flags
    # The quickest way to the address: `array.ctypes` and `__array_interface__` build whole objects for it.
    address = c_void_p.from_address(capsule_pointer(array.__array_struct__, None) + _DATA).value or 0
    shape: tuple[int, ...] = array.shape
    strides = None
    if not flags.c_contiguous:
        shape, strides = simplify(shape, array.strides, dtype.itemsize)
    return Buffer(address, dtype, shape, strides=strides, readonly=not flags.writeable, owner=owner)


def _viewed(obj: Any) -> np.ndarray[Any, Any]:
    """Let numpy look at memory that it does not own: array interface or buffer protocol."""
    try:
        if not isinstance(obj, np.ma.MaskedArray):  # its mask would be lost
            return np.asarray(obj if hasattr(obj, "__array_interface__") else memoryview(obj))
    except (TypeError, ValueError):
        pass
    raise BufferSpecError(
        "buffer",
        expected="an array of numpy, CuPy or torch, or an object with DLPack, an array interface or a buffer",
        got=kind_of(obj),
        remedy="Convert it to an array first, for example with numpy.asarray.",
    )


def _check_writable(buffer: Buffer, obj: object) -> None:
    if buffer.readonly:
        raise BufferSpecError(
            "buffer",
            expected="a buffer that may be written",
            got=f"a read-only {kind_of(obj)}",
            remedy="Pass a copy that may be written.",
        )
    strides = buffer.strides
    if strides is None:
        return
    if overlaps(buffer.shape, strides, buffer.dtype.itemsize) or min(strides) < 0:
        raise BufferSpecError(
            "buffer",
            expected="a buffer to write whose elements do not overlap and run upwards",
            got=f"strides {strides} for shape {buffer.shape}",
            remedy="Pass a contiguous array, and copy the result to where it belongs.",
        )


def order_after(buffer: Buffer, stream: Stream) -> None:
    """Hold later work of `stream` until those who fill `buffer` have done so, as their protocol says; nobody waits."""
    producer = buffer.producer_stream
    if producer is None:
        return
    from mpi_gpucomp.device import cuda

    if not isinstance(stream, cuda.CudaStream):
        raise BufferSpecError(
            "buffer",
            expected=f"a stream of {buffer.device}, where the buffer is",
            got=f"a stream of {stream.device.name}",
            remedy=f"Use a stream of get_device('{buffer.device}').",
        )
    cuda.order_after(stream, producer, int(buffer.device.removeprefix("cuda:")))
