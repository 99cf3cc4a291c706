"""The checker rejects every kind of faulty schedule with a full error message, and accepts correct ones."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from interpreter import Deadlock, run
from schedules import i, lane, o, program, s, with_lane, with_program, with_step, with_steps

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import Algorithm, Place, Step, checked
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.ir import BUFFERED_CHUNKS
from mpi_gpucomp.schedule.verify import _passed, check

RING = build("allreduce", "ring", 4)
CHAIN = build("broadcast", "chain", 3)
TRACE = "Trace the chunk through the schedule to the missing or wrong step."


def error_of(algorithm: Algorithm, in_flight: int | None = None) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(algorithm, in_flight)
    return str(caught.value)


def test_missing_copy():
    steps = [Step("r", None, o(0))]
    incomplete = with_steps(with_steps(CHAIN, 1, 0, steps), 2, 0, [])
    assert error_of(incomplete) == (
        f"rank 2: algorithm chain: output chunk 0: expected chunk 0 of rank 0, got an uninitialised chunk. {TRACE}"
    )


def test_incomplete_sum():
    algorithm = with_step(RING, 3, 0, 2, kind="rcs", source=None, target=o(0))
    assert error_of(algorithm) == (
        "rank 0: algorithm ring: output chunk 0: expected the sum of chunk 0 of ranks 0..3, "
        f"got the sum of chunk 0 of ranks 0..2. {TRACE}"
    )


def test_wrong_chunk():
    algorithm = with_step(build("alltoall", "pairwise", 2), 0, 0, 0, source=i(0))
    assert error_of(algorithm) == (
        "rank 1: algorithm pairwise: output chunk 0: expected chunk 1 of rank 0, got chunk 0 of rank 0. " + TRACE
    )


def test_contribution_added_twice():
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
    assert error_of(first) == (
        "rank 0: algorithm twice: lane 0, step 1 (rrc from 1): output chunk 0: expected two partial sums of the "
        "same chunk from disjoint ranks, got chunk 0 of rank 1 and the sum of chunk 0 of ranks 0, 1. "
        "Add each rank's contribution exactly once."
    )


def test_sum_of_different_chunks():
    algorithm = with_step(RING, 2, 0, 1, source=i(3))
    assert error_of(algorithm) == (
        "rank 2: algorithm ring: lane 0, step 1 (rrs from 1 to 3): input chunk 3: expected two partial sums of "
        "the same chunk from disjoint ranks, got chunk 0 of rank 1 and chunk 3 of rank 2. "
        "Add each rank's contribution exactly once."
    )


def test_read_of_uninitialised_chunk():
    algorithm = with_step(RING, 1, 0, 0, source=o(2))
    assert error_of(algorithm) == (
        "rank 1: algorithm ring: lane 0, step 0 (s to 2): output chunk 2: expected initialised data to read, "
        "got an uninitialised chunk. Write it first, or read another chunk."
    )


def test_unmatched_send_or_receive():
    assert error_of(with_steps(CHAIN, 2, 0, [])) == (
        "rank 1: algorithm chain: lane 0, step 0 (rcs from 0 to 2): expected a matching receive on rank 2, "
        "channel 0, got none. Give every message a send and a receive."
    )
    assert error_of(with_steps(CHAIN, 0, 0, [])) == (
        "rank 1: algorithm chain: lane 0, step 0 (rcs from 0 to 2): expected a matching send on rank 0, "
        "channel 0, got none. Give every message a send and a receive."
    )
    other_channel = with_lane(CHAIN, 2, 0, replace(CHAIN.programs[2].lanes[0], channel=1))
    assert "expected a matching receive on rank 2, channel 0, got none." in error_of(other_channel)


def test_message_lengths_disagree():
    gather = build("gather", "binomial", 4)
    assert error_of(with_step(gather, 2, 2, 0, count=1)) == (
        "rank 0: algorithm binomial: lane 2, step 0 (r from 2): count: expected 2 chunks, "
        "got 1 from rank 2, lane 2, step 0 (s to 0). Let both ends move the same chunks in the same order."
    )


def exchange(first: list[Step], second: list[Step]) -> Algorithm:
    programs = (program(lane(*first, send=1, receive=1)), program(lane(*second, send=0, receive=0)))
    return Algorithm("exchange", "alltoall", 2, 2, True, programs)


def test_deadlock_names_the_wait_cycle():
    waiting = exchange([Step("r", None, o(1)), Step("s", i(1))], [Step("r", None, o(0)), Step("s", i(0))])
    assert error_of(waiting) == (
        "rank 0: algorithm exchange: lane 0, step 0 (r from 1): expected a step that can run, got a deadlock: it waits "
        "for rank 1, lane 0, step 0 (r from 0), which waits for rank 0, lane 0, step 0 (r from 1). "
        "Reorder the steps, or remove a dependency."
    )


def test_an_exchange_needs_one_chunk_in_flight():
    check(exchange([Step("s", i(1)), Step("r", None, o(1))], [Step("s", i(0)), Step("r", None, o(0))]), in_flight=1)


def swap(first: str, second: str) -> Algorithm:
    """Return an exchange between two ranks, with the given orders of sends (s) and receives (r)."""
    chunks = first.count("s")
    programs = []
    for rank, order in enumerate((first, second)):
        peer, theirs, mine = 1 - rank, chunks * (1 - rank), chunks * rank
        moves = {
            "s": (Step("s", i(theirs + chunk)) for chunk in range(chunks)),
            "r": (Step("r", None, s(chunk)) for chunk in range(chunks)),
        }
        end = [Step("cpy", s(0), o(theirs), chunks), Step("cpy", i(mine), o(mine), chunks)]
        steps = [next(moves[kind]) for kind in order]
        programs.append(program(lane(*steps, *end, send=peer, receive=peer), scratch=chunks))
    return Algorithm("swap", "alltoall", 2, 2 * chunks, False, tuple(programs))


def test_sends_block_when_the_connection_is_full():
    check(swap("srsr", "srsr"), in_flight=1)
    check(swap("ssrr", "ssrr"))
    check(swap("ssrr", "ssrr"), in_flight=2)
    check(swap("ssrr", "rrss"), in_flight=1)
    assert error_of(swap("ssrr", "ssrr"), in_flight=1) == (
        "rank 0: algorithm swap: lane 0, step 1 (s to 1): expected a step that can run, got a deadlock: it waits for "
        "rank 1, lane 0, step 1 (s to 0), which waits for rank 0, lane 0, step 1 (s to 1). "
        "Receive earlier, or remove a dependency: a connection buffers 1 chunk."
    )


def test_a_connection_buffers_eight_chunks():
    assert BUFFERED_CHUNKS == 8
    eight, nine = (swap("s" * chunks + "r" * chunks, "s" * chunks + "r" * chunks) for chunks in (8, 9))
    assert checked(eight) is eight
    run(eight, room=8)
    with pytest.raises(ScheduleError) as caught:
        checked(nine)
    assert str(caught.value) == (
        "rank 0: algorithm swap: lane 0, step 8 (s to 1): expected a step that can run, got a deadlock: it waits for "
        "rank 1, lane 0, step 8 (s to 0), which waits for rank 0, lane 0, step 8 (s to 1). "
        "Receive earlier, or remove a dependency: a connection buffers 8 chunks."
    )
    for algorithm, room in ((eight, 7), (nine, 8)):
        with pytest.raises(Deadlock):
            run(algorithm, room=room)


def test_long_message_takes_one_slot_per_chunk():
    lanes = [
        (lane(Step("s", i(2), None, 2), Step("r", None, o(2), 2), send=1, receive=1), lane(Step("cpy", i(0), o(0), 2))),
        (lane(Step("s", i(0), None, 2), Step("r", None, o(0), 2), send=0, receive=0), lane(Step("cpy", i(2), o(2), 2))),
    ]
    algorithm = Algorithm("long", "alltoall", 2, 4, False, tuple(program(*own) for own in lanes))
    check(algorithm, in_flight=2)
    assert "got a deadlock: it waits for rank 1, lane 0, step 0 (s to 0)" in error_of(algorithm, in_flight=1)


def test_long_wait_cycle_is_shortened():
    ring = build("allgather", "ring", 16, in_place=True)
    for rank in range(16):
        steps = ring.programs[rank].lanes[0].steps
        ring = with_steps(ring, rank, 0, [*steps[1:], steps[0]])
    message = error_of(ring)
    assert message.count("which waits for") == 6
    assert ", which waits for 10 more steps, which waits for rank 0, lane 0, step 0 (rcs from 15 to 1). " in message


def test_cyclic_dependencies():
    lanes = (lane(Step("cpy", i(0), o(0), after=((1, 0),))), lane(Step("nop", after=((0, 0),))))
    algorithm = Algorithm("cycle", "allreduce", 1, 1, False, (program(*lanes),))
    assert error_of(algorithm) == (
        "rank 0: algorithm cycle: lane 0, step 0 (cpy): expected a step that can run, got a deadlock: it waits for "
        "rank 0, lane 1, step 0 (nop), which waits for rank 0, lane 0, step 0 (cpy). "
        "Reorder the steps, or remove a dependency."
    )
    alone = Algorithm("self", "allreduce", 1, 1, False, (program(lane(Step("cpy", i(0), o(0), after=((0, 0),)))),))
    assert "got a deadlock: it waits for rank 0, lane 0, step 0 (cpy). " in error_of(alone)


def test_race_between_two_lanes():
    tree = build("broadcast", "tree", 7)
    assert error_of(with_step(tree, 1, 1, 0, after=())) == (
        "rank 1: algorithm tree: lane 1, step 0 (s to 3): output chunk 0: expected an order relative to lane 0, "
        "step 0 (r from 0), got a race: at least one of them writes. Make one of them depend on the other."
    )


def race(after: tuple[tuple[int, int], ...]) -> Algorithm:
    lanes = (lane(Step("cpy", i(0), s(0))), lane(Step("cpy", i(0), o(0))), lane(Step("cpy", s(0), o(0), after=after)))
    return Algorithm("race", "allreduce", 1, 1, False, (program(*lanes, scratch=1),))


def test_writers_of_equal_values_still_race():
    check(race(((0, 0), (1, 0))))
    assert error_of(race(((0, 0),))) == (
        "rank 0: algorithm race: lane 2, step 0 (cpy): output chunk 0: expected an order relative to lane 1, step 0 "
        "(cpy), got a race: at least one of them writes. Make one of them depend on the other."
    )
    assert "scratch chunk 0: expected an order relative to lane 0, step 0 (cpy)" in error_of(race(((1, 0),)))


def test_a_reply_orders_steps():
    """Rank 0 overwrites what it has sent once rank 1 has replied: the result is wrong, but there is no race."""
    zero = program(lane(Step("s", o(0)), send=1), lane(Step("rrc", i(1), o(1)), Step("cpy", o(1), o(0)), receive=1))
    one = program(lane(Step("r", None, s(0)), Step("s", i(1)), send=0, receive=0), scratch=1)
    assert error_of(Algorithm("replied", "allreduce", 2, 2, True, (zero, one))) == (
        "rank 0: algorithm replied: output chunk 0: expected the sum of chunk 0 of ranks 0, 1, "
        f"got the sum of chunk 1 of ranks 0, 1. {TRACE}"
    )


def test_a_reply_does_not_prove_that_the_sender_has_stored():
    """A chunk may be forwarded before it is stored: rank 1 reads its copy after nothing but a reply."""
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
    assert error_of(two) == (
        "rank 1: algorithm hasty: lane 1, step 1 (cpy): output chunk 0: expected an order relative to lane 0, "
        "step 0 (rcs from 0 to 2), got a race: at least one of them writes. Make one of them depend on the other."
    )
    check(with_step(two, 1, 1, 1, after=((0, 0),)))


STRUCTURE = [
    (
        replace(CHAIN, collective="scan"),
        "algorithm chain: collective: expected one of broadcast, reduce, allreduce, allgather, reduce_scatter, "
        "alltoall, gather, scatter, got scan. Name one of these.",
    ),
    (
        replace(CHAIN, ranks=4),
        "algorithm chain: ranks: expected one program for each of 4 ranks, got 3 programs. Give every rank a program.",
    ),
    (
        replace(CHAIN, chunks=0),
        "algorithm chain: chunks: expected 1 to 1048576, got 0. Use another number of chunks.",
    ),
    (
        replace(build("allgather", "ring", 3), chunks=4),
        "algorithm ring: chunks: expected 1 to 1048576, and a multiple of the 3 ranks, got 4. "
        "Use another number of chunks.",
    ),
    (
        replace(CHAIN, root=3),
        "algorithm chain: root: expected a rank from 0 to 2, got 3. Use a valid rank.",
    ),
    (
        with_program(RING, 1, replace(RING.programs[1], input_chunks=9)),
        "rank 1: algorithm ring: input: expected 8 chunks, as in allreduce, got 9. Correct the length.",
    ),
    (
        with_program(RING, 1, replace(RING.programs[1], scratch_chunks=-1)),
        "rank 1: algorithm ring: scratch: expected 0 to 1048576 chunks, got -1. Correct the length.",
    ),
    (
        with_lane(CHAIN, 0, 0, replace(CHAIN.programs[0].lanes[0], send=3)),
        "rank 0: algorithm chain: lane 0: sends to: expected another rank from 0 to 2, got 3. Use a valid rank.",
    ),
    (
        with_lane(CHAIN, 2, 0, replace(CHAIN.programs[2].lanes[0], receive=2)),
        "rank 2: algorithm chain: lane 0: receives from: expected another rank from 0 to 2, got 2. Use a valid rank.",
    ),
    (
        with_program(CHAIN, 0, program(*CHAIN.programs[0].lanes, lane(Step("s", o(0)), send=1))),
        "rank 0: algorithm chain: lane 1: sends to rank 1 on channel 0: expected one lane, got lane 0 as well. "
        "Merge the lanes, or use another channel.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, kind="send"),
        "rank 0: algorithm chain: lane 0, step 0 (send): kind: expected one of s, r, rcs, rrs, rrc, rrcs, cpy, re, "
        "nop, got send. Use one of these.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, count=0),
        "rank 0: algorithm chain: lane 0, step 0 (s to 1): count: expected 1 or more, got 0. Remove the step.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, kind="r", target=o(0)),
        "rank 0: algorithm chain: lane 0, step 0 (r from None): expected a lane with a peer to receive from, got none. "
        "Give the lane a peer.",
    ),
    (
        with_step(CHAIN, 0, 0, 0, source=None),
        "rank 0: algorithm chain: lane 0, step 0 (s to 1): source: expected a chunk of i, o or s, got None. "
        "Give a buffer and an offset.",
    ),
    (
        with_step(CHAIN, 2, 0, 0, target=Place("x", 0)),
        "rank 2: algorithm chain: lane 0, step 0 (r from 1): target: expected a chunk of i, o or s, got x[0]. "
        "Give a buffer and an offset.",
    ),
    (
        with_step(CHAIN, 2, 0, 0, target=s(0)),
        "rank 2: algorithm chain: lane 0, step 0 (r from 1): target: expected chunks inside the scratch, which has 0, "
        "got s[0]. Correct the offset or the count, or enlarge the scratch.",
    ),
    (
        with_step(RING, 2, 0, 6, count=2, target=o(7)),
        "rank 2: algorithm ring: lane 0, step 6 (r from 1): target: expected chunks inside the output, which has 8, "
        "got 2 chunks from o[7] on. Correct the offset or the count, or enlarge the scratch.",
    ),
    (
        with_step(RING, 2, 0, 6, target=i(3)),
        "rank 2: algorithm ring: lane 0, step 6 (r from 1): target: expected the output or scratch, got input chunk 3, "
        "which is read-only. Write elsewhere, or declare the algorithm in place.",
    ),
    (
        with_step(CHAIN, 2, 0, 0, after=((1, 0),)),
        "rank 2: algorithm chain: lane 0, step 0 (r from 1): after: expected an existing step of this rank, "
        "got lane 1, step 0. Correct the dependency.",
    ),
]


@pytest.mark.parametrize(
    ("algorithm", "message"), STRUCTURE, ids=lambda value: "" if isinstance(value, str) else value.name
)
def test_structure(algorithm: Algorithm, message: str):
    assert error_of(algorithm) == message


def test_input_is_read_only_unless_it_aliases_the_output():
    reduce = build("reduce", "chain", 3, in_place=True)
    check(reduce)
    read_only = "expected the output or scratch, got input chunk 0, which is read-only"
    assert read_only in error_of(with_step(reduce, 1, 0, 0, kind="rrcs", target=i(0)))
    scatter = build("scatter", "linear", 2, in_place=True)
    extended = with_program(scatter, 0, replace(scatter.programs[0], lanes=(*scatter.programs[0].lanes, lane())))
    check(extended)
    assert "got input chunk 1, which is read-only" in error_of(
        with_steps(extended, 0, len(extended.programs[0].lanes) - 1, [Step("cpy", i(0), i(1))])
    )


def test_in_place_reduce_scatter_may_overwrite_its_input():
    ring = build("reduce_scatter", "ring", 4, in_place=True)
    check(with_step(ring, 2, 0, 1, kind="rrcs", target=i(0)))
    assert "got input chunk 0, which is read-only" in error_of(
        with_step(build("reduce_scatter", "ring", 4), 2, 0, 1, kind="rrcs", target=i(0))
    )


def test_checked_checks_once(monkeypatch: pytest.MonkeyPatch):
    algorithm = replace(CHAIN)
    runs = []

    def counted(algorithm: Algorithm, in_flight: int | None = None) -> None:
        runs.append(in_flight)
        check(algorithm, in_flight)

    monkeypatch.setattr("mpi_gpucomp.schedule.verify.check", counted)
    assert checked(algorithm) is algorithm and checked(algorithm) is algorithm
    assert runs == [8]
    checked(replace(CHAIN))
    assert runs == [8, 8]
    checked(algorithm, in_flight=1)
    checked(algorithm)
    assert runs == [8, 8, 1]
    key = id(algorithm)
    assert key in _passed
    del algorithm
    gc.collect()
    assert key not in _passed


def test_checked_does_not_remember_failures():
    broken = with_steps(CHAIN, 2, 0, [])
    for _ in range(2):
        with pytest.raises(ScheduleError):
            checked(broken)
