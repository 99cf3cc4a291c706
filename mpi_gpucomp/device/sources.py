"""How the objects of other libraries say where their elements lie: torch, CuPy, DLPack, CUDA's array interface.

Each reader returns `Facts` and copies nothing. No library is imported for this: an object of a library that was never
imported cannot be there.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.device import dlpack
from mpi_gpucomp.device.dtype import DTYPES, DType, dtype_of_name
from mpi_gpucomp.errors import BufferError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Facts", "find", "kind_of", "numpy_dtype", "unsupported"]

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


def unsupported(dtype: object) -> BufferError:
    """Make the error for an element type that kernels do not know."""
    return BufferError(
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
            raise BufferError(
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
        raise BufferError(
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
    if kind not in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise _elsewhere(f"a DLPack device of kind {int(kind)}")
    on_gpu = kind in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    capsule = dlpack.export(obj, NO_ORDER if on_gpu else None)
    tensor = dlpack.read(capsule)
    facts = Facts(
        tensor.address, _named(tensor.dtype), "host", tensor.shape, tensor.strides, tensor.readonly, (obj, capsule)
    )
    if not on_gpu:
        return facts
    return facts._replace(device=f"cuda:{ordinal}", producer=lambda stream: dlpack.export(obj, stream))


def _of_cuda_interface(obj: object, interface: dict[str, Any]) -> Facts:
    from mpi_gpucomp.device.cuda import ordinal_of

    producer = interface.get("stream")
    if interface["version"] < 2 or producer == 0 or interface.get("mask") is not None:
        raise BufferError(
            "buffer",
            expected="a CUDA array interface of version 2 or later, with no mask, and no stream or one that is not 0",
            got=f"version {interface['version']}, mask {interface.get('mask')}, stream {producer}",
            remedy="Update the library that the array comes from.",
        )
    address, readonly = interface["data"]
    dtype = numpy_dtype(np.dtype(interface["typestr"]))
    device = f"cuda:{ordinal_of(address)}"
    return Facts(address, dtype, device, tuple(interface["shape"]), interface.get("strides"), readonly, obj, producer)


def _elsewhere(got: str) -> BufferError:
    return BufferError(
        "buffer", expected="memory of the host or of a CUDA GPU", got=got, remedy="Move the array to one of them."
    )
