"""The collectives of torch.distributed on tensors, run by a Communicator.

Which MPI collective is called depends only on what all ranks know, never on one rank's tensors. `options` are the call
options that the policy of the group gives to the role of the operation.
"""

from __future__ import annotations

import os
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from mpi_gpucomp.device import DTYPES
from mpi_gpucomp.engine.progress import Backoff
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mpi_gpucomp._call.calls import CallOptions
    from mpi_gpucomp.communicator import Communicator

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_sparse",
    "all_to_all",
    "all_to_all_single",
    "as_array",
    "barrier",
    "broadcast",
    "copy_back",
    "flatten",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "wait_until",
]

SUPPORTED = frozenset(getattr(torch, dtype.name) for dtype in DTYPES)
"""Element types of a Communicator; tensors of other types travel as bytes."""
IN_NUMPY = SUPPORTED - {torch.bfloat16}
EAGER_POLLS = 256
"""Polls before the first nap of a wait: MPI makes progress only while it is polled."""
MONITORED_TAGS = 1 << 14
"""Monitored barriers with tags of their own, two each, before tags are reused; MPI guarantees 32767 tags."""


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements as a contiguous vector: a view of the tensor, or a copy if it is not contiguous."""
    flat = tensor.detach()
    if flat.is_conj() or flat.is_neg() or not flat.is_contiguous():
        flat = flat.resolve_conj().resolve_neg().contiguous()
    flat = flat.view(-1)
    return flat if flat.dtype in SUPPORTED else flat.view(torch.uint8)


def flatten_all(tensors: Sequence[Tensor], *, copy: bool = True) -> Tensor:
    """Return one new vector for tensors of one type, with a copy of their elements or uninitialised."""
    flats = [flatten(tensor) for tensor in tensors]
    if copy:
        return torch.cat(flats) if len(flats) > 1 else flats[0].clone()
    return flats[0].new_empty(sum(flat.numel() for flat in flats))


def as_array(flat: Tensor) -> Any:
    """Return a NumPy array of a vector on the CPU, which a Communicator parses fastest, or the vector itself."""
    return flat.numpy() if flat.dtype in IN_NUMPY and flat.device.type == "cpu" else flat


def copy_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy a result into the tensor, if `flatten` made a copy of it."""
    if flat.data_ptr() != tensor.data_ptr() and flat.numel():
        with torch.no_grad():
            tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a vector made by `flatten_all` back into its tensors."""
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            count = _count(tensor, flat)
            tensor.detach().copy_(flat[start : start + count].view(tensor.dtype).view(tensor.shape))
            start += count


def _count(tensor: Tensor, flat: Tensor) -> int:
    """Return the number of elements of a tensor in units of the vector's type."""
    return tensor.numel() * tensor.element_size() // flat.element_size()


_RedOpType: Any = ReduceOp.RedOpType  # the stub declares no members
MPI_OPS = {
    _RedOpType.SUM: MPI.SUM,
    _RedOpType.AVG: MPI.SUM,
    _RedOpType.PREMUL_SUM: MPI.SUM,
    _RedOpType.PRODUCT: MPI.PROD,
    _RedOpType.MIN: MPI.MIN,
    _RedOpType.MAX: MPI.MAX,
    _RedOpType.BAND: MPI.BAND,
    _RedOpType.BOR: MPI.BOR,
    _RedOpType.BXOR: MPI.BXOR,
}
MPI_OPS_OF_BOOL = {
    _RedOpType.SUM: MPI.MAX,
    _RedOpType.MAX: MPI.MAX,
    _RedOpType.BOR: MPI.MAX,
    _RedOpType.PRODUCT: MPI.MIN,
    _RedOpType.MIN: MPI.MIN,
    _RedOpType.BAND: MPI.MIN,
    _RedOpType.BXOR: MPI.BXOR,
}
"""Reductions of bool, on bytes of 0 and 1: a sum is True if any element is."""
BITWISE = (_RedOpType.BAND, _RedOpType.BOR, _RedOpType.BXOR)


