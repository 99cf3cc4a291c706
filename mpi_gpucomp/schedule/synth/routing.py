"""A routing: which links each chunk takes, in which form, and what that costs in time.

A message is many loops of the same routing, one behind the other, so its time is about

    loops * bottleneck + fill

where the bottleneck is the most that any link, port or stream has to do in one loop, and the fill is the time of the
longest way in an empty network. For one loop this is TACCL's objective, for a chain the formula of a pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.synth.problem import PLAIN, Hop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.synth.problem import Problem

    Way = tuple[int, int, int]
    """Sender, receiver and form."""

__all__ = ["Routing", "grown", "unfolded"]


@dataclass(frozen=True)
class Routing:
    """The hops of every chunk, each behind the one that brings the chunk to its sender."""

    problem: Problem
    hops: list[list[Hop]]
    proven: bool = False
    bound: float = 0.0
    """Seconds that no routing of this problem can be below, as far as is known."""

    @cached_property
    def loads(self) -> dict[str, float]:
        """Return the seconds that everything is busy in a loop."""
        found: defaultdict[str, float] = defaultdict(float)
        for hops in self.hops:
            for hop in hops:
                for name, seconds in self.problem.loads(hop.sender, hop.receiver, hop.form):
                    found[name] += seconds
            for rank, form in encoders(hops) if not self.problem.mirrored else ():
                seconds = self.problem.piece * self.problem.codings[form].encode
                for name, share in self.problem.coding_loads(rank, seconds):
                    found[name] += share
        return dict(found)

    @cached_property
    def bottleneck(self) -> float:
        """Return the most that anything has to do in a loop."""
        return max(self.loads.values(), default=0.0)

    @cached_property
    def fill(self) -> float:
        """Return the time until the last destination has its chunk, in an empty network."""
        return max((max(arrivals(self.problem, hops).values()) for hops in self.hops if hops), default=0.0)

    @property
    def seconds(self) -> float:
        """Return the time that it promises."""
        return self.problem.loops * self.bottleneck + self.fill

    @property
    def gap(self) -> float:
        """Return how much better the best routing could be at most, as a share."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


def encoders(hops: Sequence[Hop]) -> set[tuple[int, int]]:
    """Return who makes frames of a chunk, and in which form: those who send it in another than it came in."""
    came = {hop.receiver: hop.form for hop in hops}
    return {(hop.sender, hop.form) for hop in hops if came.get(hop.sender) != hop.form}


def exact_on(problem: Problem, hops: Sequence[Hop]) -> set[int]:
    """Return the ranks that a chunk has come to without having been encoded on its way."""
    found = {problem.chunks[hops[0].chunk].source} if hops else set()
    for hop in hops:
        if hop.form == PLAIN and hop.sender in found:
            found.add(hop.receiver)
    return found


def recoding(problem: Problem, rank_is_source: bool, form: int) -> float:
    """Return the seconds that a chunk waits where its form changes: what came is decoded, and encoded anew."""
    if problem.mirrored:
        return 0.0
    other = 0.0 if rank_is_source else problem.codings[1 - form if len(problem.codings) > 1 else form].decode
    return problem.piece * (problem.codings[form].encode + other)


def arrivals(problem: Problem, hops: Sequence[Hop]) -> dict[int, float]:
    """Return when a chunk comes to each rank, in an empty network."""
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


def grown(source: int, ways: Sequence[Way], to: frozenset[int]) -> list[Way]:
    """Put the ways of a chunk in order from its source on, and leave out those that lead nowhere."""
    onward: defaultdict[int, list[Way]] = defaultdict(list)
    for way in ways:
        onward[way[0]].append(way)
    order, todo, seen = list[tuple[int, int, int]](), [source], {source}
    while todo:
        for way in sorted(onward[todo.pop(0)]):
            if way[1] not in seen:
                seen.add(way[1])
                order.append(way)
                todo.append(way[1])
    needed = set(to)
    for way in reversed(order):
        if way[1] in needed:
            needed.add(way[0])
    return [way for way in order if way[1] in needed]


def unfolded(problem: Problem, ways: dict[int, list[Way]]) -> list[list[Hop]]:
    """Return the hops of all chunks from the ways of those that stand for the others."""
    hops = []
    for number, (start, moved) in enumerate(problem.images):
        back = {after: before for before, after in enumerate(moved)}
        hops.append([Hop(number, back[a], back[b], form) for a, b, form in ways[start]])
    return hops
