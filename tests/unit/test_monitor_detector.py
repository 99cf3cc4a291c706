"""Four engines in one process over simulated links: the detector names a link that becomes slow."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.program import Blocks, Layout
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.engine.task import CollectiveTask
from mpi_gpucomp.monitor.detector import attach, ignore_messages
from mpi_gpucomp.monitor.diagnosis import Diagnosis
from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
from mpi_gpucomp.monitor.settings import MonitorSettings
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.transport.loopback import loopback

RANKS, CHUNK, COUNT = 4, 1 << 15, 1 << 18
RATE = 20e6
"""Bytes per second: slow enough for the links to be the bottleneck on a busy machine."""


class Ranks:
    """Four ranks that broadcast along a chain."""

    def __init__(self, hang: float = 60.0) -> None:
        self._wires = loopback(RANKS)
        self.network = self._wires[0].network
        for rank in range(RANKS):
            self.network.set_rate(rank, (rank + 1) % RANKS, RATE)
        self.monitors = [ProcessMonitor(MonitorSettings(hang=hang), rank, RANKS) for rank in range(RANKS)]
        self.engines = [Engine(wire, 2, None) for wire in self._wires]
        self.detectors = [
            attach(engine, range(RANKS), monitor) for engine, monitor in zip(self.engines, self.monitors, strict=True)
        ]
        self._algorithm = build("broadcast", "chain", RANKS, 0)
        self._coders = [Coder(get_codec("none"), get_device("host"), inline=True) for _ in range(RANKS)]
        self._values = [np.full(COUNT, rank, np.float32) for rank in range(RANKS)]

    def begin(self, rank: int) -> Job:
        blocks = Blocks.even(as_buffer(self._values[rank]), 1)
        layout, engine = Layout(self._algorithm.spec, blocks, blocks, CHUNK), self.engines[rank]
        task = CollectiveTask(
            *(self._algorithm, layout, blocks.buffer.dtype, self._coders[rank], self._wires[rank]),
            engine.free_tag(),
            name="broadcast",
            raw=True,
        )
        job = Job(task, "a broadcast")
        job.waiters = 1
        engine.submit(job)
        return job

    def turn(self, jobs: list[Job], until: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            for engine in self.engines:
                engine.progress()
            time.sleep(1e-4)
            assert time.monotonic() < deadline, "no progress"

    def broadcast(self, *, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Broadcast repeatedly."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            jobs = [self.begin(rank) for rank in range(RANKS)]
            self.turn(jobs, lambda jobs=jobs: all(job.finished for job in jobs))  # type: ignore[misc]
            assert all(job.error is None for job in jobs)

    @property
    def alarms(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(alarm.kind, alarm.ranks) for alarm in self.monitors[0].alarms.all]


@pytest.fixture
def ranks(caplog: pytest.LogCaptureFixture) -> Iterator[Ranks]:
    with caplog.at_level(logging.CRITICAL, "mpi_gpucomp.monitor"):
        yield Ranks()


@pytest.mark.parametrize("pair", [(0, 1), (1, 2)])
def test_slow_link_is_named_and_recovers(ranks: Ranks, pair: tuple[int, int]) -> None:
    ranks.broadcast(seconds=2.0)
    assert not ranks.alarms
    ranks.network.set_rate(*pair, RATE / 6)
    ranks.broadcast(seconds=20.0, until=lambda: bool(ranks.alarms))
    assert ranks.alarms == [("slow link", pair)]
    ranks.network.set_rate(*pair, RATE)
    ranks.broadcast(seconds=20.0, until=lambda: not ranks.monitors[0].alarms.active)
    assert not ranks.monitors[0].alarms.active and ranks.alarms == [("slow link", pair)]
    assert all(monitor.alarms.counts == {"slow link": 1} for monitor in ranks.monitors)


def test_rank_with_slow_links_is_named(ranks: Ranks) -> None:
    ranks.broadcast(seconds=2.0)
    ranks.network.set_rate(1, 2, RATE / 6)
    ranks.network.set_rate(2, 3, RATE / 6)
    ranks.broadcast(seconds=20.0, until=lambda: bool(ranks.alarms))
    assert ranks.alarms == [("slow rank", (2,))]


def test_rank_that_does_not_join_is_named() -> None:
    ranks = Ranks(hang=0.5)
    ranks.broadcast(seconds=0.3)
    jobs = [ranks.begin(rank) for rank in (0, 1, 3)]
    ranks.turn(jobs, lambda: bool(ranks.alarms), seconds=20.0)
    assert ranks.alarms == [("hang", (2,))]
    jobs.append(ranks.begin(2))
    ranks.turn(jobs, lambda: all(job.finished for job in jobs))
    ranks.turn(jobs, lambda: not ranks.monitors[0].alarms.active, seconds=20.0)


def test_diagnosis_must_be_repeated(ranks: Ranks) -> None:
    detector, busy = ranks.detectors[0], Diagnosis("slow rank", (2,), "slow rank: rank 2", times=3)
    link = Diagnosis("slow link", (0, 1), "slow link: 0 to 1")
    for diagnosis in (busy, None, busy, link, busy, busy, None):
        detector._suspect(diagnosis)
    assert not ranks.alarms
    detector._suspect(busy)
    detector._suspect(busy)
    assert ranks.alarms == [("slow rank", (2,))]


def test_silent_rank_is_named(ranks: Ranks) -> None:
    ranks.broadcast(seconds=0.3)
    engines, _ = ranks.engines, [ranks.begin(rank) for rank in range(RANKS)]
    ranks.engines = [engine for rank, engine in enumerate(engines) if rank != 2]
    end = time.monotonic() + 1.0
    ranks.turn([], lambda: time.monotonic() > end)
    ranks.detectors[0]._ask(hang=False)
    ranks.turn([], lambda: bool(ranks.alarms), seconds=20.0)
    assert ranks.alarms == [("slow rank", (2,))]


def test_same_evidence_counts_once(ranks: Ranks) -> None:
    slow = Diagnosis("slow link", (0, 1), "slow link: 0 to 1", times=2, evidence=7)
    for _ in range(5):
        ranks.detectors[0]._suspect(slow)
    assert not ranks.alarms
    ranks.detectors[0]._suspect(slow._replace(evidence=8))
    assert ranks.alarms == [("slow link", (0, 1))]


def test_diagnosis_of_busy_ranks_must_be_repeated_more_often(ranks: Ranks) -> None:
    slow = Diagnosis("slow link", (0, 1), "slow link: 0 to 1", times=6)
    for diagnosis in (slow, slow._replace(times=2), slow, slow, slow):
        ranks.detectors[0]._suspect(diagnosis)
    assert not ranks.alarms
    ranks.detectors[0]._suspect(slow)
    assert ranks.alarms == [("slow link", (0, 1))]


def test_malformed_summary_is_logged_with_its_sender(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    detector = ranks.detectors[0]
    detector._ask(hang=False)
    with caplog.at_level(logging.ERROR, "mpi_gpucomp.monitor"):
        detector._on_summary(2, detector._numbers, "")
        detector._on_summary(2, detector._numbers, ranks.detectors[3]._summary().to_json())
        detector._on_alarm(1, 0, '["no such kind", [], "", 1, 0]')
    assert [message.partition(":")[2].strip() for message in caplog.messages] == [
        "malformed summary from rank 2: Expecting value: line 1 column 1 (char 0)",
        "malformed summary from rank 2: it is of rank 3",
        "malformed alarm from rank 1: unknown kind of alarm 'no such kind'",
    ]
    assert not ranks.alarms


def test_rank_without_a_monitor_ignores_its_messages(ranks: Ranks) -> None:
    engines = [Engine(transport) for transport in loopback(2)]
    ignore_messages(engines[1])
    for kind in ("monitor.ask", "monitor.symptom"):
        engines[0].broadcast_control(kind, *([1] if kind == "monitor.ask" else []))
    engines[1].progress()
    assert engines[1].broken is None


def counter_files() -> list[str]:
    """Return the open files of thread counters."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.endswith("/schedstat")]


def test_files_of_thread_counters_are_shared_and_closed_with_the_last_communicator() -> None:
    gc.disable()
    try:
        process = ProcessMonitor(MonitorSettings(), 0, 1)
        engines = [Engine(loopback(1)[0]) for _ in range(5)]
        detectors = [attach(engine, range(1), process) for engine in engines]
        before = len(counter_files())
        for detector in detectors:
            detector._processor.sample()
        assert 0 < len(counter_files()) - before <= threading.active_count()
        for engine in engines[1:]:
            engine.observer.close()
        assert len(counter_files()) > before
        engines[0].observer.close()
        assert len(counter_files()) == before
    finally:
        gc.enable()
