"""The process group that torch.distributed calls: every method reads its arguments and puts an operation in line.

Methods have the names by which torch 2.6 to 2.13 and its C++ side call them: some have two.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.communicator import Communicator
from mpi_gpucomp.errors import DeviceError, SpecError
from mpi_gpucomp.torch import collectives
from mpi_gpucomp.torch.collectives import all_reduce_sparse, barrier, monitored_barrier
from mpi_gpucomp.torch.register import NAME
from mpi_gpucomp.torch.work import Line, Messages, Operation, seconds, unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

    from mpi_gpucomp._dispatch.plan import CallOptions
    from mpi_gpucomp.codec import Codec

__all__ = ["ROLES", "GpucompProcessGroup", "Options", "make"]

Tensors = list[torch.Tensor]
USUAL = SimpleNamespace(reduceOp=c10d.ReduceOp.SUM, rootRank=0, asyncOp=True, timeout=None)
"""What torch's classes of options say where nobody says anything."""


# torch's stub lists overloads and keywords of its C++ classes that it never calls from outside.
_Base: Any = c10d.ProcessGroup


@unseen
class GpucompProcessGroup(_Base):  # type: ignore[misc]
    """Ranks of MPI as torch sees them."""

    backend_name = NAME
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, communicator: Communicator, options: Options, timeout: timedelta, store: Store) -> None:
        """Take over a communicator whose ranks are those of the group."""
        super().__init__(communicator.rank, communicator.size)
        self._comm, self.options, self._store = communicator, options, store
        self._timeout = timeout.total_seconds()
        self._name, self._about, self._sequence = "", "undefined", 0
        self._monitored = 0
        self._line = Line(f"rank {communicator.rank}")
        self._messages = Messages(communicator, self._timeout)
        self._moves, self._sums, self._swaps = map(options.how, ("parameters", "gradients", "activations"))
        self._broadcasts = options.how("parameters", replicate=True)

    @property
    def communicator(self) -> Communicator:
        """The Communicator that carries everything; use it between operations of the group, in the same order."""
        return self._comm

    # What torch asks of a group

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return self.backend_name

    def name(self) -> str:
        """Return the name of the backend."""
        return self.backend_name

    @property
    def group_name(self) -> str:
        """The name that torch gives it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What torch says of it."""
        return self._about

    def _set_group_desc(self, about: str) -> None:
        self._about = about

    @property
    def _device_types(self) -> list[torch.device]:
        devices = [torch.device("cpu")]
        return [*devices, torch.device("cuda")] if torch.cuda.is_available() else devices

    def _get_backend(self, device: torch.device) -> GpucompProcessGroup:
        return self

    def _set_default_backend(self, kind: Any) -> None:
        pass

    def get_group_store(self) -> Store:
        """Return the store that its members share."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations that start from now on wait so long."""
        self._timeout = timeout.total_seconds()
        self._messages.timeout = self._timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch; operations start one by one all the same."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._put("coalesced", _nothing, [], USUAL)

    def shutdown(self) -> None:
        """End it, behind what is in line; all ranks do."""
        if self._line.close(self._timeout):
            self._comm.Free()

    def abort(self) -> None:
        """Leave it as it is: peers may not come."""
        self._line.close(0.0)

    def _put(self, title: str, act: Callable[[], None], result: Any, opts: Any, on: Sequence[Tensor] = ()) -> Operation:
        """Put an operation in line. What `opts` says is read now: torch uses it again for the next one."""
        limit = seconds(opts.timeout, self._timeout)
        self._sequence += 1
        inline = not opts.asyncOp
        return self._line.run(Operation(title, result, limit), act, inline=inline, on=on)

    # Collectives

    def broadcast(self, tensors: Tensors, opts: Any = USUAL) -> Work:
        """Send the root's tensor to all."""
        (tensor,) = tensors
        act = partial(collectives.broadcast, self._comm, self._broadcasts, tensor, opts.rootRank)
        return self._put("broadcast", act, tensors, opts, tensors)

    def allreduce(self, tensors: Tensors, opts: Any = USUAL) -> Work:
        """Reduce the tensors of all ranks."""
        (tensor,) = tensors
        way = collectives.all_reduce if tensor.layout is torch.strided else all_reduce_sparse
        act = partial(way, self._comm, self._sums, tensor, opts.reduceOp)
        return self._put("all_reduce", act, tensors, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = USUAL) -> Work:
        """Reduce many tensors of all ranks."""
        act = partial(collectives.all_reduce_together, self._comm, self._sums, tensors, opts.reduceOp)
        return self._put("all_reduce_coalesced", act, tensors, opts, tensors)

    def reduce(self, tensors: Tensors, opts: Any = USUAL) -> Work:
        """Reduce the tensors of all ranks into the root's."""
        (tensor,) = tensors
        act = partial(collectives.reduce, self._comm, self._sums, tensor, opts.reduceOp, opts.rootRank)
        return self._put("reduce", act, tensors, opts, tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = USUAL) -> Work:
        """Collect the tensors of all ranks."""
        (into,), (source,) = outputs, inputs
        act = partial(collectives.all_gather, self._comm, self._moves, into, source)
        return self._put("all_gather", act, outputs, opts, inputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = USUAL) -> Work:
        """Collect many tensors of all ranks: for each rank, all of its."""

        def act() -> None:
            for source, *into in zip(inputs, *outputs, strict=True):
                collectives.all_gather(self._comm, self._moves, into, source)

        return self._put("all_gather_coalesced", act, outputs, opts, inputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = USUAL) -> Work:
        """Collect the tensors of all ranks in one."""
        act = partial(collectives.all_gather_single, self._comm, self._moves, output, source)
        return self._put("all_gather_single", act, [output], opts, [source])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = USUAL) -> Work:
        """Collect many tensors of all ranks in one each."""

        def act() -> None:
            for into, source in zip(outputs, inputs, strict=True):
                collectives.all_gather_single(self._comm, self._moves, into, source)

        return self._put("all_gather_single_coalesced", act, outputs, opts, inputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = USUAL) -> Work:
        """Reduce one tensor for each rank."""
        (into,), (sources,) = outputs, inputs
        act = partial(collectives.reduce_scatter, self._comm, self._sums, into, sources, opts.reduceOp)
        return self._put("reduce_scatter", act, outputs, opts, outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = USUAL) -> Work:
        """Reduce one tensor, each rank taking its share."""
        act = partial(collectives.reduce_scatter_single, self._comm, self._sums, output, source, opts.reduceOp)
        return self._put("reduce_scatter_single", act, [output], opts, [source])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = USUAL) -> Work:
        """Reduce many tensors, each rank taking its share of each."""
        op = opts.reduceOp

        def act() -> None:
            for into, source in zip(outputs, inputs, strict=True):
                collectives.reduce_scatter_single(self._comm, self._sums, into, source, op)

        return self._put("reduce_scatter_single_coalesced", act, outputs, opts, inputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = USUAL) -> Work:
        """Collect the tensors of all ranks at the root."""
        (source,), into = inputs, outputs[0] if outputs else []
        act = partial(collectives.gather, self._comm, self._moves, into, source, opts.rootRank)
        return self._put("gather", act, outputs, opts, inputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = USUAL) -> Work:
        """Send every rank one of the root's tensors."""
        (into,), sources = outputs, inputs[0] if inputs else []
        act = partial(collectives.scatter, self._comm, self._moves, into, sources, opts.rootRank)
        return self._put("scatter", act, outputs, opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = USUAL) -> Work:
        """Send every rank one tensor."""
        act = partial(collectives.all_to_all, self._comm, self._swaps, outputs, inputs)
        return self._put("all_to_all", act, outputs, opts, inputs)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = USUAL
    ) -> Work:
        """Send every rank its share of a tensor."""
        shares = list(received or ()), list(sent or ())
        act = partial(collectives.all_to_all_single, self._comm, self._swaps, output, source, *shares)
        return self._put("all_to_all_single", act, [output], opts, [source])

    def barrier(self, opts: Any = USUAL) -> Work:
        """Wait until all ranks are here."""
        act = partial(barrier, self._comm, seconds(opts.timeout, self._timeout))
        return self._put("barrier", act, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here, and say who is not."""
        limit = self._timeout if timeout is None else timeout.total_seconds()
        self._line.drain(limit)
        self._monitored += 1
        monitored_barrier(self._comm, self._monitored, limit, wait_all_ranks)

    # Messages

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        """Send a tensor."""
        (tensor,) = tensors
        return self._messages.send(tensor, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Receive a tensor."""
        (tensor,) = tensors
        return self._messages.receive(tensor, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from whoever sends one."""
        (tensor,) = tensors
        return self._messages.receive(tensor, None, tag)

    # Names that older versions, and torch's C++ side, use

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _nothing() -> None:
    """Take a place in the line."""


# What a process group is told by `pg_options`: which codec for which kind of traffic.

ANY_LENGTH = 1 << 62
ROLES = {
    "parameters": "broadcast, all_gather, scatter and gather",
    "gradients": "all_reduce, reduce and reduce_scatter",
    "activations": "all_to_all",
}
"""What the operations of torch.distributed usually carry, for a codec of its own each."""


@dataclass(frozen=True)
class Options:
    """The policy of one group; without one everything is lossless, by codec="auto"."""

    codec: str | Codec = "auto"
    """The codec of whatever has no role below, messages between two ranks too; "none" leaves everything to MPI."""
    roles: Mapping[str, str | Codec] | None = field(default=None)
    """Codecs by what is carried: {"parameters": ..., "gradients": ..., "activations": ...}."""
    exact_root: bool = False
    """Whether the root of a lossy broadcast keeps its exact values, and so differs from the others."""
    chunk: int | None = None
    """Bytes of a chunk; chosen by length and codec if None."""
    passthrough_bytes: int = 1 << 15
    """Bytes of the longest message that goes straight to MPI."""
    slots: int = 2
    """How many collectives are under way at once."""

    def __post_init__(self) -> None:
        """Refuse what means nothing here, before any rank waits for another."""
        get_codec(self.codec)
        for role, codec in (self.roles or {}).items():
            get_codec(codec)
            if role not in ROLES:
                raise SpecError(
                    "Options, roles",
                    expected=f"some of {', '.join(ROLES)}",
                    got=repr(role),
                    remedy="Name what the operations carry: " + "; ".join(f"{k}: {v}" for k, v in ROLES.items()) + ".",
                )

    @property
    def straight(self) -> int:
        """Bytes of the longest message that goes straight to MPI: of any, where nothing is ever encoded."""
        codecs = [self.codec, *(self.roles or {}).values()]
        return ANY_LENGTH if all(get_codec(codec).name == "none" for codec in codecs) else self.passthrough_bytes

    def how(self, role: str, *, replicate: bool = False) -> CallOptions:
        """Return what a call of this role says to the communicator: nothing, where that is what it does anyway.

        `alike` is for calls that leave all ranks with the same values, unless the policy says otherwise.
        """
        codec = (self.roles or {}).get(role)
        how: CallOptions = {} if codec is None else {"role": role}
        if replicate and not self.exact_root and not get_codec(codec or self.codec).lossless:
            how["replicate"] = True
        return how


# Makes a process group: finds the MPI ranks of its members, and a communicator for them.

LATE = 10
"""A communicator waits so many times its timeout for a rank that may only be late; torch's timeout is for those."""
TAGS = 1 << 15
"""Tags that every MPI has."""


def make(seen: Any, options: Any) -> GpucompProcessGroup:
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
            passthrough_bytes=policy.straight,
            timeout=timeout.total_seconds() / LATE,
        )
    finally:
        among.Free()
    return GpucompProcessGroup(communicator, policy, timeout, seen.store)


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
