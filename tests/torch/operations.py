"""Compare every operation of torch.distributed with gloo on the same tensors; run under mpirun.

mpirun -n 4 python tests/torch/operations.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import mpi_gpucomp.torch

GLOO_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
OTHER_DTYPES = torch.bool, torch.int16, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2
Group = Any


def values(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Return small integers: their sums are exact in every type and order."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(0, 3, (count,), generator=generator).to(dtype)


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Raise unless two results are bitwise equal."""
    for one, other in zip(_tensors(actual), _tensors(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, what
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        assert torch.equal(*bits), f"{what}: {one}, expected {other}"


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


# One function per operation: creates tensors, runs on the group, and returns what must be equal.


def broadcast(group: Group, dtype: torch.dtype) -> Any:
    tensor = values(dtype, 37)
    dist.broadcast(tensor, dist.get_world_size() - 1, group)
    return tensor


def all_gather(group: Group, dtype: torch.dtype) -> Any:
    outputs = [torch.empty(5, dtype=dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, values(dtype, 5), group)
    return outputs


def all_gather_single(group: Group, dtype: torch.dtype) -> Any:
    output = torch.empty(7 * dist.get_world_size(), dtype=dtype)
    dist.all_gather_single(output, values(dtype, 7), group)
    return output


def gather(group: Group, dtype: torch.dtype) -> Any:
    root = dist.get_world_size() // 2
    outputs = [torch.empty(3, dtype=dtype) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.gather(values(dtype, 3), outputs, root, group)
    return outputs or []


def scatter(group: Group, dtype: torch.dtype) -> Any:
    output = torch.empty(4, dtype=dtype)
    inputs = [values(dtype, 4, rank) for rank in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.scatter(output, inputs, 0, group)
    return output


def all_to_all(group: Group, dtype: torch.dtype) -> Any:
    ranks = dist.get_world_size()
    outputs = [torch.empty(3, dtype=dtype) for _ in range(ranks)]
    dist.all_to_all(outputs, [values(dtype, 3, peer) for peer in range(ranks)], group)
    return outputs


def all_to_all_single(group: Group, dtype: torch.dtype) -> Any:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    even = torch.empty(2 * ranks, 3, dtype=dtype)
    dist.all_to_all_single(even, values(dtype, 6 * ranks).view(2 * ranks, 3), group=group)
    splits = [rank + peer for peer in range(ranks)]
    uneven = torch.empty(sum(splits), 2, dtype=dtype)
    dist.all_to_all_single(uneven, values(dtype, 2 * sum(splits)).view(-1, 2), splits, splits, group=group)
    return even, uneven


def point_to_point(group: Group, dtype: torch.dtype) -> Any:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dest, source = (rank + 1) % ranks, (rank - 1) % ranks
    if ranks == 1:
        return []
    received = [torch.empty(9, dtype=dtype) for _ in range(4)]
    works = [dist.isend(values(dtype, 9, 1), dest, group, 5), dist.irecv(received[0], source, group, 5)]
    for work in works:
        work.wait()
    calls = [
        dist.P2POp(dist.irecv, received[1], source, group),
        dist.P2POp(dist.isend, values(dtype, 9, 2), dest, group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    if rank % 2 == 0:
        dist.send(values(dtype, 9, 3), dest, group)
    if (rank % 2 or ranks % 2) and source % 2 == 0:
        assert dist.recv(received[2], None if rank else source, group) == source
    received[2] = received[2] if rank % 2 else received[0]
    return received[:3]


def reductions(op: Any) -> Callable[[Group, torch.dtype], Any]:
    """Return a function that runs all operations that reduce by `op`."""

    def run(group: Group, dtype: torch.dtype) -> Any:
        ranks = dist.get_world_size()
        reduced = values(dtype, 33)
        dist.all_reduce(reduced, op, group)
        at_root = values(dtype, 11)
        dist.reduce(at_root, ranks - 1, op, group)
        scattered = torch.empty(6, dtype=dtype)
        dist.reduce_scatter(scattered, [values(dtype, 6, rank) for rank in range(ranks)], op, group)
        part = torch.empty(5, dtype=dtype)
        dist.reduce_scatter_single(part, values(dtype, 5 * ranks), op, group)
        return reduced, scattered, part, *([at_root] if dist.get_rank() == ranks - 1 else [])

    run.__name__ = f"reductions by {op}"
    return run


DATA_MOVEMENT = (
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    point_to_point,
)


def compare_with_gloo(ours: Group, gloo: Group) -> None:
    """Compare everything that gloo supports."""
    for move in DATA_MOVEMENT:
        for dtype in GLOO_DTYPES:
            assert_same(move(ours, dtype), move(gloo, dtype), f"{move.__name__} of {dtype}")
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for dtype in GLOO_DTYPES:
            reduce = reductions(op)
            assert_same(reduce(ours, dtype), reduce(gloo, dtype), f"{reduce.__name__} of {dtype}")
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        for dtype in (torch.int32, torch.int64, torch.uint8):
            mine, theirs = values(dtype, 12), values(dtype, 12)
            dist.all_reduce(mine, op, ours)
            dist.all_reduce(theirs, op, gloo)
            assert_same(mine, theirs, f"all_reduce by {op} of {dtype}")


def unsupported_by_gloo(ours: Group) -> None:
    """Check what gloo does not support against the definition of the operation."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for dtype in OTHER_DTYPES + FLOAT8:
        gathered = all_gather(ours, dtype)
        assert_same(gathered[rank], values(dtype, 5), f"all_gather of {dtype}")
        for move in (broadcast, scatter, gather, all_to_all_single, point_to_point):
            move(ours, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        mean = torch.full((3,), 2 * rank, dtype=dtype)
        dist.all_reduce(mean, dist.ReduceOp.AVG, ours)
        assert_same(mean, torch.full((3,), ranks - 1, dtype=dtype), f"AVG of {dtype}")
    sent = [torch.full((rank + peer + 1,), 10 * rank + peer) for peer in range(ranks)]
    received = [torch.empty(rank + peer + 1, dtype=torch.int64) for peer in range(ranks)]
    dist.all_to_all(received, sent, ours)
    assert_same(received, [torch.full((rank + peer + 1,), 10 * peer + rank) for peer in range(ranks)], "all_to_all")
    scaled, source = torch.empty(2), torch.full((2 * ranks,), rank + 1.0)
    dist.reduce_scatter_single(scaled, source, dist._make_nccl_premul_sum(0.5), ours)
    assert_same(scaled, torch.full((2,), ranks * (ranks + 1) / 4), "PREMUL_SUM")
    assert_same(source, torch.full((2 * ranks,), rank + 1.0), "the input of PREMUL_SUM")
    flags = torch.tensor([rank == 0, True, False])
    for op, expected in ((dist.ReduceOp.SUM, [True, True, False]), (dist.ReduceOp.PRODUCT, [ranks == 1, True, False])):
        copy = flags.clone()
        dist.all_reduce(copy, op, ours)
        assert_same(copy, torch.tensor(expected), f"{op} of bool")
    complex_ = torch.tensor([1 + 2j * rank])
    dist.all_reduce(complex_, group=ours)
    assert_same(complex_, torch.tensor([ranks + 1j * ranks * (ranks - 1)]), "sum of complex numbers")


def shapes(ours: Group) -> None:
    """Check non-contiguous, scalar, empty, long and conjugated tensors, and parameters."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    square = torch.arange(16.0).view(4, 4) + rank
    dist.all_reduce(square.t()[1:3], group=ours)
    expected = torch.arange(16.0).view(4, 4) + rank
    expected[:, 1:3] = (torch.arange(16.0).view(4, 4) * ranks + ranks * (ranks - 1) / 2)[:, 1:3]
    assert_same(square, expected, "a non-contiguous view")
    scalar = torch.tensor(float(rank))
    dist.broadcast(scalar, ranks - 1, ours)
    assert scalar.item() == ranks - 1
    empty = torch.empty(0)
    dist.all_reduce(empty, group=ours)
    dist.broadcast(empty, 0, ours)
    weight = torch.nn.Parameter(torch.full((2, 2), float(rank)))
    dist.broadcast(weight, 0, ours)
    assert weight.detach().eq(0).all()
    negative = torch.tensor([1j * (rank + 1)]).conj().imag  # negation is lazy
    dist.all_reduce(negative, group=ours)
    assert negative.item() == -ranks * (ranks + 1) / 2
    last = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    dist.all_reduce(last, group=ours)
    assert last.eq(ranks * (ranks - 1) / 2).all() and last.is_contiguous(memory_format=torch.channels_last)
    long = torch.full((3 << 18,), rank + 1, dtype=torch.bfloat16)
    dist.all_reduce(long, group=ours)
    assert long.eq(ranks * (ranks + 1) / 2).all()


def asynchronous(ours: Group) -> None:
    """Check work objects and futures: order, callbacks that start operations, results and errors."""
    ranks = dist.get_world_size()
    tensors = [torch.full((1 << n,), 1.0) for n in range(12)]
    works = [dist.all_reduce(tensor, group=ours, async_op=True) for tensor in tensors]
    dist.broadcast(tensors[0], 0, ours)  # runs after all of them
    assert works[0].is_completed() and works[-1].is_completed()
    assert all(work.wait() and work.is_success() for work in works)
    assert all(tensor.eq(ranks).all() for tensor in tensors)

    def reduce_again(future: Any) -> Any:
        (tensor,) = future.value()
        inner = dist.all_reduce(tensor, group=ours, async_op=True)
        inner.wait()
        return tensor.sum()

    sums = [
        dist.all_reduce(torch.ones(4), group=ours, async_op=True).get_future().then(reduce_again) for _ in range(20)
    ]
    assert [future.wait().item() for future in sums] == [4.0 * ranks**2] * 20
    wrong = dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, ours, async_op=True)
    try:
        wrong.wait()
    except ValueError as error:
        assert str(error) == "Cannot use ReduceOp.BAND with torch.float32"
        assert wrong.is_completed() and not wrong.is_success() and wrong.exception() is error
    else:
        raise AssertionError("no error")


def coalesced(ours: Group) -> None:
    """Check coalesced operations."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tensors = [torch.full((n + 1,), float(rank)) for n in range(3)]
    with dist._coalescing_manager(group=ours, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=ours)
    manager.wait()
    assert all(tensor.eq(ranks * (ranks - 1) / 2).all() for tensor in tensors)
    outputs = [torch.empty(ranks * n) for n in (1, 2)]
    with dist._coalescing_manager(group=ours):
        for n, output in enumerate(outputs, 1):
            dist.all_gather_single(output, torch.full((n,), float(rank)), ours)
    assert all(output[-1] == ranks - 1 and output[0] == 0 for output in outputs)


def objects_and_groups() -> None:
    """Check object collectives and subgroups."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": peer} for peer in range(ranks)]
    sent: list[Any] = ["x" * 100000 if rank == 0 else None]
    dist.broadcast_object_list(sent, 0)
    assert len(sent[0]) == 100000
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(range(ranks)) if rank == 0 else None, 0)
    assert scattered == [rank]
    if ranks < 2:
        return
    if rank % 2 == 0:
        dist.send_object_list([rank], (rank + 1) % ranks)
    else:
        received: list[Any] = [None]
        dist.recv_object_list(received, rank - 1)
        assert received == [rank - 1]
    members = list(range(ranks - 1, -1, -2))
    subgroup = dist.new_group(members, pg_options=mpi_gpucomp.torch.Options(codec="split"))
    if rank in members:
        tensor = torch.full((100000,), float(rank))
        dist.all_reduce(tensor, group=subgroup)
        assert tensor.eq(sum(members)).all()
        dist.broadcast(tensor, ranks - 1, subgroup)
        assert subgroup.communicator.size == len(members)
        dist.barrier(subgroup)
        dist.destroy_process_group(subgroup)
    half, _ = dist.new_subgroups(ranks // 2 or 1) if ranks % 2 == 0 else (dist.group.WORLD, None)
    dist.barrier(half)


def main() -> None:
    """Run all checks in one job."""
    dist.init_process_group("gpucomp")
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(ours, mpi_gpucomp.torch.GpucompProcessGroup) and dist.get_backend(ours) == "gpucomp"
    compare_with_gloo(ours, gloo)
    unsupported_by_gloo(ours)
    shapes(ours)
    asynchronous(ours)
    coalesced(ours)
    objects_and_groups()
    dist.monitored_barrier(wait_all_ranks=True)
    dist.barrier()
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main()
