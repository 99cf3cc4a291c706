"""The cost model: how long a message takes through the engine or native MPI, and which is faster.

All ranks must come to the same result, so everything here is computed from numbers that they have agreed on. The time
of native MPI is interpolated between measured sizes. The engine is modelled as a pipeline: a message in L loops takes

    (L * busy + fill) * hop + encode + decode

where `busy` counts the chunks that the busiest rank sends (or receives) in a loop, `fill` the further hops until the
first loop has completed, and a hop is the slowest stage of a chunk: latency + wire / ratio, or the codec. For a chain
this is (M / C + n - 2) (a + C / B), the textbook formula. Where ranks relay messages while they arrive, further hops of
forwarded chunks take only as long as a segment. A reduction cannot send before it has decoded its operands,
so there the stages add up. Two measured runs of the engine correct the model: one of a single short chunk, for the
overhead of a hop, and a longer one for everything else.

With several ranks on each of several nodes the discrete-event simulation takes the place of the formula (`NodeLayout`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.cost import FREE, CodecCost, LinkCost, default_chunk_bytes, longest_chain, steps_and_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import DIRECTIONS, Port, Topology
from mpi_gpucomp.schedule.verify.deadlock import execution_order, match_messages

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, Place

__all__ = [
    "ASSUMED_BETWEEN",
    "ASSUMED_WITHIN",
    "CHUNK_SIZES",
    "DEFAULT_CHUNK",
    "MAX_RANKS",
    "CodecCost",
    "Estimate",
    "LinkCost",
    "Measurements",
    "NodeLayout",
    "best",
    "best_engine",
    "default_algorithm",
    "fit",
    "native_seconds",
]


Nodes = tuple[tuple[int, ...], ...]

ASSUMED_WITHIN, ASSUMED_BETWEEN = LinkCost(5e-6, 2e-10), LinkCost(5e-5, 8e-9)
"""Links inside and between nodes before anything is measured: memory, and 1 Gbit/s."""
MAX_SIMULATED_BYTES = 1 << 26
"""Longer messages are extrapolated in proportion."""
MAX_RANKS = 16
"""With more ranks only the default algorithm is considered: building and checking all would take too long."""
CLEARLY_FASTER = 0.9
"""An unmeasured algorithm is preferred below this share of the default algorithm's time."""


class NodeLayout(NamedTuple):
    """The ranks of each node, and the cost of links inside and between nodes; the ranks of a node share its NIC.

    A formula with one kind of link cannot rank algorithms of two levels, so these are simulated. A simulation takes
    milliseconds; its results are cached per power of two of the message size.
    """

    nodes: Nodes
    within: LinkCost = ASSUMED_WITHIN
    between: LinkCost = ASSUMED_BETWEEN

    @property
    def matters(self) -> bool:
        """Return True for several nodes, some with several ranks, and few enough ranks to simulate."""
        return 1 < len(self.nodes) < sum(map(len, self.nodes)) <= MAX_RANKS

    def seconds(
        self,
        collective: str,
        name: str,
        nbytes: int,
        chunk: int,
        raw: CodecCost,
        coding: CodecCost | None,
        hop: float,
    ) -> float:
        """Return the time of an algorithm for a message of `nbytes`, with an overhead of `hop` seconds per chunk."""
        rounded = min(MAX_SIMULATED_BYTES, 1 << max(0, nbytes - 1).bit_length())
        return _simulated(self, collective, name, rounded, chunk, raw, coding, hop) * nbytes / rounded


@lru_cache(maxsize=64)
def _topology(layout: NodeLayout, raw: CodecCost, per_chunk: float) -> Topology:
    ports = tuple(
        Port(f"node {number}, {direction}", frozenset(node), direction, layout.between.per_byte, "between")
        for number, node in enumerate(layout.nodes)
        for direction in DIRECTIONS
    )
    return Topology(
        "ranks on nodes",
        layout.nodes,
        {"within": layout.within, "between": layout.between},
        "within",
        "between",
        ports=ports,
        codecs={"none": raw},
        per_chunk=per_chunk,
    )


@lru_cache(maxsize=4096)
def _simulated(
    layout: NodeLayout,
    collective: str,
    name: str,
    nbytes: int,
    chunk: int,
    raw: CodecCost,
    coding: CodecCost | None,
    per_chunk: float,
) -> float:
    topology = _topology(layout, raw, per_chunk)
    algorithm = build(collective, name, topology.ranks, 0, layout.nodes)
    return simulate(algorithm, topology, nbytes, chunk, coding).seconds


