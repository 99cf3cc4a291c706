"""Takes the arrays of any library as they are, and never copies.

A `Buffer` says where elements lie. Elements without gaps in C or in Fortran order count as contiguous: the buffer is
then the elements in the order of memory, as MPI sees them, and a Fortran-ordered array's shape is reversed. Anything
else keeps its shape and strides, for the pack kernels to gather.
"""

from __future__ import annotations

from ctypes import c_void_p
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.device import sources
from mpi_gpucomp.device.dlpack import capsule_pointer
from mpi_gpucomp.device.layout import overlaps, simplify
from mpi_gpucomp.errors import BufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.device.base import Stream
    from mpi_gpucomp.device.dtype import DType

__all__ = ["Buffer", "as_buffer", "order_after"]


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
            raise BufferError(
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
    elif (facts := None if isinstance(obj, np.ndarray) else sources.find(obj)) is not None:
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
    dtype, flags = sources.numpy_dtype(array.dtype), array.flags
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
    raise BufferError(
        "buffer",
        expected="an array of numpy, CuPy or torch, or an object with DLPack, an array interface or a buffer",
        got=sources.kind_of(obj),
        remedy="Convert it to an array first, for example with numpy.asarray.",
    )


def _check_writable(buffer: Buffer, obj: object) -> None:
    if buffer.readonly:
        raise BufferError(
            "buffer",
            expected="a buffer that may be written",
            got=f"a read-only {sources.kind_of(obj)}",
            remedy="Pass a copy that may be written.",
        )
    strides = buffer.strides
    if strides is None:
        return
    if overlaps(buffer.shape, strides, buffer.dtype.itemsize) or min(strides) < 0:
        raise BufferError(
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
        raise BufferError(
            "buffer",
            expected=f"a stream of {buffer.device}, where the buffer is",
            got=f"a stream of {stream.device.name}",
            remedy=f"Use a stream of get_device('{buffer.device}').",
        )
    cuda.order_after(stream, producer, int(buffer.device.removeprefix("cuda:")))
