"""Where the chunks of a schedule lie in the caller's memory: which elements a place means in which loop.

A vector, or each rank's block of it, is cut into pieces of the same length; loop `l` has the pieces from `l * k` on,
where k is the chunks of a loop that belong to the block. The last pieces of a block may be shorter, or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.ir import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.schedule.ir import CollectiveSpec

__all__ = ["Blocks", "Layout"]


@dataclass(frozen=True)
class Blocks:
    """A caller's buffer as blocks, each with its first element and its length."""

    buffer: Buffer
    starts: Sequence[int]
    counts: Sequence[int]

    @classmethod
    def even(cls, buffer: Buffer, blocks: int) -> Blocks:
        """Cut a buffer into so many blocks of the same length."""
        count = buffer.count // blocks
        return cls(buffer, [block * count for block in range(blocks)], [count] * blocks)


class Layout:
    """The input and output of one rank, cut into pieces of `piece` elements."""

    def __init__(self, goal: CollectiveSpec, sent: Blocks | None, received: Blocks | None, piece: int) -> None:
        """Map a goal's buffers to the caller's."""
        self.piece = piece
        self.per_block = goal.block if COLLECTIVES[goal.collective].blocks else goal.chunks
        self._buffers = {"i": sent, "o": received}
        self.longest = max((n for blocks in (sent, received) if blocks for n in blocks.counts), default=0)
        self.stretch(self.longest)

    def stretch(self, longest: int) -> None:
        """Make as many loops as the longest block of any rank takes; shorter ones are empty in the last of them."""
        self.loops = -(-longest // (self.piece * self.per_block))

    def length(self, buffer: str, offset: int, loop: int) -> int:
        """Return how many elements chunk `offset` of the input or output has in a loop."""
        blocks = self._buffers[buffer]
        assert blocks is not None
        block, chunk = divmod(offset, self.per_block)
        start = (loop * self.per_block + chunk) * self.piece
        return max(0, min(self.piece, blocks.counts[block] - start))

    def elements(self, buffer: str, offset: int, loop: int) -> Buffer:
        """Return the elements of chunk `offset` of the input or output in a loop."""
        blocks = self._buffers[buffer]
        assert blocks is not None
        block, chunk = divmod(offset, self.per_block)
        length = self.length(buffer, offset, loop)
        start = (loop * self.per_block + chunk) * self.piece if length else 0
        return blocks.buffer.slice(blocks.starts[block] + start if length else 0, length)
