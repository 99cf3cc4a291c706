"""A stall is reported unless the whole machine was paused, or stalls are frequent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpi_gpucomp.monitor import processor as module
from mpi_gpucomp.monitor.processor import FREQUENT, HELD_NS, CpuUsage, StallDetector, ThreadCounters

MS = 1_000_000


class Counts(CpuUsage):
    """A stall of a given length."""

    def __init__(self, stalled: int) -> None:
        super().__init__(ThreadCounters())
        self._stalled, self.stolen_ticks = stalled, 7

    def stalled_ns(self, begin: int, end: int, naps: int) -> int:
        return self._stalled


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ticks that a hypervisor has taken, for a test to change."""
    taken = [7]
    monkeypatch.setattr(module, "_stolen_ticks", lambda: taken[0])
    monkeypatch.setattr(module, "_is_excused", lambda length: False)
    return taken


def stalls(stalled: int) -> StallDetector:
    engine = SimpleNamespace(snapshot=lambda: SimpleNamespace(waits=[SimpleNamespace(title="broadcast (call 9)")]))
    process = SimpleNamespace(rank=2, host="h2")
    return StallDetector(cast(Any, engine), cast(Any, process), Counts(stalled))


def test_stall_is_reported_after_a_moment(ticks: list[int]) -> None:
    found = stalls(5 * MS)
    assert not found.check(100 * MS, 106 * MS, 3)
    assert found and not found.flush(106 * MS + HELD_NS)
    reported = found.flush(107 * MS + HELD_NS)
    assert [one.text for one in reported] == ["stall: rank 2 (h2) did not run for 5.0 ms in broadcast (call 9)"]
    assert [(one.kind, one.ranks) for one in reported] == [("stall", (2,))]
    assert not found and not found.flush(200 * MS + HELD_NS)


def test_pause_of_the_whole_machine_is_no_stall(ticks: list[int]) -> None:
    found = stalls(5 * MS)
    found.check(100 * MS, 106 * MS, 3)
    ticks[0] += 1
    assert not found.flush(107 * MS + HELD_NS) and not found


def test_short_gap_is_no_stall(ticks: list[int]) -> None:
    found = stalls(2 * MS)
    assert not found.check(100 * MS, 106 * MS, 3) and not found


def test_frequent_stalls_are_not_reported_singly(ticks: list[int]) -> None:
    found = stalls(30 * MS)
    often = [found.check(at * 40 * MS, (at * 40 + 31) * MS, 3) for at in range(FREQUENT + 2)]
    assert often == [False] * (FREQUENT - 1) + [True] * 3
    assert len(found.flush(10_000 * MS)) == FREQUENT - 1


def test_short_stalls_under_cpu_pressure_do_not_count(ticks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_excused", lambda length: length == 50 * MS)
    found, longer = stalls(50 * MS), stalls(120 * MS)
    assert not found.check(100 * MS, 300 * MS, 3) and not found
    assert not longer.check(100 * MS, 300 * MS, 3) and longer
