"""The commands about running and finished jobs: `monitor`, `report`, `trace` and `blame`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.cli.command import Command, add_options, parse_seconds, table
from mpi_gpucomp.monitor import exporters
from mpi_gpucomp.monitor.exporters import CsvFile, chrome_trace, rows
from mpi_gpucomp.monitor.flight import blame, read
from mpi_gpucomp.monitor.report import report
from mpi_gpucomp.monitor.trace_buffer import is_alive, newest, rates

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.trace_buffer import LinkState, TraceBuffer

__all__ = ["COMMANDS", "Terminal", "screen"]

BOLD, DIM, RED, GREEN, YELLOW, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
CLEAR = "\x1b[H\x1b[J"
RANKS = ("rank", "host", "state", "calls", "sent/s", "received/s", "encoded/s", "decoded/s", "ratio", "last alarm")
LINKS = ("link", "rail", "now", "", "mean", "in flight", "waiting", "sent", "state")
BAR = 12
SECONDS = 1.0
ALARMS = 8


class Terminal:
    """What a terminal can show: colours or none, Unicode or ASCII."""

    def __init__(self, *, colours: bool, unicode: bool) -> None:
        """Use colours and Unicode only where they are available."""
        self._colours, self._full, self._empty = colours, "█" if unicode else "#", "░" if unicode else "."
        self.to = "→" if unicode else "->"

    def paint(self, text: str, colour: str) -> str:
        """Return the text in a colour."""
        return f"{colour}{text}{RESET}" if self._colours else text

    def bar(self, share: float) -> str:
        """Return a bar that is filled to this share."""
        full = round(BAR * max(0.0, min(1.0, share)))
        return self._full * full + self._empty * (BAR - full)


def _rate(value: float) -> str:
    return f"{value / 1e6:.0f} MB" if value >= 1e6 else f"{value / 1e3:.0f} KB" if value else "-"


def _size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B" if value else "-"


def _state(buffer: TraceBuffer) -> str:
    state = buffer.state
    if state.closed:
        return "ended"
    if not is_alive(buffer):
        return f"silent {time.time() - state.wall / 1e9:.0f} s"
    return "in a call" if state.begun > state.ended else "idle"


def _rank(buffer: TraceBuffer) -> list[str]:
    header, state, now = buffer.header, buffer.state, rates(buffer, SECONDS)
    alarms = buffer.alarms
    shown = [_rate(value) if is_alive(buffer) else "-" for value in now[:4]]
    ratio = f"{state.raw_bytes / state.encoded_bytes:.2f}" if state.encoded_bytes else "-"
    return [
        str(header.rank),
        header.host,
        _state(buffer),
        f"{state.ended}/{state.begun}",
        *shown,
        ratio,
        alarms[-1][:8] if alarms else "-",
    ]


def _link(buffer: TraceBuffer, link: LinkState, terminal: Terminal) -> list[str]:
    alive = is_alive(buffer)
    share = link.bandwidth / link.mean if link.mean else 0.0
    state = "slow" if link.slow else "" if alive else "ended"
    return [
        *(
            f"{buffer.header.rank} {terminal.to} {link.peer}",
            str(link.rail),
            f"{_rate(link.bandwidth)}/s",
            terminal.bar(share),
        ),
        *(f"{_rate(link.mean)}/s", str(link.chunks_in_flight), _size(link.bytes_in_flight), _size(link.nbytes), state),
    ]


def _colour_states(text: str, terminal: Terminal) -> list[str]:
    lines = text.splitlines()
    colours = {"slow": RED, "silent": RED, "ended": DIM, "in a call": GREEN}
    found = [terminal.paint(lines[0], BOLD)]
    for line in lines[1:]:
        colour = next((colour for word, colour in colours.items() if f"  {word}" in line), None)
        found.append(terminal.paint(line, colour) if colour else line)
    return found


def screen(buffers: Sequence[TraceBuffer], terminal: Terminal, width: int = 120, height: int = 0) -> str:
    """Return the state of all ranks and links and the latest alarms, cut to the width and, if it is given, height."""
    size, alive = buffers[0].header.size, sum(is_alive(buffer) for buffer in buffers)
    title = f"mpi_gpucomp  {time.strftime('%H:%M:%S')}  {alive} of {size} ranks alive"
    lines = [terminal.paint(title, BOLD), ""]
    lines += _colour_states(table(RANKS, [_rank(buffer) for buffer in buffers], (*RANKS[3:9], "rank")), terminal)
    links = [_link(buffer, link, terminal) for buffer in buffers for link in buffer.links]
    if links:
        right = ("now", "mean", "in flight", "waiting", "sent", "rail")
        lines += ["", *_colour_states(table(LINKS, links, right), terminal)]
    alarms = sorted({text for buffer in buffers for text in buffer.alarms})[-ALARMS:]
    lines += ["", terminal.paint("alarms", BOLD), *(terminal.paint(text, _alarm_colour(text)) for text in alarms)]
    lines += [] if alarms else [terminal.paint("none", GREEN)]
    if height and len(lines) > height:
        room = max(1, height - ALARMS - 3)
        lines = [
            *lines[:room],
            terminal.paint(f"... {len(lines) - height + 1} more lines", DIM),
            *lines[-(height - room - 1) :],
        ]
    return "\n".join(_truncate(line, width) for line in lines)


def _alarm_colour(text: str) -> str:
    return DIM if " over after " in text else YELLOW if " stall: " in text else RED


def _truncate(line: str, width: int) -> str:
    """Truncate a line to a width, in which escape sequences do not count."""
    if len(line) <= width:
        return line
    shown, at = 0, 0
    while at < len(line) and shown < width:
        if line[at] == "\x1b":
            at = line.index("m", at) + 1
        else:
            shown, at = shown + 1, at + 1
    return line[:at] + (RESET if "\x1b" in line else "")


ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the alternate screen without a cursor, and back."""


