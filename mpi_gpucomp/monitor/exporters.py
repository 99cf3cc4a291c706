"""Exporters to other tools: rotating CSV files, Prometheus text files and a Prometheus endpoint, and Chrome traces.

CSV and Prometheus get the figures of links and ranks while the program runs. A Chrome trace, for Perfetto, shows the
records of all ranks: a row per rank, lane and kind of work.
"""

from __future__ import annotations

import csv
import io
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor import files
from mpi_gpucomp.monitor.diagnosis import ALARM_KINDS
from mpi_gpucomp.monitor.settings import fill
from mpi_gpucomp.monitor.trace_buffer import aligned
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, KINDS, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.trace_buffer import LinkState, ProcessState, TraceBuffer

__all__ = [
    "CONTENT_TYPE",
    "CSV_HEADER",
    "CsvFile",
    "Exporter",
    "chrome_trace",
    "exposition",
    "rows",
    "serve",
    "spans",
    "write",
]

SECONDS = 1.0
"""Between exports."""
CSV_HEADER = ("time", "group", "from", "to", "rail", "collective", "count", "bandwidth", "in_flight", "waiting")
MAX_CSV_BYTES, CSV_FILES = 8 << 20, 4
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 16
"""Of the endpoint; a further one takes the place of the oldest."""
SILENT_SECONDS = 5.0
"""After which a connection that sends nothing is closed."""

ROWS = {ENCODE: 0, SEND: 1, RECV: 2, DECODE: 3}
"""In the order in which a chunk passes them."""


def rows(buffer: TraceBuffer, since: int) -> list[list[Any]]:
    """Return a CSV row for each link with sends completed since a time of the trace buffer's clock."""
    sent = buffer.records(since)
    sent = sent[sent["kind"] == SEND]
    names, own, found = buffer.names, buffer.header.rank, []
    states = {(link.peer, link.rail): link for link in buffer.links}
    for comm, peer, rail in sorted(set(sent[["comm", "peer", "rail"]].tolist())):
        some = sent[(sent["comm"] == comm) & (sent["peer"] == peer) & (sent["rail"] == rail)]
        state = states.get((peer, rail))
        last = some[np.argmax(some["complete"])]
        figures = (round(state.bandwidth), state.chunks_in_flight, state.bytes_in_flight) if state else (0, 0, 0)
        found.append([f"{time.time():.3f}", comm, own, peer, rail, names[last["name"]], len(some), *figures])
    return found


