"""The process group `gpucomp`: its options, its operations as torch calls them, and its creation on MPI ranks."""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, wraps
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from mpi_gpucomp._torch_plugin import BACKEND_NAME
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.communicator import Communicator
from mpi_gpucomp.errors import DeviceError, SpecError
from mpi_gpucomp.torch import collectives
from mpi_gpucomp.torch.rendezvous import check_world_size
from mpi_gpucomp.torch.work import CollectiveWork, OperationQueue, irecv, isend, seconds, skip_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

    from mpi_gpucomp._call.calls import CallOptions
    from mpi_gpucomp.codec import Codec

    Ranks: TypeAlias = Communicator | MPI.Intracomm | dist.ProcessGroup | None

__all__ = ["ROLES", "GpucompProcessGroup", "Options", "communicator_of", "create", "number_on"]

Tensors = list[torch.Tensor]

ROLES = {
    "parameters": "broadcast, all_gather, scatter and gather",
    "gradients": "all_reduce, reduce and reduce_scatter",
    "activations": "all_to_all",
}
"""What the operations of torch.distributed usually carry; each role may have its own codec."""
ANY_LENGTH = 1 << 62
TIMEOUT_FACTOR = 10
"""A Communicator waits this multiple of its timeout for a late rank; torch's timeout applies to late ranks."""
TAGS = 1 << 15
"""Number of tags that every MPI library supports."""
DEFAULT_OPTS = SimpleNamespace(reduceOp=c10d.ReduceOp.SUM, rootRank=0, asyncOp=True, timeout=None)
"""The defaults of torch's option classes, such as BroadcastOptions."""


@dataclass(frozen=True)
class Options:
    """Codecs and limits of one process group; the default is lossless, with codec="auto"."""

    codec: str | Codec = "auto"
    """Codec of operations without a role below, and of point-to-point messages; "none" passes all through to MPI."""
    roles: Mapping[str, str | Codec] | None = None
    """Codec of each role: {"parameters": ..., "gradients": ..., "activations": ...}."""
    exact_root: bool = False
    """Keep the root's exact values in a lossy broadcast; they then differ from those of the other ranks."""
    chunk: int | None = None
    """Chunk size in bytes; None selects it by message size and codec."""
    passthrough_bytes: int = 1 << 15
    """Messages of at most this many bytes are handed to the MPI library."""
    slots: int = 2
    """Collectives that run at once."""

    def __post_init__(self) -> None:
        """Raise SpecError for unknown codecs and roles, before any rank waits for another."""
        get_codec(self.codec)
        for role, codec in (self.roles or {}).items():
            get_codec(codec)
            if role not in ROLES:
                raise SpecError(
                    "Options, roles",
                    expected=f"roles among {', '.join(ROLES)}",
                    got=repr(role),
                    remedy="Each role stands for operations: " + "; ".join(f"{k}: {v}" for k, v in ROLES.items()) + ".",
                )

    @property
    def passthrough_limit(self) -> int:
        """`passthrough_bytes`, or no limit if nothing is ever encoded."""
        codecs = [self.codec, *(self.roles or {}).values()]
        return ANY_LENGTH if all(get_codec(codec).name == "none" for codec in codecs) else self.passthrough_bytes

    def call_options(self, role: str, *, replicate: bool = False) -> CallOptions:
        """Return the options of a call in this role: only those that differ from the communicator's defaults.

        `replicate` marks calls after which all ranks hold identical values, unless `exact_root` is set.
        """
        codec = (self.roles or {}).get(role)
        options: CallOptions = {} if codec is None else {"role": role}
        if replicate and not self.exact_root and not get_codec(codec or self.codec).lossless:
            options["replicate"] = True
        return options


_ProcessGroup: Any = c10d.ProcessGroup  # the stub lists overloads and keywords that torch never uses


