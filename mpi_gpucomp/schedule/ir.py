"""What a schedule is: an algorithm is one program per rank, a program is lanes, a lane is steps in order.

One *loop* of an algorithm moves `chunks` chunks of the user's data, and a message is as many loops as it takes. Loops
touch disjoint data, and every loop has scratch of its own. The rules by which a program runs:

- The steps of a lane run in order, loop after loop. Lanes run through the loops independently: one lane may be in
  loop 3 while another is in loop 1, and that is what fills a pipeline.
- A step waits, besides, for the steps of other lanes that its `after` names, in the same loop of the same rank.
- Messages from one rank to another on one channel arrive in order. On each rank one lane at most sends to a peer on a
  channel, and one at most receives from it.
- A message goes chunk by chunk. A send is done once its data has been taken, whether or not the peer has it: a runtime
  holds one chunk at least for each pair of ranks and channel, or two that exchange chunks would wait for each other.

| kind | means |
|---|---|
| s    | send `source` |
| r    | receive into `target` |
| rcs  | receive into `target`, and send on what was received |
| rrs  | receive, reduce with `source`, send the result, keep nothing |
| rrc  | receive, reduce with `source`, store in `target` |
| rrcs | receive, reduce with `source`, store in `target` and send |
| cpy  | copy `source` to `target` |
| re   | reduce `source` into `target` |
| nop  | nothing, but wait |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COLLECTIVES", "KINDS", "Algorithm", "Collective", "CollectiveSpec", "Lane", "Place", "Program", "Step"]


# A collective as a goal: what the buffers of each rank hold before a loop, and what they must hold after it.
#
# With n ranks and `chunks` chunks in a loop, of which k = chunks / n belong to each rank where data is per rank:
#
# | collective     | input                      | output                     | where both are one memory (in place)    |
# |----------------|----------------------------|----------------------------|-----------------------------------------|
# | broadcast      | root: chunks               | all: chunks                | i[j] is o[j], on every rank             |
# | reduce         | all: chunks                | root: chunks               | root: i[j] is o[j]; others have i alone |
# | allreduce      | all: chunks                | all: chunks                | i[j] is o[j]                            |
# | allgather      | all: k                     | all: n k, in rank order    | i[j] is o[rank k + j]                   |
# | reduce_scatter | all: n k, by receiver      | all: k                     | o[j] is i[rank k + j]                   |
# | alltoall       | all: n k, by receiver      | all: n k, by sender        | i[j] is o[j]                            |
# | gather         | all: k                     | root: n k, in rank order   | root: i[j] is o[rank k + j]             |
# | scatter        | root: n k, by receiver     | all: k                     | root: o[j] is i[rank k + j]             |
#
# The input is the caller's send buffer and stays as it is, unless it is one memory with the output. Only a
# reduce-scatter in place may also use the rest of its input as it likes.
#
# How a message of any length becomes loops is the runtime's choice. It cuts the vector (or each block, which is one
# rank's share and may have a count and displacement of its own, as in the v-variants) into pieces, and gives each loop
# one piece per chunk; pieces may be of different length, and empty. Block b of a buffer is its chunks b k to b k +
# k - 1.
# Scratch has no block: a chunk of it takes any piece, so it is as long as the longest.
#
# MPI's own in-place reduce-scatter wants its result at the start of the buffer: run it with the output elsewhere.


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
class CollectiveSpec:
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


SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
RECEIVES = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
REDUCES = frozenset({"rrs", "rrc", "rrcs", "re"})
HAS_SOURCE = frozenset({"s", "rrs", "rrc", "rrcs", "cpy", "re"})
HAS_TARGET = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})
KINDS = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk of a buffer: `i` is the input, `o` the output, `s` scratch."""

    buffer: str
    offset: int

    def __str__(self) -> str:
        """Write it as programmers do."""
        return f"{self.buffer}[{self.offset}]"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a lane does with `count` chunks from each place on, once the steps in `after` are done."""

    kind: str
    source: Place | None = None
    target: Place | None = None
    count: int = 1
    after: tuple[tuple[int, int], ...] = ()

    @property
    def sends(self) -> bool:
        """Say whether a message leaves."""
        return self.kind in SENDS

    @property
    def receives(self) -> bool:
        """Say whether a message is taken."""
        return self.kind in RECEIVES

    @property
    def reduces(self) -> bool:
        """Say whether two operands become one."""
        return self.kind in REDUCES

    @property
    def reads(self) -> tuple[Place, ...]:
        """Return where it reads; a local reduction reads its target too."""
        source = (self.source,) if self.source and self.kind in HAS_SOURCE else ()
        return (*source, self.target) if self.kind == "re" and self.target else source

    @property
    def writes(self) -> Place | None:
        """Return where it writes."""
        return self.target if self.kind in HAS_TARGET else None


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps in order, with one rank at most to send to and one to receive from, on one channel."""

    send: int | None
    receive: int | None
    channel: int
    steps: tuple[Step, ...]
    plain: bool = False
    """Whether what it sends goes as it is, also where a codec is used; what it passes on goes as it came."""


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does in a loop, and how many chunks of input, output and scratch it has."""

    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    lanes: tuple[Lane, ...]

    def steps(self) -> Iterator[tuple[int, int, Step]]:
        """Yield every step with its lane's number and its own."""
        for number, lane in enumerate(self.lanes):
            for index, step in enumerate(lane.steps):
                yield number, index, step


@dataclass(frozen=True)
class Algorithm:
    """A way to do a collective among so many ranks; `chunks` and the buffers are explained in `schedule.spec`."""

    name: str
    collective: str
    ranks: int
    chunks: int
    in_place: bool
    programs: tuple[Program, ...]
    root: int | None = None

    @property
    def spec(self) -> CollectiveSpec:
        """Return what must hold before and after."""
        return CollectiveSpec(self.collective, self.ranks, self.chunks, self.root or 0, self.in_place)
