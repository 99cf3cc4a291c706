"""Trace buffers: written by a process, read by itself and others, also after it was killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor import settings
from mpi_gpucomp.monitor.diagnosis import summarize, united
from mpi_gpucomp.monitor.recorder import Recorder
from mpi_gpucomp.monitor.trace_buffer import LinkState, ProcessState, TraceBuffer
from mpi_gpucomp.trace import CALL, ENCODE, RECV, SEND, InFlight


def test_records_are_read_back(tmp_path: Path) -> None:
    buffer = TraceBuffer.make(64, tmp_path / "sub" / "a.trace")
    buffer.begin(2, 4, "host", 17, 3)
    trace = Recorder(buffer).communicator((5, 2), 1)
    call = trace.begin("broadcast", "1 x float32")
    call.joined(0)
    call.start()
    call.sent(0, 1000, 4096, 1, 7, 1)
    call.received(0, 2000, 2500, 512, 0, 1, 0)
    call.coded(ENCODE, 3000, 100, 400, 0, 9)
    call.end(failed=False)
    buffer.alarm("first")
    buffer.alarm("second")
    buffer.write_state(ProcessState(3, 2, 400, 100, 7, True, (1, 2, 3, 4, 5)))
    states = [LinkState(5, 1, 10, 4096, 1e6, 2e6, 77, 2, True), LinkState(2, 0, 1, 1, 0.0, 0.0, 0, 0, False)]
    buffer.write_links(states)
    other = TraceBuffer.open(buffer.path or tmp_path)
    assert (other.header.rank, other.header.size, other.header.host, other.header.pid) == (2, 4, "host", os.getpid())
    assert (other.header.offset, other.header.uncertainty, other.state[:7]) == (
        17,
        3,
        (3, 2, 400, 100, 7, True, (1, 2, 3, 4, 5)),
    )
    assert other.links == states
    assert other.alarms == ["first", "second"]
    records = {record["kind"]: record for record in other.records()}
    names = ("post", "transmit", "nbytes", "raw_bytes", "peer", "lane", "chunk", "rail", "call")
    assert [records[SEND][name] for name in names] == [1000, 1000, 4096, 0, 5, 1, 7, 1, 1]
    assert [records[RECV][name] for name in names] == [2000, 2500, 512, 0, 5, 0, 1, 0, 1]
    assert [records[ENCODE][name] for name in names] == [3000, 3000, 100, 400, -1, 0, 9, 0, 1]
    assert (
        records[CALL]["peer"] == 5 and records[CALL]["post"] <= records[CALL]["transmit"] <= records[CALL]["complete"]
    )
    assert other.names[records[SEND]["name"]] == "broadcast"


def test_ring_keeps_the_newest_records() -> None:
    buffer = TraceBuffer.make(64)
    trace = Recorder(buffer).communicator((0, 1), 0)
    call = trace.begin("broadcast", "")
    for number in range(200):
        call.sent(1, number, 1, 0, number, 0)
    call.end(failed=False)
    records = buffer.records()
    assert sorted(records["post"].tolist()) == list(range(200 - 64, 200))
    assert (records["kind"] == SEND).all()


def test_every_record_is_counted_once() -> None:
    recorder = Recorder(TraceBuffer.make(256))
    traces = [recorder.communicator((0, 1), 0) for _ in range(2)]
    for number in range(1, 1001):
        traces[number % 2].begin("x", "")
        traces[number % 2].begin("x", "").sent(1, number, 10, 0, 0, 0)
        if number % 40 == 0:
            recorder.collect()
    assert [trace.counters.links[1, 0].nbytes for trace in traces] == [5000, 5000]


def test_records_of_a_killed_process(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from mpi_gpucomp.monitor.trace_buffer import TraceBuffer
from mpi_gpucomp.monitor.recorder import Recorder
buffer = TraceBuffer.make(64, Path({str(tmp_path / "a.trace")!r}))
buffer.begin(0, 1, "host")
Recorder(buffer).communicator((0, 1), 0).begin("broadcast", "").sent(1, 1, 77, 0, 0, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    records = TraceBuffer.open(tmp_path / "a.trace").records()
    assert records[records["kind"] == SEND]["nbytes"].tolist() == [77]


def written(path: Path) -> bytes:
    """Write a trace with some records; return its bytes."""
    buffer = TraceBuffer.make(128, path)
    buffer.begin(0, 1, "host")
    call = Recorder(buffer).communicator((0, 1), 0).begin("broadcast", "")
    call.start()
    for number in range(40):
        call.sent(1, 1, 77, 0, number, 0)
        call.coded(ENCODE, 1, 77, 99, 0, number)
    call.end(failed=False)
    buffer.alarm("alarm \x1b[2J")
    buffer.write_state(ProcessState(1, 1, 99, 77))
    buffer.write_links([LinkState(1, 0, 40, 4096, 1e6, 2e6, 0, 0, False)])
    return path.read_bytes()


def changed(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    ("damage", "got"),
    [
        (lambda data: b"something" * 20000, "a file of another kind"),
        (lambda data: data[:1000], "1000 bytes, which is too short"),
        (lambda data: data[:-10], "61430 bytes, which is no whole ring of records"),
        (lambda data: data + data[-64:], "61504 bytes, which is no whole ring of records"),
        (lambda data: changed(data, 8, b"\x02"), "version 2, this library reads version 1"),
        (lambda data: changed(data, 12, b"\x05"), "rank 5 of 1"),
        (lambda data: changed(data, 256, b"\xff" * 8), "a header with negative times or totals"),
        (lambda data: changed(data, 512 + 24, b"\xff" * 8), "links whose bandwidth is no number"),
        (lambda data: data[:-8192] + b"\xaa" * 8192, "128 damaged records"),
    ],
)
def test_invalid_trace(tmp_path: Path, damage: Callable[[bytes], bytes], got: str) -> None:
    path = tmp_path / "x.trace"
    path.write_bytes(damage(written(tmp_path / "good")))
    with pytest.raises(SpecError) as refused:
        TraceBuffer.open(path)
    assert str(refused.value) == (
        f"file {path}: expected a trace that a rank has written, got {got}."
        " Name the directory that MPI_GPUCOMP_MONITOR was set to, and remove damaged files from it."
    )


def test_fifo_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.trace")
    with pytest.raises(SpecError, match="got something that is not a file"):
        TraceBuffer.open(tmp_path / "x.trace")


def test_damaged_traces_are_errors_or_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, rng, path, refused = written(tmp_path / "good"), random.Random(0), tmp_path / "x.trace", 0
    for number in range(60):
        data = bytearray(good)
        for _ in range(1 << rng.randrange(12)):
            data[rng.choice((rng.randrange(len(data)), rng.randrange(4096)))] = rng.randrange(256)
        data[:8] = good[:8]
        path.write_bytes(data)
        name = ("monitor", "trace", "report")[number % 3]
        status = main([name, str(tmp_path), *(["--once"] if name == "monitor" else ["-o", str(tmp_path / "out")])])
        shown = capsys.readouterr()
        assert status == 0 or (status == 2 and f"file {path}: expected a trace" in shown.err), shown.err
        assert "\x1b[2J" not in shown.out
        refused += status == 2
    assert 0 < refused < 60


def test_names_beyond_the_last_share_its_number() -> None:
    buffer = TraceBuffer.make(64)
    numbers = [buffer.name(f"n{number}") for number in range(300)]
    assert numbers[:255] == list(range(255)) and set(numbers[255:]) == {255}
    assert buffer.names[0] == "n0" and buffer.names[255] == "others"
    assert buffer.name("n3") == 3


def test_overlapping_spans_count_once() -> None:
    assert united([(0, 10), (5, 15), (20, 30), (28, 29), (-5, 1), (95, 200)], 0, 100) == 30
    assert united([], 0, 100) == 0


def test_summary_counts_transfers_in_flight() -> None:
    trace = Recorder(TraceBuffer.make(64)).communicator((4, 7), 0)
    call = trace.begin("broadcast", "")
    call.sent(1, call.posted, 100, 0, 0, 0)
    trace.recorder.collect()
    now = call.posted + 500_000_000
    waiting = InFlight(RECV, 1, 0, call.posted, call.posted + 250_000_000, 0)
    found = summarize(trace, now, [waiting, InFlight(SEND, 1, 0, call.posted, 0, 100)])
    assert (found.rank, found.outside) == (4, 0.5)
    assert found.recv_wait == {7: pytest.approx(0.5)} and found.links[0].busy == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "on", "directory"),
    [("", True, None), ("off", False, None), ("0", False, None), ("on", True, None), ("/tmp/x", True, "/tmp/x")],
)
def test_environment_enables_the_monitor(text: str, on: bool, directory: str | None) -> None:
    chosen = settings.read({"MPI_GPUCOMP_MONITOR": text, "MPI_GPUCOMP_RECORDS": "1000"})
    assert (chosen.on, chosen.directory, chosen.records) == (on, directory, 1024)


def test_invalid_setting() -> None:
    with pytest.raises(SpecError) as refused:
        settings.read({"MPI_GPUCOMP_HANG": "soon"})
    assert str(refused.value) == (
        "environment variable MPI_GPUCOMP_HANG: expected a number above 0, got 'soon'. Change or unset it."
    )


def test_file_names_with_host_process_and_rank() -> None:
    assert str(settings.fill("/x/%h-%p-%r-%%r.csv", 3)) == f"/x/{settings.host_name()}-{os.getpid()}-3-%r.csv"
