"""Calls on GPU buffers that the caller's stream still writes: `python -m tests.simulated_cuda gpu_order.py CASE`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from mpi_gpucomp.communicator import Communicator
from mpi_gpucomp.errors import BufferSpecError, DeviceError, SpecError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LONG, SHORT = 1 << 17, 1 << 10
STEPS = 3


def zeros(count: int) -> Any:
    """Return complete elements: what follows may be on any stream."""
    array = cupy.zeros(count, np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    return array


def new_stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def either_stream() -> list[Any]:
    """Return the default stream, which may be one of each thread, and a new one."""
    return [nullcontext(), new_stream()]


def check(array: Any, expected: float, where: object) -> None:
    values = array.get()
    assert (values == expected).all(), f"rank {RANK}, {where}: {values[values != expected][:4]} instead of {expected}"


def persistent(comm: Communicator) -> None:
    for codec in ("split", "none", "delta"):
        array = zeros(LONG)
        request = comm.Bcast_init(array, codec=codec)
        for step in range(1, STEPS + 1):
            with new_stream():
                array[...] = float(step) if RANK == 0 else -1.0
                request.Start()
                request.Wait()
                check(array, step, (codec, step))
        request.Free()


def nonblocking(comm: Communicator) -> None:
    for step in range(1, STEPS + 1):
        with new_stream():
            source, target, all_of_them = zeros(SHORT), zeros(SHORT), zeros(SHORT * SIZE)
            source[...] = float(step)
            requests = [
                comm.Iallreduce(source, target),
                comm.Iallgather(source, all_of_them),
                comm.Ibcast(source, 0),
            ]
            for request in requests:
                request.Wait()
            check(target, step * SIZE, step)
            check(all_of_them, step, step)


def point_to_point(comm: Communicator) -> None:
    peer = RANK ^ 1
    for codec in ("split", None):
        for step, count, stream in product((1, 2), (SHORT, LONG), either_stream()):
            with stream:
                source, target = zeros(count), zeros(2 * count)[::2]
                target[...] = -1.0
                received = comm.Irecv(target, peer, codec=codec)
                source[...] = float(step)
                sent = comm.Isend(source, peer, codec=codec)
                received.Wait()
                sent.Wait()
                check(target, step, (codec, count))


def strided(comm: Communicator) -> None:
    for step, stream in product(range(1, STEPS + 1), either_stream()):
        with stream:
            array = zeros(2 * LONG)[::2]
            array[...] = float(step)
            request = comm.Iallreduce(MPI.IN_PLACE, array, codec="split")
            request.Wait()
            check(array, step * SIZE, step)


def named_stream(comm: Communicator) -> None:
    arrays = [zeros(LONG), zeros(SHORT)]
    for step in range(1, STEPS + 1):
        stream = new_stream()
        for array in arrays:
            with stream:
                array[...] = float(step)
            comm.Allreduce(MPI.IN_PLACE, array, codec="split" if array.size == LONG else None, stream=stream)
            with stream:
                check(array, step * SIZE, step)
                array[...] = float(step)
            out, back = comm.Isend(array, RANK ^ 1, stream=stream.ptr), comm.Irecv(array, RANK ^ 1, stream=stream)
            back.Wait()
            out.Wait()
            with stream:
                check(array, step, step)
    for wrong in ("fast", True, -1):
        _fails(SpecError, "stream= as a CUDA stream", lambda wrong=wrong: comm.Bcast(arrays[0], stream=wrong))
        WORLD.Barrier()


def _fails(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def unsupported(comm: Communicator) -> None:
    array = zeros(SHORT)
    for call in (
        lambda: comm.Iallreduce(MPI.IN_PLACE, array, MPI.LAND).Wait(),
        lambda: comm.Isend([array, 1, MPI.FLOAT.Create_vector(4, 1, 2).Commit()], RANK ^ 1).Wait(),
    ):
        _fails(BufferSpecError, "memory of the host, or a call that can be staged through it", call)
        WORLD.Barrier()


def capture(comm: Communicator) -> None:
    array, stream = zeros(SHORT), new_stream()
    with stream:
        stream.begin_capture()
        _fails(DeviceError, "a stream that is not capturing a graph", lambda: comm.Send(array, RANK ^ 1))
        stream.end_capture()
        array[...] = 1.0
        comm.Allreduce(MPI.IN_PLACE, array)
        check(array, SIZE, "after the capture")


def kinds_of_memory(comm: Communicator) -> None:
    cuda, nbytes = cupy.cuda, 4 * LONG
    with new_stream() as stream:
        for memory in (cuda.ManagedMemory(nbytes), cuda.MemoryAsync(nbytes, stream)):
            array = cupy.ndarray(LONG, np.float32, cuda.MemoryPointer(memory, 0))
            for view in (array, _OnlyInterface(array, stream.ptr), _OnlyDlpack(array)):
                array[...] = 1.0
                comm.Allreduce(MPI.IN_PLACE, view, codec="split")
                check(array, SIZE, type(memory).__name__)


class _OnlyInterface:
    """An array with `__cuda_array_interface__` and nothing else."""

    def __init__(self, array: Any, stream: int) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "version": 3, "stream": stream}


class _OnlyDlpack:
    """An array with DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def several_gpus(comm: Communicator) -> None:
    """Use two GPUs from one process, whichever is current."""
    for step in range(1, STEPS + 1):
        arrays = []
        for ordinal in (0, 1):
            with cupy.cuda.Device(ordinal), new_stream() as stream:
                array = zeros(LONG)
                array[...] = float(step)
                arrays.append((ordinal, stream, array))
        for ordinal, stream, array in arrays:
            for current in (0, 1):
                with cupy.cuda.Device(current):
                    comm.Allreduce(MPI.IN_PLACE, array, codec="split", stream=stream)
            with cupy.cuda.Device(ordinal), stream:
                check(array, step * SIZE * SIZE, (ordinal, step))
        with cupy.cuda.Device(0):
            received = zeros(LONG)
        comm.Sendrecv(arrays[1][2], RANK ^ 1, 0, received, RANK ^ 1, 0)
        check(received, step * SIZE * SIZE, step)


