"""Buffered sends: on random exchanges, the checker and the independent interpreter find the same deadlocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import interpreter
import pytest
from schedules import i, lane, o, program, s

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import Algorithm, Lane, Step
from mpi_gpucomp.schedule.cost import LinkCost
from mpi_gpucomp.schedule.ir import BUFFERED_CHUNKS
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import Topology, even_nodes
from mpi_gpucomp.schedule.verify import check

Messages = list[Step]


def messages(kind: str, first: int, counts: list[int]) -> Iterator[Step]:
    """Yield the sends or receives of a block, which starts at chunk `first`, in messages of these lengths."""
    for count in counts:
        place = {"source": i(first)} if kind == "s" else {"target": o(first)}
        yield Step(kind, **place, count=count)
        first += count


def merged(numbers: Random, sends: Messages, receives: Messages) -> Messages:
    """Return the sends before the receives, but for a few receives that come earlier."""
    steps = [*sends, *receives]
    for at in range(len(sends), len(steps)):
        earlier = numbers.randint(0, at) if numbers.random() < 0.3 else at
        while earlier < at and steps[at - 1].kind == "s":
            steps[at - 1], steps[at] = steps[at], steps[at - 1]
            at -= 1
    return steps


def exchange(seed: int) -> Algorithm:
    """Draw an all-to-all whose result is right wherever it does not deadlock."""
    numbers = Random(seed)
    ranks, block = numbers.randint(2, 3), numbers.choice([2, 6, 8, 9, 12])
    lengths = {}
    for pair in ((a, b) for a in range(ranks) for b in range(ranks) if a != b):
        lengths[pair] = []
        while sum(lengths[pair]) < block:
            lengths[pair].append(numbers.randint(1, min(4, block - sum(lengths[pair]))))
    programs = []
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank]
        sources = numbers.sample(peers, len(peers))
        lanes = [lane(Step("cpy", i(rank * block), o(rank * block), block))]
        for to, origin in zip(peers, sources, strict=True):
            sends = list(messages("s", to * block, lengths[rank, to]))
            receives = list(messages("r", origin * block, lengths[origin, rank]))
            if numbers.random() < 0.3:
                lanes += [lane(*sends, send=to), lane(*receives, receive=origin)]
            else:
                lanes.append(lane(*merged(numbers, sends, receives), send=to, receive=origin))
        programs.append(program(*(waiting(numbers, lanes, at) for at in range(len(lanes)))))
    return Algorithm(f"exchange {seed}", "alltoall", ranks, ranks * block, False, tuple(programs))


def waiting(numbers: Random, lanes: list[Lane], number: int) -> Lane:
    """Return a lane of which some steps wait for a step of another lane."""
    steps = []
    for step in lanes[number].steps:
        other = numbers.randrange(len(lanes))
        if numbers.random() < 0.1 and other != number:
            step = replace(step, after=((other, numbers.randrange(len(lanes[other].steps))),))
        steps.append(step)
    return replace(lanes[number], steps=tuple(steps))


def deadlocks(algorithm: Algorithm, room: int) -> bool:
    """Return whether the checker finds a deadlock, after comparing with the interpreter, whose loops overlap."""
    try:
        check(algorithm, room)
    except ScheduleError as error:
        assert error.got.startswith("a deadlock: ")
        with pytest.raises(interpreter.Deadlock):
            interpreter.run(algorithm, seed=room, room=room)
        return True
    interpreter.run(algorithm, seed=room, room=room)
    return False


def test_checker_and_interpreter_agree():
    found = {room: [deadlocks(exchange(seed), room) for seed in range(150)] for room in (1, 7, BUFFERED_CHUNKS)}
    one, seven, eight = found.values()
    assert sum(one) > sum(seven) > sum(eight) > 0
    assert not all(eight)
    assert all(fewer or not more for fewer, more in zip(seven, eight, strict=True))


def test_the_simulation_blocks_where_the_checker_finds_a_deadlock():
    for seed in range(60):
        algorithm, loops = exchange(seed), 3
        topology = Topology("hosts", even_nodes(algorithm.ranks, 1), {"wire": LinkCost(1e-6, 1e-9)}, None, "wire")
        found = simulate(algorithm, topology, loops * algorithm.chunks * 1000, 1000)
        sent = sum(record.kind == "send" for record in found.records)
        every = loops * algorithm.chunks // algorithm.ranks * algorithm.ranks * (algorithm.ranks - 1)
        assert (sent < every) == deadlocks(algorithm, BUFFERED_CHUNKS)


def test_overlapping_loops_share_the_room_of_a_connection():
    """Rank 1 takes its chunks after rank 2, which rank 0 serves last: meanwhile a loop is buffered, and the next."""
    chunks = range(5)
    sends, receives = [Step("s", o(n)) for n in chunks], [Step("r", None, o(n)) for n in chunks]
    programs = (
        program(lane(*sends, send=1), lane(replace(sends[0], after=((0, 4),)), *sends[1:], send=2)),
        program(
            lane(replace(receives[0], after=((1, 0),)), *receives[1:], receive=0),
            lane(Step("r", None, s(0)), receive=2),
            scratch=1,
        ),
        program(lane(*receives, receive=0), lane(Step("s", o(4), after=((0, 4),)), send=1)),
    )
    algorithm = Algorithm("ahead", "broadcast", 3, 5, True, programs, root=0)
    assert [deadlocks(algorithm, room) for room in (4, 5, 6, BUFFERED_CHUNKS)] == [True, False, False, False]
