"""Arrays of every library, taken as they are."""

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
from mpi_gpucomp.device import buffer as dlpack
from mpi_gpucomp.device import buffer as sources
from mpi_gpucomp.errors import BufferSpecError

KNOWN = (
    "uint8, int8, uint16, int16, uint32, int32, uint64, int64, float16, bfloat16, float32, float64, bool, complex64, "
    "complex128"
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class OnlyInterface:
    """An array that says no more than `__array_interface__`."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.__array_interface__ = values, values.__array_interface__


class OnlyDlpack:
    """An array that speaks no more than DLPack, of the version that its producer gives it."""

    def __init__(self, values: Any, versioned: bool = True) -> None:
        self.values, self.versioned = values, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> object:
        if not self.versioned and "max_version" in asked:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.values.__dlpack__(**asked)


def same_place(buffer: Buffer, values: np.ndarray) -> bool:
    facts = values.__array_interface__["data"]
    return (buffer.address, buffer.readonly, buffer.count) == (facts[0], facts[1], values.size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_numpy(dtype: Any) -> None:
    values = np.zeros((3, 5), numpy_dtype(dtype.name))
    buffer = as_buffer(values, writable=True)
    assert same_place(buffer, values)
    assert (buffer.dtype, buffer.shape, buffer.strides, buffer.device) == (dtype, (3, 5), None, "host")
    assert (buffer.nbytes, buffer.contiguous, buffer.producer_stream) == (values.nbytes, True, None)
    assert buffer.owner is values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_torch(dtype: Any) -> None:
    tensor = torch.zeros((3, 5), dtype=getattr(torch, dtype.name))
    buffer = as_buffer(tensor, writable=True)
    assert (buffer.address, buffer.dtype, buffer.shape, buffer.strides) == (tensor.data_ptr(), dtype, (3, 5), None)
    assert (buffer.device, buffer.readonly, buffer.owner is tensor) == ("host", False, True)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_dlpack(dtype: Any, versioned: bool) -> None:
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
def test_every_shape_by_every_way(shape: tuple[int, ...], wrap: Any) -> None:
    values = np.zeros(shape, np.float32)
    buffer = as_buffer(wrap(values), writable=True)
    assert (buffer.shape, buffer.count, buffer.nbytes, buffer.contiguous) == (shape, values.size, values.nbytes, True)
    assert buffer.address == values.ctypes.data or not values.size


@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy, OnlyInterface, OnlyDlpack, memoryview])
def test_strides_are_told_and_nothing_is_copied(wrap: Any) -> None:
    values = np.zeros((6, 8), np.float64)
    buffer = as_buffer(wrap(values[1::2, ::4]), writable=True)
    assert (buffer.address, buffer.shape, buffer.strides) == (values[1:].ctypes.data, (3, 2), (128, 32))
    assert not buffer.contiguous


@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy, OnlyInterface, OnlyDlpack, memoryview])
def test_fortran_order_is_contiguous_with_the_shape_of_the_memory(wrap: Any) -> None:
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
def test_memory_of_many_kinds(obj: Any, name: str, count: int) -> None:
    buffer = as_buffer(obj, writable=True)
    assert (buffer.dtype.name, buffer.count, buffer.owner) == (name, count, obj)
    assert buffer.address == np.asarray(memoryview(obj)).ctypes.data


def test_a_tensor_that_wants_gradients_and_a_parameter_are_taken_too() -> None:
    for tensor in (torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(3))):
        assert as_buffer(tensor, writable=True).address == tensor.data_ptr()


def test_a_buffer_keeps_its_memory_alive_and_no_longer() -> None:
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
    assert "torch" not in vars(sources)
    assert sources.find(np.zeros(3).data) is None


@pytest.mark.parametrize(
    ("obj", "kind"),
    [
        (b"abc", "bytes"),
        (np.broadcast_to(np.zeros(3), (2, 3)), "numpy.ndarray"),
        (memoryview(b"abc"), "memoryview"),
        (OnlyInterface(np.broadcast_to(np.zeros(3), (3,))), "test_buffer.OnlyInterface"),
    ],
)
def test_what_is_read_only_can_be_read_but_not_written(obj: Any, kind: str) -> None:
    assert as_buffer(obj).readonly
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(obj, writable=True)
    assert str(caught.value) == (
        f"buffer: expected a buffer that may be written, got a read-only {kind}. Pass a copy that may be written."
    )


def test_dlpack_says_what_is_read_only() -> None:
    values = np.zeros(3)
    values.flags.writeable = False
    buffer = as_buffer(OnlyDlpack(values))
    assert (buffer.readonly, buffer.address) == (True, values.ctypes.data)


@pytest.mark.parametrize(
    "values", [as_strided(np.zeros(9), (4, 3), (16, 8)), as_strided(np.zeros(9), (4,), (0,)), np.zeros(9)[::-1]]
)
def test_overlapping_or_backward_elements_can_be_read_but_not_written(values: np.ndarray) -> None:
    assert as_buffer(values).strides == values.strides
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(values, writable=True)
    assert str(caught.value) == (
        "buffer: expected a buffer to write whose elements do not overlap and run upwards, got strides "
        f"{values.strides} for shape {values.shape}. Pass a contiguous array, and copy the result to where it belongs."
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
def test_other_types_are_refused_by_name(obj: Any, got: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(obj)
    assert str(caught.value) == (
        f"buffer: expected elements of type {KNOWN}, got {got}. Convert the array, or pass a view of it as uint8."
    )


@pytest.mark.parametrize("wrap", [lambda x: x, OnlyInterface, memoryview])
def test_the_other_byte_order_is_refused(wrap: Any) -> None:
    other = "f4" if sys.byteorder == "big" else ">f4"
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(wrap(np.zeros(2, other)))
    assert str(caught.value) == (
        f"buffer: expected elements in the byte order of this machine, got float32 in the other ({other}). "
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
def test_other_objects_are_refused(obj: Any, kind: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(obj)
    assert str(caught.value) == (
        "buffer: expected an array of numpy, CuPy or torch, or an object with DLPack, an array interface or a buffer, "
        f"got {kind}. Convert it to an array first, for example with numpy.asarray."
    )


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        (torch.zeros(3).to_sparse(), "a sparse one"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "one with a pending conjugate or minus sign"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "one with a pending conjugate or minus sign"),
    ],
)
def test_tensors_whose_memory_holds_something_else_are_refused(tensor: torch.Tensor, got: str) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(tensor)
    assert str(caught.value) == (
        f"buffer: expected a torch tensor whose elements are in memory as they are, got {got}. "
        "Pass tensor.to_dense(), tensor.resolve_conj() or tensor.resolve_neg()."
    )


def test_memory_elsewhere_is_refused() -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(torch.zeros(3, device="meta"))
    assert str(caught.value) == (
        "buffer: expected memory of the host or of a CUDA GPU, got a torch tensor on meta. "
        "Move the array to one of them."
    )


class OnGpu:
    """Says that it is on a GPU; nobody looks there."""

    def __init__(self, **facts: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (3, 4),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            "strides": None,
            "stream": None,
            **facts,
        }


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every address belong to the GPU 1: a machine without one cannot be asked."""
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
@pytest.mark.parametrize("wrong", [{"stream": 0}, {"version": 1}, {"mask": 5}])
def test_a_wrong_cuda_array_interface_is_refused(wrong: dict[str, Any]) -> None:
    said = {"version": 3, "mask": None, "stream": None} | wrong
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(OnGpu(**wrong))
    assert str(caught.value) == (
        "buffer: expected a CUDA array interface of version 2 or later, with no mask, and no stream or one that is "
        f"not 0, got version {said['version']}, mask {said['mask']}, stream {said['stream']}. "
        "Update the library that the array comes from."
    )


@pytest.mark.usefixtures("second_gpu")
def test_ordering_needs_a_stream_of_the_buffers_device(host: Any) -> None:
    order_after(as_buffer(OnGpu(stream=None)), host.stream())
    with pytest.raises(BufferSpecError) as caught:
        order_after(as_buffer(OnGpu(stream=1)), host.stream())
    assert str(caught.value) == (
        "buffer: expected a stream of cuda:1, where the buffer is, got a stream of host. "
        "Use a stream of get_device('cuda:1')."
    )


def test_a_slice_is_a_part_of_the_same_memory() -> None:
    values = np.arange(10, dtype=np.int32)
    part = as_buffer(values).slice(3, 4)
    assert (part.address, part.count, part.shape) == (values[3:].ctypes.data, 4, (4,))
    assert part.owner is values
    assert as_buffer(values).slice(10, 0).count == 0


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 11), (5, 6), (11, 0), (3, -1)])
def test_a_slice_outside_is_refused(start: int, count: int) -> None:
    with pytest.raises(BufferSpecError) as caught:
        as_buffer(np.zeros(10)).slice(start, count)
    assert str(caught.value) == (
        "slice of a buffer: expected a range within the 10 elements of a contiguous buffer, got elements "
        f"{start} to {start + count} of a contiguous one. Pack a strided buffer first, and stay within its count."
    )


