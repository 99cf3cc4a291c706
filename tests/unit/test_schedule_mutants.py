"""Good schedules with something changed: the checker must notice, unless they are still right in every order."""

from __future__ import annotations

from dataclasses import replace

import interpreter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import with_lane, with_step, with_steps

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import COLLECTIVES, Algorithm, Place
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.verify import check

SMALL = [
    build(collective, row.name, ranks, root, nodes=[range(ranks)[::2], range(ranks)[1::2]], in_place=in_place)
    for collective in COLLECTIVES
    for row in algorithms(collective)
    for ranks, root in ((3, 1), (4, 0))
    for in_place in (False, True)
]


@pytest.mark.parametrize("algorithm", SMALL, ids=lambda it: f"{it.collective}-{it.name}-{it.ranks}")
def test_no_message_can_be_left_out(algorithm: Algorithm):
    for rank, own in enumerate(algorithm.programs):
        for number, line in enumerate(own.lanes):
            for index, step in enumerate(line.steps):
                if step.sends or step.receives:
                    steps = [*line.steps[:index], *line.steps[index + 1 :]]
                    with pytest.raises(ScheduleError):
                        check(with_steps(algorithm, rank, number, steps))


@st.composite
def mutants(draw: st.DrawFn) -> Algorithm:
    """Draw a good schedule, and change one or two things in it."""
    algorithm = draw(st.sampled_from(SMALL))
    for _ in range(draw(st.integers(1, 2))):
        algorithm = draw(st.sampled_from([dropped, swapped, redirected, moved, stretched, loosened, turned]))(
            algorithm, draw
        )
    return algorithm


def spot(algorithm: Algorithm, draw: st.DrawFn) -> tuple[int, int, int]:
    spots = [
        (rank, number, index)
        for rank, own in enumerate(algorithm.programs)
        for number, line in enumerate(own.lanes)
        for index in range(len(line.steps))
    ]
    return draw(st.sampled_from(spots))


def dropped(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, index = spot(algorithm, draw)
    return with_step(algorithm, rank, number, index, kind="nop", source=None, target=None, count=1)


def swapped(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, index = spot(algorithm, draw)
    steps = list(algorithm.programs[rank].lanes[number].steps)
    other = draw(st.integers(0, len(steps) - 1))
    steps[index], steps[other] = steps[other], steps[index]
    return with_steps(algorithm, rank, number, steps)


def redirected(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, _ = spot(algorithm, draw)
    end = draw(st.sampled_from(["send", "receive"]))
    peer = draw(st.integers(0, algorithm.ranks - 1))
    return with_lane(algorithm, rank, number, replace(algorithm.programs[rank].lanes[number], **{end: peer}))


def moved(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, index = spot(algorithm, draw)
    end = draw(st.sampled_from(["source", "target"]))
    place = Place(draw(st.sampled_from("ios")), draw(st.integers(0, 4)))
    return with_step(algorithm, rank, number, index, **{end: place})


def stretched(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    return with_step(algorithm, *spot(algorithm, draw), count=draw(st.integers(1, 3)))


def loosened(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    return with_step(algorithm, *spot(algorithm, draw), after=())


def turned(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    return with_step(algorithm, *spot(algorithm, draw), kind=draw(st.sampled_from(["rcs", "rrs", "rrc", "rrcs", "re"])))


@settings(max_examples=600)
@given(algorithm=mutants(), seed=st.integers(0, 1000))
def test_what_passes_the_check_is_right_in_every_order(algorithm: Algorithm, seed: int):
    try:
        check(algorithm, in_flight=1)
    except ScheduleError:
        return
    for extra in range(3):
        interpreter.run(algorithm, seed + extra)


def test_the_interpreter_finds_races_too():
    """Both readings of the rules must be able to disagree with a schedule."""
    tree = build("broadcast", "tree", 7)
    for number in (1, 2):
        tree = with_step(tree, 1, number, 0, after=())
    with pytest.raises(AssertionError, match="holds nothing"):
        for seed in range(50):
            interpreter.run(tree, seed)
