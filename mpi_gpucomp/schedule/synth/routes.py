"""The first of the three stages: which links each chunk takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.synth.problem import PLAIN
from mpi_gpucomp.schedule.synth.routing import MICRO, Program, Routing, grown, recoding, unfolded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi_gpucomp.schedule.synth.problem import Problem

__all__ = ["MOST_CHOICES", "greedy", "route"]


# A first routing, quickly: each chunk grows a tree, hop by hop, where it makes the least of a bottleneck.


def greedy(problem: Problem) -> Routing:
    """Return a routing that is feasible, and often good."""
    found = _Growth(problem)
    todo = {number: set(problem.chunks[number].to) for number in problem.representatives}
    everywhere = problem.topology.ranks - 1
    while any(todo.values()):
        for number, missing in todo.items():
            if not missing:
                continue
            if len(problem.chunks[number].to) == everywhere:
                missing.discard(found.reach_next(number))
            else:
                missing -= found.reach(number, min(missing))
    ways = {n: grown(problem.chunks[n].source, found.ways[n], problem.chunks[n].to) for n in problem.representatives}
    return Routing(problem, unfolded(problem, ways))


class _Growth:
    """The trees so far, and how busy everything is with them."""

    def __init__(self, problem: Problem) -> None:
        """Begin at the sources."""
        self._problem = problem
        self._loads: defaultdict[str, float] = defaultdict(float)
        self._onward: defaultdict[int, list[int]] = defaultdict(list)
        for a, b in problem.links:
            self._onward[a].append(b)
        self._images: defaultdict[int, list[dict[int, int]]] = defaultdict(list)
        for start, moved in problem.images:
            self._images[start].append({after: before for before, after in enumerate(moved)})
        self.ways: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._arrived: dict[int, dict[int, float]] = {
            n: {problem.chunks[n].source: 0.0} for n in problem.representatives
        }
        self._forms: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        """In which forms a rank has a chunk ready to be sent."""
        self._exact: set[tuple[int, int]] = {(n, problem.chunks[n].source) for n in problem.representatives}
        """Who has a chunk that was never encoded."""

    def reach_next(self, number: int) -> int:
        """Let a chunk take the hop that costs least to a rank that does not have it; return the rank."""
        arrived = self._arrived[number]
        candidates = (
            (*self._cost(number, a, b, form, arrived[a]), a, b, form)
            for a in arrived
            for b in self._onward[a]
            if b not in arrived and self._problem.allowed(number, a, b)
            for form in self._forms_of(number, a)
        )
        _, _, a, b, form = min(candidates)
        self._take(number, a, b, form)
        return b

    def reach(self, number: int, goal: int) -> set[int]:
        """Let a chunk take the cheapest way to a rank; return all that it has come to."""
        arrived, before = self._arrived[number], dict[int, tuple[int, int]]()
        cost = {rank: 0.0 for rank in arrived}
        line = [(0.0, rank) for rank in arrived]
        while line:
            spent, a = heappop(line)
            if a == goal:
                break
            for b in self._onward[a]:
                for form in self._forms_of(number, a) if self._problem.allowed(number, a, b) else ():
                    total = spent + sum(self._cost(number, a, b, form, 0.0))
                    if total < cost.get(b, float("inf")):
                        cost[b], before[b] = total, (a, form)
                        heappush(line, (total, b))
        way = [goal]
        while way[-1] not in arrived:
            way.append(before[way[-1]][0])
        for b, a in reversed(list(pairwise(way))):
            self._take(number, a, b, before[b][1])
        return set(way)

    def _forms_of(self, number: int, rank: int) -> Iterator[int]:
        """Yield the forms in which a rank may send a chunk: not encoded a second time."""
        for form in range(len(self._problem.codings)):
            once = form == PLAIN or (number, rank) in self._exact or form in self._forms[number, rank]
            if once or len(self._problem.codings) == 1:
                yield form

    def _cost(self, number: int, a: int, b: int, form: int, start: float) -> tuple[float, float]:
        """Return what a hop would cost: the load that it leaves somewhere, and when the chunk would be there."""
        problem = self._problem
        loads = list(problem.loads(a, b, form))
        fresh = form not in self._forms[number, a]
        source = a == problem.chunks[number].source
        if fresh and not problem.mirrored:
            loads += problem.coding_loads(a, problem.piece * problem.codings[form].encode)
        most = max(self._loads[name] + seconds for name, seconds in loads)
        waits = recoding(problem, source, form) if fresh else 0.0
        there = start + waits + problem.latency(a, b, form)
        return problem.loops * most + there, there

    def _take(self, number: int, a: int, b: int, form: int) -> None:
        problem = self._problem
        arrived = self._arrived[number]
        arrived[b] = self._cost(number, a, b, form, arrived[a])[1]
        fresh = form not in self._forms[number, a] and not problem.mirrored
        for back in self._images[number]:
            for name, seconds in problem.loads(back[a], back[b], form):
                self._loads[name] += seconds
            for name, seconds in (
                problem.coding_loads(back[a], problem.piece * problem.codings[form].encode) if fresh else ()
            ):
                self._loads[name] += seconds
        if form == PLAIN and (number, a) in self._exact:
            self._exact.add((number, b))
        self._forms[number, a].add(form)
        self._forms[number, b].add(form)
        self.ways[number].append((a, b, form))


MOST_CHOICES = 20_000
"""With more of them the solver would not get beyond the first routing."""
SPARING_SHARE = 0.3
"""The part of the time for finding, among routings that are as quick, one that sends less."""


def route(problem: Problem, seconds: float, progress: Callable[[float, float], None] | None = None) -> Routing:
    """Return the best routing that is found in time; it is at least as good as the greedy one."""
    first = greedy(problem)
    if seconds <= 0 or not 0 < _choices(problem) <= MOST_CHOICES:
        return first
    begun = perf_counter()
    program = Program(problem, first)
    try:
        outcome = program.model.solve(seconds * (1 - SPARING_SHARE), program.start(first), progress)
    except ScheduleError:
        return first  # there was not even time to look at it
    found = Routing(problem, unfolded(problem, program.ways(outcome.values)))
    best = min(first, found, key=lambda routing: routing.seconds)
    spared = program.sparing(best, seconds - (perf_counter() - begun))
    return replace(spared, proven=outcome.proven, bound=max(0.0, outcome.bound / MICRO - program.slack))


def _choices(problem: Problem) -> int:
    """Return how many yes or no there are to be decided."""
    ways = (problem.allowed(number, a, b) for number in problem.representatives for a, b in problem.links)
    return sum(ways) * len(problem.codings)
