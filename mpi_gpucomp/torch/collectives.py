"""Each collective of torch.distributed on tensors, carried out by a Communicator, in the way (`how`) of the policy.

Which of MPI's collectives is called follows from what all ranks know alike, never from one rank's tensors.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from mpi_gpucomp.errors import BufferError
from mpi_gpucomp.torch.reductions import reduction
from mpi_gpucomp.torch.tensors import elements, flat, joined, part_out, settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mpi_gpucomp.comm import Communicator
    from mpi_gpucomp.comm.options import Options as How

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_reduce_together",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]


def broadcast(comm: Communicator, how: How, tensor: Tensor, root: int) -> None:
    """Send the root's elements to all."""
    row = flat(tensor)
    comm.Bcast(elements(row), root, **how)
    settle(tensor, row)


# Reductions


def all_reduce(comm: Communicator, how: How, tensor: Tensor, op: Any) -> None:
    """Reduce the elements of all ranks, everywhere, in place."""
    row = flat(tensor)
    by = reduction(op, tensor.dtype, comm.size)
    work = by.before(row)
    comm.Allreduce(MPI.IN_PLACE, elements(work), by.op, **how)
    by.after(work)
    settle(tensor, work)


def all_reduce_together(comm: Communicator, how: How, tensors: Sequence[Tensor], op: Any) -> None:
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


def reduce(comm: Communicator, how: How, tensor: Tensor, op: Any, root: int) -> None:
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


def reduce_scatter_single(comm: Communicator, how: How, output: Tensor, source: Tensor, op: Any) -> None:
    """Reduce the elements of all ranks, each taking its share."""
    row, by = flat(output), reduction(op, source.dtype, comm.size)
    sent = by.before(flat(source))
    into = row.view(torch.uint8) if row.dtype is torch.bool else row
    if _within(into, sent):
        into = into.clone()
    comm.Reduce_scatter_block(elements(sent), elements(into), by.op, **how)
    by.after(into)
    settle(output, into)


def reduce_scatter(comm: Communicator, how: How, output: Tensor, sources: Sequence[Tensor], op: Any) -> None:
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


def all_gather_single(comm: Communicator, how: How, output: Tensor, source: Tensor) -> None:
    """Put the elements of all ranks one behind the other, everywhere."""
    row, own = flat(output), flat(source)
    _check_room(comm, "all_gather_single", [row.numel() // comm.size] * comm.size, own.numel(), row.numel())
    _share(row, own, comm.rank * own.numel())
    # In place, so that with a lossy codec this rank holds what the others get.
    comm.Allgather(MPI.IN_PLACE, elements(row), **how)
    settle(output, row)


def all_gather(comm: Communicator, how: How, outputs: Sequence[Tensor], source: Tensor) -> None:
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


def gather(comm: Communicator, how: How, outputs: Sequence[Tensor], source: Tensor, root: int) -> None:
    """Collect the tensors of all ranks at the root."""
    own = flat(source)
    if comm.rank != root:
        comm.Gather(elements(own), None, root, **how)
        return
    row = joined(outputs, filled=False)
    comm.Gather(elements(own), elements(row), root, **how)
    part_out(row, outputs)


def scatter(comm: Communicator, how: How, output: Tensor, sources: Sequence[Tensor], root: int) -> None:
    """Send every rank one of the root's tensors."""
    row = flat(output)
    sent = elements(joined(sources)) if comm.rank == root else None
    comm.Scatter(sent, elements(row), root, **how)
    settle(output, row)


def all_to_all_single(
    comm: Communicator, how: How, output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    """Send every rank its share of every rank's elements: equal shares, or so many rows of the first dimension."""
    into, out = flat(output), flat(source)
    if not received and not sent:
        comm.Alltoall(elements(out), elements(into), **how)
    else:
        counts = _rows(source, out, sent, comm.size), _rows(output, into, received, comm.size)
        comm.Alltoallv([elements(out), counts[0]], [elements(into), counts[1]], **how)
    settle(output, into)


def all_to_all(comm: Communicator, how: How, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
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
        raise BufferError(
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
