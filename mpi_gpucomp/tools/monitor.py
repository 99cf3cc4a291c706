"""The command `monitor`: shows what the ranks of a job do, live in a terminal or once; serves it; writes rows."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor import prometheus
from mpi_gpucomp.monitor.csvfile import CsvFile, rows
from mpi_gpucomp.monitor.reader import is_alive, newest
from mpi_gpucomp.tools.live import CLEAR, Look, screen

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.box import Box

__all__ = ["add"]

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


def _watch(args: argparse.Namespace, boxes: Sequence[Box]) -> None:
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


def _record(args: argparse.Namespace, boxes: Sequence[Box], since: dict[Path | None, int]) -> None:
    if args.csv:
        file = CsvFile(args.csv)
        for box in boxes:
            file.add(rows(box, since.get(box.path, 0)))
            since[box.path] = box.state.clock
    if args.prometheus:
        prometheus.write(args.prometheus, boxes)
