"""What is to be routed: chunks with a source and destinations, over the links that a sketch leaves.

Reductions are mirrored: a reduce-scatter is an all-gather run backwards, on links that go the other way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import FREE
from mpi_gpucomp.schedule.sketch import rotation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi_gpucomp.schedule.cost import Coding
    from mpi_gpucomp.schedule.sketch import Sketch
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["MIRRORED", "Chunk", "Hop", "Problem", "chunks_of"]

MIRRORED = {"reduce": "broadcast", "reduce_scatter": "allgather"}
"""Reductions, and what they are backwards."""
PLAIN, CODED = 0, 1


class Chunk(NamedTuple):
    """Data that starts on one rank and must come to others."""

    source: int
    part: int
    """Which of the source's chunks for these destinations it is."""
    to: frozenset[int]

    def __str__(self) -> str:
        """Name it for people: source, destination if there is one, number."""
        (one, *others) = sorted(self.to)
        return f"{self.source}_{self.part}" if others else f"{self.source}_for_{one}_{self.part}"


class Hop(NamedTuple):
    """A chunk on a link, plain (0) or encoded (1)."""

    chunk: int
    sender: int
    receiver: int
    form: int


def chunks_of(collective: str, ranks: int, root: int, each: int) -> list[Chunk]:
    """Return the chunks of a collective that does not reduce, so many for each block."""
    everybody = frozenset(range(ranks))
    pairs: list[tuple[int, frozenset[int]]]
    if collective == "broadcast":
        pairs = [(root, everybody - {root})]
    elif collective == "allgather":
        pairs = [(rank, everybody - {rank}) for rank in range(ranks)]
    elif collective == "alltoall":
        pairs = [(a, frozenset({b})) for a in range(ranks) for b in range(ranks) if a != b]
    elif collective == "gather":
        pairs = [(rank, frozenset({root})) for rank in range(ranks) if rank != root]
    else:
        pairs = [(root, frozenset({rank})) for rank in range(ranks) if rank != root]
    return [Chunk(source, index, to) for source, to in pairs for index in range(each)]


