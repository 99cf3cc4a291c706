"""`as_buffer`: arrays of every library, described without a copy."""

from __future__ import annotations

import array
import ctypes
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.lib.stride_tricks import as_strided

from mpi_gpucomp.device import DTYPES, Buffer, as_buffer, order_after
from mpi_gpucomp.device import buffer as buffer_module
from mpi_gpucomp.errors import BufferSpecError

KNOWN = (
    "uint8, int8, uint16, int16, uint32, int32, uint64, int64, float16, bfloat16, float32, float64, bool, complex64, "
    "complex128"
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class OnlyInterface:
    """An array with `__array_interface__` and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.__array_interface__ = values, values.__array_interface__


class OnlyDlpack:
    """An array with DLPack and nothing else, versioned or not."""

    def __init__(self, values: Any, versioned: bool = True) -> None:
        self.values, self.versioned = values, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> object:
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.values.__dlpack__(**options)


def describes(buffer: Buffer, values: np.ndarray) -> bool:
    address, readonly = values.__array_interface__["data"]
    return (buffer.address, buffer.readonly, buffer.count) == (address, readonly, values.size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_numpy_dtype(dtype: Any) -> None:
    values = np.zeros((3, 5), numpy_dtype(dtype.name))
    buffer = as_buffer(values, writable=True)
    assert describes(buffer, values)
    assert (buffer.dtype, buffer.shape, buffer.strides, buffer.device) == (dtype, (3, 5), None, "host")
    assert (buffer.nbytes, buffer.contiguous, buffer.producer_stream) == (values.nbytes, True, None)
    assert buffer.owner is values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_torch_dtype(dtype: Any) -> None:
    tensor = torch.zeros((3, 5), dtype=getattr(torch, dtype.name))
    buffer = as_buffer(tensor, writable=True)
    assert (buffer.address, buffer.dtype, buffer.shape, buffer.strides) == (tensor.data_ptr(), dtype, (3, 5), None)
    assert (buffer.device, buffer.readonly, buffer.owner is tensor) == ("host", False, True)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dlpack_dtype(dtype: Any, versioned: bool) -> None:
    tensor = torch.zeros((3, 5), dtype=getattr(torch, dtype.name))[:, 1:4]
    buffer = as_buffer(OnlyDlpack(tensor, versioned), writable=True)
    assert (buffer.address, buffer.dtype, buffer.shape) == (tensor.data_ptr(), dtype, (3, 3))
    assert buffer.strides == (5 * dtype.itemsize, dtype.itemsize)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (4,), (0, 3), (2, 3, 4)])
@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, torch.from_numpy, OnlyInterface, OnlyDlpack, memoryview],
    ids=["numpy", "torch", "interface", "dlpack", "buffer"],
)
def test_every_shape_through_every_protocol(shape: tuple[int, ...], wrap: Any) -> None:
    values = np.zeros(shape, np.float32)
    buffer = as_buffer(wrap(values), writable=True)
    assert (buffer.shape, buffer.count, buffer.nbytes, buffer.contiguous) == (shape, values.size, values.nbytes, True)
    assert buffer.address == values.ctypes.data or not values.size


@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy, OnlyInterface, OnlyDlpack, memoryview])
def test_strided_arrays_are_not_copied(wrap: Any) -> None:
    values = np.zeros((6, 8), np.float64)
    buffer = as_buffer(wrap(values[1::2, ::4]), writable=True)
    assert (buffer.address, buffer.shape, buffer.strides) == (values[1:].ctypes.data, (3, 2), (128, 32))
    assert not buffer.contiguous


@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy, OnlyInterface, OnlyDlpack, memoryview])
def test_fortran_order_is_contiguous_with_a_reversed_shape(wrap: Any) -> None:
    buffer = as_buffer(wrap(np.zeros((2, 3, 4), np.int16).T), writable=True)
    assert (buffer.shape, buffer.strides) == ((2, 3, 4), None)


@pytest.mark.parametrize(
    ("obj", "name", "count"),
    [
        (bytearray(5), "uint8", 5),
        (array.array("d", [1, 2, 3]), "float64", 3),
        (array.array("l", [1, 2]), "int64", 2),
        (memoryview(bytearray(8)).cast("f"), "float32", 2),
        ((ctypes.c_int16 * 3)(), "int16", 3),
        (MPI.memory.fromaddress(np.zeros(7, np.uint8).ctypes.data, 7), "uint8", 7),
        (MPI.memory.allocate(9), "uint8", 9),
        (np.float32(3).reshape(1), "float32", 1),
        (np.zeros(3).view(np.recarray), "float64", 3),
    ],
)
def test_buffer_protocol_objects(obj: Any, name: str, count: int) -> None:
    buffer = as_buffer(obj, writable=True)
    assert (buffer.dtype.name, buffer.count) == (name, count)
    assert buffer.address == np.asarray(memoryview(obj)).ctypes.data


def test_an_object_cannot_be_resized_while_a_buffer_of_it_exists() -> None:
    for obj in (bytearray(5), array.array("d", [1, 2, 3])):
        buffer = as_buffer(obj, writable=True)
        with pytest.raises(BufferError):
            obj.pop()
        del buffer
        obj.pop()


def test_tensors_with_gradients_and_parameters() -> None:
    for tensor in (torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(3))):
        assert as_buffer(tensor, writable=True).address == tensor.data_ptr()


def test_a_buffer_keeps_its_memory_alive_until_it_is_dropped() -> None:
    class Values(np.ndarray):
        pass

    values = np.zeros(5, np.float32).view(Values)
    gone = weakref.ref(values)
    buffer = as_buffer(OnlyDlpack(values))
    del values
    assert gone() is not None
    del buffer
    assert gone() is None


def test_torch_is_not_imported_for_numpy() -> None:
    assert "torch" not in vars(buffer_module)
    assert buffer_module.read_exported(np.zeros(3).data) is None


@pytest.mark.parametrize(
    ("obj", "kind"),
    [
        (b"abc", "bytes"),
        (np.broadcast_to(np.zeros(3), (2, 3)), "numpy.ndarray"),
        (memoryview(b"abc"), "memoryview"),
        (OnlyInterface(np.broadcast_to(np.zeros(3), (3,))), "test_buffer.OnlyInterface"),
    ],
)
def test_read_only_memory_is_not_writable(obj: Any, kind: str) -> None:
    assert as_buffer(obj).readonly
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(obj, writable=True)
    assert str(caught.value) == (f"buffer: expected a writable buffer, got a read-only {kind}. Pass a writable copy.")


def test_read_only_dlpack() -> None:
    values = np.zeros(3)
    values.flags.writeable = False
    buffer = as_buffer(OnlyDlpack(values))
    assert (buffer.readonly, buffer.address) == (True, values.ctypes.data)


@pytest.mark.parametrize(
    "values", [as_strided(np.zeros(9), (4, 3), (16, 8)), as_strided(np.zeros(9), (4,), (0,)), np.zeros(9)[::-1]]
)
def test_overlapping_elements_and_negative_strides_are_not_writable(values: np.ndarray) -> None:
    assert as_buffer(values).strides == values.strides
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(values, writable=True)
    assert str(caught.value) == (
        "buffer: expected a writable buffer with non-negative strides and no overlapping elements, got strides "
        f"{values.strides} for shape {values.shape}. Pass a contiguous array, and copy the result from there."
    )


@pytest.mark.parametrize(
    ("obj", "got"),
    [
        (np.zeros(2, np.longdouble), np.dtype(np.longdouble).name),
        (np.zeros(2, "M8[s]"), "datetime64[s]"),
        (np.array(["ab"]), "str64"),
        (np.array([None]), "object"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2, dtype=torch.float8_e5m2), "float8_e5m2"),
        (OnlyDlpack(torch.zeros(2, dtype=torch.float8_e5m2)), "DLPack type 12 of 8 bits"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unsupported_dtypes_are_named_in_the_error(obj: Any, got: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(obj)
    assert str(caught.value) == (
        f"buffer: expected elements of type {KNOWN}, got {got}. Convert the array, or pass a view of it as uint8."
    )


@pytest.mark.parametrize("wrap", [lambda x: x, OnlyInterface, memoryview])
def test_non_native_byte_order_is_an_error(wrap: Any) -> None:
    other = "f4" if sys.byteorder == "big" else ">f4"
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(wrap(np.zeros(2, other)))
    assert str(caught.value) == (
        f"buffer: expected elements in native byte order, got float32 in the opposite order ({other}). "
        "Convert it: array.astype(array.dtype.newbyteorder('='))."
    )


@pytest.mark.parametrize(
    ("obj", "kind"),
    [
        ([1.0], "list"),
        (3.5, "float"),
        (None, "NoneType"),
        (np.ma.zeros(3), f"{np.ma.MaskedArray.__module__}.MaskedArray"),
    ],
)
def test_objects_without_a_buffer_are_an_error(obj: Any, kind: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(obj)
    assert str(caught.value) == (
        "buffer: expected an array of numpy, CuPy or torch, or an object with DLPack, an array interface or a buffer, "
        f"got {kind}. Convert it to an array first, for example with numpy.asarray."
    )


@pytest.mark.parametrize(
    ("tensor", "got", "method"),
    [
        (torch.zeros(3).to_sparse(), "one with layout torch.sparse_coo", "to_dense"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "one with a pending conjugation", "resolve_conj"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "one with a pending negation", "resolve_neg"),
    ],
)
def test_sparse_and_lazy_tensors_are_an_error(tensor: torch.Tensor, got: str, method: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(tensor)
    assert str(caught.value) == (
        f"buffer: expected a strided torch tensor whose memory holds its values, got {got}. Pass tensor.{method}()."
    )


def test_memory_of_an_unsupported_device_is_an_error() -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(torch.zeros(3, device="meta"))
    assert str(caught.value) == (
        "buffer: expected memory of the host or of a CUDA GPU, got a torch tensor on meta. "
        "Move the array to a supported device."
    )


class OnGpu:
    """An array that claims to be on a GPU; its memory is never accessed."""

    def __init__(self, **fields: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (3, 4),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            "strides": None,
            "stream": None,
            **fields,
        }


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map every address to GPU 1: without a GPU the driver cannot be queried."""
    monkeypatch.setattr("mpi_gpucomp.device.cuda.ordinal_of", lambda address: 1)


@pytest.mark.usefixtures("second_gpu")
@pytest.mark.parametrize("stream", [None, 1, 2, 0x7F0000001000])
def test_the_cuda_array_interface(stream: int | None) -> None:
    buffer = as_buffer(OnGpu(stream=stream, data=(4096, True), strides=(32, 8)))
    assert (buffer.address, buffer.device, buffer.dtype.name, buffer.readonly) == (4096, "cuda:1", "float32", True)
    assert (buffer.shape, buffer.strides, buffer.producer_stream) == ((3, 4), (32, 8), stream)


@pytest.mark.usefixtures("second_gpu")
def test_the_older_cuda_array_interface() -> None:
    obj = OnGpu(version=2)
    del obj.__cuda_array_interface__["stream"]
    assert as_buffer(obj, writable=True).producer_stream is None


@pytest.mark.usefixtures("second_gpu")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": 1}, "version 2 or later, got version 1"),
        ({"mask": 5}, "no mask, got a mask"),
        ({"stream": 0}, "a stream handle other than 0, which the protocol forbids, got stream 0"),
    ],
)
def test_an_invalid_cuda_array_interface_is_an_error(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(OnGpu(**wrong))
    assert str(caught.value) == (
        f"CUDA array interface: expected {text}. Update the library that the array comes from."
    )


def test_memory_that_cuda_does_not_know_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpi_gpucomp.device.cuda.ordinal_of", lambda address: -2)
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(OnGpu())
    assert "expected memory that CUDA knows, got 0x1000, which is unregistered memory of the host" in str(caught.value)


@pytest.mark.usefixtures("second_gpu")
def test_ordering_needs_a_stream_of_the_buffers_device(host: Any) -> None:
    order_after(as_buffer(OnGpu(stream=None)), host.stream())
    with pytest.raises(BufferSpecError) as caught:
        order_after(as_buffer(OnGpu(stream=1)), host.stream())
    assert str(caught.value) == (
        "buffer: expected a stream of cuda:1, the buffer's device, got a stream of host. "
        "Use a stream of get_device('cuda:1')."
    )


def test_a_slice_shares_the_memory() -> None:
    values = np.arange(10, dtype=np.int32)
    part = as_buffer(values).slice(3, 4)
    assert (part.address, part.count, part.shape) == (values[3:].ctypes.data, 4, (4,))
    assert part.owner is values
    assert as_buffer(values).slice(10, 0).count == 0


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 11), (5, 6), (11, 0), (3, -1)])
def test_a_slice_out_of_range_is_an_error(start: int, count: int) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(np.zeros(10)).slice(start, count)
    assert str(caught.value) == (
        "slice of a buffer: expected a range within the 10 elements of a contiguous buffer, got elements "
        f"{start} to {start + count} of a contiguous one. Pack a strided buffer first, and stay within its count."
    )


