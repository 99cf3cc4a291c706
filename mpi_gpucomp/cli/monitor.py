"""The command `monitor`: shows what the ranks of a job do, live in a terminal or once; serves it; writes rows."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.cli.output import table
from mpi_gpucomp.monitor import exporters as prometheus
from mpi_gpucomp.monitor.blame import blame, read
from mpi_gpucomp.monitor.chrome_trace import trace
from mpi_gpucomp.monitor.exporters import CsvFile, rows
from mpi_gpucomp.monitor.page import page
from mpi_gpucomp.monitor.reader import is_alive, newest, rates

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.trace_buffer import LinkState, TraceBuffer

__all__ = [
    "BOLD",
    "CLEAR",
    "DIM",
    "GREEN",
    "RED",
    "RESET",
    "YELLOW",
    "Look",
    "add",
    "blame_add",
    "report_add",
    "screen",
    "trace_add",
]


# What ranks and links do now, as lines of text for a terminal of some width.

BOLD, DIM, RED, GREEN, YELLOW, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
CLEAR = "\x1b[H\x1b[J"
RANKS = ("rank", "host", "state", "calls", "sent/s", "received/s", "encoded/s", "decoded/s", "ratio", "last alarm")
LINKS = ("link", "rail", "now", "", "mean", "in flight", "waiting", "sent", "state")
BAR = 12
SECONDS = 1.0
ALARMS = 8


class Look:
    """Colours where they are wanted, and bars of blocks or of plain signs."""

    def __init__(self, *, colours: bool, unicode: bool) -> None:
        """Say what the terminal can show."""
        self._colours, self._full, self._empty = colours, "█" if unicode else "#", "░" if unicode else "."
        self.to = "→" if unicode else "->"

    def paint(self, text: str, colour: str) -> str:
        """Colour a text."""
        return f"{colour}{text}{RESET}" if self._colours else text

    def bar(self, share: float) -> str:
        """Draw how full something is."""
        full = round(BAR * max(0.0, min(1.0, share)))
        return self._full * full + self._empty * (BAR - full)


def _rate(value: float) -> str:
    return f"{value / 1e6:.0f} MB" if value >= 1e6 else f"{value / 1e3:.0f} KB" if value else "-"


def _size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B" if value else "-"


def _state(box: TraceBuffer) -> str:
    state = box.state
    if state.closed:
        return "ended"
    if not is_alive(box):
        return f"silent {time.time() - state.wall / 1e9:.0f} s"
    return "in a call" if state.begun > state.ended else "idle"


def _rank(box: TraceBuffer) -> list[str]:
    head, state, now = box.head, box.state, rates(box, SECONDS)
    alarms = box.alarms
    shown = [_rate(value) if is_alive(box) else "-" for value in now[:4]]
    ratio = f"{state.plain / state.encoded:.2f}" if state.encoded else "-"
    return [
        str(head.rank),
        head.host,
        _state(box),
        f"{state.ended}/{state.begun}",
        *shown,
        ratio,
        alarms[-1][:8] if alarms else "-",
    ]


def _link(box: TraceBuffer, link: LinkState, look: Look) -> list[str]:
    alive = is_alive(box)
    share = link.speed / link.mean if link.mean else 0.0
    state = "slow" if link.slow else "" if alive else "ended"
    return [
        *(f"{box.head.rank} {look.to} {link.peer}", str(link.rail), f"{_rate(link.speed)}/s", look.bar(share)),
        *(f"{_rate(link.mean)}/s", str(link.in_flight), _size(link.waiting), _size(link.nbytes), state),
    ]


def _painted(text: str, look: Look) -> list[str]:
    lines = text.splitlines()
    colours = {"slow": RED, "silent": RED, "ended": DIM, "in a call": GREEN}
    found = [look.paint(lines[0], BOLD)]
    for line in lines[1:]:
        colour = next((colour for word, colour in colours.items() if f"  {word}" in line), None)
        found.append(look.paint(line, colour) if colour else line)
    return found


def screen(boxes: Sequence[TraceBuffer], look: Look, width: int = 120, height: int = 0) -> str:
    """Show all ranks, links and alarms; lines that do not fit are left out where the height is known."""
    size, alive = boxes[0].head.size, sum(is_alive(box) for box in boxes)
    title = f"mpi_gpucomp  {time.strftime('%H:%M:%S')}  {alive} of {size} ranks alive"
    lines = [look.paint(title, BOLD), ""]
    lines += _painted(table(RANKS, [_rank(box) for box in boxes], (*RANKS[3:9], "rank")), look)
    links = [_link(box, link, look) for box in boxes for link in box.links]
    if links:
        right = ("now", "mean", "in flight", "waiting", "sent", "rail")
        lines += ["", *_painted(table(LINKS, links, right), look)]
    alarms = sorted({text for box in boxes for text in box.alarms})[-ALARMS:]
    lines += ["", look.paint("alarms", BOLD), *(look.paint(text, _of_alarm(text)) for text in alarms)]
    lines += [] if alarms else [look.paint("none", GREEN)]
    if height and len(lines) > height:
        room = max(1, height - ALARMS - 3)
        lines = [
            *lines[:room],
            look.paint(f"... {len(lines) - height + 1} lines more", DIM),
            *lines[-(height - room - 1) :],
        ]
    return "\n".join(_cut(line, width) for line in lines)


def _of_alarm(text: str) -> str:
    return DIM if " over after " in text else YELLOW if " stall: " in text else RED


def _cut(line: str, width: int) -> str:
    """Cut a line that is too long; what colours it takes no room."""
    if len(line) <= width:
        return line
    shown, at = 0, 0
    while at < len(line) and shown < width:
        if line[at] == "\x1b":
            at = line.index("m", at) + 1
        else:
            shown, at = shown + 1, at + 1
    return line[:at] + (RESET if "\x1b" in line else "")


SCREEN, BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""A screen of its own with no cursor, and back to what was there."""


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "what the ranks of a job do now: bandwidth, chunks in flight, ratio and alarms, per rank and link"
    parser = commands.add_parser("monitor", help=about, description=f"Shows {about}.")
    parser.add_argument("directory", type=Path, help="what MPI_GPUCOMP_MONITOR was set to")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between looks (default 1)")
    parser.add_argument(
        "--once", action="store_true", help="show it once, as text; so it does where there is no terminal"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also add a row for each link and look; rotates")
    parser.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="also write a file for Prometheus' node exporter"
    )
    parser.add_argument(
        "--serve", metavar="[ADDRESS:]PORT", help="also answer Prometheus, to this machine unless an address is given"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    boxes = newest(args.directory)
    if args.serve:
        prometheus.serve(args.serve, lambda: newest(args.directory))
    recording = args.csv or args.prometheus or args.serve
    if args.once or not (sys.stdout.isatty() or recording):
        _record(args, boxes, {})
        print(screen(boxes, _look(), shutil.get_terminal_size((120, 40)).columns))
        return 0
    _watch(args, boxes)
    return 0


def _look() -> Look:
    encoding = (sys.stdout.encoding or "").lower()
    return Look(colours=sys.stdout.isatty(), unicode=encoding.startswith("utf"))


def _watch(args: argparse.Namespace, boxes: Sequence[TraceBuffer]) -> None:
    """Look again and again, until the ranks have ended or somebody presses Ctrl-C."""
    terminal, since = sys.stdout.isatty(), dict[Path | None, int]()
    try:
        if terminal:
            sys.stdout.write(SCREEN)
        while True:
            boxes = newest(args.directory)
            _record(args, boxes, since)
            if terminal:
                columns, lines = shutil.get_terminal_size()
                sys.stdout.write(CLEAR + screen(boxes, _look(), columns, lines - 1))
                sys.stdout.flush()
            elif not any(is_alive(box) for box in boxes):
                return
            time.sleep(args.every)
    finally:
        if terminal:
            sys.stdout.write(BACK)
            sys.stdout.flush()


def _record(args: argparse.Namespace, boxes: Sequence[TraceBuffer], since: dict[Path | None, int]) -> None:
    if args.csv:
        file = CsvFile(args.csv)
        for box in boxes:
            file.add(rows(box, since.get(box.path, 0)))
            since[box.path] = box.state.clock
    if args.prometheus:
        prometheus.write(args.prometheus, boxes)


# The command `blame`: says who is behind a hang, by the flight records of all ranks.

HEADER = ("rank", "host", "pid", "reason", "begun", "waits for", "absent", "sending", "receiving")


def blame_add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "who is behind a hang, by the flight records of all ranks"
    parser = commands.add_parser("blame", help=about, description=f"Says in one sentence {about}.")
    parser.add_argument("directory", type=Path, help="what MPI_GPUCOMP_FLIGHT was set to")
    parser.add_argument("-v", "--verbose", action="store_true", help="also show what each rank was doing")
    parser.set_defaults(run=_blame_run)


def _blame_run(args: argparse.Namespace) -> int:
    records = read(args.directory)
    print(blame(records).text)
    if args.verbose:
        print("\n" + table(HEADER, [_row(record) for _, record in sorted(records.items())], ("rank", "pid")))
    return 0


def _row(record: dict[str, Any]) -> list[str]:
    told = [one for one in record["communicators"] if one]
    calls = [call for one in told for call in one["calls"]]
    return [
        *(str(record["rank"]), record["host"], str(record["pid"]), record["reason"].partition(":")[0]),
        str(sum(sum(one["begun"].values()) for one in told)),
        ", ".join(call["title"] for one in told for call in one["waits"]) or "-",
        ", ".join(str(rank) for call in calls for rank in call["absent"]) or "-",
        ", ".join(f"{one['bytes'] / 1e6:.1f} MB to {one['rank']}" for call in calls for one in call["sending"]) or "-",
        ", ".join(f"from {one['rank']}" for call in calls for one in call["receiving"]) or "-",
    ]


# The command `report`: makes a page of what all ranks have recorded.


def report_add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "a page of what all ranks did: alarms, a rank x rank heat map, a timeline"
    parser = commands.add_parser("report", help=about, description=f"Makes {about}; one file, for any browser.")
    parser.add_argument("directory", type=Path, help="what MPI_GPUCOMP_MONITOR was set to")
    parser.add_argument("-o", "--output", type=Path, default=Path("monitor.html"), help="(default monitor.html)")
    parser.set_defaults(run=_report_run)


def _report_run(args: argparse.Namespace) -> int:
    boxes = newest(args.directory)
    args.output.write_text(page(boxes), encoding="utf-8")
    print(f"{args.output}: {len(boxes)} ranks, {args.output.stat().st_size / 1e6:.1f} MB")
    return 0


# The command `trace`: writes the records of all ranks as a Chrome trace, which Perfetto opens.


def trace_add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "the last operations of all ranks as a Chrome trace, for ui.perfetto.dev"
    parser = commands.add_parser("trace", help=about, description=f"Writes {about}.")
    parser.add_argument("directory", type=Path, help="what MPI_GPUCOMP_MONITOR was set to")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="(default trace.json)")
    parser.set_defaults(run=_trace_run)


def _trace_run(args: argparse.Namespace) -> int:
    found = trace(newest(args.directory))
    args.output.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
    print(f"{args.output}: {len(found['traceEvents'])} events, clocks {found['otherData']['clocks']}")
    return 0
