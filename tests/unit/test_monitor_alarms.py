"""Alarms are raised once, kept while they last, and then over."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from mpi_gpucomp.monitor import process_monitor as module
from mpi_gpucomp.monitor.diagnosis import Diagnosis
from mpi_gpucomp.monitor.process_monitor import Alarms
from mpi_gpucomp.monitor.trace_buffer import TraceBuffer

SLOW = Diagnosis("slow link", (1, 2), "slow link: from rank 1 to rank 2")


def test_alarm_is_raised_once_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, clock = TraceBuffer.make(64), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    alarms = Alarms(buffer, 3, tmp_path / "logs" / "log")
    with caplog.at_level(logging.WARNING):
        assert alarms.add(SLOW) is not None
        clock[0] += 2.0
        assert alarms.add(SLOW) is None
        clock[0] += 2.0
        assert not alarms.expire() and [alarm.text for alarm in alarms.active] == [SLOW.text]
        clock[0] += 2.0
        assert [alarm.over for alarm in alarms.expire()] == [True] and not alarms.active
    assert caplog.messages[0] == "rank 3: slow link: from rank 1 to rank 2"
    assert re.fullmatch(r"rank 3: over after \S+ s: slow link: from rank 1 to rank 2", caplog.messages[1])
    assert alarms.counts == {"slow link": 1} and len(buffer.alarms) == 2
    assert (tmp_path / "logs" / "log").read_text().count("slow link") == 2


def test_hangs_last_until_progress_and_stalls_are_momentary(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms, before = Alarms(TraceBuffer.make(64), 0), time.monotonic()
    alarms.add(Diagnosis("stall", (1,), "stall"), logged=False)
    alarms.add(Diagnosis("hang", (2,), "hang"), logged=False)
    monkeypatch.setattr(module.time, "monotonic", lambda: before + 1000)
    assert not alarms.expire() and [alarm.kind for alarm in alarms.active] == ["hang"]
    assert [alarm.kind for alarm in alarms.end_hangs()] == ["hang"] and not alarms.active
