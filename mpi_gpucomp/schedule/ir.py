"""The intermediate representation of schedules, and the collectives that they implement.

An `Algorithm` has one `Program` per rank, a program has lanes, and a `Lane` has steps in order. One *loop* of an
algorithm moves `chunks` chunks; a message takes as many loops as it needs. Loops use disjoint data and disjoint
scratch. Execution rules:

- The steps of a lane run in order, loop after loop. Lanes advance independently: one lane may be in loop 3 while
  another is in loop 1, which fills the pipeline.
- A step also waits for the steps of other lanes listed in its `after`, in the same loop of the same rank.
- Messages between two ranks on one channel arrive in order. On each rank at most one lane sends to a given peer on a
  given channel, and at most one receives from it.
- Messages move chunk by chunk. A send completes once its data has been taken, whether or not the peer has received it.
- A runtime buffers `BUFFERED_CHUNKS` chunks per connection (sender, receiver, channel), those of all loops together. A
  chunk occupies the connection from its send until its receive takes it; while the connection is full, sends wait. A
  schedule that needs more room deadlocks. The library's own algorithms need room for one chunk.

| kind | meaning |
|---|---|
| s    | send `source` |
| r    | receive into `target` |
| rcs  | receive into `target` and forward the received chunk |
| rrs  | receive, reduce with `source`, send the result, store nothing |
| rrc  | receive, reduce with `source`, store in `target` |
| rrcs | receive, reduce with `source`, store in `target` and send |
| cpy  | copy `source` to `target` |
| re   | reduce `source` into `target` |
| nop  | no operation; only waits for its dependencies |

A collective is a precondition and a postcondition on the buffers of each rank. With n ranks and `chunks` chunks in a
loop, a block (one rank's share) has k = chunks / n chunks:

| collective     | input                  | output                   | aliasing if in place                       |
|----------------|------------------------|--------------------------|--------------------------------------------|
| broadcast      | root: chunks           | all: chunks              | i[j] is o[j], on every rank                |
| reduce         | all: chunks            | root: chunks             | root: i[j] is o[j]; other ranks have no o  |
| allreduce      | all: chunks            | all: chunks              | i[j] is o[j]                               |
| allgather      | all: k                 | all: n k, in rank order  | i[j] is o[rank k + j]                      |
| reduce_scatter | all: n k, by receiver  | all: k                   | o[j] is i[rank k + j]                      |
| alltoall       | all: n k, by receiver  | all: n k, by sender      | i[j] is o[j]                               |
| gather         | all: k                 | root: n k, in rank order | root: i[j] is o[rank k + j]                |
| scatter        | root: n k, by receiver | all: k                   | root: o[j] is i[rank k + j]                |

The input is the caller's send buffer and is read-only unless it aliases the output. The exception is an in-place
reduce-scatter, which may overwrite all of its input.

The runtime divides a message into loops. It cuts the vector, or each block, into chunks and assigns one to each chunk
of each loop. Blocks may have their own counts and displacements (the v-variants), and chunks may have different lengths
or be empty. Block b of a buffer is its chunks b k to b k + k - 1. Scratch has no blocks: a scratch chunk is as long as
the longest chunk.

MPI's in-place reduce-scatter leaves its result at the start of the buffer: run it with a separate output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BUFFERED_CHUNKS",
    "COLLECTIVES",
    "COLLECTIVE_OF",
    "KINDS",
    "PASSTHROUGH_METHODS",
    "Algorithm",
    "BufferMap",
    "Collective",
    "CollectiveSpec",
    "Lane",
    "Place",
    "Program",
    "Step",
]

BUFFERED_CHUNKS = 8
"""Chunks that a connection buffers between a send and its receive, as many as MSCCL's runtime does."""


class Collective(NamedTuple):
    """A collective: its names, and the shape of its buffers."""

    name: str
    mpi_name: str
    """The name in MPI, in lower case."""
    methods: tuple[str, ...]
    """The mpi4py methods that it implements; the first takes one count for all ranks."""
    rooted: bool = False
    """True if it has a root."""
    reduces: bool = False
    """True if it reduces the contributions of the ranks."""
    block_input: bool = False
    """True if the input of a rank is one block."""
    block_output: bool = False
    """True if the output of a rank is one block."""
    blocks: bool = False
    """True if the longer buffer has one block for each rank."""

    @property
    def method(self) -> str:
        """Return the mpi4py method that takes one count for all ranks."""
        return self.methods[0]

    @property
    def block_buffers(self) -> tuple[bool, ...]:
        """Return, for each buffer argument of `method`, True if it is one block and False if it is a whole vector."""
        return (self.block_output,) if self.name == "broadcast" else (self.block_input, self.block_output)


