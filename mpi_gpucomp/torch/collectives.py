"""Each collective of torch.distributed on tensors, carried out by a Communicator, in the way (`how`) of the policy.

Which of MPI's collectives is called follows from what all ranks know alike, never from one rank's tensors.
"""

from __future__ import annotations

import os
import time
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import ReduceOp

from mpi_gpucomp.communicator import Communicator
from mpi_gpucomp.device import DTYPES
from mpi_gpucomp.errors import BufferSpecError, SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch import Tensor

    from mpi_gpucomp._dispatch.plan import CallOptions

    Ranks: TypeAlias = Communicator | MPI.Intracomm | dist.ProcessGroup | None
    from collections.abc import Callable

__all__ = [
    "Patience",
    "Reduction",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_reduce_sparse",
    "all_reduce_together",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "communicator_of",
    "elements",
    "flat",
    "gather",
    "joined",
    "monitored_barrier",
    "part_out",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduction",
    "scatter",
    "settle",
]


# torch's reductions in terms of MPI's: what is done to the elements before, by MPI, and after.

_Kind: Any = ReduceOp.RedOpType  # torch's stub knows none of its members
SUMS = (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM)
OPERATIONS = {
    _Kind.SUM: MPI.SUM,
    _Kind.AVG: MPI.SUM,
    _Kind.PREMUL_SUM: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}
TRUTHS = {
    _Kind.SUM: MPI.MAX,
    _Kind.MAX: MPI.MAX,
    _Kind.BOR: MPI.MAX,
    _Kind.PRODUCT: MPI.MIN,
    _Kind.MIN: MPI.MIN,
    _Kind.BAND: MPI.MIN,
    _Kind.BXOR: MPI.BXOR,
}
"""On bool, as bytes of 0 and 1: a sum is true if any is."""
BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)


class Reduction(NamedTuple):
    """One reduction of elements of one type among so many ranks."""

    op: MPI.Op
    factor: Any
    """What each rank's elements are multiplied by first; None if by nothing."""
    divisor: int
    """What the sums are divided by at the end; 1 if by nothing."""

    def before(self, row: Tensor) -> Tensor:
        """Return what MPI works on: the row itself, or a copy of it that was multiplied."""
        row = row.view(torch.uint8) if row.dtype is torch.bool else row
        return row if self.factor is None else (row * self.factor).to(row.dtype)

    def after(self, row: Tensor) -> None:
        """Finish the result in place."""
        if self.divisor != 1:
            row.div_(self.divisor, rounding_mode=None if row.is_floating_point() or row.is_complex() else "trunc")


def reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction:
    """Read one of torch's; raise what torch's own backends raise where it makes no sense."""
    kind = getattr(op, "op", op)
    integral = not (dtype.is_floating_point or dtype.is_complex)
    table = TRUTHS if dtype is torch.bool else OPERATIONS
    if kind not in table or (kind in BITWISE and not integral):
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with {dtype}")
    factor = op.factor if kind == _Kind.PREMUL_SUM else None
    return Reduction(table[kind], factor, size if kind == _Kind.AVG else 1)


# Tensors as a Communicator takes them: elements one behind the other, of a type that it knows, never copied if so.

KNOWN = frozenset(getattr(torch, dtype.name) for dtype in DTYPES)
NUMPY = KNOWN - {torch.bfloat16}


def flat(tensor: Tensor) -> Tensor:
    """Return the elements in one row: the same memory, or a copy of a tensor with gaps."""
    row = tensor.detach()
    if row.is_conj() or row.is_neg() or not row.is_contiguous():
        row = row.resolve_conj().resolve_neg().contiguous()
    row = row.view(-1)
    return row if row.dtype in KNOWN else row.view(torch.uint8)


def elements(row: Tensor) -> Any:
    """Return a row as whatever gets a Communicator to its elements soonest."""
    return row.numpy() if row.dtype in NUMPY and row.device.type == "cpu" else row


def settle(tensor: Tensor, row: Tensor) -> None:
    """Bring back what has arrived in the row of a tensor, if that was a copy."""
    if row.data_ptr() != tensor.data_ptr() and row.numel():
        with torch.no_grad():
            tensor.detach().copy_(row.view(tensor.dtype).view(tensor.shape))


def joined(tensors: Sequence[Tensor], *, filled: bool = True) -> Tensor:
    """Return one row for many tensors of one type, with their elements or only room for them."""
    rows = [flat(tensor) for tensor in tensors]
    if filled:
        return torch.cat(rows) if len(rows) > 1 else rows[0].clone()
    return rows[0].new_empty(sum(row.numel() for row in rows))


