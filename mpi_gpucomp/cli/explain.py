"""The command `explain`, under mpirun: prints how a communicator would run a collective call, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.cli.command import Command, add_collective, add_options, format_size
from mpi_gpucomp.schedule.ir import COLLECTIVES

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from mpi4py import MPI

__all__ = ["COMMAND"]

ITEM_BYTES = 4


def _add_arguments(parser: ArgumentParser) -> None:
    add_collective(parser)
    add_options(parser, "--size", "--root")
    add_options(parser, "--codec", default="auto", help="a codec of `codecs`, or none (default auto)")
    add_options(parser, "--algorithm", "--chunk")
    add_options(parser, "--plans", help="a schedule library to look for schedules in")


def _run(args: Namespace) -> int:
    from mpi4py import MPI

    from mpi_gpucomp.communicator import Communicator  # here, because other commands run without MPI

    method = COLLECTIVES[args.collective].method
    options = {name: value for name in ("algorithm", "chunk") if (value := getattr(args, name)) is not None}
    communicator: Any = Communicator(MPI.COMM_WORLD, args.codec, plans=args.plans and str(args.plans))
    with communicator as comm:
        plan = comm.explain(method, *_arguments(args, comm), **options)
        if comm.rank == 0:
            ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
            print(f"{method} of {format_size(args.size)} float32, {ranks}\n{plan}")
    return 0


def _arguments(args: Namespace, comm: MPI.Intracomm) -> list[Any]:
    """Return the arguments of the call: buffers of `--size` bytes, or blocks of it, and the operation and root."""
    from mpi4py import MPI

    collective = COLLECTIVES[args.collective]
    block = max(1, args.size // ITEM_BYTES // (comm.size if collective.blocks else 1))
    count = block * (comm.size if collective.blocks else 1)
    buffers = [np.zeros(block if is_block else count, np.float32) for is_block in collective.block_buffers]
    return [*buffers, *([MPI.SUM] if collective.reduces else ()), *([args.root] if collective.rooted else ())]


COMMAND = Command(
    "explain",
    "print how a communicator would run a collective call, and why",
    "Bcast --size 64MB --codec split",
    _add_arguments,
    _run,
    mpirun=4,
)