def default_algorithm(collective: str, nbytes: int, nodes: Nodes) -> str:
    """Return the algorithm to use before anything is measured: the first of the table, or one of two levels.

    Links inside nodes are assumed to be far faster than those between them.
    """
    first, *others = algorithms(collective)
    two_level = [row.name for row in others if row.two_level]
    layout = NodeLayout(nodes)
    if not two_level or not layout.matters or not nbytes:
        return first.name
    chunk = default_chunk_bytes(nbytes, coded=False)
    times = {
        name: layout.seconds(collective, name, nbytes, chunk, CodecCost(), None, 0.0)
        for name in (first.name, *two_level)
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] <= CLEARLY_FASTER * times[first.name] else first.name


CHUNK_SIZES = tuple(1 << power for power in range(17, 23))
"""Candidate chunk sizes: 128 KiB to 4 MiB."""
DEFAULT_CHUNK = 1 << 20
MARGIN = 1.05
"""How many times faster than native MPI the engine must be predicted to be."""
CODED_MARGIN = 1.25
CODED_CHAIN_MARGIN = 1.1
"""The same with a codec: the model covers the codec, not the other work per frame.

It is more accurate for a broadcast, whose ranks forward frames unchanged.
"""
MIN_CODED_CHUNK = 1 << 19
"""The smallest chunk worth encoding."""
UNMEASURED = 1.1
"""How many times faster than the first algorithm of the table, which was measured, others must be predicted to be."""


@dataclass(frozen=True)
class Measurements:
    """Measurements of one collective, agreed on by all ranks."""

    link: LinkCost
    native: tuple[tuple[int, float], ...]
    """Native MPI: message bytes and seconds, in ascending order; not empty."""
    raw: CodecCost = FREE
    """The cost of sending a chunk without a codec."""
    per_hop: float = 0.0
    """Overhead of the engine per chunk and hop, in seconds, beyond the link's latency."""
    scale: float = 1.0
    """Measured over modelled time of the engine without a codec.

    A value below 1 is not applied to encoded chunks: it says nothing about codecs.
    """
    layout: NodeLayout | None = None
    """The ranks of each node, where that matters."""
    relay_bytes: int = 0
    """The segment after which ranks relay a message; 0 where they forward whole chunks."""


class Estimate(NamedTuple):
    """A predicted time, and what achieves it; no algorithm means native MPI."""

    algorithm: str | None
    chunk_bytes: int
    encoded: bool
    """True if encoding pays."""
    seconds: float


class _Loop(NamedTuple):
    """One loop of an algorithm: chunks, hops of the busiest rank, further hops, chunks coded by each rank."""

    chunks: int
    busy: int
    fill: int
    relays: int
    """The further hops that can be relayed."""
    coded: frozenset[tuple[int, int]]

    def hops(self, loops: int) -> int:
        """Return the number of consecutive hops in a number of loops."""
        return loops * self.busy + self.fill


@lru_cache(maxsize=4096)
def best(collective: str, nbytes: int, ranks: int, measured: Measurements, coding: CodecCost | None = None) -> Estimate:
    """Return the faster of native MPI and the engine for a message whose longest buffer has `nbytes`.

    `coding` is the cost of the codec, with its expected ratio; without it chunks are sent raw.
    """
    native = native_seconds(measured, nbytes)
    if ranks < 2 or nbytes == 0:
        return Estimate(None, DEFAULT_CHUNK, False, native)
    engine = best_engine(collective, nbytes, ranks, measured, coding)
    coded_margin = CODED_CHAIN_MARGIN if collective == "broadcast" else CODED_MARGIN
    margin = coded_margin if engine.encoded else MARGIN
    return engine if engine.seconds * margin <= native else Estimate(None, DEFAULT_CHUNK, False, native)


def native_seconds(measured: Measurements, nbytes: int) -> float:
    """Return the time of native MPI, interpolated; outside the measured range a lower bound."""
    sizes = measured.native
    for (low, before), (high, after) in pairwise(sizes):
        if low <= nbytes <= high:
            return before + (after - before) * (nbytes - low) / (high - low)
    near, seconds = sizes[0] if nbytes < sizes[0][0] else sizes[-1]
    in_proportion = seconds * nbytes / near
    if nbytes < near or len(sizes) < 2:
        return in_proportion
    before, earlier = sizes[-2]
    slope = max(0.0, seconds - earlier) / (near - before)
    return min(in_proportion, seconds + slope * (nbytes - near))


def fit(
    collective: str, ranks: int, measured: Measurements, short: tuple[int, float], long: tuple[int, float]
) -> Measurements:
    """Correct the model by two runs of the engine, each as bytes and seconds: one short chunk or few, and long ones.

    Both use the first algorithm of the table, codec none and chunks of DEFAULT_CHUNK.
    """
    name = algorithms(collective)[0].name
    expected = partial(_seconds, collective, name, ranks=ranks, chunk=DEFAULT_CHUNK, coding=measured.raw)
    hops = _loop(collective, name, ranks).hops(1)
    besides = (short[1] - expected(measured, short[0])) / hops if hops else 0.0
    measured = replace(measured, per_hop=max(0.0, besides))
    return replace(measured, scale=long[1] / (expected(measured, long[0]) or long[1] or 1.0))


