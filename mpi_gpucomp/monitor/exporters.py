"""A thread that writes what the settings ask for once a second: rows, Prometheus' file, and its endpoint."""

from __future__ import annotations

import csv
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.diagnosis import ALARM_KINDS
from mpi_gpucomp.monitor.settings import fill
from mpi_gpucomp.trace import SEND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.trace_buffer import LinkState, State, TraceBuffer

__all__ = ["CONTENT", "HEADER", "CsvFile", "Writer", "exposition", "rows", "serve", "write"]


# Rows of comma-separated values: how each link did since the last row, in files that take turns.

HEADER = ("time", "group", "from", "to", "rail", "collective", "count", "bandwidth", "in_flight", "waiting")
MOST_BYTES, FILES = 8 << 20, 4


def rows(box: TraceBuffer, since: int) -> list[list[Any]]:
    """Return a row for each link that has sent something since a time of the box's clock."""
    sent = box.records(since)
    sent = sent[sent["kind"] == SEND]
    names, own, found = box.names, box.head.rank, []
    states = {(link.peer, link.rail): link for link in box.links}
    for group, peer, rail in sorted(set(sent[["group", "peer", "rail"]].tolist())):
        some = sent[(sent["group"] == group) & (sent["peer"] == peer) & (sent["rail"] == rail)]
        state = states.get((peer, rail))
        last = some[np.argmax(some["complete"])]
        speed, in_flight, waiting = (state.speed, state.in_flight, state.waiting) if state else (0.0, 0, 0)
        who = [group, own, peer, rail, names[last["name"]]]
        found.append([f"{time.time():.3f}", *who, len(some), round(speed), in_flight, waiting])
    return found


class CsvFile:
    """A file that is put aside when it is full; the oldest go."""

    def __init__(self, path: Path, most: int = MOST_BYTES, files: int = FILES) -> None:
        """Keep so many files of so many bytes."""
        self._path, self._most, self._files = path, most, files
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, found: list[list[Any]]) -> None:
        """Add rows."""
        if not found:
            return
        if self._path.exists() and self._path.stat().st_size > self._most:
            self._rotate()
        fresh = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *found] if fresh else found)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path if number == 1 else self._path.with_name(f"{self._path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)


# What boxes say, as Prometheus reads it: a text file for its node exporter, or an endpoint of one's own.

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = "127.0.0.1"

OF_RANKS: dict[str, tuple[str, str, Callable[[State], float]]] = {
    "calls_begun_total": ("counter", "Calls that were begun", lambda state: state.begun),
    "calls_ended_total": ("counter", "Calls that have ended", lambda state: state.ended),
    "plain_bytes_total": ("counter", "Bytes before encoding", lambda state: state.plain),
    "encoded_bytes_total": ("counter", "Bytes behind encoding", lambda state: state.encoded),
    "waited_seconds_total": ("counter", "Time spent waiting for ranks to join", lambda state: state.waited / 1e9),
    "seen_timestamp_seconds": ("gauge", "When the rank was last known to be alive", lambda state: state.wall / 1e9),
}
OF_LINKS: dict[str, tuple[str, str, Callable[[LinkState], float]]] = {
    "sent_bytes_total": ("counter", "Bytes sent over a link", lambda link: link.nbytes),
    "sent_chunks_total": ("counter", "Chunks sent over a link", lambda link: link.chunks),
    "link_bytes_per_second": ("gauge", "Bandwidth of the last window of chunks", lambda link: link.speed),
    "link_mean_bytes_per_second": ("gauge", "Mean bandwidth before", lambda link: link.mean),
    "link_waiting_bytes": ("gauge", "Bytes under way", lambda link: link.waiting),
    "link_in_flight": ("gauge", "Chunks under way", lambda link: link.in_flight),
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


def exposition(boxes: Sequence[TraceBuffer]) -> str:
    """Write down how all ranks and links are."""
    ranks = [(f'rank="{box.head.rank}",host="{_escaped(box.head.host)}"', box) for box in boxes]
    states = [(who, box.state) for who, box in ranks]
    links = [(f'{who},to="{link.peer}",rail="{link.rail}"', link) for who, box in ranks for link in box.links]
    lines: list[str] = []
    for name, (kind, about, value) in OF_RANKS.items():
        lines += _metric(name, kind, about, [(who, value(state)) for who, state in states])
    for name, (kind, about, of_link) in OF_LINKS.items():
        lines += _metric(name, kind, about, [(who, of_link(link)) for who, link in links])
    alarms = [
        (f'{who},kind="{kind}"', count)
        for who, state in states
        for kind, count in zip(ALARM_KINDS, state.alarms, strict=True)
    ]
    return "\n".join(lines + _metric("alarms_total", "counter", "Alarms", alarms)) + "\n"


def write(path: Path, boxes: Sequence[TraceBuffer]) -> None:
    """Write a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(exposition(boxes), encoding="utf-8")
    part.replace(path)


def serve(where: str, boxes: Callable[[], Sequence[TraceBuffer]], added: int = 0) -> ThreadingHTTPServer:
    """Answer requests for /metrics in a thread, at [address:]port; on this machine alone unless an address is given."""
    address, _, port = where.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) + added <= 65535:
        remedy = "Write 9400, or 0.0.0.0:9400 to let other machines read it."
        raise SpecError("endpoint", expected="[address:]port", got=repr(where), remedy=remedy)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer."""
            known = self.path.partition("?")[0] in ("/", "/metrics")
            body = exposition(boxes()).encode() if known else b"not here: /metrics is\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", CONTENT if known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    try:
        server = ThreadingHTTPServer((address or LOOPBACK, int(port) + added if int(port) else 0), Handler)
    except OSError as error:
        raise SpecError(
            f"endpoint {where}", expected="one that is free", got=str(error), remedy="Name another."
        ) from error
    threading.Thread(target=server.serve_forever, name="gpucomp-serve", daemon=True).start()
    return server


SECONDS = 1.0


class Writer:
    """The thread, until it is closed."""

    def __init__(self, station: ProcessMonitor) -> None:
        """Start it."""
        chosen, rank = station.settings, station.rank
        self._station, self._box = station, station.box
        self._csv = CsvFile(fill(chosen.csv, rank)) if chosen.csv else None
        self._prometheus = fill(chosen.prometheus, rank) if chosen.prometheus else None
        if chosen.serve:  # each rank of a machine has a port of its own
            serve(chosen.serve, lambda: [self._box], added=rank)
        self._written, self._end = perf_counter_ns(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpucomp-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SECONDS):
            self._write()

    def _write(self) -> None:
        since, self._written = self._written, perf_counter_ns()
        self._station.recorder.collect()
        self._station.beat()
        if self._csv is not None:
            self._csv.add(rows(self._box, since))
        if self._prometheus is not None:
            write(self._prometheus, [self._box])

    def close(self) -> None:
        """Write the rest, and end."""
        self._end.set()
        self._thread.join()
        self._write()
