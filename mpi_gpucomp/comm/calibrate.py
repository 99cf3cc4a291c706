"""Measures what `codec="auto"` decides by: the link, MPI's own collective, the engine and the codecs.

All ranks measure together and agree on the slowest rank's times, so that each comes to the same decisions. It takes a
tenth of a second or two on a fast network, about one on 1 Gbit/s: every size is tried a few times, but no further once
a budget is spent, and larger sizes only while they are not too slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf, isfinite
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.codec import frame
from mpi_gpucomp.codec.auto import ASSUMED, CODINGS, Auto, Costs
from mpi_gpucomp.codec.auto import Coding as Speeds
from mpi_gpucomp.collectives.select import Choice, Coding, Figures, Link, calibrated, select
from mpi_gpucomp.device import Buffer, dtype_of_name, get_device
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import DType, Memory, Stream

    Array = np.ndarray[Any, Any]
    Run = Callable[[], object]

__all__ = ["Calibration", "calibrate"]

ROUNDS = 4
FEWEST = 3
"""Rounds that are made beyond the budget, unless they are slow: a single one may have met something else."""
BUDGET = 0.025
"""Seconds after which a measurement is not repeated."""
OWN_BYTES = (1 << 16, 1 << 20, 1 << 23)
SLOW = 0.1
"""Seconds after which no larger message is tried."""
LINK_BYTES = (1 << 16, 1 << 20, 1 << 22)
LINK_SLOW = 0.05
SMALL_MESSAGES = 20
ENGINE_SHORT, ENGINE_LONG = 1 << 16, 1 << 22
CODED_BYTES = 1 << 19
NAP = 1e-4

OWN: dict[str, Callable[[MPI.Intracomm, Array, Array], None]] = {
    "broadcast": lambda comm, sent, received: comm.Bcast(sent),
    "reduce": lambda comm, sent, received: comm.Reduce(sent, received),
    "allreduce": lambda comm, sent, received: comm.Allreduce(sent, received),
    "allgather": lambda comm, sent, received: comm.Allgather(sent[: sent.size // comm.size], received),
    "reduce_scatter": lambda comm, sent, received: comm.Reduce_scatter_block(sent, received[: sent.size // comm.size]),
    "alltoall": lambda comm, sent, received: comm.Alltoall(sent, received),
    "gather": lambda comm, sent, received: comm.Gather(sent[: sent.size // comm.size], received),
    "scatter": lambda comm, sent, received: comm.Scatter(sent, received[: sent.size // comm.size]),
}
"""MPI's own collectives, on two buffers as long as the longest that each has."""


@dataclass(frozen=True)
class Calibration:
    """What is known about one collective of a communicator: equal on all ranks."""

    collective: str
    ranks: int
    figures: Figures
    costs: Costs

    def choose(self, nbytes: int, dtype: DType, codec: str = "none", ratio: float = 1.0) -> Choice:
        """Choose for a message whose longest buffer has `nbytes`; codec and ratio, agreed on too, are what to expect.

        They may be those of a sample of the data (`Auto.sample`) on the rank where there is any.
        """
        coding = self.costs.coding.get((codec, dtype.name)) or self.costs.coding.get((codec, "uint8"))
        expected = Coding(*coding, ratio) if coding else None
        return select(self.collective, nbytes, self.ranks, self.figures, expected)


def calibrate(
    comm: MPI.Intracomm,
    collective: str,
    run_engine: Callable[[int], object],
    device: str = "host",
    known: Calibration | None = None,
) -> Calibration:
    """Measure for a collective; all ranks of `comm` call it together, with nothing else under way on it.

    `run_engine` runs the collective through the engine, on buffers of which the longest has so many bytes, with the
    first algorithm of the table, codec none and chunks of `DEFAULT_CHUNK`; it returns when the rank has its result.
    `device` is where the elements are. From `known`, which was measured for another collective of the communicator,
    link and codecs are taken over.
    """
    if comm.size == 1:
        return Calibration(collective, 1, Figures(Link(0.0, 0.0), ((1, 0.0),)), known.costs if known else ASSUMED)
    link = known.figures.link if known else _link(comm)
    costs = known.costs if known else _costs(comm, link, device)
    plain = Coding(*costs.coding["none", "uint8"])
    figures = Figures(link, _own(comm, collective), plain)
    runs = [(nbytes, _seconds(comm, partial(run_engine, nbytes))) for nbytes in (ENGINE_SHORT, ENGINE_LONG)]
    return Calibration(collective, comm.size, calibrated(collective, comm.size, figures, *runs), costs)


def _seconds(comm: MPI.Intracomm, run: Run) -> float:
    """Return the least time that something took the slowest rank, in a few tries of which the first warms up."""
    times: list[float] = []
    while len(times) < ROUNDS and (sum(times) < BUDGET or (len(times) < FEWEST and sum(times) < SLOW)):
        comm.Barrier()
        times += _agreed(comm, [_timed(run)])
    return min(times)


