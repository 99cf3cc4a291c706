"""Ways to change a schedule, for tests of what must not go unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpi_gpucomp.schedule import Algorithm, Lane, Program, Step
from mpi_gpucomp.schedule.builder import i, o, s

__all__ = ["i", "lane", "o", "s", "with_lane", "with_program", "with_step", "with_steps"]


def with_lane(algorithm: Algorithm, rank: int, number: int, lane: Lane) -> Algorithm:
    """Put another lane in a rank's program."""
    program = algorithm.programs[rank]
    lanes = (*program.lanes[:number], lane, *program.lanes[number + 1 :])
    return with_program(algorithm, rank, replace(program, lanes=lanes))


def with_program(algorithm: Algorithm, rank: int, program: Program) -> Algorithm:
    """Give a rank another program."""
    programs = (*algorithm.programs[:rank], program, *algorithm.programs[rank + 1 :])
    return replace(algorithm, programs=programs)


def with_steps(algorithm: Algorithm, rank: int, number: int, steps: Sequence[Step]) -> Algorithm:
    """Give a lane other steps."""
    lane = algorithm.programs[rank].lanes[number]
    return with_lane(algorithm, rank, number, replace(lane, steps=tuple(steps)))


def with_step(algorithm: Algorithm, rank: int, number: int, index: int, **changes: object) -> Algorithm:
    """Change a step."""
    steps = list(algorithm.programs[rank].lanes[number].steps)
    steps[index] = replace(steps[index], **changes)
    return with_steps(algorithm, rank, number, steps)


def lane(*steps: Step, send: int | None = None, receive: int | None = None, channel: int = 0) -> Lane:
    """Write a lane."""
    return Lane(send, receive, channel, steps)


def program(*lanes: Lane, scratch: int = 0) -> Program:
    """Write a program that leaves the lengths of input and output to its collective."""
    return Program(0, 0, scratch, lanes)
