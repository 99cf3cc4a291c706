"""Rendezvous over MPI: rank and size are those of MPI.COMM_WORLD, and rank 0 serves the store.

Importing mpi_gpucomp.torch registers it: `init_method="mpi://"` selects it, and it is the fallback of `env://`, torch's
default, in processes that an MPI launcher started without MASTER_ADDR. It also sets LOCAL_RANK, as torchrun does. MPI
is initialised by the rendezvous, not by the import.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from functools import cache, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch.distributed as dist

from mpi_gpucomp.errors import DeviceError, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from mpi4py import MPI
    from torch._C._distributed_c10d import Store, TCPStore

__all__ = ["check_world_size", "register_rendezvous", "rendezvous", "set_local_rank"]

SCHEME = "mpi"
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "SLURM_STEP_ID")
"""Variables set by MPI launchers; each launcher sets at least one."""
TORCH_VARIABLES = ("MASTER_ADDR", "TORCHELASTIC_RUN_ID")
"""Variables that configure torch's own `env://` rendezvous."""
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
"""Variables with the number of processes that an MPI launcher started; processes that mpirun started within a Slurm
step have those of both, and mpirun's count."""
LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Variables with the rank of this process on its host, in the same order."""
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""ioctl request for the address of a network interface."""
HOST_NAME_BYTES = 256
CONNECT_SECONDS = 5.0

_count = 0


@cache
def register_rendezvous() -> None:
    """Register `mpi://`; make it the fallback of `env://` in processes that have an MPI launcher and no MASTER_ADDR."""
    if not dist.is_available():
        return
    from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

    register_rendezvous_handler(SCHEME, rendezvous)  # type: ignore[no-untyped-call]
    env_rendezvous = _rendezvous_handlers["env"]

    @wraps(env_rendezvous)
    def env_or_mpi(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        by_mpi = _launched() and not any(name in os.environ for name in TORCH_VARIABLES)
        return rendezvous(url, **kwargs) if by_mpi else env_rendezvous(url, **kwargs)

    _rendezvous_handlers["env"] = env_or_mpi


def rendezvous(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield store, rank and size to torch; collective over MPI.COMM_WORLD."""
    global _count
    from mpi4py import MPI
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.constants import default_pg_timeout

    world = MPI.COMM_WORLD
    check_world_size("init_process_group")
    _check_launched(world)
    _check_rank(url, world)
    hosts = _host_names(world)
    os.environ.setdefault("LOCAL_RANK", str(hosts[: world.rank].count(hosts[world.rank])))
    store = _create_store(world, timeout or default_pg_timeout, same_host=len(set(hosts)) == 1)
    _count += 1
    yield PrefixStore(f"rendezvous {_count}", store), world.rank, world.size
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def set_local_rank() -> None:
    """Set LOCAL_RANK, as torchrun does, if an MPI launcher's variables tell it."""
    local_rank = _launcher_value(LOCAL_RANK_VARIABLES)
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", local_rank[1])


def check_world_size(topic: str) -> None:
    """Raise unless MPI's world has the size that the launcher says: unconnected processes would train separately."""
    from mpi4py import MPI

    world, (library, version) = MPI.COMM_WORLD, MPI.get_vendor()
    for named in (_launcher_value(("WORLD_SIZE",)), _launcher_value(SIZE_VARIABLES)):
        if named is not None and named[1] != str(world.size):
            raise DeviceError(
                topic,
                expected=f"an MPI world of {named[1]} ranks, as {named[0]} says",
                got=f"an MPI world of {world.size}",
                remedy=f"Start the program with the mpirun of {library} {'.'.join(map(str, version))}, or with srun "
                "and the --mpi option for it; torchrun does not connect processes by MPI.",
                rank=world.rank,
            )


def _launcher_value(names: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the first of the variables that is set for this process, with its value."""
    # Slurm sets its variables in an allocation too, outside of any step.
    usable = (name for name in names if "SLURM_STEP_ID" in os.environ or not name.startswith("SLURM"))
    return next(((name, os.environ[name]) for name in usable if name in os.environ), None)


def _launched() -> bool:
    return any(name in os.environ for name in LAUNCHER_VARIABLES)


def _check_launched(world: MPI.Intracomm) -> None:
    """Raise if no MPI launcher started this process."""
    if world.size == 1 and not _launched():
        raise DeviceError(
            "torch.distributed, backend gpucomp",
            expected="a process started by an MPI launcher",
            got="a process started without one",
            remedy="Run it as `mpirun -n 4 python ...`; for one rank, as `mpirun -n 1 python ...`.",
        )


def _check_rank(url: str, world: MPI.Intracomm) -> None:
    """Raise if the caller passed a rank or size that is not MPI's."""
    query = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
    got = query.get("rank", world.rank), query.get("world_size", world.size)
    if got != (world.rank, world.size):
        raise SpecError(
            "init_process_group",
            expected=f"MPI's rank and size, rank {world.rank} of {world.size}",
            got=f"rank {got[0]} of {got[1]}",
            remedy="Omit rank and world_size.",
            rank=world.rank,
        )


def _create_store(world: MPI.Intracomm, timeout: timedelta, *, same_host: bool) -> TCPStore:
    """Serve a store on a free port of rank 0, and connect the other ranks to it."""
    from torch._C._distributed_c10d import TCPStore

    if world.rank == 0:
        store = TCPStore(LOOPBACK, 0, world.size, is_master=True, timeout=timeout, wait_for_workers=False)
        _broadcast_text(world, " ".join([str(store.port), *([LOOPBACK] if same_host else _local_addresses())]))
        return store
    port, *addresses = _broadcast_text(world).split()
    address = _reachable_address(addresses, int(port), world.rank)
    return TCPStore(address, int(port), world.size, is_master=False, timeout=timeout, wait_for_workers=False)


def _host_names(world: MPI.Intracomm) -> list[bytes]:
    """Return the host name of each rank."""
    name = np.array([socket.gethostname().encode()], dtype=f"S{HOST_NAME_BYTES}")
    names = np.empty(world.size, name.dtype)
    world.Allgather(name.view(np.uint8), names.view(np.uint8))
    found: list[bytes] = names.tolist()
    return found


def _broadcast_text(world: MPI.Intracomm, text: str = "") -> str:
    """Return rank 0's text on all ranks."""
    payload = np.frombuffer(text.encode(), np.uint8).copy()
    length = np.array([payload.size])
    world.Bcast(length)
    if world.rank != 0:
        payload = np.empty(length[0], np.uint8)
    world.Bcast(payload)
    return payload.tobytes().decode()


def _local_addresses() -> list[str]:
    """Return the addresses of this host's name, then those of its interfaces."""
    interfaces = _interface_addresses()
    with suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [*dict.fromkeys([*(str(info[4][0]) for info in infos), *interfaces])]
    return interfaces


def _interface_addresses() -> list[str]:
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in addresses if address != LOOPBACK]


def _reachable_address(addresses: list[str], port: int, rank: int) -> str:
    """Return the first address that accepts a connection."""
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except OSError:
            continue
        return address
    raise DeviceError(
        "init_process_group",
        expected="a connection to the store of rank 0",
        got=f"no connection to {', '.join(addresses)} on port {port}",
        remedy="Set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE to use torch's env:// rendezvous.",
        rank=rank,
    )