@skip_dynamo
class GpucompProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A torch process group on a Communicator.

    Methods have the names by which torch 2.6 to 2.13 and its C++ code call them; some have two.
    """

    backend_name = BACKEND_NAME
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(
        self, communicator: Communicator, control: MPI.Intracomm, options: Options, timeout: timedelta, store: Store
    ) -> None:
        """Take ownership of a communicator of the group's ranks, and of an MPI one for monitored barriers."""
        super().__init__(communicator.rank, communicator.size)
        self._comm, self._control = communicator, control
        self.options, self._store = options, store
        self._timeout = timeout.total_seconds()
        self._name, self._description, self._sequence = "", "undefined", 0
        self._monitored_barriers = 0
        self._queue = OperationQueue(f"rank {communicator.rank}")
        self._parameters = options.call_options("parameters")
        self._replicas = options.call_options("parameters", replicate=True)
        self._gradients = options.call_options("gradients")
        self._activations = options.call_options("activations")

    @property
    def communicator(self) -> Communicator:
        """The Communicator of the group. Calls on it must be ordered with the group's operations on all ranks."""
        return self._comm

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return self.backend_name

    def name(self) -> str:
        """Return the name of the backend."""
        return self.backend_name

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description that torch gave the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        devices = [torch.device("cpu")]
        return [*devices, torch.device("cuda")] if torch.cuda.is_available() else devices

    def _get_backend(self, device: torch.device) -> GpucompProcessGroup:
        return self

    def _set_default_backend(self, backend_type: Any) -> None:
        pass

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations started from now on."""
        self._timeout = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch; its operations run one by one."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._enqueue("coalesced", _no_op, [], DEFAULT_OPTS)

    def shutdown(self) -> None:
        """Complete queued operations and free the communicator; collective."""
        if self._queue.close(self._timeout):
            self._comm.Free()
            self._control.Free()

    def abort(self) -> None:
        """Stop without freeing the communicator, which would wait for the other ranks."""
        self._queue.close(0.0)

    def _enqueue(
        self, title: str, function: Callable[[], None], result: Any, opts: Any, tensors: Sequence[Tensor] = ()
    ) -> CollectiveWork:
        """Queue an operation. `opts` is read here: torch reuses the object for the next one."""
        self._sequence += 1
        work = CollectiveWork(title, result, seconds(opts.timeout, self._timeout))
        return self._queue.run(work, function, inline=not opts.asyncOp, tensors=tensors)

    def broadcast(self, tensors: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Send the root's tensor to all ranks."""
        (tensor,) = tensors
        run = partial(collectives.broadcast, self._comm, self._replicas, tensor, opts.rootRank)
        return self._enqueue("broadcast", run, tensors, opts, tensors)

    def allreduce(self, tensors: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Reduce the tensors of all ranks."""
        (tensor,) = tensors
        reduce = collectives.all_reduce if tensor.layout is torch.strided else collectives.all_reduce_sparse
        run = partial(reduce, self._comm, self._gradients, tensor, opts.reduceOp)
        return self._enqueue("all_reduce", run, tensors, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Reduce several tensors of all ranks."""
        run = partial(collectives.all_reduce_coalesced, self._comm, self._gradients, tensors, opts.reduceOp)
        return self._enqueue("all_reduce_coalesced", run, tensors, opts, tensors)

    def reduce(self, tensors: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Reduce the tensors of all ranks into the root's."""
        (tensor,) = tensors
        run = partial(collectives.reduce, self._comm, self._gradients, tensor, opts.reduceOp, opts.rootRank)
        return self._enqueue("reduce", run, tensors, opts, tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Gather the tensors of all ranks."""
        (targets,), (source,) = outputs, inputs
        run = partial(collectives.all_gather, self._comm, self._parameters, targets, source)
        return self._enqueue("all_gather", run, outputs, opts, inputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Gather several tensors of all ranks; each list of outputs belongs to one rank."""

        def run() -> None:
            for source, *targets in zip(inputs, *outputs, strict=True):
                collectives.all_gather(self._comm, self._parameters, targets, source)

        return self._enqueue("all_gather_coalesced", run, outputs, opts, inputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = DEFAULT_OPTS) -> Work:
        """Gather the tensors of all ranks into one."""
        run = partial(collectives.all_gather_single, self._comm, self._parameters, output, source)
        return self._enqueue("all_gather_single", run, [output], opts, [source])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Gather several tensors of all ranks, each into one."""

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                collectives.all_gather_single(self._comm, self._parameters, output, source)

        return self._enqueue("all_gather_single_coalesced", run, outputs, opts, inputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = DEFAULT_OPTS) -> Work:
        """Reduce one tensor per rank; each rank receives its own."""
        (output,), (sources,) = outputs, inputs
        run = partial(collectives.reduce_scatter, self._comm, self._gradients, output, sources, opts.reduceOp)
        return self._enqueue("reduce_scatter", run, outputs, opts, outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = DEFAULT_OPTS) -> Work:
        """Reduce one tensor; each rank receives an equal part."""
        run = partial(collectives.reduce_scatter_single, self._comm, self._gradients, output, source, opts.reduceOp)
        return self._enqueue("reduce_scatter_single", run, [output], opts, [source])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Reduce several tensors; each rank receives an equal part of each."""
        op = opts.reduceOp

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                collectives.reduce_scatter_single(self._comm, self._gradients, output, source, op)

        return self._enqueue("reduce_scatter_single_coalesced", run, outputs, opts, inputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Gather the tensors of all ranks at the root."""
        (source,), targets = inputs, outputs[0] if outputs else []
        run = partial(collectives.gather, self._comm, self._parameters, targets, source, opts.rootRank)
        return self._enqueue("gather", run, outputs, opts, inputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = DEFAULT_OPTS) -> Work:
        """Send each rank one of the root's tensors."""
        (output,), sources = outputs, inputs[0] if inputs else []
        run = partial(collectives.scatter, self._comm, self._parameters, output, sources, opts.rootRank)
        return self._enqueue("scatter", run, outputs, opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = DEFAULT_OPTS) -> Work:
        """Send each rank one tensor."""
        run = partial(collectives.all_to_all, self._comm, self._activations, outputs, inputs)
        return self._enqueue("all_to_all", run, outputs, opts, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = DEFAULT_OPTS,
    ) -> Work:
        """Send each rank a part of a tensor."""
        splits = list(output_splits or ()), list(input_splits or ())
        run = partial(collectives.all_to_all_single, self._comm, self._activations, output, source, *splits)
        return self._enqueue("all_to_all_single", run, [output], opts, [source])

    def barrier(self, opts: Any = DEFAULT_OPTS) -> Work:
        """Wait until all ranks have reached the barrier."""
        run = partial(collectives.barrier, self._comm, seconds(opts.timeout, self._timeout))
        return self._enqueue("barrier", run, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have reached the barrier; raise an error on rank 0 that names the missing ranks."""
        limit = self._timeout if timeout is None else timeout.total_seconds()
        self._queue.drain(limit)
        self._monitored_barriers += 1
        collectives.monitored_barrier(self._control, self._monitored_barriers, limit, wait_all_ranks)

    def send(self, tensors: Tensors, dest: int, tag: int) -> Work:
        """Send a tensor."""
        (tensor,) = tensors
        return isend(self._comm, tensor, dest, tag, self._timeout)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Receive a tensor."""
        (tensor,) = tensors
        return irecv(self._comm, tensor, source, tag, self._timeout)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from any rank."""
        (tensor,) = tensors
        return irecv(self._comm, tensor, None, tag, self._timeout)

    # Names used by older versions of torch and by its C++ code.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _no_op() -> None:
    """Complete after the operations queued before."""


def create(dist_options: Any, pg_options: Any) -> GpucompProcessGroup:
    """Create the process group that torch describes; collective over its members."""
    options = _checked(pg_options)
    _check_thread_level()
    _support_monitored_barrier()
    timeout, store = dist_options.timeout, dist_options.store
    members = _mpi_ranks(store, dist_options.group_rank, dist_options.group_size)
    world = MPI.COMM_WORLD
    group = world.group.Incl(members)
    # Collective over the members alone; the tag separates groups that several threads create at once.
    control = world.Create_group(group, zlib.crc32(repr(members).encode()) % TAGS)
    group.Free()
    try:
        communicator = Communicator(
            control,
            options.codec,
            roles=options.roles,
            chunk=options.chunk,
            slots=options.slots,
            passthrough_bytes=options.passthrough_limit,
            timeout=timeout.total_seconds() / TIMEOUT_FACTOR,
        )
    except BaseException:
        control.Free()
        raise
    return GpucompProcessGroup(communicator, control, options, timeout, store)


def _checked(pg_options: Any) -> Options:
    if pg_options is None:
        return Options()
    if isinstance(pg_options, Options):
        return pg_options
    raise SpecError(
        "pg_options",
        expected="an mpi_gpucomp.torch.Options",
        got=f"{type(pg_options).__module__}.{type(pg_options).__qualname__}",
        remedy='Pass for example pg_options=mpi_gpucomp.torch.Options(codec="split").',
    )


def _check_thread_level() -> None:
    """Raise unless the group's thread may call MPI at the same time as the program's."""
    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    if (level := MPI.Query_thread()) in levels:
        raise DeviceError(
            "torch.distributed, backend gpucomp",
            expected="MPI initialised with MPI_THREAD_MULTIPLE",
            got=f"MPI_THREAD_{levels[level]}",
            remedy="Do not lower mpi4py.rc.thread_level, and use an MPI library built with thread support.",
            rank=MPI.COMM_WORLD.rank,
        )


@cache
def _support_monitored_barrier() -> None:
    """Let torch.distributed.monitored_barrier, which rejects all backends but gloo, serve our groups too."""
    original = distributed_c10d.monitored_barrier

    @wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        used: Any = group if group is not None else distributed_c10d.GroupMember.WORLD
        if not isinstance(used, GpucompProcessGroup):
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        return used.monitored_barrier(limit, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def _mpi_ranks(store: Store, rank: int, size: int) -> list[int]:
    """Return the MPI rank of each member: torch may number them differently, or not run under mpirun."""
    world = MPI.COMM_WORLD
    store.set(f"rank {rank}", str(world.rank))
    ranks = [int(store.get(f"rank {member}")) for member in range(size)]
    if len(set(ranks)) != size or max(ranks) >= world.size:
        raise DeviceError(
            "torch.distributed, backend gpucomp",
            expected=f"{size} ranks of one MPI job",
            got=f"MPI ranks {', '.join(map(str, ranks))} of {world.size}",
            remedy=f"Run it as `mpirun -n {size} python ...`.",
            rank=rank,
        )
    return ranks


def communicator_of(ranks: Ranks) -> Communicator:
    """Return the communicator of a `gpucomp` group, or one over the MPI ranks given; None means all ranks."""
    if ranks is None:
        ranks = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(ranks, Communicator):
        return ranks
    if isinstance(ranks, MPI.Intracomm):
        return Communicator(ranks)
    if isinstance(ranks, GpucompProcessGroup):
        return ranks.communicator
    if not (ranks is None or isinstance(ranks, dist.ProcessGroup)):
        raise SpecError(
            "ranks",
            expected="a Communicator, an MPI communicator, a torch group or None",
            got=repr(ranks),
            remedy="Pass a codec by its keyword, codec=.",
        )
    _check_same_ranks(ranks)
    return _world_communicator()


_numbers: WeakKeyDictionary[Communicator, defaultdict[str, count[int]]] = WeakKeyDictionary()


def number_on(communicator: Communicator, kind: str) -> int:
    """Return the next number of a kind of named object; the ranks of a communicator create them in the same order."""
    return next(_numbers.setdefault(communicator, defaultdict(count))[kind])


@cache
def _world_communicator() -> Communicator:
    check_world_size("communicator of all MPI ranks")
    return Communicator(MPI.COMM_WORLD)


def _check_same_ranks(group: dist.ProcessGroup | None) -> None:
    """Raise unless a group of another backend has the ranks of MPI.COMM_WORLD."""
    world = MPI.COMM_WORLD
    rank, size = (world.rank, world.size) if group is None else (group.rank(), group.size())
    if (rank, size) != (world.rank, world.size):
        raise SpecError(
            "communicator of a torch group",
            expected=f"a group of all MPI ranks, in which this one is rank {world.rank} of {world.size}",
            got=f"rank {rank} of {size}",
            remedy="Initialise torch with the MPI ranks, or pass a Communicator of the ranks of the group.",
            rank=world.rank,
        )
