"""A collective as a goal: what the buffers of each rank hold before a loop, and what they must hold after it.

With n ranks and `chunks` chunks in a loop, of which k = chunks / n belong to each rank where data is per rank:

| collective     | input                      | output                     | where both are one memory (in place)    |
|----------------|----------------------------|----------------------------|-----------------------------------------|
| broadcast      | root: chunks               | all: chunks                | i[j] is o[j], on every rank             |
| reduce         | all: chunks                | root: chunks               | root: i[j] is o[j]; others have i alone |
| allreduce      | all: chunks                | all: chunks                | i[j] is o[j]                            |
| allgather      | all: k                     | all: n k, in rank order    | i[j] is o[rank k + j]                   |
| reduce_scatter | all: n k, by receiver      | all: k                     | o[j] is i[rank k + j]                   |
| alltoall       | all: n k, by receiver      | all: n k, by sender        | i[j] is o[j]                            |
| gather         | all: k                     | root: n k, in rank order   | root: i[j] is o[rank k + j]             |
| scatter        | root: n k, by receiver     | all: k                     | root: o[j] is i[rank k + j]             |

The input is the caller's send buffer and stays as it is, unless it is one memory with the output. Only a
reduce-scatter in place may also use the rest of its input as it likes.

How a message of any length becomes loops is the runtime's choice. It cuts the vector (or each block, which is one
rank's share and may have a count and displacement of its own, as in the v-variants) into pieces, and gives each loop
one piece per chunk; pieces may be of different length, and empty. Block b of a buffer is its chunks b k to b k + k - 1.
Scratch has no block: a chunk of it takes any piece, so it is as long as the longest.

MPI's own in-place reduce-scatter wants its result at the start of the buffer: run it with the output elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["COLLECTIVES", "Collective", "Goal"]


class Collective(NamedTuple):
    """The kind of a collective: has it a root, has each rank a block of its own, are contributions reduced."""

    rooted: bool
    blocks: bool
    reduces: bool


COLLECTIVES = {
    "broadcast": Collective(rooted=True, blocks=False, reduces=False),
    "reduce": Collective(rooted=True, blocks=False, reduces=True),
    "allreduce": Collective(rooted=False, blocks=False, reduces=True),
    "allgather": Collective(rooted=False, blocks=True, reduces=False),
    "reduce_scatter": Collective(rooted=False, blocks=True, reduces=True),
    "alltoall": Collective(rooted=False, blocks=True, reduces=False),
    "gather": Collective(rooted=True, blocks=True, reduces=False),
    "scatter": Collective(rooted=True, blocks=True, reduces=False),
}
"""All collectives, in the order in which they are listed."""

SMALL_INPUT = ("allgather", "gather")
SMALL_OUTPUT = ("reduce_scatter", "scatter")


@dataclass(frozen=True)
class Goal:
    """What a collective must achieve in one loop.

    What a place holds is written as one number, its contents: the ranks that have contributed as its lowest bits, one
    for each rank, and above them which chunk of their inputs it is. 0: nothing is there yet.
    """

    collective: str
    ranks: int
    chunks: int
    root: int = 0
    in_place: bool = False

    @property
    def block(self) -> int:
        """Return the chunks of one rank's share."""
        return self.chunks // self.ranks

    def inputs(self, rank: int) -> int:
        """Return the length of a rank's input, in chunks."""
        if self.collective in SMALL_INPUT:
            return self.block
        shared = self.collective == "broadcast" and self.in_place
        only_root = self.collective in ("broadcast", "scatter") and not shared
        return self.chunks if rank == self.root or not only_root else 0

    def outputs(self, rank: int) -> int:
        """Return the length of a rank's output, in chunks."""
        if self.collective in SMALL_OUTPUT:
            return self.block
        only_root = self.collective in ("reduce", "gather")
        return self.chunks if rank == self.root or not only_root else 0

    def shared(self, rank: int) -> bool:
        """Say whether input and output of a rank are one memory."""
        return self.in_place and self.inputs(rank) > 0 and self.outputs(rank) > 0

    def contribution(self, rank: int, chunk: int) -> int:
        """Return the contents that are a chunk of one rank's input."""
        return chunk << self.ranks | 1 << rank

    def total(self, chunk: int) -> int:
        """Return the contents that are the sum of a chunk of all ranks' inputs."""
        return (chunk + 1 << self.ranks) - 1

    def parts(self, contents: int) -> tuple[int, list[int]]:
        """Return which chunk it is, and the ranks that have contributed."""
        return contents >> self.ranks, [rank for rank in range(self.ranks) if contents >> rank & 1]

    def given(self, rank: int) -> list[int]:
        """Return what each chunk of a rank's input holds at the start."""
        if self.collective in ("broadcast", "scatter") and rank != self.root:
            return [0] * self.inputs(rank)
        return [self.contribution(rank, chunk) for chunk in range(self.inputs(rank))]

    def wanted(self, rank: int) -> list[int]:
        """Return what each chunk of a rank's output must hold at the end."""
        own = rank * self.block
        chunks = range(self.outputs(rank))
        match self.collective:
            case "broadcast":
                return [self.contribution(self.root, chunk) for chunk in chunks]
            case "scatter":
                return [self.contribution(self.root, own + chunk) for chunk in chunks]
            case "reduce" | "allreduce":
                return [self.total(chunk) for chunk in chunks]
            case "reduce_scatter":
                return [self.total(own + chunk) for chunk in chunks]
            case "alltoall":
                return [self.contribution(chunk // self.block, own + chunk % self.block) for chunk in chunks]
            case _:
                return [self.contribution(*divmod(chunk, self.block)) for chunk in chunks]
