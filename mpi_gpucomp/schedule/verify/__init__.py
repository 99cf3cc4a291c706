"""Checks an algorithm before it may run: its structure, messages, deadlocks, races, and its result.

The check executes the algorithm once on symbolic values. Ranks may run at any speed, but no step ever has a choice and
no race is left, so every interleaving has the same outcome as the one that is tried. Several loops need no check of
their own: their data and scratch are disjoint, and their messages stay in order because each connection belongs to one
lane at either end.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.verify.deadlock import execution_order, match_messages
from mpi_gpucomp.schedule.verify.races import check_races
from mpi_gpucomp.schedule.verify.result import check_result
from mpi_gpucomp.schedule.verify.structure import check_structure

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["check", "checked"]

_passed: dict[tuple[int, int], weakref.ref[Algorithm]] = {}


def check(algorithm: Algorithm, in_flight: int | None = None) -> None:
    """Raise ScheduleError unless every execution of the algorithm satisfies its collective's postcondition.

    `in_flight` is how many chunks a connection buffers between a send and its receive, 1 at least. The default is
    unlimited, which finds the deadlocks that no runtime can avoid.
    """
    check_structure(algorithm)
    messages = match_messages(algorithm)
    order = execution_order(algorithm, messages, in_flight)
    check_races(algorithm, order, messages)
    check_result(algorithm, order)


def checked(algorithm: Algorithm, in_flight: int = 1) -> Algorithm:
    """Return the algorithm after checking it; an object that has passed is not checked again.

    `in_flight` is how many chunks the runtime buffers per connection; 1 is what every runtime must (see `schedule.ir`).
    """
    key = (id(algorithm), in_flight)
    known = _passed.get(key)
    if known is None or known() is not algorithm:
        check(algorithm, in_flight)
        _passed[key] = weakref.ref(algorithm, lambda _: _passed.pop(key, None))
    return algorithm
