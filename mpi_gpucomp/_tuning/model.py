"""Chooses for a message: MPI's own collective, or the engine with which algorithm and chunk size, encoded or not.

All ranks must come to the same choice, so everything here is made of numbers that the ranks have agreed on. MPI's own
time is interpolated between sizes that were measured. The engine's is that of a pipeline: a message in L loops takes

    (L * busy + fill) * hop + encode + decode

where `busy` counts the chunks that the busiest rank sends (or receives) in a loop, `fill` the further hops until the
first loop is through, and a hop is the time of a chunk's slowest stage: latency + wire / ratio, or coding. For a chain
this is (M / C + n - 2) (a + C / B), as it should be. Where chunks are reduced, a rank can send no sum before it has
decoded what the sum is made of, so the times of the stages are added. Two measured runs of the engine correct this
model: one of a single short chunk, for what each hop takes besides, and a longer one for all the rest.

Where several ranks lie on each of several nodes the place of the formula is taken by the simulation (`placed`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.cost import FREE, CodecCost, LinkCost, default_chunk_bytes, steps_and_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import DIRECTIONS, Port, Topology
from mpi_gpucomp.schedule.verify.deadlock import execution_order, match_messages

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, Place

__all__ = [
    "ASSUMED_BETWEEN",
    "ASSUMED_WITHIN",
    "CHUNKS",
    "DEFAULT_CHUNK",
    "MOST_RANKS",
    "Choice",
    "CodecCost",
    "Figures",
    "LinkCost",
    "NodeLayout",
    "calibrated",
    "default_algorithm",
    "own_seconds",
    "quickest",
    "select",
]


# What algorithms take where several ranks lie on each of several nodes, by the simulation that tools use too.
#
# There a formula with one kind of link says nothing about an algorithm of two levels. To simulate takes
# milliseconds, so
# it is done once for each power of two of bytes, on messages that are not too long, and what it says is kept.

Nodes = tuple[tuple[int, ...], ...]

ASSUMED_WITHIN, ASSUMED_BETWEEN = LinkCost(5e-6, 2e-10), LinkCost(5e-5, 8e-9)
"""Links inside and between nodes where nothing was measured: memory, and 1 Gbit/s."""
MOST_BYTES = 1 << 26
"""Longer messages take longer in proportion."""
MOST_RANKS = 16
"""Beyond so many ranks only the first algorithm is looked at: to build, check and follow all would take too long."""
CLEARLY = 0.9
"""What share of the time of the usual algorithm another one may take, to be taken without having been measured."""


class NodeLayout(NamedTuple):
    """Ranks on nodes, and what links inside and between nodes cost; all that leaves a node shares its card."""

    nodes: Nodes
    within: LinkCost = ASSUMED_WITHIN
    between: LinkCost = ASSUMED_BETWEEN

    @property
    def matters(self) -> bool:
        """Whether there are several nodes, some with several ranks, and few enough ranks to look at."""
        return 1 < len(self.nodes) < sum(map(len, self.nodes)) <= MOST_RANKS

    def seconds(
        self,
        collective: str,
        name: str,
        nbytes: int,
        chunk: int,
        plain: CodecCost,
        coding: CodecCost | None,
        hop: float,
    ) -> float:
        """Return what an algorithm takes for about so many bytes, where `hop` seconds go into every chunk besides."""
        rounded = min(MOST_BYTES, 1 << max(0, nbytes - 1).bit_length())
        return _simulated(self, collective, name, rounded, chunk, plain, coding, hop) * nbytes / rounded


@lru_cache(maxsize=64)
def _topology(placed: NodeLayout, plain: CodecCost, per_chunk: float) -> Topology:
    ports = tuple(
        Port(f"node {number}, {way}", frozenset(node), way, placed.between.per_byte, "between")
        for number, node in enumerate(placed.nodes)
        for way in DIRECTIONS
    )
    return Topology(
        "ranks on nodes",
        placed.nodes,
        {"within": placed.within, "between": placed.between},
        "within",
        "between",
        ports=ports,
        codecs={"none": plain},
        per_chunk=per_chunk,
    )


@lru_cache(maxsize=4096)
def _simulated(
    placed: NodeLayout,
    collective: str,
    name: str,
    nbytes: int,
    chunk: int,
    plain: CodecCost,
    coding: CodecCost | None,
    per_chunk: float,
) -> float:
    topology = _topology(placed, plain, per_chunk)
    algorithm = build(collective, name, topology.ranks, 0, placed.nodes)
    return simulate(algorithm, topology, nbytes, chunk, coding).seconds


def default_algorithm(collective: str, nbytes: int, nodes: Nodes) -> str:
    """Name the algorithm for ranks on nodes where nothing was measured: the first of the table, or one of two levels.

    Links inside nodes are taken to be far quicker than those between them.
    """
    first, *others = algorithms(collective)
    two_level = [row.name for row in others if row.two_level]
    placed = NodeLayout(nodes)
    if not two_level or not placed.matters or not nbytes:
        return first.name
    chunk = default_chunk_bytes(nbytes, coded=False)
    times = {
        name: placed.seconds(collective, name, nbytes, chunk, CodecCost(), None, 0.0)
        for name in (first.name, *two_level)
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] <= CLEARLY * times[first.name] else first.name


CHUNKS = tuple(1 << power for power in range(17, 23))
"""The chunk sizes to choose from: 128 KiB to 4 MiB."""
DEFAULT_CHUNK = 1 << 20
MARGIN = 1.05
"""How many times faster than MPI's own the engine must promise to be."""
CODED_MARGIN = 1.25
CODED_CHAIN_MARGIN = 1.1
"""The same where chunks are encoded: the model knows the codecs alone, not what else ranks do with a frame.

It is closer for a broadcast, whose ranks only pass on what has come.
"""
LEAST_CODED = 1 << 19
"""The shortest chunks that are worth encoding."""
UNMEASURED = 1.1
"""How many times faster than the first algorithm of the table, which was measured, another one must promise to be."""


