"""Functions that modify a schedule, for tests of the checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpi_gpucomp.schedule import Algorithm, Lane, Program, Step
from mpi_gpucomp.schedule.builder import i, o, s

__all__ = ["i", "lane", "o", "s", "with_lane", "with_program", "with_step", "with_steps"]


def with_lane(algorithm: Algorithm, rank: int, number: int, lane: Lane) -> Algorithm:
    """Replace a lane."""
    program = algorithm.programs[rank]
    lanes = (*program.lanes[:number], lane, *program.lanes[number + 1 :])
    return with_program(algorithm, rank, replace(program, lanes=lanes))


def with_program(algorithm: Algorithm, rank: int, program: Program) -> Algorithm:
    """Replace the program of a rank."""
    programs = (*algorithm.programs[:rank], program, *algorithm.programs[rank + 1 :])
    return replace(algorithm, programs=programs)


def with_steps(algorithm: Algorithm, rank: int, number: int, steps: Sequence[Step]) -> Algorithm:
    """Replace the steps of a lane."""
    lane = algorithm.programs[rank].lanes[number]
    return with_lane(algorithm, rank, number, replace(lane, steps=tuple(steps)))


def with_step(algorithm: Algorithm, rank: int, number: int, index: int, **changes: object) -> Algorithm:
    """Replace fields of a step."""
    steps = list(algorithm.programs[rank].lanes[number].steps)
    steps[index] = replace(steps[index], **changes)
    return with_steps(algorithm, rank, number, steps)


def lane(*steps: Step, send: int | None = None, receive: int | None = None, channel: int = 0) -> Lane:
    """Return a lane."""
    return Lane(send, receive, channel, steps)


def program(*lanes: Lane, scratch: int = 0) -> Program:
    """Return a program with unspecified lengths of input and output."""
    return Program(0, 0, scratch, lanes)
