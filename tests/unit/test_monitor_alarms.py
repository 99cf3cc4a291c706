"""Alarms: said once, kept while they last, taken back when they are over."""

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


def test_an_alarm_is_said_once_and_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, clock = TraceBuffer.make(64), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    alarms = Alarms(box, 3, tmp_path / "log")
    with caplog.at_level(logging.WARNING):
        assert alarms.add(SLOW) is not None
        clock[0] += 2.0
        assert alarms.add(SLOW) is None
        clock[0] += 2.0
        assert not alarms.expire() and [alarm.text for alarm in alarms.lasting] == [SLOW.text]
        clock[0] += 2.0
        assert [alarm.over for alarm in alarms.expire()] == [True] and not alarms.lasting
    assert caplog.messages[0] == "rank 3: slow link: from rank 1 to rank 2"
    assert re.fullmatch(r"rank 3: over after \S+ s: slow link: from rank 1 to rank 2", caplog.messages[1])
    assert alarms.counts == {"slow link": 1} and len(box.alarms) == 2
    assert (tmp_path / "log").read_text().count("slow link") == 2


def test_hangs_last_until_something_moves_and_stalls_are_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms, before = Alarms(TraceBuffer.make(64), 0), time.monotonic()
    alarms.add(Diagnosis("stall", (1,), "stall"), loud=False)
    alarms.add(Diagnosis("hang", (2,), "hang"), loud=False)
    monkeypatch.setattr(module.time, "monotonic", lambda: before + 1000)
    assert not alarms.expire() and [alarm.kind for alarm in alarms.lasting] == ["hang"]
    assert [alarm.kind for alarm in alarms.moved()] == ["hang"] and not alarms.lasting
