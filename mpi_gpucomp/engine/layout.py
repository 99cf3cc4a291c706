"""Maps the chunks of a schedule to elements of the caller's buffers.

A vector, or each rank's block of it, is divided into chunks of the same length. A loop of the schedule covers k chunks
of a block, and loop `l` starts at chunk `l * k`. The last chunks of a block may be shorter, or empty.
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
    """A caller's buffer as blocks: first element and length of each."""

    buffer: Buffer
    starts: Sequence[int]
    counts: Sequence[int]

    @classmethod
    def even(cls, buffer: Buffer, blocks: int) -> Blocks:
        """Divide a buffer into blocks of the same length."""
        count = buffer.count // blocks
        return cls(buffer, [block * count for block in range(blocks)], [count] * blocks)


class Layout:
    """The input and output of one rank, in chunks of `chunk` elements."""

    def __init__(self, goal: CollectiveSpec, sent: Blocks | None, received: Blocks | None, chunk: int) -> None:
        """Map a goal's buffers to the caller's."""
        self.chunk = chunk
        self.per_block = goal.block if COLLECTIVES[goal.collective].blocks else goal.chunks
        self._buffers = {"i": sent, "o": received}
        self.longest = max((n for blocks in (sent, received) if blocks for n in blocks.counts), default=0)
        self.set_longest(self.longest)

    def set_longest(self, longest: int) -> None:
        """Set the loops to cover the longest block of any rank; shorter blocks are empty in the last loops."""
        self.loops = -(-longest // (self.chunk * self.per_block))

    def length(self, buffer: str, offset: int, loop: int) -> int:
        """Return the length of chunk `offset` of the input or output in a loop."""
        blocks = self._buffers[buffer]
        assert blocks is not None
        block, chunk = divmod(offset, self.per_block)
        start = (loop * self.per_block + chunk) * self.chunk
        return max(0, min(self.chunk, blocks.counts[block] - start))

    def elements(self, buffer: str, offset: int, loop: int) -> Buffer:
        """Return the elements of chunk `offset` of the input or output in a loop."""
        blocks = self._buffers[buffer]
        assert blocks is not None
        block, chunk = divmod(offset, self.per_block)
        length = self.length(buffer, offset, loop)
        start = (loop * self.per_block + chunk) * self.chunk if length else 0
        return blocks.buffer.slice(blocks.starts[block] + start if length else 0, length)
