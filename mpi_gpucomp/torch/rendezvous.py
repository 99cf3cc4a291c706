"""How the ranks of an mpirun find each other for torch: rank and size from MPI, and a store that rank 0 opens."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from mpi_gpucomp.errors import DeviceError, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_launched", "meet"]

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "SLURM_STEP_ID")
"""Variables of which a launcher of MPI programs sets some."""
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""The request of ioctl for the address of an interface."""

_meetings = 0


def check_launched() -> None:
    """Raise where no launcher has started this process."""
    if MPI.COMM_WORLD.size > 1 or any(name in os.environ for name in LAUNCHED):
        return
    raise DeviceError(
        "torch.distributed, backend gpucomp",
        expected="a process that mpirun has started",
        got="one that was started by itself",
        remedy="Run it as `mpirun -n 4 python ...`; for one rank, as `mpirun -n 1 python ...`.",
    )


def meet(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield store, rank and size, as torch wants it; all ranks of MPI's world do."""
    global _meetings
    world = MPI.COMM_WORLD
    check_launched()
    _check_same(url, world)
    store = _store(world, timeout)
    _meetings += 1
    yield PrefixStore(f"meeting {_meetings}", store), world.rank, world.size
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _check_same(url: str, world: MPI.Intracomm) -> None:
    """Raise if a rank or size that the caller gives is not MPI's."""
    given = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
    got = given.get("rank", world.rank), given.get("world_size", world.size)
    if got != (world.rank, world.size):
        raise SpecError(
            "init_process_group",
            expected=f"rank {world.rank} of {world.size}, as mpirun has it",
            got=f"rank {got[0]} of {got[1]}",
            remedy="Leave rank and world_size out.",
            rank=world.rank,
        )


def _store(world: MPI.Intracomm, timeout: timedelta) -> TCPStore:
    """Let rank 0 open a store on a port that is free, and the others find it."""
    one_host = len(set(world.allgather(socket.gethostname()))) == 1
    if world.rank == 0:
        store = TCPStore(LOOPBACK, 0, world.size, is_master=True, timeout=timeout, wait_for_workers=False)
        world.bcast(([LOOPBACK] if one_host else _addresses(), store.port))
        return store
    addresses, port = world.bcast(None)
    found = _first_that_answers(addresses, port)
    return TCPStore(found, port, world.size, is_master=False, timeout=timeout, wait_for_workers=False)


def _addresses() -> list[str]:
    """Return by which addresses other hosts may reach this one: that of its name, then those of its interfaces."""
    name = socket.gethostname()
    with suppress(OSError):
        named = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        return [*dict.fromkeys([*named, *_interfaces()])]
    return _interfaces()


def _interfaces() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if address != LOOPBACK]


def _first_that_answers(addresses: list[str], port: int) -> str:
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError:
            continue
        return address
    raise DeviceError(
        "init_process_group",
        expected="a way to rank 0's store",
        got=f"no answer from {', '.join(addresses)} at port {port}",
        remedy="Set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which torch then uses instead.",
        rank=MPI.COMM_WORLD.rank,
    )