def test_a_strided_buffer_has_no_slices() -> None:
    with pytest.raises(BufferSpecError, match="got elements 0 to 1 of a strided one"):
        as_buffer(np.zeros(10)[::2]).slice(0, 1)


def test_a_buffer_shows_what_and_where() -> None:
    values = np.zeros((2, 3), np.float16)
    assert repr(as_buffer(values)) == f"<buffer 2x3 float16 on host at {values.ctypes.data:#x}>"
    assert repr(as_buffer(values[0, 0:1].reshape(()))).startswith("<buffer scalar float16 on host at ")


def test_a_newer_dlpack_is_refused() -> None:
    capsule = np.zeros(3).__dlpack__(max_version=(1, 0))
    ctypes.c_uint32.from_address(dlpack.capsule_pointer(capsule, b"dltensor_versioned")).value = 2
    with pytest.raises(BufferSpecError, match=r"expected a DLPack tensor of version 1, got version 2\.\d+\."):
        dlpack.dlpack_read(capsule)


def test_the_offset_of_dlpack_counts() -> None:
    values = np.zeros(3)
    capsule = values.__dlpack__()
    dlpack._Tensor.from_address(dlpack.capsule_pointer(capsule, b"dltensor")).byte_offset = 16
    assert dlpack.dlpack_read(capsule).address == values[2:].ctypes.data
