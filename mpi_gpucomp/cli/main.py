"""Reads the command line and calls the command; what went wrong is one line and an exit code.

0: all is well. 1: a check failed. 2: the command, a file or a device cannot be used as asked. 130: interrupted.

A new command is a module with `add(commands)`, which makes its parser and sets `run`, and its place in COMMANDS.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from mpi_gpucomp.cli import algorithms, codecs, monitor, profile, simulate, synthesize
from mpi_gpucomp.errors import GpucompError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    codecs.add,
    algorithms.add,
    profile.add,
    synthesize.add,
    simulate.add,
    simulate.explain_add,
    monitor.add,
    monitor.report_add,
    monitor.trace_add,
    monitor.blame_add,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (the program's own arguments where it is None) names, and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except GpucompError as error:
        print(f"{_parser().prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has seen enough; without this the interpreter would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpi_gpucomp", description="GPU-aware MPI with compressed collectives."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser
