"""The threads that share a kernel's tiles."""

from __future__ import annotations

import os
import threading
from itertools import pairwise

import pytest

from mpi_gpucomp.device.host import Workers, usable_cores
from mpi_gpucomp.errors import SpecError

LONG = 30.0  # seconds after which a test has hung


GRAIN = 64


@pytest.mark.parametrize("tiles", [0, 1, GRAIN, 2 * GRAIN - 1, 2 * GRAIN, 1000, 12345])
def test_workers_cover_every_tile_once_in_contiguous_pieces(tiles: int) -> None:
    pieces: list[tuple[int, int]] = []
    Workers(4).run(lambda first, last, extra: pieces.append((first.value, last.value)), tiles, [5], GRAIN)
    pieces.sort()
    assert pieces[0][0] == 0
    assert pieces[-1][1] == tiles
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert len(pieces) == max(1, min(4, tiles // GRAIN))


def test_workers_run_at_the_same_time() -> None:
    together = threading.Barrier(3)
    Workers(3).run(lambda first, last: together.wait(LONG), 3 * GRAIN, [], GRAIN)


def test_workers_pass_on_what_a_piece_raises() -> None:
    def fail(first: object, last: object) -> None:
        raise ValueError("broken")

    workers = Workers(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            workers.run(fail, 1000, [], GRAIN)


def test_the_number_of_workers_is_the_environments_or_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPI_GPUCOMP_WORKERS", raising=False)
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MPI_GPUCOMP_WORKERS", "7")
    assert usable_cores() == 7


@pytest.mark.parametrize("said", ["0", "-2", "many", "1.5"])
def test_a_wrong_number_of_workers_is_an_error(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("MPI_GPUCOMP_WORKERS", said)
    with pytest.raises(SpecError) as caught:
        usable_cores()
    assert str(caught.value) == (
        f"environment variable MPI_GPUCOMP_WORKERS: expected a whole number of at least 1, got '{said}'. "
        "Set the number of threads that share one kernel, or unset it to use every core."
    )