class Reduction(NamedTuple):
    """A torch reduction as an MPI operation with a factor before and a divisor after it."""

    op: MPI.Op
    factor: Any
    """Multiplies each rank's elements before the reduction; None for no factor."""
    divisor: int
    """Divides the result; 1 for no division."""

    def prepare(self, flat: Tensor) -> Tensor:
        """Return the input of the MPI operation: the vector itself, or a scaled copy."""
        flat = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
        return flat if self.factor is None else (flat * self.factor).to(flat.dtype)

    def finish(self, flat: Tensor) -> None:
        """Divide the result in place."""
        if self.divisor != 1:
            flat.div_(self.divisor, rounding_mode=None if flat.is_floating_point() or flat.is_complex() else "trunc")


def reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction:
    """Return the reduction of a torch ReduceOp; raise ValueError, as torch's backends do, if it is undefined."""
    kind = getattr(op, "op", op)
    integral = not (dtype.is_floating_point or dtype.is_complex)
    ops = MPI_OPS_OF_BOOL if dtype is torch.bool else MPI_OPS
    if kind not in ops or (kind in BITWISE and not integral):
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with {dtype}")
    factor = op.factor if kind == _RedOpType.PREMUL_SUM else None
    return Reduction(ops[kind], factor, size if kind == _RedOpType.AVG else 1)


def broadcast(comm: Communicator, options: CallOptions, tensor: Tensor, root: int) -> None:
    """Send the root's elements to all ranks."""
    flat = flatten(tensor)
    comm.Bcast(as_array(flat), root, **options)
    copy_back(tensor, flat)


def all_reduce(comm: Communicator, options: CallOptions, tensor: Tensor, op: Any) -> None:
    """Reduce the tensors of all ranks in place."""
    reduce_op = reduction(op, tensor.dtype, comm.size)
    flat = reduce_op.prepare(flatten(tensor))
    comm.Allreduce(MPI.IN_PLACE, as_array(flat), reduce_op.op, **options)
    reduce_op.finish(flat)
    copy_back(tensor, flat)


def all_reduce_coalesced(comm: Communicator, options: CallOptions, tensors: Sequence[Tensor], op: Any) -> None:
    """Reduce several tensors in place, with one collective per element type and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        if len(group) == 1:
            all_reduce(comm, options, group[0], op)
        else:
            flat = flatten_all(group)
            all_reduce(comm, options, flat, op)
            unflatten(flat, group)


def all_reduce_sparse(comm: Communicator, options: CallOptions, tensor: Tensor, op: Any) -> None:
    """Sum sparse tensors in place: gather the elements of all ranks, and add them in rank order."""
    if getattr(op, "op", op) != ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"Cannot use {op} with {tensor.layout}: sparse tensors support only ReduceOp.SUM with torch.sparse_coo"
        )
    with torch.no_grad():
        local = tensor.detach().coalesce()
        indices, values = local.indices(), local.values()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(comm.size)]
        all_gather(comm, {}, counts, torch.tensor([values.shape[0]]))
        lengths = [int(count) for count in counts]
        all_indices = [indices.new_empty(indices.shape[0], length) for length in lengths]
        all_values = [values.new_empty(length, *values.shape[1:]) for length in lengths]
        all_gather(comm, {}, all_indices, indices.contiguous())
        all_gather(comm, options, all_values, values.contiguous())
        total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape)
        tensor.copy_(total.coalesce())


def reduce(comm: Communicator, options: CallOptions, tensor: Tensor, op: Any, root: int) -> None:
    """Reduce the tensors of all ranks into the root's."""
    reduce_op = reduction(op, tensor.dtype, comm.size)
    flat = reduce_op.prepare(flatten(tensor))
    if comm.rank == root:
        comm.Reduce(MPI.IN_PLACE, as_array(flat), reduce_op.op, root, **options)
        reduce_op.finish(flat)
        copy_back(tensor, flat)
    else:
        comm.Reduce(as_array(flat), None, reduce_op.op, root, **options)


def reduce_scatter(comm: Communicator, options: CallOptions, output: Tensor, inputs: Sequence[Tensor], op: Any) -> None:
    """Reduce one tensor per rank, whose lengths may differ; each rank receives its own."""
    counts = [tensor.numel() for tensor in inputs]
    if len(set(counts)) == 1:
        reduce_scatter_single(comm, options, output, flatten_all(inputs), op)
        return
    reduce_op = reduction(op, output.dtype, comm.size)
    source, target = reduce_op.prepare(flatten_all(inputs)), _bool_as_bytes(flatten(output))
    comm.Reduce_scatter(as_array(source), as_array(target), counts, reduce_op.op, **options)
    reduce_op.finish(target)
    copy_back(output, target)


