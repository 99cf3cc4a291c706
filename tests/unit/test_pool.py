"""Pooled memory: size classes, reuse, bounds and counts."""

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
    """Stands for memory; its life can be watched."""


@pytest.fixture
def made() -> list[int]:
    return []


@pytest.fixture
def pool(host: Device, made: list[int]) -> Pool:
    addresses = count(1 << 20, 1 << 20)

    def allocate(nbytes: int) -> tuple[int, object]:
        made.append(nbytes)
        return next(addresses), Block()

    return Pool(host, allocate, limit=10_000)


@given(st.integers(0, 1 << 45))
def test_a_size_class_holds_the_request_and_wastes_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % 256 == 0
    assert size - nbytes < max(257, nbytes / 4)
    assert size_class(size) == size


def test_nothing_is_allocated_after_warm_up(pool: Pool, made: list[int]) -> None:
    for _ in range(100):
        with pool.take(1000), pool.take(1000), pool.take(3000):
            pass
    assert made == [1024, 1024, 3072]
    assert pool.statistics == (3, 297, 0, 5120)


def test_a_second_release_does_nothing(pool: Pool) -> None:
    memory = pool.take(100)
    memory.release()
    memory.release()
    a, b = pool.take(100), pool.take(100)
    assert a.address != b.address


def test_memory_that_was_dropped_is_not_reused(pool: Pool) -> None:
    memory = pool.take(100)
    address, block = memory.address, weakref.ref(memory.owner)
    del memory
    assert block() is None
    assert pool.take(100).address != address
    assert pool.statistics.in_use == 512


def test_no_more_is_kept_than_the_limit_and_the_oldest_goes_first(pool: Pool) -> None:
    old, new = pool.take(4096), pool.take(8192)
    old_block, new_block = weakref.ref(old.owner), weakref.ref(new.owner)
    old.release()
    new.release()
    del old, new
    assert pool.statistics.retained == 8192
    assert (old_block(), new_block() is not None) == (None, True)


def test_use_makes_a_size_the_newest(pool: Pool) -> None:
    for nbytes in (4096, 2048, 4096, 5120):
        pool.take(nbytes).release()
    assert pool.statistics.retained == 4096 + 5120


def test_a_lower_limit_lets_go_at_once(pool: Pool) -> None:
    pool.take(4096).release()
    pool.limit = 0
    assert pool.statistics.retained == 0
    pool.take(4096).release()
    assert (pool.limit, pool.statistics.retained) == (0, 0)


def test_trim_lets_go_of_everything(pool: Pool) -> None:
    pool.take(256).release()
    pool.take(512).release()
    pool.trim()
    assert pool.statistics.retained == 0


def test_when_memory_is_short_what_is_kept_is_given_up(host: Device) -> None:
    room = 8192

    def allocate(nbytes: int) -> tuple[int, object]:
        if nbytes > room - pool.statistics.retained:
            raise MemoryError
        return 256, Block()

    pool = Pool(host, allocate)
    pool.take(4096).release()
    pool.take(8192)
    assert pool.statistics.retained == 0
    with pytest.raises(MemoryError):
        pool.take(1 << 20)


def test_many_threads_share_a_pool(pool: Pool) -> None:
    taken: set[int] = set()
    clashes: list[int] = []

    def work() -> None:
        for _ in range(500):
            with pool.take(700) as memory:
                if memory.address in taken:
                    clashes.append(memory.address)
                taken.add(memory.address)
                taken.discard(memory.address)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = pool.statistics
    assert not clashes
    assert statistics.in_use == 0
    assert statistics.allocations + statistics.hits == 8 * 500
