"""The command line, `gpucomp` or `python -m mpi_gpucomp`: parses the arguments and runs a command.

Exit codes: 0 for success, 1 if a check failed, 2 if an argument, a file or a device cannot be used, 130 if interrupted.
An error is one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp import __version__
from mpi_gpucomp.cli import algorithms, codecs, doctor, explain, monitor, profile, selftest, simulate, synthesize
from mpi_gpucomp.cli.command import CommandLineParser
from mpi_gpucomp.errors import GpucompError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS = (
    doctor.COMMAND,
    selftest.COMMAND,
    codecs.COMMAND,
    algorithms.COMMAND,
    profile.COMMAND,
    synthesize.COMMAND,
    simulate.COMMAND,
    explain.COMMAND,
    *monitor.COMMANDS,
)
CONSOLE, MODULE = "gpucomp", "python -m mpi_gpucomp"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default the program's arguments, and return the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except GpucompError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe. The interpreter flushes once more at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, under the name that the program was started by."""
    prog = CONSOLE if Path(sys.argv[0]).name == CONSOLE else MODULE
    parser = CommandLineParser(prog=prog, description="GPU-aware MPI with compressed collectives.")
    parser.add_argument("--version", action="version", version=f"mpi_gpucomp {__version__}")
    parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        launcher = f"mpirun -n {command.mpirun} " if command.mpirun else ""
        sub = parsers.add_parser(
            command.name,
            help=command.summary,
            description=textwrap.fill(f"{command.summary[0].upper()}{command.summary[1:]}."),
            epilog=f"example:\n  {launcher}{prog} {command.name} {command.example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the example on one line
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser
