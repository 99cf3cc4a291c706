"""The worker threads that share the tiles of a kernel."""

from __future__ import annotations

import os
import threading
from itertools import pairwise

import pytest

from mpi_gpucomp.device.host import Workers, usable_cores
from mpi_gpucomp.errors import SpecError

LONG = 30.0  # seconds: a test that takes longer has hung
GRAIN = 64


@pytest.mark.parametrize("tiles", [0, 1, GRAIN, 2 * GRAIN - 1, 2 * GRAIN, 1000, 12345])
def test_workers_cover_every_tile_once_in_contiguous_ranges(tiles: int) -> None:
    ranges: list[tuple[int, int]] = []
    Workers(4).run(lambda first, last, extra: ranges.append((first.value, last.value)), tiles, [5], GRAIN)
    ranges.sort()
    assert ranges[0][0] == 0
    assert ranges[-1][1] == tiles
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert len(ranges) == max(1, min(4, tiles // GRAIN))


def test_workers_run_concurrently() -> None:
    together = threading.Barrier(3)
    Workers(3).run(lambda first, last: together.wait(LONG), 3 * GRAIN, [], GRAIN)


def test_workers_raise_the_error_of_a_range() -> None:
    def fail(first: object, last: object) -> None:
        raise ValueError("broken")

    workers = Workers(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            workers.run(fail, 1000, [], GRAIN)


def test_the_number_of_workers_is_the_variable_or_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPI_GPUCOMP_WORKERS", raising=False)
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MPI_GPUCOMP_WORKERS", "7")
    assert usable_cores() == 7


@pytest.mark.parametrize("text", ["0", "-2", "many", "1.5"])
def test_an_invalid_number_of_workers_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPI_GPUCOMP_WORKERS", text)
    with pytest.raises(SpecError) as caught:
        usable_cores()
    assert str(caught.value) == (
        f"environment variable MPI_GPUCOMP_WORKERS: expected a whole number of at least 1, got '{text}'. "
        "Set the number of threads that share one kernel, or unset it to use every core."
    )
