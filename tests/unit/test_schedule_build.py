"""Plans and what becomes of them: lanes, fused steps, dependencies, and other roots."""

from __future__ import annotations

import pytest
from interpreter import run
from schedules import i, o, s

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import Algorithm, CollectiveSpec, Lane, Program, ScheduleBuilder, Step, rotated
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.verify import check


def test_a_plan_as_the_documentation_has_it():
    plan = ScheduleBuilder("chain", "broadcast", ranks=3, in_place=True)
    for rank in range(2):
        plan.copy(rank, o(0), rank + 1, o(0))
    assert plan.algorithm() == Algorithm(
        "chain",
        "broadcast",
        3,
        1,
        True,
        (
            Program(1, 1, 0, (Lane(1, None, 0, (Step("s", o(0)),)),)),
            Program(1, 1, 0, (Lane(2, 0, 0, (Step("rcs", None, o(0)),)),)),
            Program(1, 1, 0, (Lane(None, 1, 0, (Step("r", None, o(0)),)),)),
        ),
        root=0,
    )


def test_two_sends_of_a_chunk_have_lanes_of_their_own():
    plan = ScheduleBuilder("star", "broadcast", ranks=4, in_place=True)
    plan.copy(0, o(0), 1, o(0))
    plan.copy(1, o(0), 2, o(0))
    plan.copy(1, o(0), 3, o(0))
    algorithm = plan.algorithm()
    check(algorithm)
    assert algorithm.programs[1].lanes == (
        Lane(None, 0, 0, (Step("r", None, o(0)),)),
        Lane(2, None, 0, (Step("s", o(0), after=((0, 0),)),)),
        Lane(3, None, 0, (Step("s", o(0), after=((0, 0),)),)),
    )


def test_channels_have_lanes_of_their_own():
    plan = ScheduleBuilder("wide", "broadcast", ranks=3, in_place=True)
    plan.cut(2)
    for chunk in range(2):
        for rank in range(2):
            plan.copy(rank, o(chunk), rank + 1, o(chunk), channel=chunk)
    algorithm = plan.algorithm()
    check(algorithm)
    assert algorithm.programs[1].lanes == tuple(Lane(2, 0, chunk, (Step("rcs", None, o(chunk)),)) for chunk in range(2))


def test_what_changes_between_receive_and_send_is_not_passed_on():
    plan = ScheduleBuilder("own", "reduce", ranks=3)
    plan.copy(2, i(0), 1, s(0))
    plan.local_reduce(1, i(0), s(0))
    plan.reduce(1, s(0), 0, o(0), operand=i(0))
    algorithm = plan.algorithm()
    check(algorithm)
    run(algorithm)
    assert algorithm.programs[1] == Program(
        1,
        0,
        1,
        (
            Lane(None, 2, 0, (Step("r", None, s(0)),)),
            Lane(None, None, 0, (Step("re", i(0), s(0), after=((0, 0),)),)),
            Lane(0, None, 0, (Step("s", s(0), after=((1, 0),)),)),
        ),
    )


def test_a_sum_that_is_needed_later_is_kept():
    plan = ScheduleBuilder("kept", "allreduce", ranks=2)
    plan.reduce(0, i(0), 1, o(0), operand=i(0))
    plan.copy(1, o(0), 0, o(0))
    algorithm = plan.algorithm()
    check(algorithm)
    assert algorithm.programs[1].lanes == (Lane(0, 0, 0, (Step("rrcs", i(0), o(0)),)),)


def test_the_transfers_of_a_round_read_before_they_write():
    plan = ScheduleBuilder("swap", "alltoall", ranks=2, in_place=True)
    with plan.round():
        plan.copy(0, i(1), 1, o(0))
        plan.copy(1, i(0), 0, o(1))
    algorithm = plan.algorithm()
    check(algorithm, in_flight=1)
    run(algorithm)
    assert algorithm.programs[0].lanes == (
        Lane(1, None, 0, (Step("s", i(1)),)),
        Lane(None, 1, 0, (Step("r", None, o(1), after=((0, 0),)),)),
    )


