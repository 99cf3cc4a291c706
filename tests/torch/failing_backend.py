"""What goes wrong on the backend, and how torch's users hear of it; run under mpirun on two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mpi_gpucomp.torch
from mpi_gpucomp.errors import AgreementError, BufferSpecError, SpecError


def raises(kind: type[Exception], text: str, act: Callable[[], Any]) -> None:
    """Raise unless `act` raises this, with this text in it."""
    try:
        act()
    except kind as error:
        assert text in str(error), f"{error} instead of {text}"
    else:
        raise AssertionError(f"no error: {text}")


def options() -> None:
    """Refuse policies that mean nothing."""
    raises(
        SpecError,
        "Options, roles: expected some of parameters, gradients, activations, got 'weights'. Name what the operations "
        "carry: parameters: broadcast, all_gather, scatter and gather; gradients: all_reduce, reduce and "
        "reduce_scatter; activations: all_to_all.",
        lambda: mpi_gpucomp.torch.Options(roles={"weights": "split"}),
    )
    raises(SpecError, "no-such", lambda: mpi_gpucomp.torch.Options(codec="no-such"))
    raises(
        SpecError,
        "pg_options: expected an mpi_gpucomp.torch.Options, got builtins.dict. Pass for example "
        'pg_options=mpi_gpucomp.torch.Options(codec="split").',
        lambda: dist.new_group(pg_options={"codec": "split"}),
    )


def wrong_calls(rank: int) -> None:
    """Raise on every rank where they call different things, and where one's tensors do not fit."""
    group = dist.new_group()
    raises(AgreementError, "rank 0: 4 x float32", lambda: dist.all_reduce(torch.ones(4 + rank), group=group))
    group = dist.new_group()
    raises(
        BufferSpecError,
        f"rank {rank}: all_gather: expected 2 tensors to receive, and this rank's of 3 elements, got 2, and 4 elements",
        lambda: dist.all_gather([torch.empty(4), torch.empty(4)], torch.empty(3), group=group),
    )
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(2).all()


def after_the_end() -> None:
    """Say that a group is gone, whichever way it is called."""
    group = dist.new_group()
    dist.destroy_process_group(group)
    for call in (group.allreduce, group.broadcast):
        raises(SpecError, "communicator: expected one that is in use", call([torch.ones(2)]).wait)


def timeouts(rank: int) -> None:
    """Raise when a rank does not come in time."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    begun = time.monotonic()
    if rank == 0:
        raises(RuntimeError, "barrier: Timed out waiting 1000 ms for all ranks", lambda: dist.barrier(group))
        assert time.monotonic() - begun >= 1
    quick = timedelta(seconds=0.2)
    if rank == 0:
        late = dist.irecv(torch.empty(3), 1)
        raises(RuntimeError, "recv from rank 1: Timed out waiting 200 ms", lambda: late.wait(quick))
        work = dist.all_reduce(torch.ones(4), async_op=True)
        raises(RuntimeError, "all_reduce: Timed out waiting 200 ms for it to complete", lambda: work.wait(quick))
        dist.send(torch.ones(1), 1)
        work.wait()
        late.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(4))
        dist.send(torch.ones(3), 0)
    monitored = dist.new_group()
    if rank == 0:
        raises(
            RuntimeError,
            "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 200 ms",
            lambda: dist.monitored_barrier(monitored, quick),
        )


def main() -> None:
    """Run everything."""
    dist.init_process_group("gpucomp")
    rank = dist.get_rank()
    options()
    wrong_calls(rank)
    after_the_end()
    timeouts(rank)
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
