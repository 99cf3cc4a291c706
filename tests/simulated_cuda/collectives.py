"""Collectives and messages of GPU buffers, on every rank: `collectives.py CASE CODEC COUNT`; prints what is wrong."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import cupy
import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, GpucompError, Request
from tests.simulated_cuda import machine

CASE, CODEC, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3])
COMM = MPI.COMM_WORLD
ROUNDS, LONG = 3, 1 << 19


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-50, 50, COUNT).astype(np.float32)


def check(array: cupy.ndarray, wanted: np.ndarray, what: str) -> None:
    """Print a rank's message unless the values are exact, or near for a lossy codec."""
    if not np.allclose(array.get(), wanted, rtol=0, atol=0 if CODEC in ("none", "split") else 40):
        print(f"rank {COMM.rank}: {what} is wrong", file=sys.stderr)


def source(seed: int) -> cupy.ndarray:
    return cupy.asarray(values(seed))


def broadcasts(comm: Communicator) -> None:
    for number in range(ROUNDS):
        array = source(number) if COMM.rank == 0 else cupy.empty(COUNT, np.float32)
        comm.Bcast(array, root=0, codec=CODEC)
        check(array, values(number), f"broadcast {number}")


def named_broadcasts(comm: Communicator) -> None:
    """Start named broadcasts in another order on every second rank."""
    arrays = [source(number) if COMM.rank == 0 else cupy.empty(COUNT, np.float32) for number in range(ROUNDS)]
    order = range(ROUNDS) if COMM.rank % 2 else reversed(range(ROUNDS))
    Request.Waitall([comm.Ibcast(arrays[number], root=0, codec=CODEC, name=f"b{number}") for number in order])
    for number, array in enumerate(arrays):
        check(array, values(number), f"broadcast b{number}")


def reductions(comm: Communicator) -> None:
    for number in range(ROUNDS):
        total = cupy.empty(COUNT, np.float32)
        comm.Allreduce(source(10 * number + COMM.rank), total, codec=CODEC)
        check(total, sum(values(10 * number + rank) for rank in range(COMM.size)), f"reduction {number}")


def gathering(comm: Communicator) -> None:
    every = cupy.empty(COUNT * COMM.size, np.float32)
    comm.Allgather(source(COMM.rank), every, codec=CODEC)
    check(every, np.concatenate([values(rank) for rank in range(COMM.size)]), "allgather")


def messages(comm: Communicator) -> None:
    for number in range(ROUNDS):
        if COMM.rank == 0:
            comm.Send(source(number), dest=1, tag=number, codec=CODEC)
        elif COMM.rank == 1:
            array = cupy.empty(COUNT, np.float32)
            comm.Recv(array, source=0, tag=number, codec=CODEC)
            check(array, values(number), f"message {number}")


def persistent(comm: Communicator) -> None:
    """Start a persistent broadcast on another stream each time, as the data's producer."""
    array = cupy.zeros(COUNT, np.float32)
    cupy.cuda.Device().synchronize()  # the streams below do not wait for this one
    request = comm.Bcast_init(array, root=0, codec=CODEC)
    for number in range(ROUNDS):
        with cupy.cuda.Stream(non_blocking=True):
            if COMM.rank == 0:
                array.set(values(number))
            request.Start()
            request.Wait()
            check(array, values(number), f"start {number}")


def second_gpu(comm: Communicator) -> None:
    """Use the second GPU alone; a context on the first one would be an accident."""
    machine().expect_devices(1)
    named_broadcasts(comm)


def on_rails(comm: Communicator) -> None:
    """Stage through the host's memory what rails send, and what they receive."""
    with Communicator(COMM, rails="127.0.0.2,127.0.0.3") as railed:
        for case in (named_broadcasts, reductions, messages, persistent):
            case(railed)
        assert railed.rail_stats() is not None


def fault(comm: Communicator) -> None:
    """Fail on the GPU of rank 1 alone, which gets an error, as do the others: none waits for ever."""
    reductions(comm)
    array = cupy.zeros(COUNT, np.float32)
    cupy.cuda.Device().synchronize()
    if COMM.rank == 1:
        machine().inject(os.environ["SIMULATED_CUDA_FAULT"])
    _report_error(lambda: [comm.Allreduce(MPI.IN_PLACE, array, codec=CODEC) for _ in range(ROUNDS)])


def full(comm: Communicator) -> None:
    """Fill the memory of rank 1's GPU: every rank gets an error, and collectives work again once there is memory."""
    reductions(comm)
    runtime, blocks = cupy.cuda.runtime, []
    array = cupy.zeros(LONG, np.float32)
    with suppress(runtime.CUDARuntimeError):
        while COMM.rank == 1:
            blocks.append(runtime.malloc(1 << 20))
    _report_error(lambda: comm.Allreduce(MPI.IN_PLACE, array, codec=CODEC))
    for block in blocks:
        runtime.free(block)
    broadcasts(comm)
    reductions(comm)
    comm.Allreduce(MPI.IN_PLACE, array, codec=CODEC)


def _report_error(call: Callable[[], object]) -> None:
    try:
        call()
    except GpucompError as error:
        print(json.dumps([COMM.rank, str(error)]), flush=True)
    COMM.Barrier()


CASES: dict[str, Callable[[Communicator], None]] = {
    case.__name__: case
    for case in (
        broadcasts,
        named_broadcasts,
        reductions,
        gathering,
        messages,
        persistent,
        second_gpu,
        on_rails,
        fault,
        full,
    )
}

if patience := os.environ.get("SIMULATED_CUDA_PATIENCE"):
    faulthandler.dump_traceback_later(float(patience), exit=True)
if CASE == "second_gpu":
    cupy.cuda.Device(1).use()
with Communicator(COMM) as communicator:
    CASES[CASE](communicator)
