"""Makes a process group: finds the MPI ranks of its members, and a communicator for them."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.comm import Communicator
from mpi_gpucomp.errors import DeviceError, SpecError
from mpi_gpucomp.torch.group import Group
from mpi_gpucomp.torch.options import Options

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["make"]

LATE = 10
"""A communicator waits so many times its timeout for a rank that may only be late; torch's timeout is for those."""
TAGS = 1 << 15
"""Tags that every MPI has."""


def make(seen: Any, options: Any) -> Group:
    """Make the group that torch describes by `seen`; every member does, and nobody else."""
    policy = _policy(options)
    _check_threads()
    rank, size, timeout = seen.group_rank, seen.group_size, seen.timeout
    members = _members(seen.store, rank, size)
    world = MPI.COMM_WORLD
    # Collective over the members alone. The tag keeps apart groups that different threads make at once.
    chosen = world.group.Incl(members)
    among = world.Create_group(chosen, zlib.crc32(repr(members).encode()) % TAGS)
    chosen.Free()
    try:
        communicator = Communicator(
            among,
            policy.codec,
            roles=policy.roles,
            chunk=policy.chunk,
            slots=policy.slots,
            small=policy.straight,
            timeout=timeout.total_seconds() / LATE,
        )
    finally:
        among.Free()
    return Group(communicator, policy, timeout, seen.store)


def _check_threads() -> None:
    """Raise where MPI does not allow the thread of a group to call it beside the program's own."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise DeviceError(
            "torch.distributed, backend gpucomp",
            expected="an MPI that several threads may call (MPI_THREAD_MULTIPLE)",
            got="one that was started without",
            remedy="Leave mpi4py.rc.thread_level as it is, or build MPI with support for threads.",
            rank=MPI.COMM_WORLD.rank,
        )


def _policy(options: Any) -> Options:
    if options is None:
        return Options()
    if isinstance(options, Options):
        return options
    raise SpecError(
        "pg_options",
        expected="an mpi_gpucomp.torch.Options",
        got=f"{type(options).__module__}.{type(options).__qualname__}",
        remedy='Pass for example pg_options=mpi_gpucomp.torch.Options(codec="split").',
    )


def _members(store: Store, rank: int, size: int) -> list[int]:
    """Return MPI's rank of each member: torch may count them in another order, or not have been started by mpirun."""
    world = MPI.COMM_WORLD
    store.set(f"rank {rank}", str(world.rank))
    members = [int(store.get(f"rank {member}")) for member in range(size)]
    if len(set(members)) != size or max(members) >= world.size:
        raise DeviceError(
            "torch.distributed, backend gpucomp",
            expected=f"{size} ranks of one mpirun",
            got=f"MPI ranks {', '.join(map(str, members))} of {world.size}",
            remedy=f"Run it as `mpirun -n {size} python ...`.",
            rank=rank,
        )
    return members