def _add_directory(parser: ArgumentParser, variable: str = "MPI_GPUCOMP_MONITOR") -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help=f"the directory in {variable}")


def _add_monitor_arguments(parser: ArgumentParser) -> None:
    _add_directory(parser)
    option = parser.add_argument
    option("--every", type=parse_seconds, default=1.0, metavar="SECONDS", help="interval between updates (default 1)")
    option("--once", action="store_true", help="print one snapshot as text; the default without a terminal")
    option("--csv", type=Path, metavar="FILE", help="append a row per link and update to this file, which is rotated")
    option("--prometheus", type=Path, metavar="FILE", help="write a file for Prometheus' node exporter")
    option("--serve", metavar="[ADDRESS:]PORT", help="serve metrics to Prometheus, by default on localhost only")


def _monitor(args: Namespace) -> int:
    buffers = newest(args.directory)
    if args.serve:
        exporters.serve(args.serve, lambda: newest(args.directory))
    recording = args.csv or args.prometheus or args.serve
    if args.once or not (sys.stdout.isatty() or recording):
        _record(args, buffers, {})
        print(screen(buffers, _terminal(), shutil.get_terminal_size((120, 40)).columns))
        return 0
    _watch(args, buffers)
    return 0


def _terminal() -> Terminal:
    encoding = (sys.stdout.encoding or "").lower()
    return Terminal(colours=sys.stdout.isatty(), unicode=encoding.startswith("utf"))


