"""Checks an algorithm before it may run: its form, its messages, its order, its races, and its result.

The check runs the algorithm once on symbols. Ranks are free to run at any speed, but since no step ever has a choice
and no race is left, every order of events has the same outcome as the one that is tried. How loops meet needs no check
of its own: their data and scratch are disjoint, and their messages stay in order because each connection belongs to
one lane at either end.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.verify.deadlock import executable, paired
from mpi_gpucomp.schedule.verify.races import check_races
from mpi_gpucomp.schedule.verify.result import check_result
from mpi_gpucomp.schedule.verify.structure import check_form

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["check", "checked"]

_passed: dict[tuple[int, int], weakref.ref[Algorithm]] = {}


def check(algorithm: Algorithm, in_flight: int | None = None) -> None:
    """Raise ScheduleError unless the algorithm does what its collective promises, on every run.

    `in_flight` is how many chunks a connection can hold between a send and its receive, 1 at least; with the default
    it is any number, which finds the deadlocks that no runtime can avoid.
    """
    check_form(algorithm)
    pairs = paired(algorithm)
    order = executable(algorithm, pairs, in_flight)
    check_races(algorithm, order, pairs)
    check_result(algorithm, order)


def checked(algorithm: Algorithm, in_flight: int = 1) -> Algorithm:
    """Return the algorithm once it has passed its check, for which one time in its life is enough.

    `in_flight` is what the runtime can hold; 1 is what every runtime must (see `schedule.ir`).
    """
    key = (id(algorithm), in_flight)
    known = _passed.get(key)
    if known is None or known() is not algorithm:
        check(algorithm, in_flight)
        _passed[key] = weakref.ref(algorithm, lambda _: _passed.pop(key, None))
    return algorithm
