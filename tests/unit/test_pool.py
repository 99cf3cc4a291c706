"""The memory pool: size classes, reuse, limits and statistics."""

from __future__ import annotations

import threading
import weakref
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.device import Device
from mpi_gpucomp.device.pool import Parking, Pool, size_class
from mpi_gpucomp.errors import DeviceError


class Block:
    """A stand-in for memory that weak references can track."""


@pytest.fixture
def allocated() -> list[int]:
    return []


@pytest.fixture
def pool(host: Device, allocated: list[int]) -> Pool:
    addresses = count(1 << 20, 1 << 20)

    def allocate(nbytes: int) -> tuple[int, object]:
        allocated.append(nbytes)
        return next(addresses), Block()

    return Pool(host, allocate, limit=10_000)


@given(st.integers(0, 1 << 45))
def test_a_size_class_fits_the_request_with_little_waste(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % 256 == 0
    assert size - nbytes < max(257, nbytes / 4)
    assert size_class(size) == size


def test_nothing_is_allocated_after_warm_up(pool: Pool, allocated: list[int]) -> None:
    for _ in range(100):
        with pool.take(1000), pool.take(1000), pool.take(3000):
            pass
    assert allocated == [1024, 1024, 3072]
    assert pool.statistics == (3, 297, 0, 5120)


def test_a_second_release_does_nothing(pool: Pool) -> None:
    memory = pool.take(100)
    memory.release()
    memory.release()
    a, b = pool.take(100), pool.take(100)
    assert a.address != b.address


def test_dropped_memory_is_not_reused(pool: Pool) -> None:
    memory = pool.take(100)
    address, block = memory.address, weakref.ref(memory.owner)
    del memory
    assert block() is None
    assert pool.take(100).address != address
    assert pool.statistics.in_use == 512


def test_the_least_recently_used_size_is_evicted_at_the_limit(pool: Pool) -> None:
    old, new = pool.take(4096), pool.take(8192)
    old_block, new_block = weakref.ref(old.owner), weakref.ref(new.owner)
    old.release()
    new.release()
    del old, new
    assert pool.statistics.retained == 8192
    assert (old_block(), new_block() is not None) == (None, True)


def test_reuse_makes_a_size_the_most_recent(pool: Pool) -> None:
    for nbytes in (4096, 2048, 4096, 5120):
        pool.take(nbytes).release()
    assert pool.statistics.retained == 4096 + 5120


def test_a_lower_limit_evicts_immediately(pool: Pool) -> None:
    pool.take(4096).release()
    pool.limit = 0
    assert pool.statistics.retained == 0
    pool.take(4096).release()
    assert (pool.limit, pool.statistics.retained) == (0, 0)


def test_trim_frees_everything(pool: Pool) -> None:
    pool.take(256).release()
    pool.take(512).release()
    pool.trim()
    assert pool.statistics.retained == 0


def test_cached_memory_is_freed_when_allocation_fails(host: Device) -> None:
    capacity = 8192

    def allocate(nbytes: int) -> tuple[int, object]:
        if nbytes > capacity - pool.statistics.retained:
            raise MemoryError
        return 256, Block()

    pool = Pool(host, allocate)
    pool.take(4096).release()
    pool.take(8192)
    assert pool.statistics.retained == 0
    with pytest.raises(DeviceError) as caught:
        pool.take(1 << 20)
    assert str(caught.value) == (
        "memory of host: expected 1048576 bytes more than the 8192 in use by the library, got 'MemoryError: '. "
        "Free memory there, or pass a smaller chunk= or fewer slots= to the communicator."
    )


class Passing:
    """An event that passes when it is waited for."""

    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.passed = True


def test_memory_behind_events_is_waited_for_when_allocation_fails(host: Device) -> None:
    capacity = 8192

    def allocate(nbytes: int) -> tuple[int, object]:
        if pool.statistics.in_use + pool.statistics.retained + nbytes > capacity:
            raise MemoryError
        return 256, Block()

    pool = Pool(host, allocate)
    parking, events = Parking(pool), [Passing(), Passing()]
    for event in events:
        parking.add(event, pool.take(4096))
    assert pool.statistics.in_use == capacity
    one = pool.take(4096)
    assert [event.passed for event in events] == [True, False]
    one.release()
    pool.take(8192)
    assert [event.passed for event in events] == [True, True]
    with pytest.raises(DeviceError):
        pool.take(256)


def test_memory_returns_to_its_pool_when_its_event_has_passed(pool: Pool) -> None:
    parking, first, second = Parking(pool), Passing(), Passing()
    parking.add(first, pool.take(256))
    parking.add(second, pool.take(256))
    second.wait()
    parking.release_passed()
    assert pool.statistics.in_use == 512  # events of one stream pass in order
    first.wait()
    parking.release_passed()
    assert pool.statistics.in_use == 0


def test_a_gpu_waits_for_memory_that_its_streams_still_use(gpu: Device) -> None:
    gpu.pool.trim()
    nbytes = gpu.cupy.cuda.Device(0).mem_info[0] // 2  # type: ignore[attr-defined]
    stream = gpu.stream()
    for _ in range(4):  # twice as much as there is
        memory = gpu.alloc(nbytes)
        stream.fill(memory.address, 1, 256)
        stream.release(memory)
        del memory  # it would keep the block from being freed
    stream.synchronize()
    gpu.pool.trim()


def test_a_pool_is_thread_safe(pool: Pool) -> None:
    taken: set[int] = set()
    shared: list[int] = []

    def work() -> None:
        for _ in range(500):
            with pool.take(700) as memory:
                if memory.address in taken:
                    shared.append(memory.address)
                taken.add(memory.address)
                taken.discard(memory.address)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = pool.statistics
    assert not shared
    assert statistics.in_use == 0
    assert statistics.allocations + statistics.hits == 8 * 500
