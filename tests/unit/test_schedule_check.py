"""The checker: every kind of mistake is found, named in full, and nothing that is right is refused."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from schedules import i, lane, o, program, s, with_lane, with_program, with_step, with_steps

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import Algorithm, Place, Step, checked
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.verify import _passed, check

RING = build("allreduce", "ring", 4)
CHAIN = build("broadcast", "chain", 3)
FOLLOW = "Follow the chunk through the schedule to the step that is missing or wrong."


def refusal(algorithm: Algorithm, in_flight: int | None = None) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(algorithm, in_flight)
    return str(caught.value)


def test_a_missing_copy_is_a_missing_result():
    steps = [Step("r", None, o(0))]
    quiet = with_steps(with_steps(CHAIN, 1, 0, steps), 2, 0, [])
    assert refusal(quiet) == (
        f"rank 2: algorithm chain: output chunk 0: expected chunk 0 of rank 0, got nothing. {FOLLOW}"
    )


def test_a_sum_that_lacks_ranks():
    algorithm = with_step(RING, 3, 0, 2, kind="rcs", source=None, target=o(0))
    assert refusal(algorithm) == (
        "rank 0: algorithm ring: output chunk 0: expected the sum of chunk 0 of ranks 0..3, "
        f"got the sum of chunk 0 of ranks 0..2. {FOLLOW}"
    )


def test_a_chunk_in_the_wrong_place():
    algorithm = with_step(build("alltoall", "pairwise", 2), 0, 0, 0, source=i(0))
    assert refusal(algorithm) == (
        "rank 1: algorithm pairwise: output chunk 0: expected chunk 1 of rank 0, got chunk 0 of rank 0. " + FOLLOW
    )


def test_a_contribution_twice():
    first = Algorithm(
        "twice",
        "reduce",
        2,
        1,
        False,
        (
            program(lane(Step("rrc", i(0), o(0)), Step("rrc", o(0), o(0)), receive=1)),
            program(lane(Step("s", i(0)), Step("s", i(0)), send=0)),
        ),
        root=0,
    )
    assert refusal(first) == (
        "rank 0: algorithm twice: lane 0, step 1 (rrc from 1): output chunk 0: expected two sums of the same chunk "
        "without a rank in common, got chunk 0 of rank 1 and the sum of chunk 0 of ranks 0, 1. "
        "Add each rank's share to a sum once."
    )


def test_different_chunks_are_not_added():
    algorithm = with_step(RING, 2, 0, 1, source=i(3))
    assert refusal(algorithm) == (
        "rank 2: algorithm ring: lane 0, step 1 (rrs from 1 to 3): input chunk 3: expected two sums of the same chunk "
        "without a rank in common, got chunk 0 of rank 1 and chunk 3 of rank 2. Add each rank's share to a sum once."
    )


def test_reading_what_is_not_there():
    algorithm = with_step(RING, 1, 0, 0, source=o(2))
    assert refusal(algorithm) == (
        "rank 1: algorithm ring: lane 0, step 0 (s to 2): output chunk 2: expected something to read, "
        "got a chunk that holds nothing yet. Fill it first, or read elsewhere."
    )


def test_a_message_without_a_receive_or_a_send():
    assert refusal(with_steps(CHAIN, 2, 0, [])) == (
        "rank 1: algorithm chain: lane 0, step 0 (rcs from 0 to 2): expected a receive at rank 2 on channel 0, "
        "got none that is left. Let every message have two ends."
    )
    assert refusal(with_steps(CHAIN, 0, 0, [])) == (
        "rank 1: algorithm chain: lane 0, step 0 (rcs from 0 to 2): expected a send at rank 0 on channel 0, "
        "got none that is left. Let every message have two ends."
    )
    other_channel = with_lane(CHAIN, 2, 0, replace(CHAIN.programs[2].lanes[0], channel=1))
    assert "expected a receive at rank 2 on channel 0, got none that is left." in refusal(other_channel)


def test_messages_of_different_lengths():
    gather = build("gather", "binomial", 4)
    assert refusal(with_step(gather, 2, 2, 0, count=1)) == (
        "rank 0: algorithm binomial: lane 2, step 0 (r from 2): count: expected 2 chunks, "
        "got 1 from rank 2, lane 2, step 0 (s to 0). Let both ends move the same chunks in the same order."
    )


def exchange(first: list[Step], second: list[Step]) -> Algorithm:
    programs = (program(lane(*first, send=1, receive=1)), program(lane(*second, send=0, receive=0)))
    return Algorithm("exchange", "alltoall", 2, 2, True, programs)


def test_a_deadlock_says_who_waits_for_whom():
    waiting = exchange([Step("r", None, o(1)), Step("s", i(1))], [Step("r", None, o(0)), Step("s", i(0))])
    assert refusal(waiting) == (
        "rank 0: algorithm exchange: lane 0, step 0 (r from 1): expected to run at some time, got a deadlock: it waits "
        "for rank 1, lane 0, step 0 (r from 0), which waits for rank 0, lane 0, step 0 (r from 1). "
        "Change the order of the steps, or let go of a dependency."
    )


def test_an_exchange_needs_one_chunk_in_flight():
    check(exchange([Step("s", i(1)), Step("r", None, o(1))], [Step("s", i(0)), Step("r", None, o(0))]), in_flight=1)


def double(first: str, second: str) -> Algorithm:
    """Write an exchange of two chunks each, as a message for each of them, in which sends are `s` and receives `r`."""
    steps = {
        0: {"s": [Step("s", i(2)), Step("s", i(3))], "r": [Step("r", None, s(0)), Step("r", None, s(1))]},
        1: {"s": [Step("s", i(0)), Step("s", i(1))], "r": [Step("r", None, s(0)), Step("r", None, s(1))]},
    }
    programs = []
    for rank, order in enumerate((first, second)):
        left = {kind: iter(these) for kind, these in steps[rank].items()}
        theirs, mine = 2 * (1 - rank), 2 * rank
        end = [Step("cpy", s(0), o(theirs), 2), Step("cpy", i(mine), o(mine), 2)]
        peer = 1 - rank
        programs.append(program(lane(*(next(left[kind]) for kind in order), *end, send=peer, receive=peer), scratch=2))
    return Algorithm("double", "alltoall", 2, 4, False, tuple(programs))


def test_room_decides_whether_sends_can_run_ahead():
    check(double("srsr", "srsr"), in_flight=1)
    check(double("ssrr", "ssrr"))
    check(double("ssrr", "ssrr"), in_flight=2)
    check(double("ssrr", "rrss"), in_flight=1)
    assert refusal(double("ssrr", "ssrr"), in_flight=1) == (
        "rank 0: algorithm double: lane 0, step 1 (s to 1): expected to run at some time, got a deadlock: it waits for "
        "rank 1, lane 0, step 1 (s to 0), which waits for rank 0, lane 0, step 1 (s to 1). "
        "Change the order of the steps, or let go of a dependency."
    )


def test_a_long_message_takes_as_much_room_as_several():
    lanes = [
        (lane(Step("s", i(2), None, 2), Step("r", None, o(2), 2), send=1, receive=1), lane(Step("cpy", i(0), o(0), 2))),
        (lane(Step("s", i(0), None, 2), Step("r", None, o(0), 2), send=0, receive=0), lane(Step("cpy", i(2), o(2), 2))),
    ]
    algorithm = Algorithm("long", "alltoall", 2, 4, False, tuple(program(*own) for own in lanes))
    check(algorithm, in_flight=2)
    assert "got a deadlock: it waits for rank 1, lane 0, step 0 (s to 0)" in refusal(algorithm, in_flight=1)


def test_a_long_circle_is_shortened():
    ring = build("allgather", "ring", 16, in_place=True)
    for rank in range(16):
        steps = ring.programs[rank].lanes[0].steps
        ring = with_steps(ring, rank, 0, [*steps[1:], steps[0]])
    said = refusal(ring)
    assert said.count("which waits for") == 6
    assert ", which waits for 10 more in turn, which waits for rank 0, lane 0, step 0 (rcs from 15 to 1). " in said


def test_dependencies_in_a_circle():
    lanes = (lane(Step("cpy", i(0), o(0), after=((1, 0),))), lane(Step("nop", after=((0, 0),))))
    algorithm = Algorithm("circle", "allreduce", 1, 1, False, (program(*lanes),))
    assert refusal(algorithm) == (
        "rank 0: algorithm circle: lane 0, step 0 (cpy): expected to run at some time, got a deadlock: it waits for "
        "rank 0, lane 1, step 0 (nop), which waits for rank 0, lane 0, step 0 (cpy). "
        "Change the order of the steps, or let go of a dependency."
    )
    alone = Algorithm("self", "allreduce", 1, 1, False, (program(lane(Step("cpy", i(0), o(0), after=((0, 0),)))),))
    assert "got a deadlock: it waits for rank 0, lane 0, step 0 (cpy). " in refusal(alone)


def test_a_race_between_two_lanes():
    tree = build("broadcast", "tree", 7)
    assert refusal(with_step(tree, 1, 1, 0, after=())) == (
        "rank 1: algorithm tree: lane 1, step 0 (s to 3): output chunk 0: expected an order between it and lane 0, "
        "step 0 (r from 0), got none, and one of them writes. Let one of them come after the other."
    )


def race(after: tuple[tuple[int, int], ...]) -> Algorithm:
    lanes = (lane(Step("cpy", i(0), s(0))), lane(Step("cpy", i(0), o(0))), lane(Step("cpy", s(0), o(0), after=after)))
    return Algorithm("race", "allreduce", 1, 1, False, (program(*lanes, scratch=1),))


def test_two_writers_need_an_order_even_if_they_write_the_same():
    check(race(((0, 0), (1, 0))))
    assert refusal(race(((0, 0),))) == (
        "rank 0: algorithm race: lane 2, step 0 (cpy): output chunk 0: expected an order between it and lane 1, step 0 "
        "(cpy), got none, and one of them writes. Let one of them come after the other."
    )
    assert "scratch chunk 0: expected an order between it and lane 0, step 0 (cpy)" in refusal(race(((1, 0),)))


def test_an_answer_is_an_order():
    """Rank 0 writes over what it has sent once rank 1 has answered; only the result is wrong, there is no race."""
    zero = program(lane(Step("s", o(0)), send=1), lane(Step("rrc", i(1), o(1)), Step("cpy", o(1), o(0)), receive=1))
    one = program(lane(Step("r", None, s(0)), Step("s", i(1)), send=0, receive=0), scratch=1)
    assert refusal(Algorithm("answered", "allreduce", 2, 2, True, (zero, one))) == (
        "rank 0: algorithm answered: output chunk 0: expected the sum of chunk 0 of ranks 0, 1, "
        f"got the sum of chunk 1 of ranks 0, 1. {FOLLOW}"
    )


def test_an_answer_does_not_prove_that_the_sender_has_stored():
    """Bytes may travel on before they are stored: rank 1 passes on, and reads its copy after an answer alone."""
    two = Algorithm(
        "hasty",
        "broadcast",
        3,
        1,
        True,
        (
            program(lane(Step("s", o(0)), send=1)),
            program(
                lane(Step("rcs", None, o(0)), send=2, receive=0),
                lane(Step("r", None, s(0)), Step("cpy", o(0), s(0)), receive=2),
                scratch=1,
            ),
            program(lane(Step("r", None, o(0)), Step("s", o(0)), send=1, receive=1)),
        ),
        root=0,
    )
    assert refusal(two) == (
        "rank 1: algorithm hasty: lane 1, step 1 (cpy): output chunk 0: expected an order between it and lane 0, "
        "step 0 (rcs from 0 to 2), got none, and one of them writes. Let one of them come after the other."
    )
    check(with_step(two, 1, 1, 1, after=((0, 0),)))


FORM = [
    (
        replace(CHAIN, collective="scan"),
        "algorithm chain: collective: expected one of broadcast, reduce, allreduce, allgather, reduce_scatter, "
        "alltoall, gather, scatter, got scan. Name the collective that it does.",
    ),
    (
        replace(CHAIN, ranks=4),
        "algorithm chain: ranks: expected one program for each of 4 ranks, got 3 programs. Write one for each rank.",
    ),
    (
        replace(CHAIN, chunks=0),
        "algorithm chain: chunks: expected 1 to 1048576, got 0. Cut the data into another number of chunks.",
    ),
    (
        replace(build("allgather", "ring", 3), chunks=4),
        "algorithm ring: chunks: expected 1 to 1048576, and a multiple of the 3 ranks, got 4. "
        "Cut the data into another number of chunks.",
    ),
    (
        replace(CHAIN, root=3),
        "algorithm chain: root: expected a rank from 0 to 2, got 3. Name a rank that there is.",
    ),
    (
        with_program(RING, 1, replace(RING.programs[1], input_chunks=9)),
        "rank 1: algorithm ring: input: expected 8 chunks, as allreduce has, got 9. Correct the length, or the chunks.",
    ),
    (
        with_program(RING, 1, replace(RING.programs[1], scratch_chunks=-1)),
        "rank 1: algorithm ring: scratch: expected 0 to 1048576 chunks, got -1. Correct the length.",
    ),
    (
        with_lane(CHAIN, 0, 0, replace(CHAIN.programs[0].lanes[0], send=3)),
        "rank 0: algorithm chain: lane 0: sends to: expected another rank from 0 to 2, got 3. "
        "Name a rank that there is.",
    ),
    (
        with_lane(CHAIN, 2, 0, replace(CHAIN.programs[2].lanes[0], receive=2)),
        "rank 2: algorithm chain: lane 0: receives from: expected another rank from 0 to 2, got 2. "
        "Name a rank that there is.",
    ),
    (
        with_program(CHAIN, 0, program(*CHAIN.programs[0].lanes, lane(Step("s", o(0)), send=1))),
        "rank 0: algorithm chain: lane 1: sends to rank 1 on channel 0: expected to be the only one, "
        "got lane 0 that does so too. Join the lanes, or use another channel.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, kind="send"),
        "rank 0: algorithm chain: lane 0, step 0 (send): kind: expected one of s, r, rcs, rrs, rrc, rrcs, cpy, re, "
        "nop, got send. Choose one of these.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, count=0),
        "rank 0: algorithm chain: lane 0, step 0 (s to 1): count: expected one chunk at least, got 0. "
        "Leave the step out.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, kind="r", target=o(0)),
        "rank 0: algorithm chain: lane 0, step 0 (r from None): expected a lane with a rank to receive from, got none. "
        "Give the lane a peer.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, source=None),
        "rank 0: algorithm chain: lane 0, step 0 (s to 1): source: expected a place in i, o or s, got None. "
        "Name a buffer and an offset.",
    ),
    (
        with_step(CHAIN, 2, 0, 0, target=Place("x", 0)),
        "rank 2: algorithm chain: lane 0, step 0 (r from 1): target: expected a place in i, o or s, got x[0]. "
        "Name a buffer and an offset.",
    ),
    (
        with_step(CHAIN, 2, 0, 0, target=s(0)),
        "rank 2: algorithm chain: lane 0, step 0 (r from 1): target: expected chunks of the scratch, which has 0 here, "
        "got s[0]. Correct the offset or the count, or lengthen the scratch.",
    ),
    (
        with_step(RING, 2, 0, 6, count=2, target=o(7)),
        "rank 2: algorithm ring: lane 0, step 6 (r from 1): target: expected chunks of the output, which has 8 here, "
        "got 2 chunks from o[7] on. Correct the offset or the count, or lengthen the scratch.",
    ),
    (
        with_step(RING, 2, 0, 6, target=i(3)),
        "rank 2: algorithm ring: lane 0, step 6 (r from 1): target: expected the output or scratch, got input chunk 3, "
        "which the caller keeps. Write elsewhere, or declare the algorithm to be in place.",
    ),
    (
        with_step(CHAIN, 2, 0, 0, after=((1, 0),)),
        "rank 2: algorithm chain: lane 0, step 0 (r from 1): after: expected a step that this rank has, "
        "got lane 1, step 0. Correct the dependency.",
    ),
]


@pytest.mark.parametrize(("algorithm", "said"), FORM, ids=lambda value: "" if isinstance(value, str) else value.name)
def test_form(algorithm: Algorithm, said: str):
    assert refusal(algorithm) == said


def test_the_senders_buffer_stays_unless_it_is_the_output_too():
    reduce = build("reduce", "chain", 3, in_place=True)
    check(reduce)
    kept = "expected the output or scratch, got input chunk 0, which the caller keeps"
    assert kept in refusal(with_step(reduce, 1, 0, 0, kind="rrcs", target=i(0)))
    scatter = build("scatter", "linear", 2, in_place=True)
    over = with_program(scatter, 0, replace(scatter.programs[0], lanes=(*scatter.programs[0].lanes, lane())))
    check(over)
    assert "got input chunk 1, which the caller keeps" in refusal(
        with_steps(over, 0, len(over.programs[0].lanes) - 1, [Step("cpy", i(0), i(1))])
    )


def test_a_reduce_scatter_in_place_may_use_all_of_its_input():
    ring = build("reduce_scatter", "ring", 4, in_place=True)
    check(with_step(ring, 2, 0, 1, kind="rrcs", target=i(0)))
    assert "got input chunk 0, which the caller keeps" in refusal(
        with_step(build("reduce_scatter", "ring", 4), 2, 0, 1, kind="rrcs", target=i(0))
    )


def test_checked_replays_once(monkeypatch: pytest.MonkeyPatch):
    algorithm = replace(CHAIN)
    runs = []

    def counted(algorithm: Algorithm, in_flight: int | None = None) -> None:
        runs.append(in_flight)
        check(algorithm, in_flight)

    monkeypatch.setattr("mpi_gpucomp.schedule.verify.check", counted)
    assert checked(algorithm) is algorithm and checked(algorithm) is algorithm
    assert runs == [1]
    checked(algorithm, in_flight=2)
    checked(replace(CHAIN))
    assert runs == [1, 2, 1]
    key = (id(algorithm), 1)
    assert key in _passed
    del algorithm
    gc.collect()
    assert key not in _passed


def test_checked_does_not_remember_failures():
    broken = with_steps(CHAIN, 2, 0, [])
    for _ in range(2):
        with pytest.raises(ScheduleError):
            checked(broken)
