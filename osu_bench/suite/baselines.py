"""Compression per message: what a point-to-point layer that compresses gives to collectives built on top of it.

Each hop encodes what it sends and decodes what it receives, knowing nothing of the hops before. With a lossy codec the
error may add up, once for each hop that coded the values again, so ranks far from the root get worse values; the
benchmark's caller decides what is still right.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp import Communicator
from mpi_gpucomp.errors import DeviceError, SpecError

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI

    from mpi_gpucomp import Request

    Array = np.ndarray[Any, Any]
    from types import ModuleType

__all__ = ["Gloo", "PerMessage", "PerMessageChain", "own_address"]

TAG = 1
AHEAD = 3
"""Messages of a chain that are received ahead of the one that is waited for, and that may still be leaving behind it.

With more, MPI would share the wire among them, and each would arrive later.
"""


WHOLE = 1 << 30


class PerMessage:
    """Collectives of whole messages: the broadcast is MPI's usual binomial tree, the others are rings."""

    def __init__(self, comm: MPI.Intracomm, codec: str, *, chunk: int = WHOLE) -> None:
        """Let all ranks of `comm` make one.

        A message is encoded as a whole and then sent, as in the layers that this stands for, or in chunks beside the
        wire if they are shorter than it.
        """
        self._codec, self._chunk = codec, chunk
        self._comm = Communicator(comm, codec, chunk=chunk)
        self._rank, self._size = comm.rank, comm.size

    def __enter__(self) -> PerMessage:
        """Close it at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close it as the communicator would be closed."""
        self._comm.__exit__(kind, error, at)

    def close(self) -> None:
        """Let all ranks free the communicator."""
        self._comm.Free()

    def stats(self) -> tuple[int, int]:
        """Return the bytes that were sent and received in frames so far; those of `none` are MPI's own."""
        stats = self._comm.stats()
        return stats.bytes_sent, stats.bytes_received

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast by a binomial tree: receive from the parent, then send to each child, the farthest first."""
        flat, rank = array.reshape(-1), (self._rank - root) % self._size
        reach = 1
        while reach < self._size and not rank & reach:
            reach *= 2
        if rank:
            self._comm.Recv(flat, (rank - reach + root) % self._size, TAG, codec=self._codec)
        while reach > 1:
            reach //= 2
            if rank + reach < self._size:
                self._comm.Send(flat, (rank + reach + root) % self._size, TAG, codec=self._codec)

    def allgather(self, send: Array, recv: Array) -> None:
        """Pass every rank's array around a ring."""
        blocks = np.split(recv.reshape(-1), self._size)
        blocks[self._rank][:] = send.reshape(-1)
        self._pass_around(blocks, self._rank)

    def allreduce(self, send: Array, recv: Array) -> None:
        """Add up by a ring, in which each block collects the ranks' values and is then passed around.

        With a lossy codec the ranks' results differ: only who added up a block has it as it was added up.
        """
        flat = recv.reshape(-1)
        if send is not recv:
            flat[:] = send.reshape(-1)
        blocks = np.array_split(flat, self._size)
        arriving = np.empty_like(blocks[0])
        for step in range(self._size - 1):
            own = blocks[(self._rank - step - 1) % self._size]
            self._exchange(blocks[(self._rank - step) % self._size], arriving[: own.size])
            np.add(own, arriving[: own.size], out=own)
        self._pass_around(blocks, self._rank + 1)

    def _pass_around(self, blocks: list[Array], first: int) -> None:
        """Give all ranks all blocks around a ring; this one has its `first` already."""
        for step in range(self._size - 1):
            self._exchange(blocks[(first - step) % self._size], blocks[(first - step - 1) % self._size])

    def _exchange(self, send: Array, recv: Array) -> None:
        """Send to the next rank of the ring while receiving from the one before."""
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        self._comm.Sendrecv(send, after, TAG, recv, before, TAG, codec=self._codec)


class PerMessageChain(PerMessage):
    """The stronger form: a broadcast along a chain of ranks in many messages, several of them under way at a time."""

    def __init__(self, comm: MPI.Intracomm, codec: str, *, chunk: int = 1 << 20, message: int = 4 << 20) -> None:
        """Let all ranks of `comm` make one, for messages of so many bytes; each is encoded in chunks as any other."""
        super().__init__(comm, codec, chunk=chunk)
        self._message = message

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast message by message: receive and decode one, encode it again for the next rank, and so on."""
        rank = (self._rank - root) % self._size
        messages = self._messages(array.reshape(-1))
        before, after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        arriving: deque[Request] = deque()
        leaving: deque[Request] = deque()
        for number, message in enumerate(messages):
            if rank:
                for later in messages[number + len(arriving) : number + AHEAD]:
                    arriving.append(self._comm.Irecv(later, before, TAG, codec=self._codec))
                arriving.popleft().Wait()
            if rank + 1 < self._size:
                if len(leaving) == AHEAD:
                    leaving.popleft().Wait()
                leaving.append(self._comm.Isend(message, after, TAG, codec=self._codec))
        for request in leaving:
            request.Wait()

    def _messages(self, flat: Array) -> list[Array]:
        piece = max(1, self._message // flat.itemsize)
        return [flat[start : start + piece] for start in range(0, flat.size, piece)]


# gloo, by way of torch.distributed, among the ranks of an MPI communicator.
#
# gloo connects over the interface that GLOO_SOCKET_IFNAME names, and else over the one that the host's name leads to.

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
