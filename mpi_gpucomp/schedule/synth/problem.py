"""The routing problem and its solutions: chunks with a source and destinations, and the links that each takes.

Reductions are mirrored: a reduce-scatter is a reversed allgather, on links in the other direction.

A message is many loops of the same routing, one after the other, so its time is about

    loops * bottleneck + fill

where the bottleneck is the largest load of any link, port or rank in one loop, and the fill is the time of the longest
path in an empty network. For one loop this is TACCL's objective, for a chain the formula of a pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import FREE
from mpi_gpucomp.schedule.sketch import rotation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.sketch import Sketch
    from mpi_gpucomp.schedule.topology import Topology

    Edge = tuple[int, int, int]
    "Sender, receiver and form."

__all__ = [
    "ENCODED",
    "MIRRORED",
    "RAW",
    "Chunk",
    "Hop",
    "Problem",
    "Routing",
    "chunks_of",
    "expand_symmetry",
    "prune_tree",
]

MIRRORED = {"reduce": "broadcast", "reduce_scatter": "allgather"}
"""Reductions, and the collectives that they reverse."""
RAW, ENCODED = 0, 1


class Chunk(NamedTuple):
    """Data that starts on one rank and must reach others."""

    source: int
    part: int
    """Its index among the chunks with the same source and destinations."""
    to: frozenset[int]

    def __str__(self) -> str:
        """Return a name for variables: source, destination if there is one, index."""
        (one, *others) = sorted(self.to)
        return f"{self.source}_{self.part}" if others else f"{self.source}_for_{one}_{self.part}"


class Hop(NamedTuple):
    """A chunk on a link, raw (0) or encoded (1)."""

    chunk: int
    sender: int
    receiver: int
    form: int


def chunks_of(collective: str, ranks: int, root: int, each: int) -> list[Chunk]:
    """Return the chunks of a collective that does not reduce, with `each` chunks per block."""
    all_ranks = frozenset(range(ranks))
    pairs: list[tuple[int, frozenset[int]]]
    if collective == "broadcast":
        pairs = [(root, all_ranks - {root})]
    elif collective == "allgather":
        pairs = [(rank, all_ranks - {rank}) for rank in range(ranks)]
    elif collective == "alltoall":
        pairs = [(a, frozenset({b})) for a in range(ranks) for b in range(ranks) if a != b]
    elif collective == "gather":
        pairs = [(rank, frozenset({root})) for rank in range(ranks) if rank != root]
    else:
        pairs = [(root, frozenset({rank})) for rank in range(ranks) if rank != root]
    return [Chunk(source, index, to) for source, to in pairs for index in range(each)]


@dataclass(frozen=True)
class Problem:
    """A routing problem: `loops` equal loops, with chunks of `chunk_bytes` bytes."""

    topology: Topology
    sketch: Sketch
    chunks: list[Chunk]
    chunk_bytes: float
    loops: float
    codecs: tuple[CodecCost, ...] = (FREE,)
    """The costs of the forms that a chunk may be sent in: raw, and encoded if there is a second."""
    mirrored: bool = False
    """True for a reduction: messages go in the other direction, and each is decoded and encoded again."""
    allreduce: bool = False
    """True for an allreduce: every path is used in reverse by partial sums, then forwards by results."""

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        """The usable links, in the direction of the routing."""
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
                    expected=f"a path from rank {chunk.source} to rank {min(missing)}",
                    got="none that the sketch allows",
                    remedy="Allow more links between nodes in the sketch (internode_conn).",
                )
        return found

    @cached_property
    def halves(self) -> tuple[Problem, ...]:
        """The reduction and the distribution of an allreduce; otherwise the problem itself."""
        if not self.allreduce:
            return (self,)
        return replace(self, allreduce=False, mirrored=True), replace(self, allreduce=False)

    def _usable(self, a: int, b: int) -> bool:
        links = [half.real(a, b) for half in self.halves]
        exist = all(self.topology.link(*link) is not None for link in links)
        return exist and all(self.sketch.allows(self.topology, *link) for link in links)

    def real(self, a: int, b: int) -> tuple[int, int]:
        """Return sender and receiver of a message on a link of the routing."""
        return (b, a) if self.mirrored else (a, b)

    def allowed(self, chunk: int, a: int, b: int) -> bool:
        """Return True if a chunk may use a link: not into its source, and out of its node only from its sender."""
        source, topology = self.chunks[chunk].source, self.topology
        if b == source:
            return False
        leaves = topology.node_of(a) == topology.node_of(source) != topology.node_of(b)
        sender = self.sketch.sender_of.get(topology.position(source))
        return not leaves or self.mirrored or sender in (None, topology.position(a))

    def seconds(self, a: int, b: int, form: int) -> float:
        """Return the time of a message on its link, without coding."""
        link = self.topology.link(*self.real(a, b))
        assert link is not None
        return link.latency + self.topology.per_chunk + self.chunk_bytes / self.codecs[form].ratio * link.per_byte

    def latency(self, a: int, b: int, form: int) -> float:
        """Return the time of a chunk over an idle link, without decoding."""
        if self.allreduce:
            return sum(half.latency(a, b, form) for half in self.halves)
        unloaded = self.topology.unloaded_link(*self.real(a, b))
        assert unloaded is not None
        codec = self.codecs[form]
        recoded = self.chunk_bytes * (codec.encode + codec.decode) if self.mirrored else 0.0
        nbytes, cost = self.chunk_bytes / codec.ratio, self.topology.message_cost
        return unloaded.seconds(nbytes) + self.topology.per_chunk + 2 * cost.seconds(nbytes) + cost.wait + recoded

    def loads(self, a: int, b: int, form: int) -> tuple[tuple[str, float], ...]:
        """Return the load of a message on each resource, in seconds; encoding of copies is counted elsewhere."""
        key = a, b, form
        if key not in self._load_cache:
            self._load_cache[key] = tuple(load for half in self.halves for load in half._loads(*key))
        return self._load_cache[key]

    @cached_property
    def _load_cache(self) -> dict[tuple[int, int, int], tuple[tuple[str, float], ...]]:
        return {}

    def _loads(self, a: int, b: int, form: int) -> Iterator[tuple[str, float]]:
        sender, receiver = self.real(a, b)
        codec = self.codecs[form]
        yield f"link {sender} to {receiver}", self.seconds(a, b, form)
        for number in self.topology.ports_of(sender, receiver):
            port = self.topology.ports[number]
            yield port.name, self.chunk_bytes / codec.ratio * port.per_byte
        handled = self.topology.message_cost.seconds(self.chunk_bytes / codec.ratio)
        yield from self.work_loads(sender, handled, "messages of")
        yield from self.work_loads(receiver, handled, "messages of")
        yield from self.work_loads(receiver, self.chunk_bytes * codec.decode)
        if self.mirrored:
            yield from self.work_loads(sender, self.chunk_bytes * codec.encode)

    def work_loads(self, rank: int, seconds: float, what: str = "of") -> Iterator[tuple[str, float]]:
        """Yield the load of work of a rank on its work queue and on shared cores."""
        if seconds:
            yield f"stream {what} {rank}", seconds
            for number, processor in enumerate(self.topology.processors):
                if rank in processor.ranks:
                    yield f"processor {number}", seconds / processor.cores

    @cached_property
    def images(self) -> list[tuple[int, tuple[int, ...]]]:
        """For each chunk its representative under symmetry, and the permutation of ranks that maps it there."""
        number = {chunk: at for at, chunk in enumerate(self.chunks)}
        identity = tuple(range(self.topology.ranks))
        rotations = [rotation(self.topology.ranks, *one) for one in self.sketch.symmetries]
        found: list[tuple[int, tuple[int, ...]] | None] = [None] * len(self.chunks)
        for start in range(len(self.chunks)):
            if found[start] is not None:
                continue
            found[start] = start, identity
            todo = [start]
            while todo:
                at = todo.pop()
                _, back = found[at] or (start, identity)
                for rotated in rotations:
                    source, part, to = self.chunks[at]
                    image = number.get(Chunk(rotated[source], part, frozenset(rotated[rank] for rank in to)))
                    if image is not None and found[image] is None:
                        inverse = {after: before for before, after in enumerate(rotated)}
                        found[image] = start, tuple(back[inverse[rank]] for rank in range(len(rotated)))
                        todo.append(image)
        return [one for one in found if one is not None]

    @cached_property
    def canonical_link(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each link the first of its equivalents under symmetry."""
        rotations = [rotation(self.topology.ranks, *one) for one in self.sketch.symmetries]
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for link in self.links:
            todo = [] if link in found else [link]
            while todo:
                a, b = todo.pop()
                if (a, b) not in found:
                    found[a, b] = link
                    todo += [(rotated[a], rotated[b]) for rotated in rotations]
        return found

    @cached_property
    def representatives(self) -> list[int]:
        """The chunks that represent all others under symmetry."""
        return sorted({start for start, _ in self.images})


