"""Stalls: a standstill is told unless the whole machine stood still, or it is one of very many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpi_gpucomp.monitor import stalls as module
from mpi_gpucomp.monitor.processor import OFTEN, CpuUsage, ThreadCounters
from mpi_gpucomp.monitor.stalls import HELD_NS, StallDetector

MS = 1_000_000


class Counts(CpuUsage):
    """A processor that has stood still for as long as a test says."""

    def __init__(self, still: int) -> None:
        super().__init__(ThreadCounters())
        self.says, self.stolen = still, 7

    def stood_still(self, begin: int, end: int, naps: int) -> int:
        return self.says


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what a hypervisor has taken, for a test to change."""
    taken = [7]
    monkeypatch.setattr(module, "stolen", lambda: taken[0])
    monkeypatch.setattr(module, "is_pressed", lambda still: False)
    return taken


def stalls(still: int) -> StallDetector:
    engine = SimpleNamespace(snapshot=lambda: SimpleNamespace(waits=[SimpleNamespace(title="broadcast (call 9)")]))
    station = SimpleNamespace(rank=2, host="h2")
    return StallDetector(cast(Any, engine), cast(Any, station), Counts(still))


def test_a_standstill_is_told_after_a_moment(ticks: list[int]) -> None:
    found = stalls(5 * MS)
    assert not found.check(100 * MS, 106 * MS, 3)
    assert found and not found.settle(106 * MS + HELD_NS)
    told = found.settle(107 * MS + HELD_NS)
    assert [one.text for one in told] == ["stall: rank 2 (h2) did not run for 5.0 ms in broadcast (call 9)"]
    assert [(one.kind, one.ranks) for one in told] == [("stall", (2,))]
    assert not found and not found.settle(200 * MS + HELD_NS)


def test_a_pause_of_the_whole_machine_is_not_told(ticks: list[int]) -> None:
    found = stalls(5 * MS)
    found.check(100 * MS, 106 * MS, 3)
    ticks[0] += 1
    assert not found.settle(107 * MS + HELD_NS) and not found


def test_a_short_one_is_not_told(ticks: list[int]) -> None:
    found = stalls(2 * MS)
    assert not found.check(100 * MS, 106 * MS, 3) and not found


def test_many_in_a_second_are_not_told_one_by_one(ticks: list[int]) -> None:
    found = stalls(30 * MS)
    often = [found.check(at * 40 * MS, (at * 40 + 31) * MS, 3) for at in range(OFTEN + 2)]
    assert often == [False] * (OFTEN - 1) + [True] * 3
    assert len(found.settle(10_000 * MS)) == OFTEN - 1


def test_none_is_told_on_a_machine_with_too_much_to_do(ticks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_pressed", lambda still: still == 50 * MS)
    found, longer = stalls(50 * MS), stalls(120 * MS)
    assert not found.check(100 * MS, 300 * MS, 3) and not found  # however long it then had to wait for a processor
    assert not longer.check(100 * MS, 300 * MS, 3) and longer
