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

from mpi_gpucomp._tuning.model import (
    Choice,
    CodecCost,
    Figures,
    LinkCost,
    NodeLayout,
    calibrated,
    own_seconds,
    quickest,
    select,
)
from mpi_gpucomp._tuning.mpi_algorithms import DEFAULT, Better
from mpi_gpucomp.codec import frame
from mpi_gpucomp.codec.auto import ASSUMED, CODINGS, Auto, CodecSpeed, Costs
from mpi_gpucomp.device import Buffer, dtype_of_name, get_device
from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import DType, Memory, Stream

    Array = np.ndarray[Any, Any]
    from collections.abc import Callable, Sequence

    from mpi_gpucomp._dispatch.runtime import Nodes
    from mpi_gpucomp._tuning.mpi_algorithms import Tuned

    Run = Callable[[], object]

__all__ = ["METHODS", "Calibration", "arguments", "calibrate", "codec_speeds"]


# How fast this rank encodes and decodes, measured on values that codecs shrink, though none that make it easy.

ROUNDS = 4
CODED_BYTES = 1 << 19


@lru_cache(maxsize=16)
def codec_speeds(device: str) -> tuple[float, ...]:
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
        stream.device.alloc(frame.max_frame_bytes(codec, source.count, source.dtype)) as room,
        stream.device.alloc(source.nbytes) as back,
    ):
        to = Buffer(back.address, source.dtype, source.shape, device=source.device, owner=back)
        for _ in range(ROUNDS):
            start = perf_counter()
            frame.encode(codec, source, room, 0, stream).result()
            middle = perf_counter()
            header = frame.read_header(room, stream)
            frame.decode(codec, header, room, to, stream, op="replace").result()
            encoding, decoding = min(encoding, middle - start), min(decoding, perf_counter() - middle)
    return encoding, decoding


