"""The builder and its lowering: lanes, fused steps, dependencies, and rotation."""

from __future__ import annotations

import pytest
from interpreter import run
from schedules import i, o, s

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import Algorithm, CollectiveSpec, Lane, Program, ScheduleBuilder, Step, rotate
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.verify import check


def test_example_of_the_documentation():
    builder = ScheduleBuilder("chain", "broadcast", ranks=3, in_place=True)
    for rank in range(2):
        builder.copy(rank, o(0), rank + 1, o(0))
    assert builder.algorithm() == Algorithm(
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


def test_two_sends_of_a_chunk_use_separate_lanes():
    builder = ScheduleBuilder("star", "broadcast", ranks=4, in_place=True)
    builder.copy(0, o(0), 1, o(0))
    builder.copy(1, o(0), 2, o(0))
    builder.copy(1, o(0), 3, o(0))
    algorithm = builder.algorithm()
    check(algorithm)
    assert algorithm.programs[1].lanes == (
        Lane(None, 0, 0, (Step("r", None, o(0)),)),
        Lane(2, None, 0, (Step("s", o(0), after=((0, 0),)),)),
        Lane(3, None, 0, (Step("s", o(0), after=((0, 0),)),)),
    )


def test_channels_use_separate_lanes():
    builder = ScheduleBuilder("wide", "broadcast", ranks=3, in_place=True)
    builder.chunks = 2
    for chunk in range(2):
        for rank in range(2):
            builder.copy(rank, o(chunk), rank + 1, o(chunk), channel=chunk)
    algorithm = builder.algorithm()
    check(algorithm)
    assert algorithm.programs[1].lanes == tuple(Lane(2, 0, chunk, (Step("rcs", None, o(chunk)),)) for chunk in range(2))


def test_a_modified_chunk_is_not_forwarded():
    builder = ScheduleBuilder("own", "reduce", ranks=3)
    builder.copy(2, i(0), 1, s(0))
    builder.local_reduce(1, i(0), s(0))
    builder.reduce(1, s(0), 0, o(0), operand=i(0))
    algorithm = builder.algorithm()
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


def test_a_sum_that_is_read_later_is_stored():
    builder = ScheduleBuilder("kept", "allreduce", ranks=2)
    builder.reduce(0, i(0), 1, o(0), operand=i(0))
    builder.copy(1, o(0), 0, o(0))
    algorithm = builder.algorithm()
    check(algorithm)
    assert algorithm.programs[1].lanes == (Lane(0, 0, 0, (Step("rrcs", i(0), o(0)),)),)


def test_transfers_of_a_round_read_before_they_write():
    builder = ScheduleBuilder("swap", "alltoall", ranks=2, in_place=True)
    with builder.round():
        builder.copy(0, i(1), 1, o(0))
        builder.copy(1, i(0), 0, o(1))
    algorithm = builder.algorithm()
    check(algorithm, in_flight=1)
    run(algorithm)
    assert algorithm.programs[0].lanes == (
        Lane(1, None, 0, (Step("s", i(1)),)),
        Lane(None, 1, 0, (Step("r", None, o(1), after=((0, 0),)),)),
    )


def test_transfers_outside_a_round_are_sequential():
    builder = ScheduleBuilder("overwritten", "alltoall", ranks=2, in_place=True)
    builder.copy(0, i(1), 1, o(0))
    builder.copy(1, i(0), 0, o(1))
    with pytest.raises(ScheduleError) as caught:
        check(builder.algorithm())
    assert str(caught.value) == (
        "rank 0: algorithm overwritten: output chunk 1: expected chunk 0 of rank 1, got chunk 1 of rank 0. "
        "Trace the chunk through the schedule to the missing or wrong step."
    )


def test_separate_buffers_need_no_dependencies():
    builder = ScheduleBuilder("swap", "alltoall", ranks=2)
    with builder.round():
        builder.copy(0, i(1), 1, o(0))
        builder.copy(1, i(0), 0, o(1))
    assert not any(step.after for program in builder.algorithm().programs for _, _, step in program.steps())


def test_copies_between_aliased_chunks_are_dropped():
    for in_place, lanes in ((False, (Lane(None, None, 0, (Step("cpy", i(0), o(2)),)),)), (True, ())):
        builder = ScheduleBuilder("own", "allgather", ranks=3, in_place=in_place)
        builder.local_copy(2, i(0), o(2))
        assert builder.algorithm().programs[2].lanes == lanes


def test_implied_dependencies_are_omitted():
    builder = ScheduleBuilder("again", "broadcast", ranks=2, in_place=True)
    builder.copy(0, o(0), 1, s(0))
    builder.local_copy(1, s(0), o(0))
    builder.copy(0, o(0), 1, s(0), channel=1)
    algorithm = builder.algorithm()
    check(algorithm)
    run(algorithm)
    assert algorithm.programs[1].lanes == (
        Lane(None, 0, 0, (Step("r", None, s(0)),)),
        Lane(None, None, 0, (Step("cpy", s(0), o(0), after=((0, 0),)),)),
        Lane(None, 0, 1, (Step("r", None, s(0), after=((1, 0),)),)),
    )


def test_scratch_covers_the_highest_offset():
    builder = ScheduleBuilder("far", "allreduce", ranks=1)
    builder.local_copy(0, i(0), s(6))
    assert builder.algorithm().programs[0] == Program(1, 1, 7, (Lane(None, None, 0, (Step("cpy", i(0), s(6)),)),))


@pytest.mark.parametrize("root", range(5))
def test_rotate(root: int):
    algorithm = rotate(build("reduce", "binomial", 5), root)
    assert algorithm.root == root
    assert algorithm == build("reduce", "binomial", 5, root)
    check(algorithm)
    run(algorithm)
    assert rotate(algorithm, 5 - root) == build("reduce", "binomial", 5)


def test_rotate_without_root_or_with_blocks():
    ring = rotate(build("allreduce", "ring", 5), 2)
    assert ring.root is None
    check(ring)
    with pytest.raises(ScheduleError) as caught:
        rotate(build("gather", "linear", 5), 2)
    assert str(caught.value) == (
        "algorithm linear: expected a collective on whole vectors (broadcast, reduce, allreduce) to rotate, "
        "got gather. Build it for the root: its chunk offsets depend on the ranks."
    )


def test_buffer_lengths_of_each_collective():
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
    builder = ScheduleBuilder("two chunks a block", "allgather", ranks=2)
    builder.chunks = 4
    for rank in range(2):
        builder.local_copy(rank, i(0), o(2 * rank), 2)
        builder.copy(rank, i(0), 1 - rank, o(2 * rank), 2)
    algorithm = builder.algorithm()
    check(algorithm)
    run(algorithm)