@dataclass(frozen=True)
class Problem:
    """A routing to be found: among `loops` equal rounds, each with chunks of `piece` bytes."""

    topology: Topology
    sketch: Sketch
    chunks: list[Chunk]
    piece: float
    loops: float
    codings: tuple[Coding, ...] = (FREE,)
    """The forms that a chunk may travel in: plain, and encoded if there is a second."""
    mirrored: bool = False
    """Whether it is a reduction: messages go the other way, and every one is encoded and decoded again."""
    both: bool = False
    """Whether it is an all-reduce: every way is taken backwards with sums, and then forwards with the results."""

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        """All links that may be used, in the direction of the routing."""
        found = [
            (a, b)
            for a in range(self.topology.ranks)
            for b in range(self.topology.ranks)
            if a != b and self._usable(a, b)
        ]
        reached = _reached(self.topology.ranks, found, self.chunks[0].source) if self.chunks else set()
        for chunk in self.chunks:
            missing = chunk.to - reached if chunk.source == self.chunks[0].source else set()
            if missing:
                raise SpecError(
                    f"topology {self.topology.name}",
                    expected=f"a way from rank {chunk.source} to rank {min(missing)}",
                    got="none that the sketch leaves",
                    remedy="Let the sketch have more links between nodes (internode_conn).",
                )
        return found

    @cached_property
    def halves(self) -> tuple[Problem, ...]:
        """What it consists of: the sums and the results of an all-reduce, or itself."""
        if not self.both:
            return (self,)
        return replace(self, both=False, mirrored=True), replace(self, both=False)

    def _usable(self, a: int, b: int) -> bool:
        ways = [half.real(a, b) for half in self.halves]
        exist = all(self.topology.link(*way) is not None for way in ways)
        return exist and all(self.sketch.allows(self.topology, *way) for way in ways)

    def real(self, a: int, b: int) -> tuple[int, int]:
        """Return sender and receiver of what goes along a link of the routing."""
        return (b, a) if self.mirrored else (a, b)

    def allowed(self, chunk: int, a: int, b: int) -> bool:
        """Say whether a chunk may take a link: not into its source, and out of its node by its sender."""
        source, topology = self.chunks[chunk].source, self.topology
        if b == source:
            return False
        leaves = topology.node_of(a) == topology.node_of(source) != topology.node_of(b)
        sender = self.sketch.sender_of.get(topology.position(source))
        return not leaves or self.mirrored or sender in (None, topology.position(a))

    def seconds(self, a: int, b: int, form: int) -> float:
        """Return what a message takes on a link of its own, besides coding."""
        link = self.topology.link(*self.real(a, b))
        assert link is not None
        return link.latency + self.topology.per_chunk + self.piece / self.codings[form].ratio * link.per_byte

    def latency(self, a: int, b: int, form: int) -> float:
        """Return the time until a chunk has come over a link that is free, decoding not included."""
        if self.both:
            return sum(half.latency(a, b, form) for half in self.halves)
        alone = self.topology.alone(*self.real(a, b))
        assert alone is not None
        coding = self.codings[form]
        again = self.piece * (coding.encode + coding.decode) if self.mirrored else 0.0
        nbytes, handling = self.piece / coding.ratio, self.topology.handling
        return alone.seconds(nbytes) + self.topology.per_chunk + 2 * handling.seconds(nbytes) + handling.wait + again

    def loads(self, a: int, b: int, form: int) -> tuple[tuple[str, float], ...]:
        """Return everything that a message keeps busy, and for how long; encoding of copies is counted elsewhere."""
        key = a, b, form
        if key not in self._known:
            self._known[key] = tuple(load for half in self.halves for load in half._loads(*key))
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], tuple[tuple[str, float], ...]]:
        return {}

    def _loads(self, a: int, b: int, form: int) -> Iterator[tuple[str, float]]:
        sender, receiver = self.real(a, b)
        coding = self.codings[form]
        yield f"link {sender} to {receiver}", self.seconds(a, b, form)
        for number in self.topology.ports_of(sender, receiver):
            port = self.topology.ports[number]
            yield port.name, self.piece / coding.ratio * port.per_byte
        handled = self.topology.handling.seconds(self.piece / coding.ratio)
        yield from self.coding_loads(sender, handled, "messages of")
        yield from self.coding_loads(receiver, handled, "messages of")
        yield from self.coding_loads(receiver, self.piece * coding.decode)
        if self.mirrored:
            yield from self.coding_loads(sender, self.piece * coding.encode)

    def coding_loads(self, rank: int, seconds: float, what: str = "of") -> Iterator[tuple[str, float]]:
        """Yield what a rank's coding keeps busy: its stream, and its part of cores that are shared."""
        if seconds:
            yield f"stream {what} {rank}", seconds
            for number, processor in enumerate(self.topology.processors):
                if rank in processor.ranks:
                    yield f"processor {number}", seconds / processor.cores

    @cached_property
    def images(self) -> list[tuple[int, tuple[int, ...]]]:
        """For each chunk the one that stands for all that are alike, and where the ranks go on the way to it."""
        number = {chunk: at for at, chunk in enumerate(self.chunks)}
        identity = tuple(range(self.topology.ranks))
        turns = [rotation(self.topology.ranks, *one) for one in self.sketch.symmetries]
        found: list[tuple[int, tuple[int, ...]] | None] = [None] * len(self.chunks)
        for start in range(len(self.chunks)):
            if found[start] is not None:
                continue
            found[start] = start, identity
            todo = [start]
            while todo:
                at = todo.pop()
                _, back = found[at] or (start, identity)
                for turn in turns:
                    source, part, to = self.chunks[at]
                    image = number.get(Chunk(turn[source], part, frozenset(turn[rank] for rank in to)))
                    if image is not None and found[image] is None:
                        undone = {after: before for before, after in enumerate(turn)}
                        found[image] = start, tuple(back[undone[rank]] for rank in range(len(turn)))
                        todo.append(image)
        return [one for one in found if one is not None]

    @cached_property
    def alike(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each link the first of those that symmetry maps onto it."""
        turns = [rotation(self.topology.ranks, *one) for one in self.sketch.symmetries]
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for link in self.links:
            todo = [] if link in found else [link]
            while todo:
                a, b = todo.pop()
                if (a, b) not in found:
                    found[a, b] = link
                    todo += [(turn[a], turn[b]) for turn in turns]
        return found

    @cached_property
    def representatives(self) -> list[int]:
        """The chunks that stand for others, or for themselves alone."""
        return sorted({start for start, _ in self.images})


def _reached(ranks: int, links: list[tuple[int, int]], source: int) -> set[int]:
    onward: list[list[int]] = [[] for _ in range(ranks)]
    for a, b in links:
        onward[a].append(b)
    seen, todo = {source}, [source]
    while todo:
        for other in onward[todo.pop()]:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen
