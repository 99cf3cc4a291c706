"""Sums that grow from rank to rank: where each of them lies, and the transfers that add to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.builder import ScheduleBuilder, i, o, s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.ir import Place

__all__ = ["Sums"]


class Sums:
    """The partial sums of a reduction: each begins as a rank's input, which is left alone, and grows elsewhere."""

    def __init__(self, plan: ScheduleBuilder) -> None:
        """Begin with the inputs alone."""
        self._plan = plan
        self._places: dict[tuple[int, int], Place] = {}

    def place(self, rank: int, chunk: int) -> Place:
        """Return where a rank's sum of a chunk lies now."""
        return self._places.get((rank, chunk), i(chunk))

    def add(self, *moves: tuple[int, int, int, int], channel: int = 0) -> None:
        """Add sums of senders to those of receivers, all at once: sender, receiver, first chunk and count of each."""
        with self._plan.round():
            for sender, receiver, first, count in moves:
                source, operand = self.place(sender, first), self.place(receiver, first)
                home = self._home(receiver, first, count)
                self._plan.reduce(sender, source, receiver, home, count, operand=operand, channel=channel)
        for _, receiver, first, count in moves:
            home = self._home(receiver, first, count)
            for chunk in range(count):
                self._places[receiver, first + chunk] = type(home)(home.buffer, home.offset + chunk)

    def ring(self, group: Sequence[int], first: int = 0, channel: int = 0) -> None:
        """Add up, once around a ring: the member at position c gets the whole sum of chunk c behind the first."""
        size = len(group)
        for step in range(1, size):
            moves = ((group[at], group[(at + 1) % size], first + (at - step) % size, 1) for at in range(size))
            self.add(*moves, channel=channel)

    def fold(self, ranks: int, chunks: int) -> None:
        """Add the vectors of the ranks from `ranks` on to those of the first ones, so that these go on alone."""
        if self._plan.ranks > ranks:
            self.add(*((extra, extra - ranks, 0, chunks) for extra in range(ranks, self._plan.ranks)))

    def halve(self, ranks: int, distance: int, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """Return the moves by which each of `ranks` gives half of what it sums to the rank at a distance.

        Chunks are those of the ranks that they end at, counted from `first`; from `last` on there are none.
        """
        moves = []
        for rank in range(ranks):
            given = first + (rank & -2 * distance) + (0 if rank & distance else distance)
            count = min(distance, last - given)
            if count > 0:
                moves.append((rank, rank ^ distance, given, count))
        return moves

    def _home(self, rank: int, chunk: int, count: int) -> Place:
        """Choose where a sum grows: at its destination, or in scratch on a rank that is not."""
        collective = self._plan.collective
        if collective == "reduce_scatter":
            return o(0) if (chunk, count) == (rank, 1) else s(chunk)
        return s(chunk) if collective == "reduce" and rank != self._plan.root else o(chunk)


def alone(plan: ScheduleBuilder) -> None:
    """Finish a plan of one rank, whose input is the sum already."""
    if plan.ranks == 1:
        plan.local_copy(0, i(0), o(0))