def _watch(args: Namespace, buffers: Sequence[TraceBuffer]) -> None:
    """Update the screen and the files until the ranks have ended or the user interrupts."""
    interactive, since = sys.stdout.isatty(), dict[Path | None, int]()
    try:
        if interactive:
            sys.stdout.write(ENTER_SCREEN)
        while True:
            buffers = newest(args.directory)
            _record(args, buffers, since)
            if interactive:
                columns, lines = shutil.get_terminal_size()
                sys.stdout.write(CLEAR + screen(buffers, _terminal(), columns, lines - 1))
                sys.stdout.flush()
            elif not any(is_alive(buffer) for buffer in buffers):
                return
            time.sleep(args.every)
    finally:
        if interactive:
            sys.stdout.write(LEAVE_SCREEN)
            sys.stdout.flush()


def _record(args: Namespace, buffers: Sequence[TraceBuffer], since: dict[Path | None, int]) -> None:
    if args.csv:
        file = CsvFile(args.csv)
        for buffer in buffers:
            file.add(rows(buffer, since.get(buffer.path, 0)))
            since[buffer.path] = buffer.state.clock
    if args.prometheus:
        exporters.write(args.prometheus, buffers)


def _add_report_arguments(parser: ArgumentParser) -> None:
    _add_directory(parser)
    add_options(parser, "--output", default=Path("monitor.html"), help="file to write (default monitor.html)")


def _report(args: Namespace) -> int:
    buffers = newest(args.directory)
    args.output.write_text(report(buffers), encoding="utf-8")
    print(f"{args.output}: {len(buffers)} ranks, {args.output.stat().st_size / 1e6:.1f} MB")
    return 0


def _add_trace_arguments(parser: ArgumentParser) -> None:
    _add_directory(parser)
    add_options(parser, "--output", default=Path("trace.json"), help="file to write (default trace.json)")


def _trace(args: Namespace) -> int:
    found = chrome_trace(newest(args.directory))
    args.output.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
    print(f"{args.output}: {len(found['traceEvents'])} events, clocks {found['otherData']['clocks']}")
    return 0


BLAME = ("rank", "host", "pid", "reason", "begun", "waits for", "absent", "sending", "receiving")


def _add_blame_arguments(parser: ArgumentParser) -> None:
    _add_directory(parser, "MPI_GPUCOMP_FLIGHT")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print the state of every rank")


def _blame(args: Namespace) -> int:
    records = read(args.directory)
    print(blame(records).text)
    if args.verbose:
        states = [_flight_row(record) for _, record in sorted(records.items())]
        print("\n" + table(BLAME, states, ("rank", "pid")))
    return 0


def _flight_row(record: dict[str, Any]) -> list[str]:
    communicators = record["communicators"]
    calls = [call for one in communicators for call in one["calls"]]
    return [
        *(str(record["rank"]), record["host"], str(record["pid"]), record["reason"].partition(":")[0]),
        str(sum(sum(one["begun"].values()) for one in communicators)),
        ", ".join(call["title"] for one in communicators for call in one["waits"]) or "-",
        ", ".join(str(rank) for call in calls for rank in call["absent"]) or "-",
        ", ".join(f"{one['bytes'] / 1e6:.1f} MB to {one['rank']}" for call in calls for one in call["sending"]) or "-",
        ", ".join(f"from {one['rank']}" for call in calls for one in call["receiving"]) or "-",
    ]


COMMANDS = (
    Command(
        "monitor",
        "show the throughput, chunks in flight, compression ratio and alarms of a job, per rank and link",
        "/dev/shm/job",
        _add_monitor_arguments,
        _monitor,
    ),
    Command(
        "report",
        "write an HTML page about a job: alarms, a rank-by-rank heat map, a timeline",
        "/dev/shm/job -o report.html",
        _add_report_arguments,
        _report,
    ),
    Command(
        "trace",
        "write the latest operations of all ranks as a Chrome trace, for ui.perfetto.dev",
        "/dev/shm/job -o trace.json",
        _add_trace_arguments,
        _trace,
    ),
    Command(
        "blame",
        "name the rank or link that causes a hang, from the flight records of all ranks",
        "/tmp/flight --verbose",
        _add_blame_arguments,
        _blame,
    ),
)