def _sampled(plain: Memory, stream: Stream) -> float:
    """Return the seconds to try one codec on a sample, as the sender of a chunk does."""
    auto = Auto(Costs(wire=1.0, sample=0.0))  # so slow a link that everything is tried
    dtype = dtype_of_name("float32")
    assert dtype is not None
    source = Buffer(plain.address, dtype, (CODED_BYTES // 4,), device=plain.device.name, owner=plain)
    best = inf
    for _ in range(ROUNDS):
        start = perf_counter()
        auto.sample(source, stream).result()
        best = min(best, perf_counter() - start)
    return best / 2


CALIBRATE_ROUNDS = 4
FEWEST = 3
"""Rounds that are made beyond the budget, unless they are slow: a single one may have met something else."""
BUDGET = 0.025
"""Seconds after which a measurement is not repeated."""
OWN_BYTES = (1 << 16, 1 << 20, 1 << 23)
SWEPT_BYTES = (1 << 20, 1 << 22, 1 << 24)
"""On these MPI's algorithms are tried: the first where the second would take too long, the last where it does not."""
WORTH_LONG, WORTH_LONGER = 0.04, 0.02
"""Seconds that the first may take for the second to be tried, and the second for the last."""
LONG_BYTES = 1 << 23
"""From here on messages count as long."""
CLEARLY = 0.9
"""What share of the default's time another algorithm may take, to be taken instead."""
TUNED_BYTES = 1 << 18
"""What is shorter is left to MPI's default."""
SLOW = 0.1
"""Seconds after which no larger message is tried."""
LINK_BYTES = (1 << 16, 1 << 20, 1 << 22)
LINK_SLOW = 0.05
SMALL_MESSAGES = 20
ENGINE_SHORT, ENGINE_LONG = 1 << 16, 1 << 22
NAP = 1e-4

METHODS = {
    "broadcast": ("Bcast", (1,)),
    "reduce": ("Reduce", (1, 1)),
    "allreduce": ("Allreduce", (1, 1)),
    "allgather": ("Allgather", (0, 1)),
    "reduce_scatter": ("Reduce_scatter_block", (1, 0)),
    "alltoall": ("Alltoall", (1, 1)),
    "gather": ("Gather", (0, 1)),
    "scatter": ("Scatter", (1, 0)),
}
"""The method of each collective, and which of its buffers are whole (1) or one rank's share (0)."""


def arguments(collective: str, ranks: int, nbytes: int) -> tuple[Array, ...]:
    """Make the buffers of a collective's method, of which the longest has so many bytes, or a few more."""
    share = max(1, -(-nbytes // 4 // ranks))
    return tuple(np.ones(share * ranks if whole else share, np.float32) for whole in METHODS[collective][1])


@dataclass(frozen=True)
class Calibration:
    """What is known about one collective of a communicator: equal on all ranks."""

    collective: str
    ranks: int
    figures: Figures
    costs: Costs
    better: tuple[Better, ...] = ()
    """Where MPI's own is faster than by its default."""

    def choose(self, nbytes: int, dtype: DType, codec: str = "none", ratio: float = 1.0) -> Choice:
        """Choose for a message whose longest buffer has `nbytes`; codec and ratio, agreed on too, are what to expect.

        They may be those of a sample of the data (`Auto.sample`) on the rank where there is any.
        """
        return select(self.collective, nbytes, self.ranks, self.figures, self._coding(dtype, codec, ratio))

    def engine(self, nbytes: int, dtype: DType, codec: str = "none", ratio: float = 1.0) -> Choice:
        """Return the quickest way through the engine with this codec, also where another should be faster."""
        coding = self._coding(dtype, codec, ratio)
        return quickest(self.collective, nbytes, self.ranks, self.figures, coding, encoded_only=True)

    def own_seconds(self, nbytes: int) -> float:
        """Return what MPI's own should take."""
        return own_seconds(self.figures, nbytes)

    def _coding(self, dtype: DType, codec: str, ratio: float) -> CodecCost | None:
        coding = self.costs.coding.get((codec, dtype.name)) or self.costs.coding.get((codec, "uint8"))
        return CodecCost(*coding, ratio) if coding else None


def calibrate(
    comm: MPI.Intracomm,
    collective: str,
    run_engine: Callable[[int], object],
    device: str = "host",
    known: Calibration | None = None,
    tuned: Callable[[], Tuned] | None = None,
    nodes: Nodes = (),
) -> Calibration:
    """Measure for a collective; all ranks of `comm` call it together, with nothing else under way on it.

    `run_engine` runs the collective through the engine, on buffers of which the longest has so many bytes, with the
    first algorithm of the table, codec none and chunks of `DEFAULT_CHUNK`; it returns when the rank has its result.
    `device` is where the elements are. From `known`, which was measured for another collective of the communicator,
    link and codecs are taken over. `tuned` makes what finds the best of MPI's own algorithms. `nodes` lists the
    ranks of each.
    """
    if comm.size == 1:
        return Calibration(collective, 1, Figures(LinkCost(0.0, 0.0), ((1, 0.0),)), known.costs if known else ASSUMED)
    link = known.figures.link if known else _link(comm)
    costs = known.costs if known else _costs(comm, link, device)
    plain = CodecCost(*costs.coding["none", "uint8"])
    own, better = _own(comm, collective, tuned)
    figures = Figures(link, own, plain, placed=known.figures.placed if known else _placed(comm, nodes))
    runs = [(nbytes, _seconds(comm, partial(run_engine, nbytes))) for nbytes in (ENGINE_SHORT, ENGINE_LONG)]
    return Calibration(collective, comm.size, calibrated(collective, comm.size, figures, *runs), costs, better)


def _seconds(comm: MPI.Intracomm, run: Run) -> float:
    """Return the least time that something took the slowest rank, in a few tries of which the first warms up."""
    times: list[float] = []
    while len(times) < CALIBRATE_ROUNDS and (sum(times) < BUDGET or (len(times) < FEWEST and sum(times) < SLOW)):
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


def _own(
    comm: MPI.Intracomm, collective: str, tuned: Callable[[], Tuned] | None
) -> tuple[tuple[tuple[int, float], ...], tuple[Better, ...]]:
    """Time MPI's own collective on a few sizes; find out where other algorithms than its default are faster."""
    found = _improvements(comm, collective, tuned) if tuned else []
    measured: list[tuple[int, float]] = []
    for nbytes in OWN_BYTES:
        buffers = arguments(collective, comm.size, nbytes)
        longest = max(buffer.nbytes for buffer in buffers)
        seconds = _own_seconds(comm, comm, collective, buffers)
        for number, better in enumerate(found):
            if better.suits(longest):
                improved = _own_seconds(comm, better.comm, collective, buffers)
                found[number] = better if improved < CLEARLY * seconds else better.without(longest)
                seconds = min(seconds, improved)
        measured.append((longest, seconds))
        if seconds > SLOW:
            break
    return tuple(measured), tuple(found)


def _own_seconds(comm: MPI.Intracomm, on: MPI.Intracomm, collective: str, buffers: tuple[Array, ...]) -> float:
    return _seconds(comm, partial(getattr(on, METHODS[collective][0]), *buffers))


def _improvements(comm: MPI.Intracomm, collective: str, tuned: Callable[[], Tuned]) -> list[Better]:
    """Try MPI's algorithms on as long messages as do not take too long, and on longer ones where the wire is fast."""
    short, long, longer = (arguments(collective, comm.size, nbytes) for nbytes in SWEPT_BYTES)
    slow = _own_seconds(comm, comm, collective, short) > WORTH_LONG
    on, seconds = _swept(comm, collective, tuned(), short if slow else long)
    if slow or seconds > WORTH_LONGER:
        return [Better(on, TUNED_BYTES, inf)] if on else []
    beyond, _ = _swept(comm, collective, tuned(), longer)
    bands = (Better(on, TUNED_BYTES, LONG_BYTES) if on else None, Better(beyond, LONG_BYTES, inf) if beyond else None)
    return [better for better in bands if better]


def _swept(
    comm: MPI.Intracomm, collective: str, tuned: Tuned, buffers: tuple[Array, ...]
) -> tuple[MPI.Intracomm | None, float]:
    """Return where messages of one size are clearly faster than by default, if anywhere, and the best time."""

    def once(on: MPI.Intracomm) -> float:
        comm.Barrier()
        return _timed(partial(getattr(on, METHODS[collective][0]), *buffers))

    winner = tuned.sweep(once)
    with tuned.best() as best:
        pays = tuned.times[winner] < CLEARLY * tuned.times[DEFAULT]
        return best if pays and best is not comm else None, tuned.times[winner]


def _placed(comm: MPI.Intracomm, nodes: Nodes) -> NodeLayout | None:
    """Measure links inside and between nodes, where it matters how ranks lie on them."""
    if not NodeLayout(nodes).matters:
        return None
    own = next(node for node in nodes if comm.rank in node)
    within = _link(comm, own)
    return NodeLayout(nodes, within, _link(comm, [node[0] for node in nodes]))


def _link(comm: MPI.Intracomm, ring: Sequence[int] | None = None) -> LinkCost:
    """Time messages around a ring: every rank of it sends to the next one while it receives from the one before."""
    ring = range(comm.size) if ring is None else ring
    at = ring.index(comm.rank) if comm.rank in ring and len(ring) > 1 else None
    before, after = (ring[at - 1], ring[(at + 1) % len(ring)]) if at is not None else (MPI.PROC_NULL, MPI.PROC_NULL)
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
    return LinkCost(latency, max(0.0, later - sooner) / (more - less))


def _costs(comm: MPI.Intracomm, link: LinkCost, device: str) -> Costs:
    """Agree on the speeds of the codecs; one that a rank does not have has none."""
    comm.Barrier()  # ranks that share cores should feel each other, as they will
    measured = codec_speeds(device)
    arrived = comm.Ibarrier()
    while not arrived.Test():
        sleep(NAP)  # MPI would take a core to wait, from ranks that still measure
    *times, sample = _agreed(comm, measured)
    pairs = zip(times[::2], times[1::2], strict=True)
    coding = {
        (codec.name, name): CodecSpeed(*pair)
        for (codec, name), pair in zip(CODINGS, pairs, strict=True)
        if all(map(isfinite, pair))
    }
    # A copy cannot take longer than a codec, whatever disturbed the measurement: raw must not look worse than it is.
    coding["none", "uint8"] = CodecSpeed(*map(min, zip(*coding.values(), strict=True)))
    return Costs(link.per_byte, coding, sample)
