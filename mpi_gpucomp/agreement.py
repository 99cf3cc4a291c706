"""Lets all ranks find out, before data moves, that they have not called the same collective in the same way."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.errors import AgreementError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["agree"]


def agree(comm: MPI.Intracomm, collective: str, said: str) -> None:
    """Raise on every rank, with who said what, unless all say the same; a small all-reduce if they do."""
    number = zlib.crc32(said.encode())
    extremes = np.array([number, -number])
    comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
    if extremes[0] != -extremes[1]:
        raise AgreementError(
            collective,
            expected="the same call on every rank",
            got=_who_said_what(comm.allgather(said)),
            remedy="Pass the same count, type, root, codec, chunk and algorithm on every rank.",
            rank=comm.rank,
        )


def _who_said_what(sayings: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, said in enumerate(sayings):
        ranks.setdefault(said, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {said}" for said, who in ranks.items())
