"""Checks an algorithm before it may run: its structure, messages, deadlocks, races, and its result.

The check executes the algorithm once on symbolic values. Ranks may run at any speed, but no step ever has a choice and
no race is left, so every interleaving has the same outcome as the one that is tried. Several loops need no check of
their own: their data and scratch are disjoint, and their messages stay in order because each connection belongs to one
lane at either end. Loops that overlap share the room of a connection, which `deadlock` shows to be enough.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from mpi_gpucomp.schedule.ir import BUFFERED_CHUNKS
from mpi_gpucomp.schedule.verify.deadlock import execution_order, match_messages
from mpi_gpucomp.schedule.verify.races import check_races
from mpi_gpucomp.schedule.verify.result import check_result
from mpi_gpucomp.schedule.verify.structure import check_structure

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["check", "checked"]

_passed: dict[int, tuple[weakref.ref[Algorithm], int]] = {}
"""By identity, each algorithm that has passed, and the fewest buffered chunks with which it has."""


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


def checked(algorithm: Algorithm, in_flight: int = BUFFERED_CHUNKS) -> Algorithm:
    """Return the algorithm after checking it; an object that has passed is not checked again.

    `in_flight` is how many chunks the runtime buffers per connection (see `schedule.ir`). An algorithm that has passed
    with fewer passes with more.
    """
    key = id(algorithm)
    known, fewest = _passed.get(key, (None, 0))
    if known is None or known() is not algorithm or fewest > in_flight:
        check(algorithm, in_flight)
        _passed[key] = weakref.ref(algorithm, lambda _: _passed.pop(key, None)), in_flight
    return algorithm