def test_one_after_the_other_is_not_at_once():
    plan = ScheduleBuilder("overwritten", "alltoall", ranks=2, in_place=True)
    plan.copy(0, i(1), 1, o(0))
    plan.copy(1, i(0), 0, o(1))
    with pytest.raises(ScheduleError) as caught:
        check(plan.algorithm())
    assert str(caught.value) == (
        "rank 0: algorithm overwritten: output chunk 1: expected chunk 0 of rank 1, got chunk 1 of rank 0. "
        "Follow the chunk through the schedule to the step that is missing or wrong."
    )


def test_separate_memories_need_no_order():
    plan = ScheduleBuilder("swap", "alltoall", ranks=2)
    with plan.round():
        plan.copy(0, i(1), 1, o(0))
        plan.copy(1, i(0), 0, o(1))
    assert not any(step.after for program in plan.algorithm().programs for _, _, step in program.steps())


def test_copies_onto_itself_vanish_in_place():
    for in_place, lanes in ((False, (Lane(None, None, 0, (Step("cpy", i(0), o(2)),)),)), (True, ())):
        plan = ScheduleBuilder("own", "allgather", ranks=3, in_place=in_place)
        plan.local_copy(2, i(0), o(2))
        assert plan.algorithm().programs[2].lanes == lanes


def test_a_dependency_that_follows_from_others_is_left_out():
    plan = ScheduleBuilder("again", "broadcast", ranks=2, in_place=True)
    plan.copy(0, o(0), 1, s(0))
    plan.local_copy(1, s(0), o(0))
    plan.copy(0, o(0), 1, s(0), channel=1)
    algorithm = plan.algorithm()
    check(algorithm)
    run(algorithm)
    assert algorithm.programs[1].lanes == (
        Lane(None, 0, 0, (Step("r", None, s(0)),)),
        Lane(None, None, 0, (Step("cpy", s(0), o(0), after=((0, 0),)),)),
        Lane(None, 0, 1, (Step("r", None, s(0), after=((1, 0),)),)),
    )


def test_scratch_is_as_long_as_it_is_used():
    plan = ScheduleBuilder("far", "allreduce", ranks=1)
    plan.local_copy(0, i(0), s(6))
    assert plan.algorithm().programs[0] == Program(1, 1, 7, (Lane(None, None, 0, (Step("cpy", i(0), s(6)),)),))


@pytest.mark.parametrize("root", range(5))
def test_rotated(root: int):
    algorithm = rotated(build("reduce", "binomial", 5), root)
    assert algorithm.root == root
    assert algorithm == build("reduce", "binomial", 5, root)
    check(algorithm)
    run(algorithm)
    assert rotated(algorithm, 5 - root) == build("reduce", "binomial", 5)


def test_rotating_what_has_no_root_or_has_blocks():
    ring = rotated(build("allreduce", "ring", 5), 2)
    assert ring.root is None
    check(ring)
    with pytest.raises(ScheduleError) as caught:
        rotated(build("gather", "linear", 5), 2)
    assert str(caught.value) == (
        "algorithm linear: expected a collective of whole vectors (broadcast, reduce, allreduce) to rotate, "
        "got gather. Build it for the root: its places depend on the ranks."
    )


def test_goals_as_the_table_has_them():
    lengths = {
        collective: [
            (
                CollectiveSpec(collective, 3, 6, root=1).input_chunks(rank),
                CollectiveSpec(collective, 3, 6, root=1).output_chunks(rank),
            )
            for rank in (0, 1)
        ]
        for collective in (
            "broadcast",
            "reduce",
            "allreduce",
            "allgather",
            "reduce_scatter",
            "alltoall",
            "gather",
            "scatter",
        )
    }
    assert lengths == {
        "broadcast": [(0, 6), (6, 6)],
        "reduce": [(6, 0), (6, 6)],
        "allreduce": [(6, 6), (6, 6)],
        "allgather": [(2, 6), (2, 6)],
        "reduce_scatter": [(6, 2), (6, 2)],
        "alltoall": [(6, 6), (6, 6)],
        "gather": [(2, 0), (2, 6)],
        "scatter": [(0, 2), (6, 2)],
    }


def test_blocks_of_several_chunks():
    plan = ScheduleBuilder("two chunks a block", "allgather", ranks=2)
    plan.cut(4)
    for rank in range(2):
        plan.local_copy(rank, i(0), o(2 * rank), 2)
        plan.copy(rank, i(0), 1 - rank, o(2 * rank), 2)
    algorithm = plan.algorithm()
    check(algorithm)
    run(algorithm)