def across_gpus(comm: Communicator) -> None:
    """Send from one GPU of the process, and receive on the other."""
    device = cupy.cuda.Device
    ways: list[tuple[int, dict[str, Any]]] = [
        (LONG, {"codec": "split"}),
        (LONG, {"codec": "none", "algorithm": "ring"}),
        (SHORT, {}),
    ]
    for count, options in ways:
        with device(0), new_stream():
            first = zeros(count)
            first[...] = 1.0
            with device(1), new_stream():
                second = zeros(count)
                second[...] = -1.0
                comm.Allreduce(first, second, **options)
                check(second, SIZE, options)
                comm.Allreduce(second, first, **options)
            check(first, SIZE * SIZE, options)


def calibrated(comm: Communicator) -> None:
    """Calibrate first without a GPU, then with one on one rank: all agree on its costs."""
    values = np.ones(LONG, np.float32)
    comm.Allreduce(MPI.IN_PLACE, values, codec="auto", algorithm="ring")
    comm.calibrate("Bcast")
    tuner = comm._dispatcher.tuner
    assert tuner._calibrations["broadcast"].gpu_costs is None
    array: Any = zeros(16 * LONG) if RANK == 0 else np.zeros(16 * LONG, np.float32)
    comm.Bcast(array, codec="none")
    comm.calibrate("Bcast")
    found = tuner._calibrations["broadcast"]
    assert found.gpu_costs is not None and found.gpu_costs is not found.costs
    assert WORLD.bcast(found.gpu_costs) == found.gpu_costs == tuner.codec.gpu_costs
    for _ in range(STEPS):
        comm.Bcast(array)
    comm.calibrate("Allreduce")
    assert tuner._calibrations["allreduce"].gpu_costs == found.gpu_costs


def main() -> None:
    comm = Communicator(WORLD)
    globals()[sys.argv[1]](comm)
    comm.Free()
    print("passed")


if __name__ == "__main__":
    main()
