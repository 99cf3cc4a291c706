"""Packing of strided buffers and of many small buffers, on streams of any device."""

from __future__ import annotations

import numpy as np
import pytest
from device_memory import download, upload

from mpi_gpucomp.device import Buffer, as_buffer, dtype_of_name
from mpi_gpucomp.device.pack import COPY_BYTES, Bucket, gather, scatter
from mpi_gpucomp.errors import BufferSpecError

VIEWS = {
    "all": lambda x: x,
    "every third": lambda x: x[::3],
    "transposed": lambda x: x.reshape(60, 100).T,
    "columns": lambda x: x.reshape(60, 100)[:, 7:31],
    "permuted": lambda x: x.reshape(6, 10, 100)[::2].transpose(2, 0, 1),
    "none": lambda x: x[:0],
}


@pytest.fixture
def stream(device):
    opened = device.stream()
    yield opened
    opened.close()


def device_buffer(memory, whole, view):
    """Describe the view of an array that was uploaded to a device."""
    start = memory.address + view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    strides = None if view.flags.c_contiguous else view.strides
    dtype = dtype_of_name(view.dtype.name)
    return Buffer(start, dtype, view.shape, device=memory.device.name, strides=strides, owner=memory)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "complex128"])
def test_gather_and_scatter_of_strided_elements(device, stream, name, dtype):
    whole = np.arange(6000).astype(dtype)
    view = VIEWS[name](whole)
    with upload(whole, device, stream) as memory, device.alloc(max(1, view.nbytes)) as packed:
        buffer = device_buffer(memory, whole, view)
        gather(buffer, packed, stream)
        assert download(packed, stream).tobytes()[: view.nbytes] == view.tobytes()
        stream.fill(memory.address, 0, whole.nbytes)
        scatter(packed, buffer, stream)
        back = np.zeros_like(whole)
        VIEWS[name](back)[...] = view
        assert download(memory, stream).tobytes() == back.tobytes()


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [5, 0, 70_000, 16, 3], [4] * 500, [COPY_BYTES, COPY_BYTES + 1, 2 * COPY_BYTES]]
)
def test_a_bucket_packs_and_unpacks_many_buffers(device, stream, sizes):
    tensors = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)]
    memories = [upload(tensor, device, stream) for tensor in tensors]
    dtype = dtype_of_name("uint8")
    buffers = [Buffer(m.address, dtype, (t.size,), device=device.name) for m, t in zip(memories, tensors, strict=True)]
    bucket = Bucket(buffers)
    assert bucket.nbytes == sum(-(-size // 16) * 16 for size in sizes)
    with device.alloc(bucket.nbytes) as packed:
        bucket.fill(packed, stream)
        stream.synchronize()
        for memory in memories:
            stream.fill(memory.address, 0, memory.nbytes)
        bucket.empty(packed, stream)
        for memory, tensor in zip(memories, tensors, strict=True):
            assert download(memory, stream).tobytes() == tensor.tobytes()


def test_memory_that_is_too_small_or_on_another_device_is_an_error(host):
    stream = host.stream()
    strided = as_buffer(np.arange(10, dtype=np.float32)[::2])
    with host.alloc(8) as small, pytest.raises(BufferSpecError) as caught:
        gather(strided, small, stream)
    assert str(caught.value) == (
        "packing: expected memory of 20 bytes for the packed elements, got 8. Allocate memory for all elements."
    )
    elsewhere = Buffer(strided.address, strided.dtype, strided.shape, device="cuda:1", strides=strided.strides)
    with host.alloc(20) as packed, pytest.raises(BufferSpecError) as caught:
        gather(elsewhere, packed, stream)
    assert str(caught.value) == (
        "packing: expected elements on host, the stream's device, got elements on cuda:1. "
        "Use a stream of the buffer's device."
    )
    with pytest.raises(BufferSpecError) as caught:
        Bucket([as_buffer(np.zeros(3)), strided])
    assert str(caught.value) == (
        "buffer 1 of a bucket: expected contiguous elements on host, the first buffer's device, "
        "got strided ones on host. Gather strided elements first, and use one bucket per device."
    )
    with host.alloc(8) as small, pytest.raises(BufferSpecError) as caught:
        Bucket([as_buffer(np.zeros(3))]).fill(small, stream)
    expected = "bucket: expected memory of 32 bytes, got 8. Allocate Bucket.nbytes bytes."
    assert str(caught.value) == expected
    stream.close()
