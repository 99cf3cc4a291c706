"""The communicator behind torch's ranks: the gpucomp group's own, or one over MPI beside gloo or NCCL."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch.distributed as dist
from mpi4py import MPI

from mpi_gpucomp.comm import Communicator
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from typing import TypeAlias

    Ranks: TypeAlias = Communicator | MPI.Intracomm | dist.ProcessGroup | None

__all__ = ["communicator_of"]


def communicator_of(ranks: Ranks) -> Communicator:
    """Return the communicator of a group, or one over MPI's ranks; None means all ranks."""
    if ranks is None:
        ranks = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(ranks, Communicator):
        return ranks
    if isinstance(ranks, MPI.Intracomm):
        return Communicator(ranks)
    own = getattr(ranks, "communicator", None)
    if isinstance(own, Communicator):
        return own
    _check_same_ranks(ranks)
    return _world()


@cache
def _world() -> Communicator:
    return Communicator(MPI.COMM_WORLD)


def _check_same_ranks(group: dist.ProcessGroup | None) -> None:
    """Raise unless another backend's group numbers all ranks as MPI does."""
    world = MPI.COMM_WORLD
    torchs = (world.rank, world.size) if group is None else (group.rank(), group.size())
    if torchs != (world.rank, world.size):
        raise SpecError(
            "communicator of a torch group",
            expected=f"rank {world.rank} of {world.size}, as MPI has it",
            got=f"rank {torchs[0]} of {torchs[1]}",
            remedy="Start torch with MPI's ranks, or pass a Communicator of the group's ranks.",
            rank=world.rank,
        )