COLLECTIVES = {
    one.name: one
    for one in (
        Collective("broadcast", "bcast", ("Bcast",), rooted=True),
        Collective("reduce", "reduce", ("Reduce",), rooted=True, reduces=True),
        Collective("allreduce", "allreduce", ("Allreduce",), reduces=True),
        Collective("allgather", "allgather", ("Allgather", "Allgatherv"), block_input=True, blocks=True),
        Collective(
            "reduce_scatter",
            "reduce_scatter",
            ("Reduce_scatter_block", "Reduce_scatter"),
            reduces=True,
            block_output=True,
            blocks=True,
        ),
        Collective("alltoall", "alltoall", ("Alltoall", "Alltoallv"), blocks=True),
        Collective("gather", "gather", ("Gather", "Gatherv"), rooted=True, block_input=True, blocks=True),
        Collective("scatter", "scatter", ("Scatter", "Scatterv"), rooted=True, block_output=True, blocks=True),
    )
}
"""All collectives by name, in the order in which they are listed."""

COLLECTIVE_OF = {method: one.name for one in COLLECTIVES.values() for method in one.methods}
"""The collective of each mpi4py method."""

PASSTHROUGH_METHODS = ("Scan", "Exscan")
"""Collective methods that have no schedule: they always use native MPI."""


@dataclass(frozen=True)
class CollectiveSpec:
    """The precondition and postcondition of one loop of a collective.

    The value of a chunk is an integer: the lowest `ranks` bits are the set of ranks that have contributed, the bits
    above them the index of the chunk in the contributors' inputs. 0 means that nothing has been written.
    """

    collective: str
    ranks: int
    chunks: int
    root: int = 0
    in_place: bool = False

    @property
    def block(self) -> int:
        """Return the number of chunks in a block."""
        return self.chunks // self.ranks

    def input_chunks(self, rank: int) -> int:
        """Return the length of a rank's input, in chunks."""
        if COLLECTIVES[self.collective].block_input:
            return self.block
        shared = self.collective == "broadcast" and self.in_place
        only_root = self.collective in ("broadcast", "scatter") and not shared
        return self.chunks if rank == self.root or not only_root else 0

    def output_chunks(self, rank: int) -> int:
        """Return the length of a rank's output, in chunks."""
        if COLLECTIVES[self.collective].block_output:
            return self.block
        only_root = self.collective in ("reduce", "gather")
        return self.chunks if rank == self.root or not only_root else 0

    def aliased(self, rank: int) -> bool:
        """Return True if the input and output of a rank share memory."""
        return self.in_place and self.input_chunks(rank) > 0 and self.output_chunks(rank) > 0

    def contribution(self, rank: int, chunk: int) -> int:
        """Return the value of a chunk of one rank's input."""
        return chunk << self.ranks | 1 << rank

    def total(self, chunk: int) -> int:
        """Return the value of a chunk reduced over all ranks."""
        return (chunk + 1 << self.ranks) - 1

    def decompose(self, value: int) -> tuple[int, list[int]]:
        """Return the chunk index of a value, and the ranks that have contributed to it."""
        return value >> self.ranks, [rank for rank in range(self.ranks) if value >> rank & 1]

    def precondition(self, rank: int) -> list[int]:
        """Return the value of each chunk of a rank's input before the loop."""
        if self.collective in ("broadcast", "scatter") and rank != self.root:
            return [0] * self.input_chunks(rank)
        return [self.contribution(rank, chunk) for chunk in range(self.input_chunks(rank))]

    def postcondition(self, rank: int) -> list[int]:
        """Return the value that each chunk of a rank's output must have after the loop."""
        own = rank * self.block
        chunks = range(self.output_chunks(rank))
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
        """Return it in index notation, such as o[3]."""
        return f"{self.buffer}[{self.offset}]"


BUFFER_NAMES = {"i": "input", "o": "output", "s": "scratch"}


