"""What boxes say, as Prometheus reads it: a text file for its node exporter, or an endpoint of one's own."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.judge import ALARM_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from mpi_gpucomp.monitor.box import Box, LinkState, State

__all__ = ["CONTENT", "exposition", "serve", "write"]

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


def exposition(boxes: Sequence[Box]) -> str:
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


def write(path: Path, boxes: Sequence[Box]) -> None:
    """Write a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(exposition(boxes), encoding="utf-8")
    part.replace(path)


def serve(where: str, boxes: Callable[[], Sequence[Box]], added: int = 0) -> ThreadingHTTPServer:
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