def _timed(run: Run) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _agreed(comm: MPI.Intracomm, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number among the ranks."""
    largest = np.array(numbers, np.float64)
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    return [float(number) for number in largest]


def _own(comm: MPI.Intracomm, collective: str) -> tuple[tuple[int, float], ...]:
    """Time MPI's own collective on a few sizes."""
    measured: list[tuple[int, float]] = []
    for nbytes in OWN_BYTES:
        sent, received = (np.ones(-(-nbytes // 4 // comm.size) * comm.size, np.float32) for _ in range(2))
        measured.append((sent.nbytes, _seconds(comm, partial(OWN[collective], comm, sent, received))))
        if measured[-1][1] > SLOW:
            break
    return tuple(measured)


def _link(comm: MPI.Intracomm) -> Link:
    """Time messages around a ring: every rank sends to the next one while it receives from the one before."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent, received = np.ones(LINK_BYTES[-1], np.uint8), np.ones(LINK_BYTES[-1], np.uint8)

    def pass_on(nbytes: int, times: int = 1) -> None:
        for _ in range(times):
            comm.Sendrecv(sent[:nbytes], after, 0, received[:nbytes], before, 0)

    latency = _seconds(comm, partial(pass_on, 1, SMALL_MESSAGES)) / SMALL_MESSAGES
    measured = [(0, latency)]
    for nbytes in LINK_BYTES:
        measured.append((nbytes, _seconds(comm, partial(pass_on, nbytes))))
        if measured[-1][1] > LINK_SLOW:
            break
    # The difference of the two longest: what a message costs besides its bytes drops out.
    (less, sooner), (more, later) = measured[-2:]
    return Link(latency, max(0.0, later - sooner) / (more - less))


def _costs(comm: MPI.Intracomm, link: Link, device: str) -> Costs:
    """Agree on the speeds of the codecs; one that a rank does not have has none."""
    comm.Barrier()  # ranks that share cores should feel each other, as they will
    measured = _speeds(device)
    arrived = comm.Ibarrier()
    while not arrived.Test():
        sleep(NAP)  # MPI would take a core to wait, from ranks that still measure
    *times, sample = _agreed(comm, measured)
    pairs = zip(times[::2], times[1::2], strict=True)
    coding = {
        (codec.name, name): Speeds(*pair)
        for (codec, name), pair in zip(CODINGS, pairs, strict=True)
        if all(map(isfinite, pair))
    }
    # A copy cannot take longer than a codec, whatever disturbed the measurement: raw must not look worse than it is.
    coding["none", "uint8"] = Speeds(*map(min, zip(*coding.values(), strict=True)))
    return Costs(link.per_byte, coding, sample)


@lru_cache(maxsize=16)
def _speeds(device: str) -> tuple[float, ...]:
    """Return the seconds per byte of encoding and decoding for each of CODINGS, then the seconds of a sample."""
    place = get_device(device)
    stream = place.stream()
    times: list[float] = []
    with place.alloc(CODED_BYTES) as plain:
        for codec, name in CODINGS:
            source = _fill(plain, codec, name, stream)
            try:
                times += (seconds / CODED_BYTES for seconds in _coded(codec, source, stream))
            except DeviceError:
                times += (inf, inf)
        times.append(_sampled(plain, stream))
    stream.close()
    return tuple(times)


def _fill(plain: Memory, codec: Codec, name: str, stream: Stream) -> Buffer:
    """Fill memory with values that the codec shrinks, though none that make it easy."""
    dtype = dtype_of_name(name)
    assert dtype is not None
    count = CODED_BYTES // dtype.itemsize
    values = _values(codec, dtype, count)
    stream.copy(plain.address, values.ctypes.data, CODED_BYTES)
    stream.synchronize()
    return Buffer(plain.address, dtype, (count,), device=plain.device.name, owner=plain)


def _values(codec: Codec, dtype: DType, count: int) -> Array:
    random = np.random.default_rng(0)
    if dtype.kind != "f":
        return random.integers(0, 1000, count // 4, np.int32)  # for lz4 and zstd far slower than text
    if codec.name == "mpc":
        return np.cumsum(random.normal(0, 1, count)).astype(dtype.name)
    drawn = random.normal(0, 0.02, count)
    if dtype.name == "bfloat16":  # which numpy does not have: the upper half of a float32
        return (drawn.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return drawn.astype(dtype.name)


def _coded(codec: Codec, source: Buffer, stream: Stream) -> tuple[float, float]:
    """Return the seconds to make a frame, and to check and decode it."""
    encoding, decoding = inf, inf
    with (
        stream.device.alloc(frame.room(codec, source.count, source.dtype)) as room,
        stream.device.alloc(source.nbytes) as back,
    ):
        to = Buffer(back.address, source.dtype, source.shape, device=source.device, owner=back)
        for _ in range(ROUNDS):
            start = perf_counter()
            frame.encode(codec, source, room, 0, stream).size()
            middle = perf_counter()
            header = frame.read_header(room, stream)
            frame.decode(codec, header, room, to, stream, op="replace").size()
            encoding, decoding = min(encoding, middle - start), min(decoding, perf_counter() - middle)
    return encoding, decoding


def _sampled(plain: Memory, stream: Stream) -> float:
    """Return the seconds to try one codec on a sample, as the sender of a chunk does."""
    auto = Auto(Costs(wire=1.0, sample=0.0))  # so slow a link that everything is tried
    dtype = dtype_of_name("float32")
    assert dtype is not None
    source = Buffer(plain.address, dtype, (CODED_BYTES // 4,), device=plain.device.name, owner=plain)
    return min(_timed(lambda: auto.sample(source, stream).result()) for _ in range(ROUNDS)) / 2
