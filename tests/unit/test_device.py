"""The device contract: one suite for the host and a GPU."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import pytest
from device_memory import download, upload, view

from mpi_gpucomp.device import Device, Memory, Stream, get_device
from mpi_gpucomp.errors import BufferSpecError, DeviceError

CHECKSUM_TILE = 4096
REDUCE_TILE = 1024
SUM = 1
random = np.random.default_rng(7)


@pytest.fixture(params=["own thread", "inline"])
def stream(request: pytest.FixtureRequest, device: Device) -> Stream:
    if request.param == "own thread":
        return device.stream()
    if device.name != "host":
        pytest.skip("only the host has inline streams")
    return device.stream(inline=True)


def checksum(data: Memory, nbytes: int, device: Device, stream: Stream, split: bool) -> int:
    tiles = -(-nbytes // CHECKSUM_TILE)
    with device.alloc(8 * max(tiles, 1)) as partials, device.alloc(4) as result:
        stream.launch("checksum_tiles", tiles, data.address, nbytes, partials.address, split=split)
        stream.launch("checksum_join", 1, partials.address, nbytes, result.address, split=False)
        return int(download(result, stream).view(np.uint32)[0])


def test_a_device_is_created_once(device: Device) -> None:
    assert get_device(device.name) is device


def test_an_unknown_device_name_is_an_error() -> None:
    with pytest.raises(DeviceError) as caught:
        get_device("gpu")
    assert str(caught.value) == "device 'gpu': expected host or cuda:N, got 'gpu'. Name the first GPU cuda:0."


def test_a_missing_gpu_is_an_error() -> None:
    pytest.importorskip("cupy")
    with pytest.raises(DeviceError) as caught:
        get_device("cuda:4095")
    text = str(caught.value)
    assert text.startswith("device cuda:4095: expected a CUDA GPU with this ordinal, got ")
    assert text.endswith("Check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES, or use the device 'host'.")


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 5000, 1 << 20, (1 << 20) + 1])
def test_memory_is_aligned_and_disjoint(device: Device, nbytes: int) -> None:
    blocks = [take(nbytes) for take in (device.alloc, device.pinned, device.alloc)]
    assert all(block.address % 256 == 0 and block.nbytes == nbytes and block.device is device for block in blocks)
    addresses = sorted(block.address for block in blocks)
    assert all(b - a >= max(nbytes, 1) for a, b in pairwise(addresses))
    for block in blocks:
        block.release()


def test_memory_of_a_negative_size_is_an_error(device: Device) -> None:
    with pytest.raises(BufferSpecError) as caught:
        device.alloc(-1)
    assert str(caught.value) == (
        f"memory of {device.name}: expected a size of at least 0 bytes, got -1. Check how the size is computed."
    )


def test_released_memory_serves_the_next_request(device: Device) -> None:
    device.alloc(10_000).release()
    before = device.pool.statistics
    addresses = set()
    for nbytes in (10_000, 9_999, 9_217):
        with device.alloc(nbytes) as memory:
            addresses.add(memory.address)
    after = device.pool.statistics
    assert len(addresses) == 1
    assert (after.allocations, after.hits, after.in_use) == (before.allocations, before.hits + 3, before.in_use)


def test_copies_preserve_bytes(device: Device, stream: Stream) -> None:
    data = random.integers(0, 256, 100_003, np.uint8)
    there = upload(data, device, stream)
    with device.alloc(data.nbytes) as other:
        stream.copy(other.address, there.address, data.nbytes)
        assert np.array_equal(download(other, stream), data)
    there.release()


def test_copies_and_fills_of_zero_bytes(device: Device, stream: Stream) -> None:
    with device.alloc(1) as memory:
        stream.copy(memory.address, memory.address, 0)
        stream.fill(memory.address, 1, 0)
        stream.synchronize()


def test_fill_sets_only_its_bytes(device: Device, stream: Stream) -> None:
    there = upload(np.zeros(1000, np.uint8), device, stream)
    stream.fill(there.address + 10, 0xA5, 900)
    expected = np.zeros(1000, np.uint8)
    expected[10:910] = 0xA5
    assert np.array_equal(download(there, stream), expected)
    there.release()


def test_work_runs_in_order(device: Device, stream: Stream) -> None:
    size = 1 << 20
    with device.alloc(size) as a, device.alloc(size) as b:
        for step in range(100):
            stream.fill(a.address, step, size)
            stream.copy(b.address, a.address, size)
            stream.fill(a.address, 255, size)
        assert np.array_equal(download(b, stream), np.full(size, 99, np.uint8))


def test_one_stream_waits_for_another(device: Device, stream: Stream) -> None:
    size = 4 << 20
    with device.alloc(size) as a, device.alloc(size) as b:
        other = device.stream()
        for step in range(20):
            stream.fill(a.address, step, size)
            other.wait(stream.record())
            other.copy(b.address, a.address, size)
            stream.wait(other.record())
        assert np.array_equal(download(b, other), np.full(size, 19, np.uint8))
        other.close()


def test_an_event_is_done_after_wait(device: Device, stream: Stream) -> None:
    with device.alloc(1 << 20) as memory:
        stream.fill(memory.address, 1, memory.nbytes)
        event = stream.record()
        event.wait()
        assert event.done()
        event.wait()
        stream.wait(event)
        stream.synchronize()


def test_failed_work_raises_and_the_stream_stays_usable(device: Device, stream: Stream) -> None:
    def fail() -> None:
        raise LookupError("no such thing")

    def fail_and_wait() -> None:  # a GPU's stream raises immediately, the host's at synchronize
        stream.run(fail)
        stream.synchronize()

    for _ in range(2):
        with pytest.raises(LookupError, match="no such thing"):
            fail_and_wait()
    ran: list[int] = []
    stream.run(lambda: ran.append(1))
    stream.synchronize()
    assert ran == [1]


def test_many_streams_at_once(device: Device) -> None:
    streams = [device.stream() for _ in range(32)]
    memories = [device.alloc(10_000) for _ in streams]
    for _ in range(5):
        for index, (stream, memory) in enumerate(zip(streams, memories, strict=True)):
            stream.fill(memory.address, index, memory.nbytes)
    for index, (stream, memory) in enumerate(zip(streams, memories, strict=True)):
        assert np.array_equal(download(memory, stream), np.full(10_000, index, np.uint8))
        stream.close()
        memory.release()


def test_close_completes_the_queued_work(device: Device) -> None:
    stream, result = device.stream(), device.pinned(1 << 20)
    with device.alloc(1 << 20) as memory:
        for step in range(10):
            stream.fill(memory.address, step, memory.nbytes)
        stream.copy(result.address, memory.address, memory.nbytes)
        stream.close()
        assert np.array_equal(view(result), np.full(1 << 20, 9, np.uint8))
    result.release()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_001, 3_000_001])
def test_split_does_not_change_the_result(device: Device, stream: Stream, nbytes: int, split: bool) -> None:
    data = random.integers(0, 256, nbytes, np.uint8)
    there = upload(data, device, stream)
    assert checksum(there, nbytes, device, stream, split) == zlib.adler32(data)
    there.release()


def test_kernels_keep_denormal_numbers(device: Device, stream: Stream) -> None:
    count = 300_000
    a = np.full(count, 1e-41, np.float32)
    b = random.uniform(0, 1e-40, count).astype(np.float32)
    to, source = upload(a, device, stream), upload(b, device, stream)
    stream.launch("reduce_f32", -(-count // REDUCE_TILE), to.address, source.address, count, SUM)
    assert np.array_equal(download(to, stream).view(np.float32), a + b)
    assert (a + b > 0).all()
    to.release()
    source.release()


def test_an_unknown_kernel_is_an_error_at_launch(device: Device, stream: Stream) -> None:
    with pytest.raises(DeviceError, match=r"^kernel no_such_kernel: expected a "):
        stream.launch("no_such_kernel", 1)
