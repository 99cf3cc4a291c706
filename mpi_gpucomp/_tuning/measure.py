"""Measurements behind `codec="auto"`: the link, native MPI, the engine and the codecs.

All ranks measure together and agree on the slowest rank's times, so that all make the same plans. This takes a tenth of
a second or two on a fast network and about one second at 1 Gbit/s: every size is repeated a few times within a time
budget, and larger sizes are measured only while they are fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf, isfinite
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.calls import parse_call
from mpi_gpucomp._dispatch.plan import Plan, Route
from mpi_gpucomp._tuning.model import (
    DEFAULT_CHUNK,
    CodecCost,
    Estimate,
    LinkCost,
    Measurements,
    NodeLayout,
    best,
    best_engine,
    fit,
    native_seconds,
)
from mpi_gpucomp._tuning.mpi_algorithms import DEFAULT, TunedComm, agree_max
from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.codec.auto import ASSUMED, CODINGS, Auto, CodecSpeed, Costs
from mpi_gpucomp.device import Buffer, dtype_of_name, get_device
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.errors import DeviceError
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.cost import RELAY_BYTES, default_chunk_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.transport.gpu_aware import cuda_aware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp._dispatch.runtime import Runtime
    from mpi_gpucomp._tuning.mpi_algorithms import AlgorithmSweep
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.core.wire import Wire
    from mpi_gpucomp.device import DType, Memory, Stream

    Array = np.ndarray[Any, Any]
    Run = Callable[[], object]
    NewSweep = Callable[[str], AlgorithmSweep]

__all__ = ["Calibration", "calibrate", "codec_speeds", "sample_buffers"]

ROUNDS = 4
MIN_ROUNDS = 3
"""Rounds beyond the time budget, unless they are slow: a single one may have been disturbed."""
BUDGET = 0.025
"""Seconds after which a measurement is not repeated."""
NATIVE_BYTES = (1 << 16, 1 << 20, 1 << 23)
SWEEP_BYTES = (1 << 20, 1 << 22, 1 << 24)
"""Message sizes of the sweeps over native algorithms: the first on slow links, the last on fast ones too."""
SLOW_SWEEP, FAST_SWEEP = 0.04, 0.02
"""Seconds of the first size above which only that is swept, and of the second below which the last is swept too."""
LONG_BYTES = 1 << 23
"""Messages from this size on use the winner of the last sweep."""
CLEARLY_FASTER = 0.9
"""Another algorithm is used below this share of the default's time."""
TUNED_BYTES = 1 << 18
"""Shorter messages use the MPI library's default algorithm."""
SLOW = 0.1
"""Seconds above which no larger message is measured."""
LINK_BYTES = (1 << 16, 1 << 20, 1 << 22)
LINK_SLOW = 0.05
SMALL_MESSAGES = 20
ENGINE_SHORT, ENGINE_LONG = 1 << 16, 1 << 22
POLL_SECONDS = 1e-4
CODEC_ROUNDS = 4
CODED_BYTES = 1 << 19
LONG_MESSAGE = 1 << 30


