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

from mpi_gpucomp.collectives.placed import MOST_RANKS, Placed
from mpi_gpucomp.collectives.table import algorithms, build
from mpi_gpucomp.schedule.cost import FREE, Coding, Link, usual_chunk
from mpi_gpucomp.schedule.goal import COLLECTIVES
from mpi_gpucomp.schedule.order import executable, paired
from mpi_gpucomp.schedule.traffic import steps_and_bytes

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm, Place

__all__ = [
    "CHUNKS",
    "DEFAULT_CHUNK",
    "Choice",
    "Coding",
    "Figures",
    "Link",
    "calibrated",
    "own_seconds",
    "quickest",
    "select",
]

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

    link: Link
    own: tuple[tuple[int, float], ...]
    """MPI's own: bytes of a message and seconds, in ascending order; not empty."""
    plain: Coding = FREE
    """What it takes to send a chunk as it is."""
    per_hop: float = 0.0
    """Seconds that the engine spends on a chunk, however short, besides the link's latency."""
    scale: float = 1.0
    """How many times longer the engine really takes than the model says, for chunks as they are.

    A number below 1 shows what the engine gains elsewhere, which is no reason to believe in faster codecs too.
    """
    placed: Placed | None = None
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
def select(collective: str, nbytes: int, ranks: int, figures: Figures, coding: Coding | None = None) -> Choice:
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
    coding: Coding | None = None,
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
        for chunk in ([usual_chunk(nbytes, coded=encoded)] if figures.placed else CHUNKS)
        if (LEAST_CODED if encoded else 0) <= chunk <= most
    ]
    return min(choices, key=lambda choice: choice.seconds * (1 if choice.algorithm == names[0] else UNMEASURED))


def _seconds(
    collective: str, name: str, figures: Figures, nbytes: int, ranks: int, chunk: int, coding: Coding
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
    for spot in executable(algorithm, paired(algorithm)):
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
