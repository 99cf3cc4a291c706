"""The second stage: in which order the hops of a routing are made, and when, in one loop.

Greedy, as TACCL does it: of the hops that could be made next, the one whose chunk has the longest way before it goes
first, then the one that can begin soonest. A hop keeps its link, and the ports on its way, busy.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.synth.problem import Hop, Problem
    from mpi_gpucomp.schedule.synth.routing import Routing

__all__ = ["Timed", "ordered"]


class Timed(NamedTuple):
    """A hop with its time, and how many hops of following chunks go with it in one message."""

    hop: Hop
    start: float
    end: float


def ordered(routing: Routing) -> list[Timed]:
    """Return all hops with their times, in the order of their beginnings."""
    problem = routing.problem
    behind = {hop: far for hops in routing.hops for hop, far in _distances(problem, hops).items()}
    onward: defaultdict[tuple[int, int], list[Hop]] = defaultdict(list)
    for hops in routing.hops:
        for hop in hops:
            onward[hop.chunk, hop.sender].append(hop)
    free: defaultdict[str, float] = defaultdict(float)
    sources = (hop for number, chunk in enumerate(problem.chunks) for hop in onward[number, chunk.source])
    line = [(_priority(problem, hop, 0.0, behind), hop, 0.0) for hop in sources]
    heapify(line)
    done: list[Timed] = []
    while line:
        known, hop, ready = heappop(line)
        start = max(ready, _free(problem, hop, free))
        if start > known[0]:
            # What it needs has been taken since: it stands in line again. Nothing ever becomes free sooner.
            heappush(line, (_priority(problem, hop, start, behind), hop, ready))
            continue
        for name, seconds in problem.loads(hop.sender, hop.receiver, hop.form):
            if not name.startswith(("stream", "processor")):
                free[name] = start + seconds
        end = start + problem.latency(hop.sender, hop.receiver, hop.form)
        done.append(Timed(hop, start, end))
        for other in onward[hop.chunk, hop.receiver]:
            heappush(line, (_priority(problem, other, end, behind), other, end))
    return sorted(done, key=lambda one: (one.start, one.end, one.hop))


def _priority(problem: Problem, hop: Hop, start: float, behind: dict[Hop, float]) -> tuple[float, ...]:
    """Put the earliest first among those that compete, the longest way first among the earliest."""
    in_order = problem.chunks[hop.chunk].source if problem.sketch.in_order else 0
    return start, in_order, -behind[hop], hop.chunk, hop.sender, hop.receiver


def _free(problem: Problem, hop: Hop, free: dict[str, float]) -> float:
    names = (name for name, _ in problem.loads(hop.sender, hop.receiver, hop.form))
    return max(free.get(name, 0.0) for name in names)


def _distances(problem: Problem, hops: list[Hop]) -> dict[Hop, float]:
    """Return for each hop how long its chunk still travels, to the last of the ranks that get it from there."""
    below: defaultdict[int, float] = defaultdict(float)
    found = {}
    for hop in reversed(hops):
        found[hop] = problem.latency(hop.sender, hop.receiver, hop.form) + below[hop.receiver]
        below[hop.sender] = max(below[hop.sender], found[hop])
    return found