def sample_buffers(collective: str, ranks: int, nbytes: int) -> tuple[Array, ...]:
    """Make the buffers of a collective's first method; the longest has `nbytes`, or slightly more."""
    share = max(1, -(-nbytes // 4 // ranks))
    blocks = COLLECTIVES[collective].block_buffers
    return tuple(np.ones(share if block else share * ranks, np.float32) for block in blocks)


@dataclass(frozen=True)
class Calibration:
    """The measurements of one collective on a communicator; equal on all ranks."""

    collective: str
    ranks: int
    measured: Measurements
    costs: Costs
    """On the host."""
    gpu_costs: Costs | None = None
    """On GPUs, if a rank had elements there: then they are what plans are made by."""
    tuned_comms: tuple[TunedComm, ...] = ()
    """Communicators on which native MPI is faster than by default."""

    def best(self, nbytes: int, dtype: DType, codec: str = "none", ratio: float = 1.0) -> Estimate:
        """Return the fastest way to run a message of `nbytes`, if `codec` compresses it by `ratio`."""
        return best(self.collective, nbytes, self.ranks, self.measured, self._coding(dtype, codec, ratio))

    def best_engine(self, nbytes: int, dtype: DType, codec: str = "none", ratio: float = 1.0) -> Estimate:
        """Return the fastest configuration of the engine with this codec."""
        coding = self._coding(dtype, codec, ratio)
        return best_engine(self.collective, nbytes, self.ranks, self.measured, coding, encoded_only=True)

    def native_seconds(self, nbytes: int) -> float:
        """Return the predicted time of native MPI."""
        return native_seconds(self.measured, nbytes)

    def _coding(self, dtype: DType, codec: str, ratio: float) -> CodecCost | None:
        costs = self.gpu_costs or self.costs
        speed = costs.coding.get((codec, dtype.name)) or costs.coding.get((codec, "uint8"))
        layout, link = self.measured.layout, self.measured.link
        wire = max(link.per_byte, layout.between.per_byte if layout else 0.0)
        return CodecCost(*speed, ratio) if speed and max(speed) <= wire else None


def calibrate(
    runtime: Runtime,
    collective: str,
    device: str = "host",
    known: Calibration | None = None,
    new_sweep: NewSweep | None = None,
) -> Calibration:
    """Measure a collective: all ranks do, with nothing else in flight on the communicator.

    `device` holds this rank's elements. Link and codec costs are taken over from `known`, measured for another
    collective or without GPUs. `new_sweep` makes a sweep over the MPI library's algorithms; without it only the default
    is measured.
    """
    comm = runtime.comm
    if comm.size == 1:
        return Calibration(
            collective, 1, Measurements(LinkCost(0.0, 0.0), ((1, 0.0),)), known.costs if known else ASSUMED
        )
    link = known.measured.link if known else _measure_link(comm)
    costs = known.costs if known else _measure_codecs(comm, link, "host")
    gpu_costs = known.gpu_costs if known else None
    if gpu_costs is None and any(agree_max(comm, [float(device != "host")])):
        gpu_costs = _measure_codecs(comm, link, device if device != "host" else None)
    raw = CodecCost(*costs.coding["none", "uint8"])
    native, tuned = _measure_native(comm, collective, new_sweep)
    layout = known.measured.layout if known else _measure_layout(comm, runtime.nodes)
    measured = Measurements(
        link, native, raw, layout=layout, relay_bytes=_relay_bytes(runtime.nodes, runtime.wire, link)
    )
    runs = [
        (nbytes, _seconds(comm, partial(_run_engine, runtime, collective, nbytes)))
        for nbytes in (ENGINE_SHORT, ENGINE_LONG)
    ]
    fitted = fit(collective, comm.size, measured, *runs)
    if gpu_costs is not None:
        fitted = replace(fitted, raw=CodecCost(*gpu_costs.coding["none", "uint8"]))
    return Calibration(collective, comm.size, fitted, costs, gpu_costs, tuned)


def _run_engine(runtime: Runtime, collective: str, nbytes: int) -> None:
    """Run a collective through the engine, with the configuration that the model is fitted to."""
    buffers = sample_buffers(collective, runtime.size, nbytes)
    call = parse_call(COLLECTIVES[collective].method, buffers, {}, runtime.rank, runtime.size)
    schedule = build(collective, algorithms(collective)[0].name, runtime.size, 0, runtime.nodes, call.in_place)
    plan = Plan(Route.ENGINE, "calibration", get_codec("none"), schedule, DEFAULT_CHUNK)
    runtime.execute(plan, call)


def _seconds(comm: MPI.Intracomm, run: Run) -> float:
    """Return the least time of the slowest rank in a few rounds, of which the first warms up."""
    times: list[float] = []
    while len(times) < ROUNDS and (sum(times) < BUDGET or (len(times) < MIN_ROUNDS and sum(times) < SLOW)):
        comm.Barrier()
        times += agree_max(comm, [_timed(run)])
    return min(times)


def _timed(run: Run) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _measure_native(
    comm: MPI.Intracomm, collective: str, new_sweep: NewSweep | None
) -> tuple[tuple[tuple[int, float], ...], tuple[TunedComm, ...]]:
    """Time native MPI on a few sizes; find communicators whose algorithm is faster than the default."""
    found = _sweep_algorithms(comm, collective, new_sweep) if new_sweep else []
    measured: list[tuple[int, float]] = []
    for nbytes in NATIVE_BYTES:
        buffers = sample_buffers(collective, comm.size, nbytes)
        longest = max(buffer.nbytes for buffer in buffers)
        seconds = _native_call_seconds(comm, comm, collective, buffers)
        for number, tuned in enumerate(found):
            if tuned.covers(longest):
                improved = _native_call_seconds(comm, tuned.comm, collective, buffers)
                found[number] = tuned if improved < CLEARLY_FASTER * seconds else tuned.excluding(longest)
                seconds = min(seconds, improved)
        measured.append((longest, seconds))
        if seconds > SLOW:
            break
    return tuple(measured), tuple(found)


def _native_call_seconds(comm: MPI.Intracomm, on: MPI.Intracomm, collective: str, buffers: tuple[Array, ...]) -> float:
    return _seconds(comm, partial(getattr(on, COLLECTIVES[collective].method), *buffers))


def _sweep_algorithms(comm: MPI.Intracomm, collective: str, new_sweep: NewSweep) -> list[TunedComm]:
    """Sweep the MPI library's algorithms with messages as long as the network allows."""
    short, long, longer = (sample_buffers(collective, comm.size, nbytes) for nbytes in SWEEP_BYTES)
    slow = _native_call_seconds(comm, comm, collective, short) > SLOW_SWEEP
    winner, seconds = _sweep(comm, collective, new_sweep(collective), short if slow else long)
    if slow or seconds > FAST_SWEEP:
        return [TunedComm(winner, TUNED_BYTES, inf)] if winner else []
    long_winner, _ = _sweep(comm, collective, new_sweep(collective), longer)
    bands = [TunedComm(winner, TUNED_BYTES, LONG_BYTES)] if winner else []
    return bands + ([TunedComm(long_winner, LONG_BYTES, inf)] if long_winner else [])


def _sweep(
    comm: MPI.Intracomm, collective: str, sweep: AlgorithmSweep, buffers: tuple[Array, ...]
) -> tuple[MPI.Intracomm | None, float]:
    """Return the communicator that is clearly faster than the default, if any, and the best time."""

    def once(on: MPI.Intracomm) -> float:
        comm.Barrier()
        return _timed(partial(getattr(on, COLLECTIVES[collective].method), *buffers))

    winner = sweep.sweep(once)
    with sweep.best() as fastest:
        pays = sweep.times[winner] < CLEARLY_FASTER * sweep.times[DEFAULT]
        return fastest if pays and fastest is not comm else None, sweep.times[winner]


def _measure_layout(comm: MPI.Intracomm, nodes: tuple[tuple[int, ...], ...]) -> NodeLayout | None:
    """Measure the links inside and between nodes, where the layout matters."""
    if not NodeLayout(nodes).matters:
        return None
    own = next(node for node in nodes if comm.rank in node)
    within = _measure_link(comm, own)
    return NodeLayout(nodes, within, _measure_link(comm, [node[0] for node in nodes]))


def _relay_bytes(nodes: tuple[tuple[int, ...], ...], wire: Wire, link: LinkCost) -> int:
    """Return the segment after which ranks relay a message: where all are apart, and the wire relays on such links."""
    apart = all(len(node) == 1 for node in nodes)
    return RELAY_BYTES if apart and wire.relays(1 / link.per_byte if link.per_byte else inf) else 0


def _measure_link(comm: MPI.Intracomm, ring: Sequence[int] | None = None) -> LinkCost:
    """Time messages around a ring: every rank of it sends to the next while it receives from the previous."""
    ring = range(comm.size) if ring is None else ring
    at = ring.index(comm.rank) if comm.rank in ring and len(ring) > 1 else None
    before, after = (ring[at - 1], ring[(at + 1) % len(ring)]) if at is not None else (MPI.PROC_NULL, MPI.PROC_NULL)
    sent, received = np.ones(LINK_BYTES[-1], np.uint8), np.ones(LINK_BYTES[-1], np.uint8)

    def exchange(nbytes: int, times: int = 1) -> None:
        for _ in range(times):
            comm.Sendrecv(sent[:nbytes], after, 0, received[:nbytes], before, 0)

    latency = _seconds(comm, partial(exchange, 1, SMALL_MESSAGES)) / SMALL_MESSAGES
    measured = [(0, latency)]
    for nbytes in LINK_BYTES:
        measured.append((nbytes, _seconds(comm, partial(exchange, nbytes))))
        if measured[-1][1] > LINK_SLOW:
            break
    # The difference of the two longest cancels the fixed cost of a message.
    (less, sooner), (more, later) = measured[-2:]
    return LinkCost(latency, max(0.0, later - sooner) / (more - less))


def _measure_codecs(comm: MPI.Intracomm, link: LinkCost, device: str | None) -> Costs:
    """Agree on the speeds of the codecs that all ranks have; a rank without a device has no say."""
    comm.Barrier()  # ranks that share cores measure at the same time, as they will run
    measured = (0.0,) * (2 * len(CODINGS) + 1) if device is None else codec_speeds(device)
    arrived = comm.Ibarrier()
    while not arrived.Test():
        sleep(POLL_SECONDS)  # a blocking wait would take a core from ranks that still measure
    *times, sample = agree_max(comm, measured)
    pairs = zip(times[::2], times[1::2], strict=True)
    coding = {
        (codec.name, name): CodecSpeed(*pair)
        for (codec, name), pair in zip(CODINGS, pairs, strict=True)
        if all(map(isfinite, pair))
    }
    # A copy is never slower than a codec; a disturbed measurement must not make raw look worse than it is.
    coding["none", "uint8"] = CodecSpeed(*map(min, zip(*coding.values(), strict=True)))
    return Costs(link.per_byte, coding, sample)


@lru_cache(maxsize=16)
def codec_speeds(device: str) -> tuple[float, ...]:
    """Return the seconds per byte of encoding and decoding for each of CODINGS, then the seconds of a sample.

    A core codes all chunks at about one speed. A GPU is the faster the longer a chunk is, so there they have the length
    of those that long messages are cut into.
    """
    place = get_device(device)
    nbytes = CODED_BYTES if device == "host" else default_chunk_bytes(LONG_MESSAGE, coded=True, gpu=True)
    stream = place.stream()
    times: list[float] = []
    with place.alloc(nbytes) as memory:
        for codec, name in CODINGS:
            source = _fill(memory, codec, name, stream)
            try:
                times += (seconds / nbytes for seconds in _code_seconds(codec, source, stream))
            except DeviceError:
                times += (inf, inf)
        times.append(_sample_seconds(memory, stream))
    stream.close()
    return tuple(times)


def _fill(memory: Memory, codec: Codec, name: str, stream: Stream) -> Buffer:
    """Fill memory with values that compress like real data."""
    dtype = dtype_of_name(name)
    assert dtype is not None
    count = memory.nbytes // dtype.itemsize
    values = _values(codec, dtype, count)
    stream.copy(memory.address, values.ctypes.data, memory.nbytes)
    stream.synchronize()
    return Buffer(memory.address, dtype, (count,), device=memory.device.name, owner=memory)


def _values(codec: Codec, dtype: DType, count: int) -> Array:
    random = np.random.default_rng(0)
    if dtype.kind != "f":
        return random.integers(0, 1000, count // 4, np.int32)  # far slower for lz4 and zstd than text
    if codec.name == "mpc":
        return np.cumsum(random.normal(0, 1, count)).astype(dtype.name)
    drawn = random.normal(0, 0.02, count)
    if dtype.name == "bfloat16":  # unknown to numpy: the upper half of a float32
        return (drawn.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return drawn.astype(dtype.name)


def _code_seconds(codec: Codec, source: Buffer, stream: Stream) -> tuple[float, float]:
    """Return the seconds to make a frame where the wire reaches it, and to verify and decode it."""
    encoding, decoding = inf, inf
    staged = not isinstance(stream.device, HostDevice) and not cuda_aware().aware
    most = frame.max_frame_bytes(codec, source.count, source.dtype)
    with (
        stream.device.alloc(most) as room,
        stream.device.alloc(source.nbytes) as back,
        stream.device.pinned(most if staged else 0) as pinned,
    ):
        to = Buffer(back.address, source.dtype, source.shape, device=source.device, owner=back)
        for _ in range(CODEC_ROUNDS):
            start = perf_counter()
            nbytes = frame.encode(codec, source, room, 0, stream).result() or 0
            if staged:
                stream.copy(pinned.address, room.address, nbytes)
                stream.synchronize()
            middle = perf_counter()
            if staged:
                stream.copy(room.address, pinned.address, nbytes)
            header = frame.read_header(room, stream)
            frame.decode(codec, header, room, to, stream, op="replace").result()
            encoding, decoding = min(encoding, middle - start), min(decoding, perf_counter() - middle)
    return encoding, decoding


def _sample_seconds(memory: Memory, stream: Stream) -> float:
    """Return the seconds to try one codec on a sample of a chunk."""
    auto = Auto(Costs(wire=1.0, sample=0.0))  # a link so slow that every codec is tried
    dtype = dtype_of_name("float32")
    assert dtype is not None
    source = Buffer(memory.address, dtype, (memory.nbytes // 4,), device=memory.device.name, owner=memory)
    best = inf
    for _ in range(CODEC_ROUNDS):
        start = perf_counter()
        auto.sample(source, stream).result()
        best = min(best, perf_counter() - start)
    return best / 2
