"""The memory pool: size classes, reuse, limits and statistics."""

from __future__ import annotations

import threading
import weakref
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.device import Device
from mpi_gpucomp.device.pool import Pool, size_class


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
    with pytest.raises(MemoryError):
        pool.take(1 << 20)


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