def reduce_scatter_single(comm: Communicator, options: CallOptions, output: Tensor, source: Tensor, op: Any) -> None:
    """Reduce a tensor; each rank receives an equal part."""
    reduce_op = reduction(op, source.dtype, comm.size)
    flat, target = reduce_op.prepare(flatten(source)), _bool_as_bytes(flatten(output))
    if _overlaps(target, flat):
        target = target.clone()
    comm.Reduce_scatter_block(as_array(flat), as_array(target), reduce_op.op, **options)
    reduce_op.finish(target)
    copy_back(output, target)


def _bool_as_bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def _overlaps(part: Tensor, whole: Tensor) -> bool:
    """Return True if a vector starts in the memory of another."""
    first = whole.data_ptr()
    return first <= part.data_ptr() < first + whole.numel() * whole.element_size()


def all_gather(comm: Communicator, options: CallOptions, outputs: Sequence[Tensor], source: Tensor) -> None:
    """Gather the tensors of all ranks, whose lengths may differ, on all ranks."""
    flat, local = flatten_all(outputs, copy=False), flatten(source)
    counts = [_count(output, flat) for output in outputs]
    _check_outputs("all_gather", comm, counts, local.numel())
    starts = list(accumulate(counts[:-1], initial=0))
    _place(flat, local, starts[comm.rank])
    if len(set(counts)) == 1:
        comm.Allgather(MPI.IN_PLACE, as_array(flat), **options)
    else:
        comm.Allgatherv(MPI.IN_PLACE, [as_array(flat), (counts, starts)], **options)
    unflatten(flat, outputs)


def all_gather_single(comm: Communicator, options: CallOptions, output: Tensor, source: Tensor) -> None:
    """Gather the tensors of all ranks into one tensor on all ranks."""
    flat, local = flatten(output), flatten(source)
    _check_output("all_gather_single", comm, flat.numel(), local.numel())
    _place(flat, local, comm.rank * local.numel())
    # In place: with a lossy codec this rank then holds the same values as the others.
    comm.Allgather(MPI.IN_PLACE, as_array(flat), **options)
    copy_back(output, flat)


def _place(flat: Tensor, local: Tensor, start: int) -> None:
    """Copy this rank's elements to their place in the result, unless they are a view of it."""
    place = flat[start : start + local.numel()]
    if local.data_ptr() != place.data_ptr():
        place.copy_(local)


def _check_outputs(topic: str, comm: Communicator, counts: list[int], local: int) -> None:
    """Raise unless there is one output per rank, and this rank's has the length of its input; MPI cannot check it."""
    if len(counts) != comm.size:
        expected, got = f"{comm.size} output tensors, one per rank", str(len(counts))
    elif counts[comm.rank] != local:
        expected, got = f"output {comm.rank} to have {local} elements, as the input", str(counts[comm.rank])
    else:
        return
    remedy = "Pass one output tensor per rank, of the size that the rank sends."
    raise BufferSpecError(topic, expected=expected, got=got, remedy=remedy, rank=comm.rank)


def _check_output(topic: str, comm: Communicator, count: int, local: int) -> None:
    """Raise unless the output has room for the input of every rank."""
    if count != local * comm.size:
        raise BufferSpecError(
            topic,
            expected=f"an output of {local * comm.size} elements, {local} from each of {comm.size} ranks",
            got=f"{count} elements",
            remedy="Pass an output tensor of the size of all inputs.",
            rank=comm.rank,
        )


def gather(comm: Communicator, options: CallOptions, outputs: Sequence[Tensor], source: Tensor, root: int) -> None:
    """Gather the tensors of all ranks at the root."""
    local = as_array(flatten(source))
    if comm.rank == root:
        flat = flatten_all(outputs, copy=False)
        comm.Gather(local, as_array(flat), root, **options)
        unflatten(flat, outputs)
    else:
        comm.Gather(local, None, root, **options)


