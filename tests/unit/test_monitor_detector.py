"""Four engines in one process over simulated links: the detector names a link that becomes slow."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.layout import Blocks, Layout
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.engine.task import Task
from mpi_gpucomp.monitor.detector import attach
from mpi_gpucomp.monitor.diagnosis import Diagnosis
from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
from mpi_gpucomp.monitor.settings import MonitorSettings
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.transport.base import Transfer, Transport
from mpi_gpucomp.transport.loopback import loopback

RANKS, PIECE, COUNT = 4, 1 << 14, 1 << 18
RATE = 100e6


class Wires:
    """How fast each link is, and when what is on it arrives."""

    def __init__(self) -> None:
        self.rates: defaultdict[tuple[int, int], float] = defaultdict(lambda: RATE)
        self._free: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.arrivals: defaultdict[tuple[int, int, int], deque[float]] = defaultdict(deque)

    def carry(self, source: int, to: int, tag: int, nbytes: int) -> float:
        """Put a message on a link, behind those that are on it; return when it arrives."""
        key = source, to
        self._free[key] = max(time.monotonic(), self._free[key]) + nbytes / self.rates[key]
        self.arrivals[source, to, tag].append(self._free[key])
        return self._free[key]


class Timed(Transfer):
    """A message that is done when the wire says so."""

    def __init__(self, inner: Transfer, arrives: Callable[[], float | None]) -> None:
        self._inner, self._arrives = inner, arrives
        self._at: float | None = None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._inner.nbytes

    def done(self) -> bool:
        if self._at is None:
            self._at = self._arrives()
        return self._at is not None and time.monotonic() >= self._at and self._inner.done()

    def cancel(self) -> bool:
        return self._at is None and self._inner.cancel()


class Wire(Transport):
    """A rank's way to the others, over these wires."""

    def __init__(self, inner: Transport, wires: Wires) -> None:
        self._inner, self._wires = inner, wires
        self.rank, self.size, self.largest_tag = inner.rank, inner.size, inner.largest_tag

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        at = self._wires.carry(self.rank, peer, tag, nbytes)
        return Timed(self._inner.send(peer, tag, address, nbytes), lambda: at)

    def receive(self, peer: int, tag: int, address: int, room: int) -> Transfer:
        arrivals = self._wires.arrivals[peer, self.rank, tag]
        return Timed(self._inner.receive(peer, tag, address, room), lambda: arrivals.popleft() if arrivals else None)

    def probe_any(self) -> int | None:
        return self._inner.probe_any()

    def discard(self, peer: int, tag: int) -> Transfer | None:
        return self._inner.discard(peer, tag)

    def send_control(self, peer: int, letter: bytes) -> None:
        self._inner.send_control(peer, letter)

    def recv_control(self) -> tuple[int, bytes] | None:
        return self._inner.recv_control()

    def revoke(self) -> None:
        self._inner.revoke()

    def close(self) -> None:
        self._inner.close()