def best_engine(
    collective: str,
    nbytes: int,
    ranks: int,
    measured: Measurements,
    coding: CodecCost | None = None,
    *,
    encoded_only: bool = False,
) -> Estimate:
    """Return the fastest configuration of the engine; the measured algorithm is preferred where it is nearly as fast.

    With `encoded_only`, raw chunks are considered only if the codec does not compress.
    """
    names = [row.name for row in algorithms(collective) if measured.layout or not row.two_level]
    codings = {True: coding} if coding and coding.ratio > 1 else {}
    if not (codings and encoded_only):
        codings[False] = measured.raw
    # A reduction waits for its operands, so its pipeline is shallow: do not extrapolate beyond the measured chunk size.
    most = DEFAULT_CHUNK if COLLECTIVES[collective].reduces else CHUNK_SIZES[-1]
    estimates = [
        Estimate(name, chunk, encoded, _seconds(collective, name, measured, nbytes, ranks, chunk, codings[encoded]))
        for name in (names if ranks <= MAX_RANKS else names[:1])
        for encoded in codings
        for chunk in ([default_chunk_bytes(nbytes, coded=encoded)] if measured.layout else CHUNK_SIZES)
        if (MIN_CODED_CHUNK if encoded else 0) <= chunk <= most
    ]
    return min(estimates, key=lambda one: one.seconds * (1 if one.algorithm == names[0] else UNMEASURED))


def _seconds(
    collective: str, name: str, measured: Measurements, nbytes: int, ranks: int, chunk: int, coding: CodecCost
) -> float:
    """Return the time of the engine for a message."""
    scale = measured.scale if coding == measured.raw else max(1.0, measured.scale)
    if measured.layout:
        sent_as = None if coding == measured.raw else coding
        layout = measured.layout.seconds(collective, name, nbytes, chunk, measured.raw, sent_as, measured.per_hop)
        return scale * layout
    loop = _loop(collective, name, ranks)
    chunk_bytes = min(chunk, -(-nbytes // loop.chunks))
    loops = -(-nbytes // (chunk_bytes * loop.chunks)) if chunk_bytes else 0
    encode, decode = chunk_bytes * coding.encode, chunk_bytes * coding.decode
    wire = measured.link.latency + chunk_bytes / coding.ratio * measured.link.per_byte
    coded = max(out * encode + back * decode for out, back in loop.coded) / max(1, loop.busy)
    stage = wire + coded if COLLECTIVES[collective].reduces else max(wire, coded)
    hops = loop.hops(loops) * (measured.per_hop + stage)
    if 0 < measured.relay_bytes < chunk_bytes / coding.ratio:
        hops -= loop.relays * (stage - measured.link.seconds(measured.relay_bytes))
    return scale * (hops + encode + decode)


@lru_cache(maxsize=256)
def _loop(collective: str, name: str, ranks: int) -> _Loop:
    """Count the steps of an algorithm in one loop."""
    algorithm = build(collective, name, ranks)
    traffic = steps_and_bytes(algorithm)
    busy = int(max(traffic.sent, traffic.received) * algorithm.chunks)
    fill = max(0, traffic.steps - busy)
    relays = fill - max(0, longest_chain(algorithm, relays=True) - busy)
    return _Loop(algorithm.chunks, busy, fill, relays, _coded(algorithm))


def _coded(algorithm: Algorithm) -> frozenset[tuple[int, int]]:
    """Count the chunks that each rank encodes and decodes: a frame received or made once is forwarded as it is."""
    encoded, decoded = [0] * algorithm.ranks, [0] * algorithm.ranks
    framed: set[tuple[int, str, int]] = set()
    for ref in execution_order(algorithm, match_messages(algorithm)):
        rank, step = ref.rank, algorithm.programs[ref.rank].lanes[ref.lane].steps[ref.step]
        sources, targets = (_places(rank, place, step.count) for place in (step.source, step.writes))
        decoded[rank] += step.count * step.receives
        if step.kind == "s":
            encoded[rank] += len(sources - framed)
            framed |= sources
        elif step.sends and step.reduces:
            encoded[rank] += step.count
        if step.receives and step.kind != "rrc":
            framed |= targets
        else:
            framed -= targets
    return frozenset(zip(encoded, decoded, strict=True))


def _places(rank: int, first: Place | None, count: int) -> set[tuple[int, str, int]]:
    return {(rank, first.buffer, first.offset + chunk) for chunk in range(count)} if first else set()
