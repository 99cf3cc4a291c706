"""Errors and timeouts of the backend; run under mpirun on two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mpi_gpucomp.torch
from mpi_gpucomp.errors import AgreementError, BufferSpecError, SpecError


def assert_raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """Check that a call raises an error that contains the text."""
    try:
        call()
    except kind as error:
        assert text in str(error), f"{error}, expected {text}"
    else:
        raise AssertionError(f"no error: {text}")


def options() -> None:
    """Check errors of Options and pg_options."""
    assert_raises(
        SpecError,
        "Options, roles: expected roles among parameters, gradients, activations, got 'weights'. Each role stands for "
        "operations: parameters: broadcast, all_gather, scatter and gather; gradients: all_reduce, reduce and "
        "reduce_scatter; activations: all_to_all.",
        lambda: mpi_gpucomp.torch.Options(roles={"weights": "split"}),
    )
    assert_raises(SpecError, "no-such", lambda: mpi_gpucomp.torch.Options(codec="no-such"))
    assert_raises(
        SpecError,
        "pg_options: expected an mpi_gpucomp.torch.Options, got builtins.dict. Pass for example "
        'pg_options=mpi_gpucomp.torch.Options(codec="split").',
        lambda: dist.new_group(pg_options={"codec": "split"}),
    )


def mismatched_calls(rank: int) -> None:
    """Check errors of calls that differ between ranks, and of outputs of the wrong size."""
    group = dist.new_group()
    assert_raises(
        AgreementError, "rank 0: Allreduce of 4 x float32", lambda: dist.all_reduce(torch.ones(4 + rank), group=group)
    )
    group = dist.new_group()
    assert_raises(
        BufferSpecError,
        f"rank {rank}: all_gather: expected output {rank} to have 3 elements, as the input, got 4. "
        "Pass one output tensor per rank, of the size that the rank sends.",
        lambda: dist.all_gather([torch.empty(4), torch.empty(4)], torch.empty(3), group=group),
    )
    assert_raises(
        BufferSpecError,
        f"rank {rank}: all_gather: expected 2 output tensors, one per rank, got 1. Pass",
        lambda: group.allgather([[torch.empty(3)]], [torch.empty(3)]).wait(),
    )
    assert_raises(
        BufferSpecError,
        f"rank {rank}: all_gather_single: expected an output of 6 elements, 3 from each of 2 ranks, got 8 elements. "
        "Pass an output tensor of the size of all inputs.",
        lambda: group.all_gather_single(torch.empty(8), torch.empty(3)).wait(),
    )
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(2).all()


def destroyed_group() -> None:
    """Check the error of operations on a destroyed group."""
    group = dist.new_group()
    dist.destroy_process_group(group)
    for call in (group.allreduce, group.broadcast):
        assert_raises(SpecError, "communicator: expected one that is in use", call([torch.ones(2)]).wait)


def timeouts(rank: int) -> None:
    """Check the timeouts of operations that a rank does not join in time."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    start = time.monotonic()
    if rank == 0:
        assert_raises(RuntimeError, "barrier: Timed out waiting 1000 ms for all ranks", lambda: dist.barrier(group))
        assert time.monotonic() - start >= 1
    short = timedelta(seconds=0.2)
    if rank == 0:
        receive = dist.irecv(torch.empty(3), 1)
        assert_raises(
            RuntimeError, "recv from rank 1: Timed out waiting 200 ms for completion", lambda: receive.wait(short)
        )
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert_raises(RuntimeError, "all_reduce: Timed out waiting 200 ms for completion", lambda: work.wait(short))
        dist.send(torch.ones(1), 1)
        work.wait()
        receive.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(4))
        dist.send(torch.ones(3), 0)
    monitored = dist.new_group()
    if rank == 0:
        assert_raises(
            RuntimeError,
            "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 200 ms",
            lambda: dist.monitored_barrier(monitored, short),
        )


def main() -> None:
    """Run all checks."""
    dist.init_process_group("gpucomp")
    rank = dist.get_rank()
    options()
    mismatched_calls(rank)
    destroyed_group()
    timeouts(rank)
    print("passed", flush=True)


if __name__ == "__main__":
    main()
