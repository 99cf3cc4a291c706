"""Mutated schedules: the checker rejects them unless they are still correct in every execution order."""

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
from mpi_gpucomp.schedule.ir import BUFFERED_CHUNKS
from mpi_gpucomp.schedule.verify import check

SMALL = [
    build(collective, info.name, ranks, root, nodes=[range(ranks)[::2], range(ranks)[1::2]], in_place=in_place)
    for collective in COLLECTIVES
    for info in algorithms(collective)
    for ranks, root in ((3, 1), (4, 0))
    for in_place in (False, True)
]


@pytest.mark.parametrize("algorithm", SMALL, ids=lambda it: f"{it.collective}-{it.name}-{it.ranks}")
def test_removing_any_message_is_rejected(algorithm: Algorithm):
    for rank, own in enumerate(algorithm.programs):
        for number, lane in enumerate(own.lanes):
            for index, step in enumerate(lane.steps):
                if step.sends or step.receives:
                    steps = [*lane.steps[:index], *lane.steps[index + 1 :]]
                    with pytest.raises(ScheduleError):
                        check(with_steps(algorithm, rank, number, steps))


@st.composite
def mutants(draw: st.DrawFn) -> Algorithm:
    """Draw a correct schedule, and mutate it once or twice."""
    algorithm = draw(st.sampled_from(SMALL))
    for _ in range(draw(st.integers(1, 2))):
        algorithm = draw(
            st.sampled_from(
                [drop_step, swap_steps, change_peer, change_place, change_count, drop_dependencies, change_kind]
            )
        )(algorithm, draw)
    return algorithm


def draw_step(algorithm: Algorithm, draw: st.DrawFn) -> tuple[int, int, int]:
    steps = [
        (rank, number, index)
        for rank, own in enumerate(algorithm.programs)
        for number, lane in enumerate(own.lanes)
        for index in range(len(lane.steps))
    ]
    return draw(st.sampled_from(steps))


def drop_step(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, index = draw_step(algorithm, draw)
    return with_step(algorithm, rank, number, index, kind="nop", source=None, target=None, count=1)


def swap_steps(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, index = draw_step(algorithm, draw)
    steps = list(algorithm.programs[rank].lanes[number].steps)
    other = draw(st.integers(0, len(steps) - 1))
    steps[index], steps[other] = steps[other], steps[index]
    return with_steps(algorithm, rank, number, steps)


def change_peer(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, _ = draw_step(algorithm, draw)
    end = draw(st.sampled_from(["send", "receive"]))
    peer = draw(st.integers(0, algorithm.ranks - 1))
    return with_lane(algorithm, rank, number, replace(algorithm.programs[rank].lanes[number], **{end: peer}))


def change_place(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    rank, number, index = draw_step(algorithm, draw)
    end = draw(st.sampled_from(["source", "target"]))
    place = Place(draw(st.sampled_from("ios")), draw(st.integers(0, 4)))
    return with_step(algorithm, rank, number, index, **{end: place})


def change_count(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    return with_step(algorithm, *draw_step(algorithm, draw), count=draw(st.integers(1, 3)))


def drop_dependencies(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    return with_step(algorithm, *draw_step(algorithm, draw), after=())


def change_kind(algorithm: Algorithm, draw: st.DrawFn) -> Algorithm:
    return with_step(
        algorithm, *draw_step(algorithm, draw), kind=draw(st.sampled_from(["rcs", "rrs", "rrc", "rrcs", "re"]))
    )


@settings(max_examples=600)
@given(algorithm=mutants(), seed=st.integers(0, 1000), room=st.sampled_from([1, BUFFERED_CHUNKS]))
def test_accepted_schedules_are_correct_in_every_order(algorithm: Algorithm, seed: int, room: int):
    try:
        check(algorithm, in_flight=room)
    except ScheduleError as error:
        if error.got.startswith("a deadlock: "):
            # It may read an uninitialised chunk before it deadlocks.
            with pytest.raises((interpreter.Deadlock, AssertionError)):
                interpreter.run(algorithm, seed, room=room)
        return
    for extra in range(3):
        interpreter.run(algorithm, seed + extra, room=room)


def test_the_interpreter_detects_races():
    """The independent interpreter must be able to reject a schedule as well."""
    tree = build("broadcast", "tree", 7)
    for number in (1, 2):
        tree = with_step(tree, 1, number, 0, after=())
    with pytest.raises(AssertionError, match="is uninitialised"):
        for seed in range(50):
            interpreter.run(tree, seed)
