"""Maps the chunks of a schedule to elements of the caller's buffers.

A vector, or each rank's block of it, is divided into chunks of the same length. A loop of the schedule covers k chunks
of a block, and loop `l` starts at chunk `l * k`. The last chunks of a block may be shorter, or empty. The core computes
where each chunk is.
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
        self.input, self.output = sent, received
        self.longest = max((n for blocks in (sent, received) if blocks for n in blocks.counts), default=0)
        """The length of the longest block that this rank knows of."""

    def lengths(self) -> set[int]:
        """Return the lengths of the chunks that are not empty."""
        counts = {count for blocks in (self.input, self.output) if blocks for count in blocks.counts}
        full = {self.chunk for count in counts if count >= self.chunk}
        return full | {count % self.chunk for count in counts if count % self.chunk}