@dataclass(frozen=True)
class Figures:
    """What was measured for one collective, and agreed on by all ranks."""

    link: LinkCost
    own: tuple[tuple[int, float], ...]
    """MPI's own: bytes of a message and seconds, in ascending order; not empty."""
    plain: CodecCost = FREE
    """What it takes to send a chunk as it is."""
    per_hop: float = 0.0
    """Seconds that the engine spends on a chunk, however short, besides the link's latency."""
    scale: float = 1.0
    """How many times longer the engine really takes than the model says, for chunks as they are.

    A number below 1 shows what the engine gains elsewhere, which is no reason to believe in faster codecs too.
    """
    placed: NodeLayout | None = None
    """How ranks lie on nodes, where that matters."""


class Choice(NamedTuple):
    """What to do with a message; no algorithm: MPI's own collective."""

    algorithm: str | None
    chunk: int
    encoded: bool
    """Whether it pays to encode it; else send chunks as they are."""
    seconds: float
    """What it is expected to take."""


class _Loop(NamedTuple):
    """One loop of an algorithm: its chunks, hops of the busiest rank, further hops, and what ranks en- and decode."""

    chunks: int
    busy: int
    fill: int
    coded: frozenset[tuple[int, int]]

    def hops(self, loops: int) -> int:
        """Return how many hops follow each other in so many loops."""
        return loops * self.busy + self.fill


@lru_cache(maxsize=4096)
def select(collective: str, nbytes: int, ranks: int, figures: Figures, coding: CodecCost | None = None) -> Choice:
    """Choose for a message of `nbytes`, the length of the longest buffer that the collective has on any rank.

    `coding` is the codec that would be used, with the ratio that is expected; without it, chunks travel as they are.
    """
    own = own_seconds(figures, nbytes)
    if ranks < 2 or nbytes == 0:
        return Choice(None, DEFAULT_CHUNK, False, own)
    engine = quickest(collective, nbytes, ranks, figures, coding)
    coded_margin = CODED_CHAIN_MARGIN if collective == "broadcast" else CODED_MARGIN
    margin = coded_margin if engine.encoded else MARGIN
    return engine if engine.seconds * margin <= own else Choice(None, DEFAULT_CHUNK, False, own)


def own_seconds(figures: Figures, nbytes: int) -> float:
    """Return what MPI's own collective takes; where this is not known exactly, rather too little."""
    sizes = figures.own
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


