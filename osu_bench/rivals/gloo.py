"""gloo, by way of torch.distributed, among the ranks of an MPI communicator.

gloo connects over the interface that GLOO_SOCKET_IFNAME names, and else over the one that the host's name leads to.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.errors import DeviceError, SpecError

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from mpi4py import MPI

    Array = np.ndarray[Any, Any]

__all__ = ["Gloo", "own_address"]

INTERFACE = "GLOO_SOCKET_IFNAME"
TIMEOUT = timedelta(seconds=300)
SIOCGIFADDR = 0x8915
"""The request of ioctl for the address of an interface."""
LOOPBACK = "127.0.0.1"


class Gloo:
    """A process group of gloo's; what gloo does in place begins with a copy to where the result shall be."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Let all ranks of `comm` make one."""
        self._torch = _torch()
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        self._store = self._meet()
        self._group: Any = self._torch.distributed.ProcessGroupGloo(self._store, comm.rank, comm.size, TIMEOUT)

    def __enter__(self) -> Gloo:
        """Close it at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close it, unless an error may have kept other ranks from coming."""
        if error is None:
            self.close()

    def close(self) -> None:
        """Let all ranks end the group together: rank 0 has the store that the others speak to."""
        if self._group is not None:
            self._comm.Barrier()
            self._group = None
            self._comm.Barrier()
            self._store = None

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast the array of the root."""
        self._group.broadcast(self._bytes(array), root).wait()

    def allreduce(self, send: Array, recv: Array) -> None:
        """Add up the arrays of all ranks."""
        _copy(send, recv)
        self._group.allreduce([self._numbers(recv)]).wait()

    def reduce(self, send: Array, recv: Array, root: int = 0) -> None:
        """Add up the arrays of all ranks on the root; the others' `recv` is overwritten too."""
        _copy(send, recv)
        self._group.reduce(self._numbers(recv), root).wait()

    def allgather(self, send: Array, recv: Array) -> None:
        """Put the arrays of all ranks behind each other, on all."""
        self._group.allgather([self._blocks(recv)], [self._bytes(send)]).wait()

    def reduce_scatter(self, send: Array, recv: Array) -> None:
        """Add up the arrays of all ranks, of which each gets its part; the parts are equal."""
        options = self._torch.distributed.ReduceScatterOptions()
        self._group._reduce_scatter_base(self._numbers(recv), self._numbers(send), options).wait()

    def alltoall(self, send: Array, recv: Array) -> None:
        """Send every rank its part, and put what comes from each behind each other; the parts are equal."""
        self._group.alltoall_base(self._bytes(recv), self._bytes(send), [], []).wait()

    def gather(self, send: Array, recv: Array | None, root: int = 0) -> None:
        """Put the arrays of all ranks behind each other, on the root."""
        parts = [self._blocks(recv)] if recv is not None and self._rank == root else []
        self._group.gather(parts, [self._bytes(send)], self._rooted("Gather", root)).wait()

    def scatter(self, send: Array | None, recv: Array, root: int = 0) -> None:
        """Send every rank its part of the root's array; the parts are equal."""
        parts = [self._blocks(send)] if send is not None and self._rank == root else []
        self._group.scatter([self._bytes(recv)], parts, self._rooted("Scatter", root)).wait()

    # Arrays as tensors on the same memory

    def _bytes(self, array: Array) -> Any:
        """Return the elements as bytes: gloo has not every type, and these need only travel."""
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))

    def _blocks(self, array: Array) -> list[Any]:
        return list(self._bytes(array).chunk(self._size))

    def _numbers(self, array: Array) -> Any:
        """Return the elements as numbers to add up; 16 bits that numpy has no type for are bfloat16."""
        flat = array.reshape(-1)
        if flat.dtype.name in ("bfloat16", "uint16"):
            return self._torch.from_numpy(flat.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(flat)

    def _rooted(self, name: str, root: int) -> Any:
        options = getattr(self._torch.distributed, f"{name}Options")()
        options.rootRank = root
        return options

    # Where the ranks meet

    def _meet(self) -> Any:
        """Return a store that rank 0 serves, at an address that the others hear of over MPI."""
        one_host = len(set(self._comm.allgather(socket.gethostname()))) == 1
        make, at = self._torch.distributed.TCPStore, None
        if self._rank == 0:
            address = LOOPBACK if one_host else own_address()
            store = make(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
            at = (address, store.port)
        address, port = self._comm.bcast(at)
        if self._rank != 0:
            store = make(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        return store


def _copy(source: Array, target: Array) -> None:
    if source is not target:
        np.copyto(target, source)


def own_address() -> str:
    """Return where other hosts reach this one, over the interface that gloo is told to take."""
    named = os.environ.get(INTERFACE, "").split(",")[0]
    if not named:
        return socket.gethostbyname(socket.gethostname())
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
            answer = fcntl.ioctl(some.fileno(), SIOCGIFADDR, struct.pack("256s", named.encode()[:15]))
    except OSError as error:
        raise SpecError(
            f"environment variable {INTERFACE}",
            expected="an interface with an address",
            got=f"'{named}': {error.strerror}",
            remedy="`ip address` lists those of this host.",
        ) from error
    return socket.inet_ntoa(answer[20:24])


def _torch() -> ModuleType:
    # Else hosts whose addresses have no names make torch warn, once for each connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise DeviceError(
            "gloo",
            expected="torch, which brings it",
            got=f"{error}",
            remedy='Install it: pip install "mpi_gpucomp[torch]".',
        ) from error
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise DeviceError(
            "gloo",
            expected="a torch that was built with gloo",
            got=f"torch {torch.__version__} without it",
            remedy="Install a build for Linux from PyPI.",
        )
    return torch