class BufferMap:
    """Numbers the chunks of a rank's buffers, so that aliased chunks of input and output have the same number.

    The numbers are called cells. Those of scratch come last and are unbounded.
    """

    def __init__(self, spec: CollectiveSpec, rank: int, scratch: int = 0) -> None:
        """Map the buffers of a rank with `scratch` chunks of scratch."""
        inputs, outputs, own = spec.input_chunks(rank), spec.output_chunks(rank), rank * spec.block
        self.lengths = {"i": inputs, "o": outputs, "s": scratch}
        start = {"i": outputs, "o": 0, "s": inputs + outputs}
        if spec.aliased(rank):
            start = {"i": 0, "o": 0, "s": max(inputs, outputs)}
            if inputs != outputs:
                start["i" if inputs < outputs else "o"] = own
        self.start = start
        self.size = start["s"] + scratch
        free_input = spec.aliased(rank) and spec.collective == "reduce_scatter"
        read_only = () if free_input else range(start["i"], start["i"] + inputs)
        self._read_only = frozenset(read_only) - frozenset(range(start["o"], start["o"] + outputs))

    def cells(self, place: Place, count: int = 1) -> range:
        """Return the cells of `count` chunks from a place on."""
        first = self.start[place.buffer] + place.offset
        return range(first, first + count)

    def contains(self, place: Place, count: int) -> bool:
        """Return True if `count` chunks from a place on are inside its buffer."""
        return place.offset >= 0 and place.offset + count <= self.lengths[place.buffer]

    def writable(self, cell: int) -> bool:
        """Return True unless the cell belongs to a read-only input."""
        return cell not in self._read_only

    def name(self, cell: int) -> str:
        """Return the buffer and chunk of a cell, for error messages."""
        for buffer in ("o", "i", "s"):
            offset = cell - self.start[buffer]
            if 0 <= offset < self.lengths[buffer]:
                return f"{BUFFER_NAMES[buffer]} chunk {offset}"
        return f"scratch chunk {cell - self.start['s']}"


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a lane on `count` consecutive chunks, started when the steps in `after` have completed."""

    kind: str
    source: Place | None = None
    target: Place | None = None
    count: int = 1
    after: tuple[tuple[int, int], ...] = ()
    """Dependencies: (lane, step) pairs of the same program."""

    @property
    def sends(self) -> bool:
        """Return True if the step sends a message."""
        return self.kind in SENDS

    @property
    def receives(self) -> bool:
        """Return True if the step receives a message."""
        return self.kind in RECEIVES

    @property
    def reduces(self) -> bool:
        """Return True if the step reduces two operands."""
        return self.kind in REDUCES

    @property
    def reads(self) -> tuple[Place, ...]:
        """Return the places that the step reads; a local reduction also reads its target."""
        source = (self.source,) if self.source and self.kind in HAS_SOURCE else ()
        return (*source, self.target) if self.kind == "re" and self.target else source

    @property
    def writes(self) -> Place | None:
        """Return the place that the step writes."""
        return self.target if self.kind in HAS_TARGET else None


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps in order, with at most one peer to send to and one to receive from, on one channel."""

    send: int | None
    receive: int | None
    channel: int
    steps: tuple[Step, ...]
    raw: bool = False
    """True if it sends raw frames even when a codec is in use; forwarded frames keep their form."""


@dataclass(frozen=True, slots=True)
class Program:
    """The lanes of one rank, and the lengths of its input, output and scratch in chunks."""

    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    lanes: tuple[Lane, ...]

    def steps(self) -> Iterator[tuple[int, int, Step]]:
        """Yield the lane number, step number and step of every step."""
        for number, lane in enumerate(self.lanes):
            for index, step in enumerate(lane.steps):
                yield number, index, step


@dataclass(frozen=True)
class Algorithm:
    """A schedule of a collective for a fixed number of ranks: one program per rank."""

    name: str
    collective: str
    ranks: int
    chunks: int
    """Chunks in a loop."""
    in_place: bool
    programs: tuple[Program, ...]
    root: int | None = None

    @property
    def spec(self) -> CollectiveSpec:
        """Return the precondition and postcondition of a loop."""
        return CollectiveSpec(self.collective, self.ranks, self.chunks, self.root or 0, self.in_place)