def part_out(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a row that was made by `joined` to the tensors."""
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            count = tensor.numel() * tensor.element_size() // row.element_size()
            part = row[start : start + count]
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))
            start += count


def broadcast(comm: Communicator, how: CallOptions, tensor: Tensor, root: int) -> None:
    """Send the root's elements to all."""
    row = flat(tensor)
    comm.Bcast(elements(row), root, **how)
    settle(tensor, row)


# Reductions


def all_reduce(comm: Communicator, how: CallOptions, tensor: Tensor, op: Any) -> None:
    """Reduce the elements of all ranks, everywhere, in place."""
    row = flat(tensor)
    by = reduction(op, tensor.dtype, comm.size)
    work = by.before(row)
    comm.Allreduce(MPI.IN_PLACE, elements(work), by.op, **how)
    by.after(work)
    settle(tensor, work)


def all_reduce_together(comm: Communicator, how: CallOptions, tensors: Sequence[Tensor], op: Any) -> None:
    """Reduce many tensors; those of one type in one go."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        if len(same) == 1:
            all_reduce(comm, how, same[0], op)
        else:
            row = joined(same)
            all_reduce(comm, how, row, op)
            part_out(row, same)


def reduce(comm: Communicator, how: CallOptions, tensor: Tensor, op: Any, root: int) -> None:
    """Reduce the elements of all ranks into the root's."""
    row = flat(tensor)
    by = reduction(op, tensor.dtype, comm.size)
    work = by.before(row)
    if comm.rank == root:
        comm.Reduce(MPI.IN_PLACE, elements(work), by.op, root, **how)
        by.after(work)
        settle(tensor, work)
    else:
        comm.Reduce(elements(work), None, by.op, root, **how)


def reduce_scatter_single(comm: Communicator, how: CallOptions, output: Tensor, source: Tensor, op: Any) -> None:
    """Reduce the elements of all ranks, each taking its share."""
    row, by = flat(output), reduction(op, source.dtype, comm.size)
    sent = by.before(flat(source))
    into = row.view(torch.uint8) if row.dtype is torch.bool else row
    if _within(into, sent):
        into = into.clone()
    comm.Reduce_scatter_block(elements(sent), elements(into), by.op, **how)
    by.after(into)
    settle(output, into)


def reduce_scatter(comm: Communicator, how: CallOptions, output: Tensor, sources: Sequence[Tensor], op: Any) -> None:
    """Reduce one tensor for each rank, whose lengths may differ."""
    counts = [source.numel() for source in sources]
    if len(set(counts)) == 1:
        reduce_scatter_single(comm, how, output, joined(sources), op)
        return
    row, by = flat(output), reduction(op, output.dtype, comm.size)
    sent = by.before(joined(sources))
    into = row.view(torch.uint8) if row.dtype is torch.bool else row
    comm.Reduce_scatter(elements(sent), elements(into), counts, by.op, **how)
    by.after(into)
    settle(output, into)


# Moving elements


def all_gather_single(comm: Communicator, how: CallOptions, output: Tensor, source: Tensor) -> None:
    """Put the elements of all ranks one behind the other, everywhere."""
    row, own = flat(output), flat(source)
    _check_room(comm, "all_gather_single", [row.numel() // comm.size] * comm.size, own.numel(), row.numel())
    _share(row, own, comm.rank * own.numel())
    # In place, so that with a lossy codec this rank holds what the others get.
    comm.Allgather(MPI.IN_PLACE, elements(row), **how)
    settle(output, row)


def all_gather(comm: Communicator, how: CallOptions, outputs: Sequence[Tensor], source: Tensor) -> None:
    """Collect the tensors of all ranks, whose lengths may differ, everywhere."""
    row, own = joined(outputs, filled=False), flat(source)
    counts = [_count(output, row) for output in outputs]
    _check_room(comm, "all_gather", counts, own.numel())
    starts = list(accumulate(counts[:-1], initial=0))
    _share(row, own, starts[comm.rank])
    if len(set(counts)) == 1:
        comm.Allgather(MPI.IN_PLACE, elements(row), **how)
    else:
        comm.Allgatherv(MPI.IN_PLACE, [elements(row), (counts, starts)], **how)
    part_out(row, outputs)


def gather(comm: Communicator, how: CallOptions, outputs: Sequence[Tensor], source: Tensor, root: int) -> None:
    """Collect the tensors of all ranks at the root."""
    own = flat(source)
    if comm.rank != root:
        comm.Gather(elements(own), None, root, **how)
        return
    row = joined(outputs, filled=False)
    comm.Gather(elements(own), elements(row), root, **how)
    part_out(row, outputs)


def scatter(comm: Communicator, how: CallOptions, output: Tensor, sources: Sequence[Tensor], root: int) -> None:
    """Send every rank one of the root's tensors."""
    row = flat(output)
    sent = elements(joined(sources)) if comm.rank == root else None
    comm.Scatter(sent, elements(row), root, **how)
    settle(output, row)


def all_to_all_single(
    comm: Communicator, how: CallOptions, output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    """Send every rank its share of every rank's elements: equal shares, or so many rows of the first dimension."""
    into, out = flat(output), flat(source)
    if not received and not sent:
        comm.Alltoall(elements(out), elements(into), **how)
    else:
        counts = _rows(source, out, sent, comm.size), _rows(output, into, received, comm.size)
        comm.Alltoallv([elements(out), counts[0]], [elements(into), counts[1]], **how)
    settle(output, into)


def all_to_all(comm: Communicator, how: CallOptions, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Send every rank one tensor, whose lengths may differ."""
    into, out = joined(outputs, filled=False), joined(sources)
    counts = [_count(source, out) for source in sources], [_count(output, into) for output in outputs]
    comm.Alltoallv([elements(out), counts[0]], [elements(into), counts[1]], **how)
    part_out(into, outputs)


def _check_room(comm: Communicator, topic: str, counts: list[int], own: int, whole: int | None = None) -> None:
    """Raise unless there is room for every rank, and for this one's elements where they go: MPI cannot see that."""
    fits = len(counts) == comm.size and counts[comm.rank] == own and whole in (None, own * comm.size)
    if not fits:
        room = counts[comm.rank] if comm.rank < len(counts) else 0
        raise BufferSpecError(
            topic,
            expected=f"{comm.size} tensors to receive, and this rank's of {own} elements"
            if whole is None
            else f"room for {own} elements of each of {comm.size} ranks",
            got=f"{len(counts)}, and {room} elements" if whole is None else f"room for {whole} in all",
            remedy="Pass tensors of the sizes that the ranks send.",
            rank=comm.rank,
        )


def _rows(tensor: Tensor, row: Tensor, splits: Sequence[int], ranks: int) -> list[int]:
    """Return the elements of each rank's share of a tensor."""
    length = tensor.shape[0] if tensor.dim() else 1
    shares = list(splits) or [length // ranks] * ranks
    width = row.numel() // length if length else 0
    return [share * width for share in shares]


def _count(tensor: Tensor, row: Tensor) -> int:
    """Return how many elements of the row's type a tensor has."""
    return tensor.numel() * tensor.element_size() // row.element_size()


def _share(row: Tensor, own: Tensor, start: int) -> None:
    """Put this rank's elements where they belong, unless they are there."""
    place = row[start : start + own.numel()]
    if own.data_ptr() != place.data_ptr():
        place.copy_(own)


def _within(one: Tensor, other: Tensor) -> bool:
    """Say whether the memory of one lies in that of the other."""
    first = other.data_ptr()
    return first <= one.data_ptr() < first + other.numel() * other.element_size()


# Sums of sparse tensors: every rank hears of all elements, and adds them up in the order of the ranks.


def all_reduce_sparse(comm: Communicator, how: CallOptions, tensor: Tensor, op: Any) -> None:
    """Add up the sparse tensors of all ranks, everywhere, in place."""
    if getattr(op, "op", op) != ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"Cannot use {op} with {tensor.layout}: of sparse tensors there are sums of sparse_coo alone")
    with torch.no_grad():
        own = tensor.detach().coalesce()
        places, found = own.indices(), own.values()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(comm.size)]
        all_gather(comm, {}, counts, torch.tensor([found.shape[0]]))
        lengths = [int(count) for count in counts]
        all_places = [places.new_empty(places.shape[0], length) for length in lengths]
        all_found = [found.new_empty(length, *found.shape[1:]) for length in lengths]
        all_gather(comm, {}, all_places, places.contiguous())
        all_gather(comm, how, all_found, found.contiguous())
        whole = torch.sparse_coo_tensor(torch.cat(all_places, 1), torch.cat(all_found), tensor.shape).coalesce()
        tensor.copy_(whole)


# The communicator behind torch's ranks: the gpucomp group's own, or one over MPI beside gloo or NCCL.


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


# CallOptions whoever looks again and again at a call of MPI's own rests between two looks.

EAGER_SECONDS = 2e-3
"""How long looks follow each other at once, apart from letting others have the processor: MPI only goes on then."""
SHORTEST_NAP, LONGEST_NAP = 20e-6, 1e-3


class Patience:
    """One wait: eager at first, then with longer and longer naps."""

    def __init__(self) -> None:
        """Begin to wait."""
        self._nap, self._eager_until = SHORTEST_NAP, time.monotonic() + EAGER_SECONDS

    def rest(self) -> None:
        """Rest until the next look."""
        if time.monotonic() < self._eager_until:
            os.sched_yield()
            return
        time.sleep(self._nap)
        self._nap = min(LONGEST_NAP, 1.5 * self._nap)


# Barriers that end in time: one that all ranks pass or none, and one that says who has not come.

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
