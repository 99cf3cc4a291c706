"""Run under mpirun: persistent broadcasts of one buffer that send only the changes.

delta.py CHECK...     the functions below
"""

from __future__ import annotations

import faulthandler
import sys

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator, Request
from mpi_gpucomp._dispatch.persistent import DeltaRequest
from mpi_gpucomp.errors import BufferSpecError, GpucompError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ROOT = 1
TYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint16, np.int64]


def weights(dtype: type, count: int) -> np.ndarray:
    values = np.random.default_rng(0).normal(0, 0.02, count)
    return (values if np.dtype(dtype).kind in "fV" else values * 1e4).astype(dtype)


def send(request: DeltaRequest, values: np.ndarray, version: int, *, full: bool) -> None:
    """Broadcast a version, and compare it with the root's values."""
    request.Start()
    request.Wait()
    assert WORLD.bcast(values.tobytes(), ROOT) == values.tobytes(), f"version {version} is wrong"
    assert (request.version, request.full) == (version, full)


def change(values: np.ndarray, step: int) -> None:
    """Change the root's values slightly, and overwrite some of the others'."""
    if RANK == ROOT:
        values[step :: step + 2] *= values.dtype.type(1 + 2**-6)
    else:
        values[: 100 * RANK] = step


def every_type() -> None:
    with Communicator(WORLD) as comm:
        for dtype in TYPES:
            for count in (1, 1000, 300_001):
                values = weights(dtype, count) if RANK == ROOT else np.zeros(count, dtype)
                request = comm.Bcast_init(values, ROOT, codec="delta", chunk=1 << 18)
                sent = []
                for step in range(3):
                    before = comm.stats().bytes_sent
                    send(request, values, step + 1, full=step == 0)
                    sent.append(comm.stats().bytes_sent - before)
                    change(values, step)
                assert RANK != ROOT or count < 1000 or sent[2] < sent[0]
                request.Free()
                request.Free()


def unrelated() -> None:
    """Alternate between small changes and versions unrelated to the previous one."""
    with Communicator(WORLD) as comm:
        values = weights(np.float32, 200_000)
        request = comm.Bcast_init(values, ROOT, codec="delta", chunk=1 << 18)
        for step in range(4):
            if RANK == ROOT and step % 2:
                values[:] = np.random.default_rng(step).normal(0, 30, values.size)
            change(values, step)
            send(request, values, step + 1, full=step == 0)


def missed() -> None:
    """Let each rank miss a version: the next is sent in full, and later ones as changes."""
    with Communicator(WORLD) as comm:
        values = weights(np.float32, 50_000)
        request = comm.Bcast_init(values, ROOT, codec="delta")
        send(request, values, 1, full=True)
        for rank in range(SIZE):
            if rank == RANK:
                request.forget()
            change(values, rank)
            send(request, values, 2 + 2 * rank, full=True)
            change(values, rank)
            send(request, values, 3 + 2 * rank, full=False)


def failed() -> None:
    """Let a broadcast fail on one rank: versions stay correct, and the next broadcast succeeds."""
    with Communicator(WORLD) as comm:
        values = weights(np.float32, 400_000)
        request = comm.Bcast_init(values, ROOT, codec="delta", chunk=1 << 18)
        send(request, values, 1, full=True)
        change(values, 0)
        codec = request._codec
        decode, left = codec.decode_reduce, [3]

        def decode_some(*args: object) -> object:
            left[0] -= 1
            if not left[0]:
                raise ValueError("decode failed")
            return decode(*args)

        if RANK == SIZE - 1:
            codec.decode_reduce = decode_some
        request.Start()
        try:
            request.Wait()
        except (GpucompError, ValueError) as error:
            assert "decode failed" in str(error)
        else:
            raise AssertionError("no error")
        versions = WORLD.allgather(request.version)
        assert versions[-1] == 1
        send(request, values, max(versions) + 1, full=len(set(versions)) > 1)


def refused() -> None:
    expected = (
        f"rank {RANK}: Bcast_init with codec delta: expected contiguous elements of a basic type, "
        "got elements with gaps. Pass a contiguous copy, or another codec."
    )
    complex_ = (
        f"codec delta: expected elements of type {' or '.join(DELTA_TYPES)}, got complex64. "
        "Choose a codec for this type: 'python -m mpi_gpucomp codecs' lists them."
    )
    with Communicator(WORLD) as comm:
        for values, text in ((np.zeros((50, 2), np.float32)[:, 0], expected), (np.zeros(9, np.complex64), complex_)):
            try:
                comm.Bcast_init(values, codec="delta")
            except BufferSpecError as error:
                assert str(error) == text, error
            else:
                raise AssertionError("no error")


DELTA_TYPES = ["uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32", "float64"]


def ends() -> None:
    """Free requests that are in flight, never started, or of a freed communicator; and broadcast empty buffers."""
    comm = Communicator(WORLD)
    values, nothing = weights(np.float32, 100_000), np.empty(0, np.float32)
    active, never, late, empty = (comm.Bcast_init(x, ROOT, codec="delta") for x in (values, values, values, nothing))
    active.Start()
    active.Free()
    never.Free()
    for _ in range(2):
        late.Start()
        late.Wait()
        send(empty, nothing, empty.version + 1, full=empty.version == 0)
    assert late.version == 2
    comm.Free()
    late.Free()
    try:
        late.Start()
    except GpucompError as error:
        assert "got one that was freed" in str(error), error
    else:
        raise AssertionError("no error")


def in_any_order() -> None:
    """Start several requests, and wait for them, in an order that differs among ranks."""
    with Communicator(WORLD) as comm:
        several = [weights(np.float32, 20_000 + n) for n in range(6)]
        requests = [comm.Bcast_init(values, ROOT, codec="delta") for values in several]
        for step in range(4):
            for values in several:
                change(values, step)
            order = np.random.default_rng(10 * step + RANK).permutation(6)
            for n in order:
                requests[n].Start()
            assert all(requests[n].active for n in order)
            if step % 2:
                Request.Waitall(requests)
            else:
                while not all([requests[n].Test() for n in order[::-1]]):
                    pass
            for values in several:
                assert WORLD.bcast(values.tobytes(), ROOT) == values.tobytes()


def main() -> None:
    faulthandler.dump_traceback_later(120, exit=True)
    for name in sys.argv[1:]:
        globals()[name]()
        WORLD.Barrier()
        if RANK == 0:
            print(f"{name}: passed on {SIZE} ranks", flush=True)


main()
