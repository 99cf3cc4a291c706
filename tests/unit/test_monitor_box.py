"""Boxes: what is written is read, by the process itself and by others, also after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor import settings
from mpi_gpucomp.monitor.diagnosis import summarize, united
from mpi_gpucomp.monitor.recorder import Recorder
from mpi_gpucomp.monitor.trace_buffer import LinkState, State, TraceBuffer
from mpi_gpucomp.trace import CALL, ENCODE, RECV, SEND, InFlight


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    box = TraceBuffer.make(64, tmp_path / "sub" / "a.box")
    box.begin(2, 4, "host", 17, 3)
    group = Recorder(box).communicator((5, 2), 1)
    log = group.begin("broadcast", "1 x float32")
    log.joined(0)
    log.start()
    log.sent(0, 1000, 4096, 1, 7, 1)
    log.received(0, 2000, 2500, 512, 0, 1, 0)
    log.coded(ENCODE, 3000, 100, 400, 0, 9)
    log.end(failed=False)
    box.alarm("first")
    box.alarm("second")
    box.write_state(State(3, 2, 400, 100, 7, True, (1, 2, 3, 4, 5)))
    states = [LinkState(5, 1, 10, 4096, 1e6, 2e6, 77, 2, True), LinkState(2, 0, 1, 1, 0.0, 0.0, 0, 0, False)]
    box.write_links(states)
    other = TraceBuffer.open(box.path or tmp_path)
    assert (other.head.rank, other.head.size, other.head.host, other.head.pid) == (2, 4, "host", os.getpid())
    assert (other.head.offset, other.head.doubt, other.state[:7]) == (17, 3, (3, 2, 400, 100, 7, True, (1, 2, 3, 4, 5)))
    assert other.links == states
    assert other.alarms == ["first", "second"]
    records = {record["kind"]: record for record in other.records()}
    names = ("post", "transmit", "nbytes", "plain", "peer", "lane", "chunk", "rail", "call")
    assert [records[SEND][name] for name in names] == [1000, 1000, 4096, 0, 5, 1, 7, 1, 1]
    assert [records[RECV][name] for name in names] == [2000, 2500, 512, 0, 5, 0, 1, 0, 1]
    assert [records[ENCODE][name] for name in names] == [3000, 3000, 100, 400, -1, 0, 9, 0, 1]
    assert (
        records[CALL]["peer"] == 5 and records[CALL]["post"] <= records[CALL]["transmit"] <= records[CALL]["complete"]
    )
    assert other.names[records[SEND]["name"]] == "broadcast"


def test_the_ring_keeps_the_newest_and_an_old_call_harms_none() -> None:
    box = TraceBuffer.make(64)
    group = Recorder(box).communicator((0, 1), 0)
    log = group.begin("broadcast", "")
    for number in range(200):
        log.sent(1, number, 1, 0, number, 0)
    log.end(failed=False)
    records = box.records()
    assert sorted(records["post"].tolist()) == list(range(200 - 64, 200))
    assert (records["kind"] == SEND).all()


def test_all_are_counted_once_however_often_somebody_counts() -> None:
    recorder = Recorder(TraceBuffer.make(256))
    groups = [recorder.communicator((0, 1), 0) for _ in range(2)]
    for number in range(1, 1001):
        groups[number % 2].begin("x", "")
        groups[number % 2].begin("x", "").sent(1, number, 10, 0, 0, 0)
        if number % 40 == 0:
            recorder.collect()
    assert [group.tally.links[1, 0].sent for group in groups] == [5000, 5000]


def test_a_killed_process_leaves_its_records(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from mpi_gpucomp.monitor.trace_buffer import TraceBuffer
from mpi_gpucomp.monitor.recorder import Recorder
box = TraceBuffer.make(64, Path({str(tmp_path / "a.box")!r}))
box.begin(0, 1, "host")
Recorder(box).communicator((0, 1), 0).begin("broadcast", "").sent(1, 1, 77, 0, 0, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    records = TraceBuffer.open(tmp_path / "a.box").records()
    assert records[records["kind"] == SEND]["nbytes"].tolist() == [77]


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.box"
    path.write_bytes(b"something" * 20000)
    with pytest.raises(SpecError) as refused:
        TraceBuffer.open(path)
    assert str(refused.value) == (
        f"file {path}: expected a box of records, got something else."
        " Name the directory that MPI_GPUCOMP_MONITOR was set to."
    )


def test_more_names_than_there_is_room_for_share_the_last() -> None:
    box = TraceBuffer.make(64)
    numbers = [box.name(f"n{number}") for number in range(300)]
    assert numbers[:255] == list(range(255)) and set(numbers[255:]) == {255}
    assert box.names[0] == "n0" and box.names[255] == "others"
    assert box.name("n3") == 3


def test_spans_that_overlap_count_once() -> None:
    assert united([(0, 10), (5, 15), (20, 30), (28, 29), (-5, 1), (95, 200)], 0, 100) == 30
    assert united([], 0, 100) == 0


def test_a_digest_counts_what_is_under_way() -> None:
    group = Recorder(TraceBuffer.make(64)).communicator((4, 7), 0)
    log = group.begin("broadcast", "")
    log.sent(1, log.posted, 100, 0, 0, 0)
    group.recorder.collect()
    now = log.posted + 500_000_000
    waiting = InFlight(RECV, 1, 0, log.posted, log.posted + 250_000_000, 0)
    found = summarize(group, now, [waiting, InFlight(SEND, 1, 0, log.posted, 0, 100)])
    assert (found.rank, found.outside) == (4, 0.5)
    assert found.starved == {7: pytest.approx(0.5)} and found.links[0].busy == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("said", "on", "directory"),
    [("", True, None), ("off", False, None), ("0", False, None), ("on", True, None), ("/tmp/x", True, "/tmp/x")],
)
def test_the_environment_says_whether_and_where(said: str, on: bool, directory: str | None) -> None:
    chosen = settings.read({"MPI_GPUCOMP_MONITOR": said, "MPI_GPUCOMP_RECORDS": "1000"})
    assert (chosen.on, chosen.directory, chosen.records) == (on, directory, 1024)


def test_a_setting_that_means_nothing_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        settings.read({"MPI_GPUCOMP_HANG": "soon"})
    assert str(refused.value) == (
        "environment variable MPI_GPUCOMP_HANG: expected a number above 0, got 'soon'. Change or unset it."
    )


def test_file_names_say_host_process_and_rank() -> None:
    assert str(settings.fill("/x/%h-%p-%r-%%r.csv", 3)) == f"/x/{settings.host_name()}-{os.getpid()}-3-%r.csv"
