"""Whether long messages between nodes may be cut into pieces, and how long those are."""

from __future__ import annotations

import os

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.aware import cuda_aware
from mpi_gpucomp.transport.cut import MOST, PIECE, Cut

__all__ = ["agreed_cut"]

VARIABLE = "MPI_GPUCOMP_PIECE"


def agreed_cut(comm: MPI.Intracomm) -> Cut | None:
    """Let all ranks agree on the shortest piece that one of them has set; None: messages stay whole."""
    piece = np.array([_piece(comm.rank)], np.int64)
    comm.Allreduce(MPI.IN_PLACE, piece, MPI.MIN)
    return Cut(int(piece[0])) if piece[0] else None


def _piece(rank: int) -> int:
    # From a GPU's memory MPI would copy each piece by itself, and wait for that.
    said = os.environ.get(VARIABLE, "0" if cuda_aware().aware else str(PIECE))
    if said.isdecimal() and (int(said) == 0 or int(said) > 2 * MOST):
        return int(said)
    raise SpecError(
        VARIABLE,
        expected=f"more than {2 * MOST} bytes, or 0 for messages that stay whole",
        got=repr(said),
        remedy="Leave it out.",
        rank=rank,
    )