def calibrated(
    collective: str, ranks: int, figures: Figures, short: tuple[int, float], long: tuple[int, float]
) -> Figures:
    """Correct the model by two runs of the engine, each as bytes and seconds: a short chunk or few, and long ones.

    They are made by the first algorithm of the table, with codec none and chunks of DEFAULT_CHUNK.
    """
    name = algorithms(collective)[0].name
    expected = partial(_seconds, collective, name, ranks=ranks, chunk=DEFAULT_CHUNK, coding=figures.plain)
    hops = _loop(collective, name, ranks).hops(1)
    besides = (short[1] - expected(figures, short[0])) / hops if hops else 0.0
    figures = replace(figures, per_hop=max(0.0, besides))
    return replace(figures, scale=long[1] / (expected(figures, long[0]) or long[1] or 1.0))


def quickest(
    collective: str,
    nbytes: int,
    ranks: int,
    figures: Figures,
    coding: CodecCost | None = None,
    *,
    encoded_only: bool = False,
) -> Choice:
    """Return the quickest way through the engine, the measured algorithm first where it is nearly as quick.

    Only among those that encode, if there are any, where somebody asks for that.
    """
    names = [row.name for row in algorithms(collective) if figures.placed or not row.two_level]
    codings = {True: coding} if coding and coding.ratio > 1 else {}
    if not (codings and encoded_only):
        codings[False] = figures.plain
    # A sum waits for what it is made of, so a pipeline of reductions is never deep: what was measured is all to go by.
    most = DEFAULT_CHUNK if COLLECTIVES[collective].reduces else CHUNKS[-1]
    choices = [
        Choice(name, chunk, encoded, _seconds(collective, name, figures, nbytes, ranks, chunk, codings[encoded]))
        for name in (names if ranks <= MOST_RANKS else names[:1])
        for encoded in codings
        for chunk in ([default_chunk_bytes(nbytes, coded=encoded)] if figures.placed else CHUNKS)
        if (LEAST_CODED if encoded else 0) <= chunk <= most
    ]
    return min(choices, key=lambda choice: choice.seconds * (1 if choice.algorithm == names[0] else UNMEASURED))


def _seconds(
    collective: str, name: str, figures: Figures, nbytes: int, ranks: int, chunk: int, coding: CodecCost
) -> float:
    """Return what the engine takes for a message."""
    scale = figures.scale if coding == figures.plain else max(1.0, figures.scale)
    if figures.placed:
        sent_as = None if coding == figures.plain else coding
        placed = figures.placed.seconds(collective, name, nbytes, chunk, figures.plain, sent_as, figures.per_hop)
        return scale * placed
    loop = _loop(collective, name, ranks)
    piece = min(chunk, -(-nbytes // loop.chunks))
    loops = -(-nbytes // (piece * loop.chunks)) if piece else 0
    encode, decode = piece * coding.encode, piece * coding.decode
    wire = figures.link.latency + piece / coding.ratio * figures.link.per_byte
    coded = max(out * encode + back * decode for out, back in loop.coded) / max(1, loop.busy)
    stage = wire + coded if COLLECTIVES[collective].reduces else max(wire, coded)
    return scale * (loop.hops(loops) * (figures.per_hop + stage) + encode + decode)


@lru_cache(maxsize=256)
def _loop(collective: str, name: str, ranks: int) -> _Loop:
    """Count what an algorithm does in a loop."""
    algorithm = build(collective, name, ranks)
    traffic = steps_and_bytes(algorithm)
    busy = int(max(traffic.sent, traffic.received) * algorithm.chunks)
    return _Loop(algorithm.chunks, busy, max(0, traffic.steps - busy), _coded(algorithm))


def _coded(algorithm: Algorithm) -> frozenset[tuple[int, int]]:
    """Count the chunks that ranks encode and decode: what came in a frame, or left in one, is sent on in that frame."""
    encoded, decoded = [0] * algorithm.ranks, [0] * algorithm.ranks
    framed: set[tuple[int, str, int]] = set()
    for spot in execution_order(algorithm, match_messages(algorithm)):
        rank, step = spot.rank, algorithm.programs[spot.rank].lanes[spot.lane].steps[spot.step]
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
