"""How the checker speaks of what is wrong: algorithm, rank, lane, step and chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["StepRef", "describe", "fault", "listed"]


class StepRef(NamedTuple):
    """Which step of which lane of which rank."""

    rank: int
    lane: int
    step: int


def describe(algorithm: Algorithm, spot: StepRef) -> str:
    """Name a step within its rank: its number, what it does and with whom."""
    lane = algorithm.programs[spot.rank].lanes[spot.lane]
    step = lane.steps[spot.step]
    sender = f" from {lane.receive}" if step.receives else ""
    receiver = f" to {lane.send}" if step.sends else ""
    return f"lane {spot.lane}, step {spot.step} ({step.kind}{sender}{receiver})"


def fault(
    algorithm: Algorithm, at: StepRef | int | None, what: str, expected: str, got: str, remedy: str
) -> ScheduleError:
    """Return the error for a step, a rank or the whole of an algorithm; `what` is a part of it, or nothing."""
    rank = at.rank if isinstance(at, StepRef) else at
    where = describe(algorithm, at) if isinstance(at, StepRef) else ""
    topic = ": ".join(filter(None, (f"algorithm {algorithm.name}", where, what)))
    return ScheduleError(topic, expected=expected, got=got, remedy=remedy, rank=rank)


def listed(numbers: Iterable[int]) -> str:
    """Write numbers with runs of three or more shortened: 0..3, 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
