"""The command `trace`: writes the records of all ranks as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor.reader import newest
from mpi_gpucomp.monitor.trace import trace

if TYPE_CHECKING:
    import argparse

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "the last operations of all ranks as a Chrome trace, for ui.perfetto.dev"
    parser = commands.add_parser("trace", help=about, description=f"Writes {about}.")
    parser.add_argument("directory", type=Path, help="what MPI_GPUCOMP_MONITOR was set to")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="(default trace.json)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    found = trace(newest(args.directory))
    args.output.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
    print(f"{args.output}: {len(found['traceEvents'])} events, clocks {found['otherData']['clocks']}")
    return 0
