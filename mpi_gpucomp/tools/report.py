"""The command `report`: makes a page of what all ranks have recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor.page import page
from mpi_gpucomp.monitor.reader import newest

if TYPE_CHECKING:
    import argparse

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "a page of what all ranks did: alarms, a rank x rank heat map, a timeline"
    parser = commands.add_parser("report", help=about, description=f"Makes {about}; one file, for any browser.")
    parser.add_argument("directory", type=Path, help="what MPI_GPUCOMP_MONITOR was set to")
    parser.add_argument("-o", "--output", type=Path, default=Path("monitor.html"), help="(default monitor.html)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    boxes = newest(args.directory)
    args.output.write_text(page(boxes), encoding="utf-8")
    print(f"{args.output}: {len(boxes)} ranks, {args.output.stat().st_size / 1e6:.1f} MB")
    return 0