def test_slicing_a_strided_buffer_is_an_error() -> None:
    with pytest.raises(BufferSpecError, match="got elements 0 to 1 of a strided one"):
        as_buffer(np.zeros(10)[::2]).slice(0, 1)


def test_repr_shows_shape_type_device_and_address() -> None:
    values = np.zeros((2, 3), np.float16)
    assert repr(as_buffer(values)) == f"<buffer 2x3 float16 on host at {values.ctypes.data:#x}>"
    assert repr(as_buffer(values[0, 0:1].reshape(()))).startswith("<buffer scalar float16 on host at ")


def test_a_newer_dlpack_version_is_an_error() -> None:
    capsule = np.zeros(3).__dlpack__(max_version=(1, 0))
    ctypes.c_uint32.from_address(buffer_module.capsule_pointer(capsule, b"dltensor_versioned")).value = 2
    with pytest.raises(BufferSpecError, match=r"expected a DLPack tensor of version 1, got version 2\.\d+\."):
        buffer_module.read_dlpack(capsule)


def test_the_byte_offset_of_dlpack_is_added() -> None:
    values = np.zeros(3)
    capsule = values.__dlpack__()
    buffer_module._DLTensor.from_address(buffer_module.capsule_pointer(capsule, b"dltensor")).byte_offset = 16
    assert buffer_module.read_dlpack(capsule).address == values[2:].ctypes.data
