"""Measures codecs on a rank of its own and on all ranks at once: their speeds, and how many cores ranks share."""

from __future__ import annotations

from itertools import cycle
from statistics import fmean, median
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING

import numpy as np

from mpi_gpucomp.codec import find, frame
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.schedule.cost import Coding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mpi4py import MPI

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Buffer, Memory, Stream

__all__ = ["LEAST_CORES", "codings", "quiet_barrier"]

BYTES, CHUNKS = 1 << 20, 16
"""Of a chunk, and how many there are: no cache has them all, as with a message."""
TRIES = 8
ALONE, SHARING = 0.05, 0.5
"""Seconds that a codec is tried alone, and in which ranks that share cores with others get their parts of them."""
SHARED = 0.7
"""If all ranks code together no faster than this share of what they would alone, they share cores."""
LEAST_CORES = 0.25


def quiet_barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks without taking the core of those that measure."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        sleep(1e-3)


def codings(comm: MPI.Intracomm, specs: Sequence[str]) -> tuple[dict[str, Coding], float]:
    """Measure the codecs on rank 0 alone, then one on all ranks at once, which shows how many cores they have.

    Of cores that others use too it is the part that is left. Where ranks share them, caches and the halves of a core
    too, so each takes more of a processor's time than alone: by so much all codecs are slower.
    """
    alone = {spec: _coding(spec) for spec in specs} if comm.rank == 0 else {}
    quiet_barrier(comm)
    alone = comm.bcast(alone)
    slowest = max(alone, key=lambda spec: alone[spec].encode)
    comm.Barrier()
    own = _shared_encode(slowest)
    quiet_barrier(comm)
    clock, processor = (fmean(part) for part in zip(*comm.allgather(own), strict=True))
    best = alone[slowest].encode
    if best > SHARED * clock:
        return alone, float(comm.size)
    slower = max(1.0, processor / best)
    found = {spec: Coding(one.encode * slower, one.decode * slower, one.ratio) for spec, one in alone.items()}
    return found, max(LEAST_CORES, round(comm.size * slower * best / clock, 2))


def _values() -> list[Buffer]:
    """Return chunks of values like a network's weights."""
    values = np.random.default_rng(0).normal(0, 0.02, (CHUNKS, BYTES // 4)).astype(np.float32)
    return [as_buffer(chunk, writable=True) for chunk in values]


def _coding(spec: str) -> Coding:
    """Measure a codec as it works on chunks: with frames and their checksums."""
    codec, device = find(spec), get_device("host")
    chunks, stream = _values(), device.stream()
    with device.alloc(frame.room(codec, chunks[0].count, chunks[0].dtype)) as room:
        nbytes = frame.encode(codec, chunks[0], room, 0, stream).size() or BYTES
        encode = median(_tries(_encoder(codec, room, stream), chunks, ALONE))
        header = frame.read_header(room, stream)

        def decode(chunk: Buffer) -> object:
            return frame.decode(codec, header, room, chunk, stream, op="replace").size()

        back = median(_tries(decode, chunks, ALONE))
    stream.close()
    return Coding(encode / BYTES, back / BYTES, max(1.0, BYTES / nbytes))


def _shared_encode(spec: str) -> tuple[float, float]:
    """Return the seconds per byte, of a clock and of a processor, to encode while other ranks do."""
    codec, device = find(spec), get_device("host")
    chunks, stream = _values(), device.stream()
    with device.alloc(frame.room(codec, chunks[0].count, chunks[0].dtype)) as room:
        start, used = perf_counter(), process_time()
        tries = len(_tries(_encoder(codec, room, stream), chunks, SHARING))
        spent = perf_counter() - start, process_time() - used
    stream.close()
    return spent[0] / tries / BYTES, spent[1] / tries / BYTES


def _encoder(codec: Codec, room: Memory, stream: Stream) -> Callable[[Buffer], object]:
    return lambda chunk: frame.encode(codec, chunk, room, 0, stream).size()


def _tries(run: Callable[[Buffer], object], chunks: Iterable[Buffer], seconds: float) -> list[float]:
    """Return what each of some tries took, of a processor where others held it up, for so many seconds at least."""
    times: list[float] = []
    begun = perf_counter()
    for chunk in cycle(chunks):
        if len(times) >= TRIES and perf_counter() - begun > seconds:
            break
        start, used = perf_counter(), process_time()
        run(chunk)
        # Several workers share a chunk: then the clock's time is the shorter one.
        times.append(min(perf_counter() - start, process_time() - used))
    return times
