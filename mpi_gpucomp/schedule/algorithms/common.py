"""Building blocks shared by the algorithms of several collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.builder import i, o, s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mpi_gpucomp.schedule.builder import ScheduleBuilder
    from mpi_gpucomp.schedule.ir import Place

__all__ = [
    "RINGS",
    "AlgorithmInfo",
    "PartialSums",
    "absolute_rank",
    "binomial",
    "doublings",
    "forward_along",
    "node_leaders",
    "power_of_two",
    "runs",
    "single_rank",
]

RINGS = 2
"""A ring waits for each chunk before it forwards it; meanwhile the link serves the other ring."""


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm by name, and the function that adds its transfers to a builder."""

    name: str
    fill: Callable[[ScheduleBuilder], None]
    description: str
    best_for: str
    two_level: bool = False
    """True if it depends on the placement of ranks on nodes."""


def doublings(below: int) -> list[int]:
    """Return the powers of two below a number: 1, 2, 4, ..."""
    return [1 << bit for bit in range((below - 1).bit_length())] if below > 1 else []


def power_of_two(ranks: int) -> int:
    """Return the largest power of two that is not above the number of ranks."""
    return 1 << ranks.bit_length() - 1


def binomial(ranks: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the rounds of a binomial tree rooted at rank 0, as (parent, child, size of the child's subtree)."""
    for distance in reversed(doublings(ranks)):
        children = range(distance, ranks, 2 * distance)
        yield [(child - distance, child, min(distance, ranks - child)) for child in children]


def runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield first and length of the runs of consecutive blocks, each of which is one message."""
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


def forward_along(builder: ScheduleBuilder, members: Sequence[int], chunk: int) -> None:
    """Forward a chunk of the output from the first of some ranks along a chain to the last."""
    for at, member in enumerate(members[1:]):
        builder.copy(members[at], o(chunk), member, o(chunk))


def absolute_rank(builder: ScheduleBuilder, relative: int) -> int:
    """Return the rank at a distance from the root."""
    return (relative + builder.root) % builder.ranks


def node_leaders(builder: ScheduleBuilder) -> list[list[int]]:
    """Return the ranks of each node, its leader first; the root leads its node, which comes first."""
    nodes = [sorted(node, key=lambda rank: (rank != builder.root, rank)) for node in builder.nodes]
    return sorted(nodes, key=lambda node: (node[0] != builder.root, node[0]))


def single_rank(builder: ScheduleBuilder) -> None:
    """Complete a reduction on one rank, whose input is already the result."""
    if builder.ranks == 1:
        builder.local_copy(0, i(0), o(0), builder.chunks)


class PartialSums:
    """The partial sums of a reduction: where each is stored, and the transfers that add to it."""

    def __init__(self, builder: ScheduleBuilder) -> None:
        """Start with the inputs, which are never written."""
        self._builder = builder
        self._places: dict[tuple[int, int], Place] = {}

    def place(self, rank: int, chunk: int) -> Place:
        """Return where a rank's partial sum of a chunk is stored."""
        return self._places.get((rank, chunk), i(chunk))

    def add(self, *moves: tuple[int, int, int, int], channel: int = 0) -> None:
        """Add partial sums of senders to those of receivers in one round: (sender, receiver, first chunk, count)."""
        with self._builder.round():
            for sender, receiver, first, count in moves:
                source, operand = self.place(sender, first), self.place(receiver, first)
                target = self._accumulator(receiver, first, count)
                self._builder.reduce(sender, source, receiver, target, count, operand=operand, channel=channel)
        for _, receiver, first, count in moves:
            target = self._accumulator(receiver, first, count)
            for chunk in range(count):
                self._places[receiver, first + chunk] = type(target)(target.buffer, target.offset + chunk)

    def ring(self, group: Sequence[int], first: int = 0, channel: int = 0) -> None:
        """Reduce once around a ring: the member at position c gets the total of chunk `first + c`."""
        size = len(group)
        for step in range(1, size):
            moves = ((group[at], group[(at + 1) % size], first + (at - step) % size, 1) for at in range(size))
            self.add(*moves, channel=channel)

    def fold(self, ranks: int, chunks: int) -> None:
        """Add the vectors of the ranks from `ranks` on to those of the first ranks, which continue without them."""
        if self._builder.ranks > ranks:
            self.add(*((extra, extra - ranks, 0, chunks) for extra in range(ranks, self._builder.ranks)))

    def halve(self, ranks: int, distance: int, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """Return the moves by which each of `ranks` sends half of its partial sums to the rank at a distance.

        Chunk `first + r` ends at rank r; there are no chunks from `last` on.
        """
        moves = []
        for rank in range(ranks):
            sent = first + (rank & -2 * distance) + (0 if rank & distance else distance)
            count = min(distance, last - sent)
            if count > 0:
                moves.append((rank, rank ^ distance, sent, count))
        return moves

    def _accumulator(self, rank: int, chunk: int, count: int) -> Place:
        """Return where a partial sum is stored: in the output on its destination, else in scratch."""
        collective = self._builder.collective
        if collective == "reduce_scatter":
            return o(0) if (chunk, count) == (rank, 1) else s(chunk)
        return s(chunk) if collective == "reduce" and rank != self._builder.root else o(chunk)