class Ranks:
    """Four ranks that broadcast along a chain."""

    def __init__(self, hang: float = 60.0) -> None:
        self.wires = Wires()
        transports = [Wire(inner, self.wires) for inner in loopback(RANKS)]
        self.stations = [ProcessMonitor(MonitorSettings(hang=hang), rank, RANKS) for rank in range(RANKS)]
        self.engines = [Engine(transport, 2, None) for transport in transports]
        self.detectors = [
            attach(engine, range(RANKS), station) for engine, station in zip(self.engines, self.stations, strict=True)
        ]
        self._transports, self._algorithm = transports, build("broadcast", "chain", RANKS, 0)
        self._coders = [Coder(get_codec("none"), get_device("host"), inline=True) for _ in range(RANKS)]
        self._values = [np.full(COUNT, rank, np.float32) for rank in range(RANKS)]

    def begin(self, rank: int) -> Job:
        blocks = Blocks.even(as_buffer(self._values[rank]), 1)
        layout, engine = Layout(self._algorithm.spec, blocks, blocks, PIECE), self.engines[rank]
        task = Task(
            *(self._algorithm, layout, blocks.buffer.dtype, self._coders[rank], self._transports[rank]),
            engine.free_tag(),
            name="broadcast",
            plain=True,
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
            assert time.monotonic() < deadline, "the ranks are stuck"

    def broadcast(self, *, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Broadcast again and again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            jobs = [self.begin(rank) for rank in range(RANKS)]
            self.turn(jobs, lambda jobs=jobs: all(job.finished for job in jobs))  # type: ignore[misc]
            assert all(job.error is None for job in jobs)

    @property
    def alarms(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(alarm.kind, alarm.ranks) for alarm in self.stations[0].alarms.all]


@pytest.fixture
def ranks(caplog: pytest.LogCaptureFixture) -> Iterator[Ranks]:
    with caplog.at_level(logging.CRITICAL, "mpi_gpucomp.monitor"):
        yield Ranks()


@pytest.mark.parametrize("pair", [(0, 1), (1, 2)])
def test_a_wire_that_becomes_slow_is_named_and_taken_back(ranks: Ranks, pair: tuple[int, int]) -> None:
    ranks.broadcast(seconds=2.0)
    assert not ranks.alarms
    ranks.wires.rates[pair] = RATE / 6
    ranks.broadcast(seconds=20.0, until=lambda: bool(ranks.alarms))
    assert ranks.alarms == [("slow link", pair)]
    ranks.wires.rates[pair] = RATE
    ranks.broadcast(seconds=20.0, until=lambda: not ranks.stations[0].alarms.lasting)
    assert not ranks.stations[0].alarms.lasting and ranks.alarms == [("slow link", pair)]
    assert all(station.alarms.counts == {"slow link": 1} for station in ranks.stations)


def test_a_rank_whose_wires_are_all_slow_is_named(ranks: Ranks) -> None:
    ranks.broadcast(seconds=2.0)
    ranks.wires.rates[1, 2] = ranks.wires.rates[2, 3] = RATE / 6
    ranks.broadcast(seconds=20.0, until=lambda: bool(ranks.alarms))
    assert ranks.alarms == [("slow rank", (2,))]


def test_a_rank_that_does_not_join_is_named() -> None:
    ranks = Ranks(hang=0.5)
    ranks.broadcast(seconds=0.3)
    jobs = [ranks.begin(rank) for rank in (0, 1, 3)]
    ranks.turn(jobs, lambda: bool(ranks.alarms), seconds=20.0)
    assert ranks.alarms == [("hang", (2,))]
    jobs.append(ranks.begin(2))
    ranks.turn(jobs, lambda: all(job.finished for job in jobs))
    ranks.turn(jobs, lambda: not ranks.stations[0].alarms.lasting, seconds=20.0)


def test_a_verdict_needs_most_of_the_last_looks(ranks: Ranks) -> None:
    detector, busy = ranks.detectors[0], Diagnosis("slow rank", (2,), "slow rank: rank 2", times=3)
    link = Diagnosis("slow link", (0, 1), "slow link: 0 to 1")
    for said in (busy, None, busy, link, busy, busy, None):
        detector._suspect(said)
    assert not ranks.alarms
    detector._suspect(busy)
    detector._suspect(busy)
    assert ranks.alarms == [("slow rank", (2,))]


def test_a_rank_that_does_not_come_to_answer_is_named(ranks: Ranks) -> None:
    ranks.broadcast(seconds=0.3)
    engines, _ = ranks.engines, [ranks.begin(rank) for rank in range(RANKS)]
    ranks.engines = [engine for rank, engine in enumerate(engines) if rank != 2]
    end = time.monotonic() + 1.0
    ranks.turn([], lambda: time.monotonic() > end)
    ranks.detectors[0]._ask(hang=False)
    ranks.turn([], lambda: bool(ranks.alarms), seconds=20.0)
    assert ranks.alarms == [("slow rank", (2,))]
