"""What algorithms take where several ranks lie on each of several nodes, by the simulation that tools use too.

There a formula with one kind of link says nothing about an algorithm of two levels. To simulate takes milliseconds, so
it is done once for each power of two of bytes, on messages that are not too long, and what it says is kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpi_gpucomp.collectives.table import algorithms, build
from mpi_gpucomp.schedule.cost import Coding, Link, usual_chunk
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import WAYS, Port, Topology

__all__ = ["ASSUMED_BETWEEN", "ASSUMED_WITHIN", "MOST_RANKS", "Placed", "suited"]

Nodes = tuple[tuple[int, ...], ...]

ASSUMED_WITHIN, ASSUMED_BETWEEN = Link(5e-6, 2e-10), Link(5e-5, 8e-9)
"""Links inside and between nodes where nothing was measured: memory, and 1 Gbit/s."""
MOST_BYTES = 1 << 26
"""Longer messages take longer in proportion."""
MOST_RANKS = 16
"""Beyond so many ranks only the first algorithm is looked at: to build, check and follow all would take too long."""
CLEARLY = 0.9
"""What share of the time of the usual algorithm another one may take, to be taken without having been measured."""


class Placed(NamedTuple):
    """Ranks on nodes, and what links inside and between nodes cost; all that leaves a node shares its card."""

    nodes: Nodes
    within: Link = ASSUMED_WITHIN
    between: Link = ASSUMED_BETWEEN

    @property
    def matters(self) -> bool:
        """Whether there are several nodes, some with several ranks, and few enough ranks to look at."""
        return 1 < len(self.nodes) < sum(map(len, self.nodes)) <= MOST_RANKS

    def seconds(
        self, collective: str, name: str, nbytes: int, chunk: int, plain: Coding, coding: Coding | None, hop: float
    ) -> float:
        """Return what an algorithm takes for about so many bytes, where `hop` seconds go into every chunk besides."""
        rounded = min(MOST_BYTES, 1 << max(0, nbytes - 1).bit_length())
        return _simulated(self, collective, name, rounded, chunk, plain, coding, hop) * nbytes / rounded


@lru_cache(maxsize=64)
def _topology(placed: Placed, plain: Coding, per_chunk: float) -> Topology:
    ports = tuple(
        Port(f"node {number}, {way}", frozenset(node), way, placed.between.per_byte, "between")
        for number, node in enumerate(placed.nodes)
        for way in WAYS
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
    placed: Placed,
    collective: str,
    name: str,
    nbytes: int,
    chunk: int,
    plain: Coding,
    coding: Coding | None,
    per_chunk: float,
) -> float:
    topology = _topology(placed, plain, per_chunk)
    algorithm = build(collective, name, topology.ranks, 0, placed.nodes)
    return simulate(algorithm, topology, nbytes, chunk, coding).seconds


def suited(collective: str, nbytes: int, nodes: Nodes) -> str:
    """Name the algorithm for ranks on nodes where nothing was measured: the first of the table, or one of two levels.

    Links inside nodes are taken to be far quicker than those between them.
    """
    first, *others = algorithms(collective)
    two_level = [row.name for row in others if row.two_level]
    placed = Placed(nodes)
    if not two_level or not placed.matters or not nbytes:
        return first.name
    chunk = usual_chunk(nbytes, coded=False)
    times = {
        name: placed.seconds(collective, name, nbytes, chunk, Coding(), None, 0.0) for name in (first.name, *two_level)
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] <= CLEARLY * times[first.name] else first.name
