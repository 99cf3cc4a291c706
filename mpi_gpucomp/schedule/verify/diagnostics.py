"""Errors of the checker, which name algorithm, rank, lane, step and chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi_gpucomp.schedule.ir import Algorithm, Step

__all__ = ["StepRef", "describe", "error_at", "format_ranks", "step_at"]


class StepRef(NamedTuple):
    """The position of a step in an algorithm."""

    rank: int
    lane: int
    step: int


def step_at(algorithm: Algorithm, ref: StepRef) -> Step:
    """Return the step at a position."""
    return algorithm.programs[ref.rank].lanes[ref.lane].steps[ref.step]


def describe(algorithm: Algorithm, ref: StepRef) -> str:
    """Describe a step within its rank: its position, kind and peers."""
    lane = algorithm.programs[ref.rank].lanes[ref.lane]
    step = lane.steps[ref.step]
    sender = f" from {lane.receive}" if step.receives else ""
    receiver = f" to {lane.send}" if step.sends else ""
    return f"lane {ref.lane}, step {ref.step} ({step.kind}{sender}{receiver})"


def error_at(
    algorithm: Algorithm, at: StepRef | int | None, field: str, expected: str, got: str, remedy: str
) -> ScheduleError:
    """Return the error for a step, a rank or the whole algorithm; `field` names a part of it, or is empty."""
    rank = at.rank if isinstance(at, StepRef) else at
    where = describe(algorithm, at) if isinstance(at, StepRef) else ""
    topic = ": ".join(filter(None, (f"algorithm {algorithm.name}", where, field)))
    return ScheduleError(topic, expected=expected, got=got, remedy=remedy, rank=rank)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks with runs of three or more shortened: 0..3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