class CsvFile:
    """A CSV file that is rotated when it is full."""

    def __init__(self, path: Path, max_bytes: int = MAX_CSV_BYTES, files: int = CSV_FILES) -> None:
        """Keep at most this many files of about this many bytes."""
        self._path, self._max_bytes, self._files = path, max_bytes, files

    def add(self, found: list[list[Any]]) -> None:
        """Add rows."""
        if not found:
            return
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            self._rotate()
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(found if self._path.exists() else [CSV_HEADER, *found])
        files.append(self._path, lines.getvalue())

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path if number == 1 else self._path.with_name(f"{self._path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)


RANK_METRICS: dict[str, tuple[str, str, Callable[[ProcessState], float]]] = {
    "calls_begun_total": ("counter", "Calls begun", lambda state: state.begun),
    "calls_ended_total": ("counter", "Calls ended", lambda state: state.ended),
    "raw_bytes_total": ("counter", "Bytes before encoding", lambda state: state.raw_bytes),
    "encoded_bytes_total": ("counter", "Bytes after encoding", lambda state: state.encoded_bytes),
    "join_wait_seconds_total": ("counter", "Time spent waiting for ranks to join", lambda state: state.join_wait / 1e9),
    "seen_timestamp_seconds": ("gauge", "Last heartbeat of the rank", lambda state: state.wall / 1e9),
}
LINK_METRICS: dict[str, tuple[str, str, Callable[[LinkState], float]]] = {
    "sent_bytes_total": ("counter", "Bytes sent over a link", lambda link: link.nbytes),
    "sent_chunks_total": ("counter", "Chunks sent over a link", lambda link: link.chunks),
    "link_bytes_per_second": ("gauge", "Bandwidth of the last window of chunks", lambda link: link.bandwidth),
    "link_mean_bytes_per_second": ("gauge", "Mean bandwidth before", lambda link: link.mean),
    "link_bytes_in_flight": ("gauge", "Bytes in flight", lambda link: link.bytes_in_flight),
    "link_chunks_in_flight": ("gauge", "Chunks in flight", lambda link: link.chunks_in_flight),
    "link_slow": ("gauge", "Whether the link is below half of its mean", lambda link: link.slow),
}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> list[str]:
    name = f"mpi_gpucomp_{name}"
    return [
        f"# HELP {name} {about}.",
        f"# TYPE {name} {kind}",
        *(f"{name}{{{who}}} {value:.15g}" for who, value in values),
    ]


def exposition(buffers: Sequence[TraceBuffer]) -> str:
    """Return the figures of all ranks and links in Prometheus' text format."""
    ranks = [(f'rank="{one.header.rank}",host="{_escaped(one.header.host)}"', one) for one in buffers]
    states = [(who, buffer.state) for who, buffer in ranks]
    links = [(f'{who},to="{link.peer}",rail="{link.rail}"', link) for who, buffer in ranks for link in buffer.links]
    lines: list[str] = []
    for name, (kind, about, value) in RANK_METRICS.items():
        lines += _metric(name, kind, about, [(who, value(state)) for who, state in states])
    for name, (kind, about, of_link) in LINK_METRICS.items():
        lines += _metric(name, kind, about, [(who, of_link(link)) for who, link in links])
    alarms = [
        (f'{who},kind="{kind}"', count)
        for who, state in states
        for kind, count in zip(ALARM_KINDS, state.alarms, strict=True)
    ]
    return "\n".join(lines + _metric("alarms_total", "counter", "Alarms", alarms)) + "\n"


def write(path: Path, buffers: Sequence[TraceBuffer]) -> None:
    """Write a Prometheus text file; readers never see it half written."""
    files.replace(path, exposition(buffers), files.PUBLIC)  # the exporter that collects it is another user


class _BoundedServer(ThreadingHTTPServer):
    """A server with a bounded number of connections, each of which has a thread."""

    def __init__(self, *arguments: Any) -> None:
        self._connections: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread; end the oldest one if there are too many."""
        with self._lock:
            self._connections.append(request)
            oldest = self._connections.popleft() if len(self._connections) > MAX_CONNECTIONS else None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock, suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client has gone away."""


def serve(where: str, buffers: Callable[[], Sequence[TraceBuffer]], added: int = 0) -> ThreadingHTTPServer:
    """Serve /metrics from a thread at [address:]port, on the loopback interface unless an address is given."""
    address, _, port = where.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) + added <= 65535:
        remedy = "Write 9400, or 0.0.0.0:9400 to let other machines read it."
        raise SpecError("endpoint", expected="[address:]port", got=repr(where), remedy=remedy)

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_SECONDS

        def do_GET(self) -> None:
            """Send the metrics."""
            known = self.path.partition("?")[0] in ("/", "/metrics")
            body = exposition(buffers()).encode() if known else b"not found: see /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", CONTENT_TYPE if known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    try:
        server = _BoundedServer((address or LOOPBACK, int(port) + added if int(port) else 0), Handler)
    except OSError as error:
        raise SpecError(
            f"endpoint {where}", expected="a free port", got=str(error), remedy="Choose another one."
        ) from error
    threading.Thread(target=server.serve_forever, name="gpucomp-serve", daemon=True).start()
    return server


class Exporter:
    """A thread that exports what the settings ask for once a second, until it is closed."""

    def __init__(self, process: ProcessMonitor) -> None:
        """Start the thread."""
        chosen, rank = process.settings, process.rank
        self._process, self._buffer = process, process.buffer
        self._csv = CsvFile(fill(chosen.csv, rank)) if chosen.csv else None
        self._prometheus = fill(chosen.prometheus, rank) if chosen.prometheus else None
        if chosen.serve:  # each rank of a machine has its own port
            serve(chosen.serve, lambda: [self._buffer], added=rank)
        self._written, self._end = perf_counter_ns(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpucomp-exporter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SECONDS):
            self._write()

    def _write(self) -> None:
        since, self._written = self._written, perf_counter_ns()
        self._process.recorder.collect()
        self._process.write_state()
        try:
            if self._csv is not None:
                self._csv.add(rows(self._buffer, since))
            if self._prometheus is not None:
                write(self._prometheus, [self._buffer])
        except OSError as error:  # such as a full disk: the program goes on
            print(f"rank {self._process.rank}: no more exports: {error}", file=sys.stderr)
            self._csv = self._prometheus = None

    def close(self) -> None:
        """Export once more, and end the thread."""
        self._end.set()
        self._thread.join()
        self._write()


