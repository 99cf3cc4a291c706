"""Barriers that end in time: one that all ranks pass or none, and one that says who has not come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from mpi_gpucomp.torch.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.comm import Communicator

__all__ = ["barrier", "monitored_barrier"]

TURNS = 10000
"""So many monitored barriers have tags of their own."""


class Tags(NamedTuple):
    """The tags of one monitored barrier's messages: at the upper end, where nobody counts up to."""

    here: int
    go: int


def _wait(ready: Callable[[], bool], limit: float) -> bool:
    """Look until something is true, or time is up; say which."""
    until, patience = time.monotonic() + limit, Patience()
    while not ready():
        if time.monotonic() > until:
            return False
        patience.rest()
    return True


def barrier(comm: Communicator, limit: float) -> None:
    """Wait until all ranks are here; raise if that takes longer than so many seconds."""
    request = comm.Ibarrier()
    if not _wait(request.Test, limit):
        raise RuntimeError(f"barrier: Timed out waiting {limit * 1000:.0f} ms for all ranks")


def monitored_barrier(comm: Communicator, turn: int, limit: float, wait_all_ranks: bool) -> None:
    """Let rank 0 hear of every rank in turn, and then let all go; say who has not come.

    It is the `turn`-th of the group: what a rank sends that comes too late for one must not do for the next.
    """
    most = comm.Get_attr(MPI.TAG_UB)
    tags = Tags(most - 2 * (turn % TURNS), most - 2 * (turn % TURNS) - 1)
    if comm.rank == 0:
        _watch_over(comm, tags, limit, wait_all_ranks)
    else:
        _report(comm, tags, limit)


def _watch_over(comm: Communicator, tags: Tags, limit: float, wait_all_ranks: bool) -> None:
    missing, until = [], time.monotonic() + limit
    if limit <= 0:
        raise RuntimeError("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms")
    for rank in range(1, comm.size):
        if _heard(comm, rank, tags.here, max(0.0, until - time.monotonic())) is None:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if not missing or wait_all_ranks:
        for rank in range(1, comm.size):
            if rank not in missing:
                comm.send(not missing, rank, tags.go)
    if missing:
        who = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
        raise RuntimeError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit * 1000:.0f} ms")


def _report(comm: Communicator, tags: Tags, limit: float) -> None:
    comm.send(True, 0, tags.here)
    if not _heard(comm, 0, tags.go, limit):
        text = f"[Rank {comm.rank}]: Rank {comm.rank} successfully reached monitoredBarrier, but received errors "
        raise RuntimeError(f"{text}while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.")


def _heard(comm: Communicator, rank: int, tag: int, limit: float) -> Any:
    """Return what a rank has sent, None if nothing in time; mpi4py's own messages do, which are short and exact."""
    request: MPI.Request = comm.irecv(None, rank, tag)
    heard: list[Any] = []

    def look() -> bool:
        arrived, message = request.test()
        heard.append(message)
        return arrived

    if _wait(look, limit):
        return heard[-1]
    request.Cancel()
    request.Free()
    return None
