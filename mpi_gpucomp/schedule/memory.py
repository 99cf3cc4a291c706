"""The buffers of a rank as one row of cells, a cell for each chunk, so that two names of one chunk are one cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.goal import Goal
    from mpi_gpucomp.schedule.ir import Place

__all__ = ["NAMES", "Memory"]

NAMES = {"i": "input", "o": "output", "s": "scratch"}


class Memory:
    """Where the chunks of a rank's buffers lie; scratch comes last, and may be of any length."""

    def __init__(self, goal: Goal, rank: int, scratch: int = 0) -> None:
        """Lay the buffers out for a goal."""
        inputs, outputs, own = goal.inputs(rank), goal.outputs(rank), rank * goal.block
        self.lengths = {"i": inputs, "o": outputs, "s": scratch}
        start = {"i": outputs, "o": 0, "s": inputs + outputs}
        if goal.shared(rank):
            start = {"i": 0, "o": 0, "s": max(inputs, outputs)}
            if inputs != outputs:
                start["i" if inputs < outputs else "o"] = own
        self.start = start
        self.size = start["s"] + scratch
        free_input = goal.shared(rank) and goal.collective == "reduce_scatter"
        kept = () if free_input else range(start["i"], start["i"] + inputs)
        self._kept = frozenset(kept) - frozenset(range(start["o"], start["o"] + outputs))

    def cells(self, place: Place, count: int = 1) -> range:
        """Return the cells of `count` chunks from a place on."""
        first = self.start[place.buffer] + place.offset
        return range(first, first + count)

    def holds(self, place: Place, count: int) -> bool:
        """Say whether so many chunks from a place on are inside its buffer."""
        return place.offset >= 0 and place.offset + count <= self.lengths[place.buffer]

    def may_write(self, cell: int) -> bool:
        """Say whether a cell is not one of the caller's that must stay as it is."""
        return cell not in self._kept

    def name(self, cell: int) -> str:
        """Name a cell as people do."""
        for buffer in ("o", "i", "s"):
            offset = cell - self.start[buffer]
            if 0 <= offset < self.lengths[buffer]:
                return f"{NAMES[buffer]} chunk {offset}"
        return f"scratch chunk {cell - self.start['s']}"