def spans(records: npt.NDArray[Any]) -> list[tuple[int, int, dict[str, int]]]:
    """Return the start and end of the work on each record of a row, which works on one after the other."""
    found, last = [], 0
    names = records.dtype.names or ()
    for record in sorted(records.tolist(), key=lambda record: record[names.index("complete")]):
        one = dict(zip(names, record, strict=True))
        waits = one["transmit"] if one["kind"] == RECV and one["transmit"] else one["post"]
        found.append((max(waits, last), one["complete"], one))
        last = one["complete"]
    return found


def chrome_trace(buffers: Sequence[TraceBuffer]) -> dict[str, Any]:
    """Return the Chrome trace of all ranks, on the clock of the first."""
    records = aligned(buffers)
    first = min((int(some["post"].min()) for some in records if len(some)), default=0)
    events: list[dict[str, Any]] = []
    for buffer, some in zip(buffers, records, strict=True):
        events += _rank_events(buffer, some, first)
    headers = [buffer.header for buffer in buffers]
    uncertainty = max((header.uncertainty for header in headers), default=0)
    clocks = f"measured, within {uncertainty / 1e3:.0f} us"
    if any(header.uncertainty < 0 for header in headers):
        clocks = "wall clocks"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks, "ranks": str(len(buffers))}}


def _rank_events(buffer: TraceBuffer, records: npt.NDArray[Any], first: int) -> Iterator[dict[str, Any]]:
    header, names = buffer.header, buffer.names
    yield _name_event("process_name", header.rank, 0, f"rank {header.rank} ({header.host})")
    yield {**_name_event("process_sort_index", header.rank, 0, ""), "args": {"sort_index": header.rank}}
    for call in records[records["kind"] == CALL]:
        yield from _call_events(call, header.rank, names, first)
    work = records[records["kind"] != CALL]
    for lane, kind in sorted(set(work[["lane", "kind"]].tolist()), key=lambda row: (row[0], ROWS[row[1]])):
        row = 1 + lane * len(ROWS) + ROWS[kind]
        yield _name_event("thread_name", header.rank, row, f"lane {lane}: {KINDS[kind]}")
        yield {**_name_event("thread_sort_index", header.rank, row, ""), "args": {"sort_index": row}}
        for begin, end, one in spans(work[(work["lane"] == lane) & (work["kind"] == kind)]):
            yield _work_event(begin - first, end - begin, one, (header.rank, row), names)


def _name_event(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _call_events(call: Any, rank: int, names: list[str], first: int) -> Iterator[dict[str, Any]]:
    """Yield the begin and end events of a call: calls may overlap."""
    title = f"{names[call['name']]} (call {call['call']})"
    common = {"cat": "call", "name": title, "id": f"{rank}.{call['comm']}.{call['call']}", "pid": rank, "tid": 0}
    joined = (int(call["transmit"]) - int(call["post"])) / 1e3 if call["transmit"] else None
    yield {**common, "ph": "b", "ts": (int(call["post"]) - first) / 1e3, "args": {"waited for ranks (us)": joined}}
    if call["complete"]:
        yield {**common, "ph": "e", "ts": (int(call["complete"]) - first) / 1e3}


def _work_event(begin: int, took: int, one: dict[str, int], row: tuple[int, int], names: list[str]) -> dict[str, Any]:
    kind = one["kind"]
    name = {SEND: f"to {one['peer']}", RECV: f"from {one['peer']}"}.get(kind, f"{KINDS[kind]} {one['chunk']}")
    args: dict[str, Any] = {"call": f"{names[one['name']]} (call {one['call']})", "bytes": one["nbytes"]}
    if kind in (SEND, RECV):
        posted = (one["complete"] - took - one["post"]) / 1e3
        args |= {"message": one["chunk"], "rail": one["rail"], "posted (us before)": posted}
    else:
        args |= {"raw bytes": one["raw_bytes"], "ratio": round(one["raw_bytes"] / max(1, one["nbytes"]), 3)}
    pid, tid = row
    return {
        **{"ph": "X", "cat": KINDS[kind], "name": name, "pid": pid, "tid": tid},
        **{"ts": begin / 1e3, "dur": took / 1e3, "args": args},
    }
