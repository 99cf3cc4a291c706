"""Contiguous memory that replaces a strided or unaligned buffer during a collective."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpi_gpucomp._call.staging import PackedBuffers
from mpi_gpucomp.device import Device, as_buffer
from mpi_gpucomp.engine.program import Blocks


def whole(array: np.ndarray) -> Blocks:
    buffer = as_buffer(array)
    return Blocks(buffer, [0], [buffer.count])


def elements(blocks: Blocks | None) -> np.ndarray:
    assert blocks is not None
    data = (np.ctypeslib.ctypes.c_char * blocks.buffer.nbytes).from_address(blocks.buffer.address)
    return np.frombuffer(data, blocks.buffer.dtype.name)


def test_contiguous_buffers_are_not_packed(host: Device) -> None:
    packing, blocks = PackedBuffers(host), whole(np.arange(5.0))
    assert packing.device_view(blocks, writable=True) is blocks
    assert not packing.needed


@pytest.mark.parametrize("odd", [False, True])
def test_strided_elements_are_packed_and_unpacked_and_gaps_stay_unchanged(host: Device, odd: bool) -> None:
    raw = np.frombuffer(bytearray(8 * 12 + 1), np.float64, 12, 1) if odd else np.zeros(24)[::2]
    raw[:] = np.arange(12)
    packing, stream = PackedBuffers(host, raw=True), host.stream()
    packed = packing.device_view(whole(raw), writable=True)
    assert packing.needed
    packing.pack(stream)
    there = elements(packed)
    assert there.tolist() == list(range(12))
    there[:] = there[::-1].copy()
    packing.unpack(stream)
    stream.synchronize()
    stream.close()
    assert raw.tolist() == list(range(11, -1, -1))
    assert odd or not raw.base[1::2].any()


def test_packed_elements_are_complete_before_the_wire_reads_them(host: Device) -> None:
    packing, stream = PackedBuffers(host, raw=True), host.stream()
    packed = packing.device_view(whole(np.arange(20.0)[::2]), writable=False)
    elements(packed)[:] = -1
    stream.run(lambda: time.sleep(0.2))
    packing.pack(stream)
    assert elements(packed).tolist() == list(range(0, 20, 2))
    packing.unpack(stream)
    stream.close()


def test_packed_memory_returns_to_its_pool(host: Device) -> None:
    before = host.pool.statistics.in_use
    packing, stream = PackedBuffers(host), host.stream()
    packing.device_view(whole(np.zeros((50, 50))[:, :7]), writable=True)
    packing.deferred_output(whole(np.zeros(100)))
    packing.pack(stream)
    packing.unpack(stream)
    stream.synchronize()
    stream.close()
    assert host.pool.statistics.in_use == before