def scatter(comm: Communicator, options: CallOptions, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
    """Send each rank one of the root's tensors."""
    flat = flatten(output)
    source = as_array(flatten_all(inputs)) if comm.rank == root else None
    comm.Scatter(source, as_array(flat), root, **options)
    copy_back(output, flat)


def all_to_all(comm: Communicator, options: CallOptions, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Send each rank one tensor, whose lengths may differ."""
    source, target = flatten_all(inputs), flatten_all(outputs, copy=False)
    send_counts = [_count(tensor, source) for tensor in inputs]
    recv_counts = [_count(tensor, target) for tensor in outputs]
    comm.Alltoallv([as_array(source), send_counts], [as_array(target), recv_counts], **options)
    unflatten(target, outputs)


def all_to_all_single(
    comm: Communicator,
    options: CallOptions,
    output: Tensor,
    source: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> None:
    """Send each rank a part of a tensor: equal parts, or as many rows of the first dimension as its split."""
    flat, target = flatten(source), flatten(output)
    if output_splits or input_splits:
        send_counts = _split_counts(source, flat, input_splits, comm.size)
        recv_counts = _split_counts(output, target, output_splits, comm.size)
        comm.Alltoallv([as_array(flat), send_counts], [as_array(target), recv_counts], **options)
    else:
        comm.Alltoall(as_array(flat), as_array(target), **options)
    copy_back(output, target)


def _split_counts(tensor: Tensor, flat: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of elements of each split."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row_elements = flat.numel() // rows if rows else 0
    return [split * row_elements for split in splits or [rows // size] * size]


def wait_until(ready: Callable[[], bool], timeout: float) -> bool:
    """Poll until `ready` returns True; return False after `timeout` seconds."""
    deadline, backoff = time.monotonic() + timeout, Backoff(EAGER_POLLS)
    while not ready():
        if time.monotonic() > deadline:
            return False
        if not backoff.rest():
            os.sched_yield()  # ranks may share cores
    return True


def barrier(comm: Communicator, timeout: float) -> None:
    """Wait until all ranks have reached the barrier; raise RuntimeError after `timeout` seconds."""
    request = comm.Ibarrier()
    if not wait_until(request.Test, timeout):
        raise RuntimeError(f"barrier: Timed out waiting {timeout * 1000:.0f} ms for all ranks")


def monitored_barrier(comm: MPI.Intracomm, number: int, timeout: float, wait_all_ranks: bool) -> None:
    """Wait until all ranks have reached the barrier; raise an error on rank 0 that names the missing ranks.

    Each rank reports to rank 0, which then releases them. `number` counts the monitored barriers of the group: messages
    of one that timed out must not match the next. `comm` carries nothing else. The texts of errors are gloo's.
    """
    report_tag = 2 * (number % MONITORED_TAGS)
    if comm.rank == 0:
        _monitor_ranks(comm, report_tag, timeout, wait_all_ranks)
        return
    comm.Send(bytearray(1), 0, report_tag)
    if _recv_flag(comm, 0, report_tag + 1, timeout) != 1:
        raise RuntimeError(
            f"[Rank {comm.rank}]: Rank {comm.rank} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )


def _monitor_ranks(comm: MPI.Intracomm, report_tag: int, timeout: float, wait_all_ranks: bool) -> None:
    if timeout <= 0:
        raise RuntimeError("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms")
    deadline, missing = time.monotonic() + timeout, []
    for rank in range(1, comm.size):
        if _recv_flag(comm, rank, report_tag, max(0.0, deadline - time.monotonic())) is None:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if not missing or wait_all_ranks:
        for rank in range(1, comm.size):
            if rank not in missing:
                comm.Send(bytearray([not missing]), rank, report_tag + 1)
    if missing:
        names = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
        raise RuntimeError(f"[Rank 0]: {names} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms")


def _recv_flag(comm: MPI.Intracomm, rank: int, tag: int, timeout: float) -> int | None:
    """Receive one byte; return None after `timeout` seconds."""
    flag = bytearray(1)
    request = comm.Irecv(flag, rank, tag)
    if wait_until(request.Test, timeout):
        return flag[0]
    status = MPI.Status()
    request.Cancel()
    request.Wait(status)
    return None if status.Is_cancelled() else flag[0]
