"""A row in the table of algorithms, and what the builders of several collectives share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mpi_gpucomp.schedule.builder import ScheduleBuilder

__all__ = ["RINGS", "AlgorithmInfo", "binomial", "doublings", "runs"]

RINGS = 2
"""One ring waits for each chunk before it sends it on; meanwhile the wire is the other one's."""


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm by name: what it does, what it is good for, and the builder that fills a plan."""

    name: str
    fill: Callable[[ScheduleBuilder], None]
    description: str
    best_for: str
    two_level: bool = False
    """Whether it asks how the ranks lie on nodes."""


def doublings(below: int) -> list[int]:
    """Return the powers of two below a number: 1, 2, 4, ..."""
    return [1 << bit for bit in range((below - 1).bit_length())] if below > 1 else []


def binomial(ranks: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the rounds of a binomial tree from rank 0: parent, child, and how many ranks from there on it serves."""
    for distance in reversed(doublings(ranks)):
        children = range(distance, ranks, 2 * distance)
        yield [(child - distance, child, min(distance, ranks - child)) for child in children]


def runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield first and length of the runs of neighbours among blocks, of which each goes as one message."""
    first = count = -1
    for block in sorted(blocks):
        if count > 0 and block == first + count:
            count += 1
            continue
        if count > 0:
            yield first, count
        first, count = block, 1
    if count > 0:
        yield first, count
