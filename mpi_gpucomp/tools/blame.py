"""The command `blame`: says who is behind a hang, by the flight records of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor.blame import blame, read
from mpi_gpucomp.tools.table import table

if TYPE_CHECKING:
    import argparse

__all__ = ["add"]

HEADER = ("rank", "host", "pid", "reason", "begun", "waits for", "absent", "sending", "receiving")


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "who is behind a hang, by the flight records of all ranks"
    parser = commands.add_parser("blame", help=about, description=f"Says in one sentence {about}.")
    parser.add_argument("directory", type=Path, help="what MPI_GPUCOMP_FLIGHT was set to")
    parser.add_argument("-v", "--verbose", action="store_true", help="also show what each rank was doing")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
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