def _reached(ranks: int, links: list[tuple[int, int]], source: int) -> set[int]:
    out_links: list[list[int]] = [[] for _ in range(ranks)]
    for a, b in links:
        out_links[a].append(b)
    seen, todo = {source}, [source]
    while todo:
        for other in out_links[todo.pop()]:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


@dataclass(frozen=True)
class Routing:
    """The hops of every chunk, each after the hop that brings the chunk to its sender."""

    problem: Problem
    hops: list[list[Hop]]
    proven: bool = False
    bound: float = 0.0
    """A proven lower bound of the time of any routing, in seconds."""

    @cached_property
    def loads(self) -> dict[str, float]:
        """The load of each resource in a loop, in seconds."""
        found: defaultdict[str, float] = defaultdict(float)
        for hops in self.hops:
            for hop in hops:
                for name, seconds in self.problem.loads(hop.sender, hop.receiver, hop.form):
                    found[name] += seconds
            for rank, form in encoders(hops) if not self.problem.mirrored else ():
                seconds = self.problem.chunk_bytes * self.problem.codecs[form].encode
                for name, share in self.problem.work_loads(rank, seconds):
                    found[name] += share
        return dict(found)

    @cached_property
    def bottleneck(self) -> float:
        """The largest load of any resource in a loop."""
        return max(self.loads.values(), default=0.0)

    @cached_property
    def fill(self) -> float:
        """The time until the last destination has its chunk, in an empty network."""
        return max((max(arrivals(self.problem, hops).values()) for hops in self.hops if hops), default=0.0)

    @property
    def seconds(self) -> float:
        """Return the estimated time."""
        return self.problem.loops * self.bottleneck + self.fill

    @property
    def gap(self) -> float:
        """Return the relative gap to the lower bound."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


def encoders(hops: Sequence[Hop]) -> set[tuple[int, int]]:
    """Return rank and form of each encoding of a chunk: ranks that send it in another form than they received."""
    came = {hop.receiver: hop.form for hop in hops}
    return {(hop.sender, hop.form) for hop in hops if came.get(hop.sender) != hop.form}


def exact_on(problem: Problem, hops: Sequence[Hop]) -> set[int]:
    """Return the ranks that a chunk has reached without having been encoded."""
    found = {problem.chunks[hops[0].chunk].source} if hops else set()
    for hop in hops:
        if hop.form == RAW and hop.sender in found:
            found.add(hop.receiver)
    return found


def recoding(problem: Problem, rank_is_source: bool, form: int) -> float:
    """Return the seconds in which a rank decodes a chunk and encodes it in another form."""
    if problem.mirrored:
        return 0.0
    other = 0.0 if rank_is_source else problem.codecs[1 - form if len(problem.codecs) > 1 else form].decode
    return problem.chunk_bytes * (problem.codecs[form].encode + other)


def arrivals(problem: Problem, hops: Sequence[Hop]) -> dict[int, float]:
    """Return the arrival times of a chunk at each rank, in an empty network."""
    if not hops:
        return {}
    source = problem.chunks[hops[0].chunk].source
    found, came = {source: 0.0}, dict[int, int]()
    for hop in hops:
        changed = came.get(hop.sender) != hop.form
        waits = recoding(problem, hop.sender == source, hop.form) if changed else 0.0
        found[hop.receiver] = found[hop.sender] + waits + problem.latency(hop.sender, hop.receiver, hop.form)
        came[hop.receiver] = hop.form
    return found


def prune_tree(source: int, edges: Sequence[Edge], to: frozenset[int]) -> list[Edge]:
    """Return the edges of a chunk in order from its source, without those that reach no destination."""
    out_links: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        out_links[edge[0]].append(edge)
    order, todo, seen = list[tuple[int, int, int]](), [source], {source}
    while todo:
        for edge in sorted(out_links[todo.pop(0)]):
            if edge[1] not in seen:
                seen.add(edge[1])
                order.append(edge)
                todo.append(edge[1])
    needed = set(to)
    for edge in reversed(order):
        if edge[1] in needed:
            needed.add(edge[0])
    return [edge for edge in order if edge[1] in needed]


def expand_symmetry(problem: Problem, edges: dict[int, list[Edge]]) -> list[list[Hop]]:
    """Return the hops of all chunks from the edges of their representatives."""
    hops = []
    for number, (start, moved) in enumerate(problem.images):
        back = {after: before for before, after in enumerate(moved)}
        hops.append([Hop(number, back[a], back[b], form) for a, b, form in edges[start]])
    return hops
