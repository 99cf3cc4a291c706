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
    # From a GPU's memory MPI would copy each piece by itself, and wait for that.
    said = os.environ.get(VARIABLE, "0" if cuda_aware().aware else str(PIECE))
    pieces = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([_piece(said)], np.int64), pieces)
    if pieces.min() < 0:
        wrong = int(pieces.argmin())
        raise SpecError(
            VARIABLE,
            expected=f"more than {2 * MOST} bytes, or 0 for messages that stay whole",
            got=repr(said) if wrong == comm.rank else f"something else on rank {wrong}",
            remedy="Leave it out.",
            rank=comm.rank,
        )
    return Cut(int(pieces.min())) if pieces.min() else None


def _piece(said: str) -> int:
    """Read what was said; -1 for what cannot be."""
    return int(said) if said.isdecimal() and (int(said) == 0 or int(said) > 2 * MOST) else -1
