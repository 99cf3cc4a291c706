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
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.goal import Goal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KINDS", "Algorithm", "Lane", "Place", "Program", "Step"]

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
    """A way to do a collective among so many ranks; `chunks` and the buffers are explained in `schedule.goal`."""

    name: str
    collective: str
    ranks: int
    chunks: int
    in_place: bool
    programs: tuple[Program, ...]
    root: int | None = None

    @property
    def goal(self) -> Goal:
        """Return what must hold before and after."""
        return Goal(self.collective, self.ranks, self.chunks, self.root or 0, self.in_place)
