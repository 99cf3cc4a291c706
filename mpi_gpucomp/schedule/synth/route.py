"""The first of the three stages: which links each chunk takes."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.synth.greedy import greedy
from mpi_gpucomp.schedule.synth.program import MICRO, Program
from mpi_gpucomp.schedule.synth.routing import Routing, unfolded

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.schedule.synth.problem import Problem

__all__ = ["MOST_CHOICES", "route"]

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
