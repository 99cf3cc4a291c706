"""Baselines that are not this library: gloo, and compression of each message separately.

`Gloo(comm)`, `PerMessage(comm, codec)` and `PerMessageChain(comm, codec)` share one interface. Construction, `close()`
and the methods are collective; arrays are contiguous numpy arrays of the same length on all ranks.

    bcast(array, root=0)        broadcast the root's array
    allreduce(send, recv)       sum; `recv` may be `send`
    allgather(send, recv)       `recv` has one block per rank

Gloo also has reduce, reduce_scatter, alltoall, gather and scatter.
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
from mpi_gpucomp.cli.command import allgather_json
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
"""Messages of a chain that are in flight in each direction; more would share the wire, and each would arrive later."""
WHOLE = 1 << 30


class PerMessage:
    """Collectives of separately compressed messages: broadcast is a binomial tree, the others are rings."""

    def __init__(self, comm: MPI.Intracomm, codec: str, *, chunk: int = WHOLE) -> None:
        """Create it; collective.

        By default a message is encoded as a whole and then sent, as point-to-point layers with compression do; with
        shorter chunks, encoding overlaps with sending.
        """
        self._codec, self._chunk = codec, chunk
        self._comm = Communicator(comm, codec, chunk=chunk)
        self._rank, self._size = comm.rank, comm.size

    def __enter__(self) -> PerMessage:
        """Return this object."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the communicator."""
        self._comm.__exit__(kind, error, at)

    def close(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()

    def stats(self) -> tuple[int, int]:
        """Return the bytes sent and received in frames; `none` sends raw messages, which are not counted."""
        stats = self._comm.stats()
        return stats.bytes_sent, stats.bytes_received

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast along a binomial tree: receive from the parent, then send to the children, the farthest first."""
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
        """Gather along a ring."""
        blocks = np.split(recv.reshape(-1), self._size)
        blocks[self._rank][:] = send.reshape(-1)
        self._gather_blocks(blocks, self._rank)

    def allreduce(self, send: Array, recv: Array) -> None:
        """Reduce along a ring, then gather the sums along it.

        With a lossy codec the results of ranks differ: only the rank that summed a block has the exact sum.
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
        self._gather_blocks(blocks, self._rank + 1)

    def _gather_blocks(self, blocks: list[Array], first: int) -> None:
        """Gather all blocks along the ring; this rank has block `first`."""
        for step in range(self._size - 1):
            self._exchange(blocks[(first - step) % self._size], blocks[(first - step - 1) % self._size])

    def _exchange(self, send: Array, recv: Array) -> None:
        """Send to the next rank of the ring while receiving from the previous one."""
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        self._comm.Sendrecv(send, after, TAG, recv, before, TAG, codec=self._codec)


class PerMessageChain(PerMessage):
    """A stronger baseline: a broadcast along a chain, in messages of a few MiB, several of them in flight."""

    def __init__(self, comm: MPI.Intracomm, codec: str, *, chunk: int = 1 << 20, message: int = 4 << 20) -> None:
        """Create it for messages of `message` bytes, each encoded in chunks; collective."""
        super().__init__(comm, codec, chunk=chunk)
        self._message = message

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast message by message: each rank receives, decodes, encodes again and sends."""
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


INTERFACE = "GLOO_SOCKET_IFNAME"
TIMEOUT = timedelta(seconds=300)
SIOCGIFADDR = 0x8915
"""The ioctl request for an interface's address."""
LOOPBACK = "127.0.0.1"


class Gloo:
    """A gloo process group of torch.distributed; in-place operations begin with a copy to the receive buffer.

    gloo connects over the interface in GLOO_SOCKET_IFNAME, or else the one that the host name resolves to.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Create the group; collective."""
        self._torch = _torch()
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        self._store = self._connect_store()
        self._group: Any = self._torch.distributed.ProcessGroupGloo(self._store, comm.rank, comm.size, TIMEOUT)

    def __enter__(self) -> Gloo:
        """Return this object."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the group, unless an error may have kept other ranks away."""
        if error is None:
            self.close()

    def close(self) -> None:
        """Close the group; collective, because rank 0 serves the store."""
        if self._group is not None:
            self._comm.Barrier()
            self._group = None
            self._comm.Barrier()
            self._store = None

    def bcast(self, array: Array, root: int = 0) -> None:
        """Broadcast the root's array."""
        self._group.broadcast(self._bytes(array), root).wait()

    def allreduce(self, send: Array, recv: Array) -> None:
        """Sum the arrays of all ranks."""
        _copy(send, recv)
        self._group.allreduce([self._numbers(recv)]).wait()

    def reduce(self, send: Array, recv: Array, root: int = 0) -> None:
        """Sum the arrays of all ranks on the root; `recv` is overwritten on all ranks."""
        _copy(send, recv)
        self._group.reduce(self._numbers(recv), root).wait()

    def allgather(self, send: Array, recv: Array) -> None:
        """Concatenate the arrays of all ranks, on all ranks."""
        self._group.allgather([self._blocks(recv)], [self._bytes(send)]).wait()

    def reduce_scatter(self, send: Array, recv: Array) -> None:
        """Sum the arrays of all ranks and scatter the sum in equal blocks."""
        options = self._torch.distributed.ReduceScatterOptions()
        self._group._reduce_scatter_base(self._numbers(recv), self._numbers(send), options).wait()

    def alltoall(self, send: Array, recv: Array) -> None:
        """Exchange equal blocks between all ranks."""
        self._group.alltoall_base(self._bytes(recv), self._bytes(send), [], []).wait()

    def gather(self, send: Array, recv: Array | None, root: int = 0) -> None:
        """Concatenate the arrays of all ranks on the root."""
        parts = [self._blocks(recv)] if recv is not None and self._rank == root else []
        self._group.gather(parts, [self._bytes(send)], self._rooted("Gather", root)).wait()

    def scatter(self, send: Array | None, recv: Array, root: int = 0) -> None:
        """Scatter the root's array in equal blocks."""
        parts = [self._blocks(send)] if send is not None and self._rank == root else []
        self._group.scatter([self._bytes(recv)], parts, self._rooted("Scatter", root)).wait()

    def _bytes(self, array: Array) -> Any:
        """Return the elements as bytes, because gloo lacks some types."""
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))

    def _blocks(self, array: Array) -> list[Any]:
        return list(self._bytes(array).chunk(self._size))

    def _numbers(self, array: Array) -> Any:
        """Return a tensor that gloo can sum; uint16 holds bfloat16."""
        flat = array.reshape(-1)
        if flat.dtype.name in ("bfloat16", "uint16"):
            return self._torch.from_numpy(flat.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(flat)

    def _rooted(self, name: str, root: int) -> Any:
        options = getattr(self._torch.distributed, f"{name}Options")()
        options.rootRank = root
        return options

    def _connect_store(self) -> Any:
        """Return a store that rank 0 serves, at an address that it broadcasts over MPI."""
        one_host = len(set(allgather_json(self._comm, socket.gethostname()))) == 1
        make, at = self._torch.distributed.TCPStore, None
        if self._rank == 0:
            address = LOOPBACK if one_host else own_address()
            store = make(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
            at = (address, store.port)
        address, port = allgather_json(self._comm, at)[0]
        if self._rank != 0:
            store = make(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        return store


def _copy(source: Array, target: Array) -> None:
    if source is not target:
        np.copyto(target, source)


def own_address() -> str:
    """Return this host's address on the interface that gloo uses."""
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
    # torch warns for each connection to an address without a host name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise DeviceError(
            "gloo",
            expected="torch",
            got=f"{error}",
            remedy='Install it: pip install "mpi_gpucomp[torch]".',
        ) from error
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise DeviceError(
            "gloo",
            expected="a torch that was built with gloo",
            got=f"torch {torch.__version__} without gloo",
            remedy="Install a build for Linux from PyPI.",
        )
    return torch
