"""An independent implementation of the rules of `schedule.ir`: executes an algorithm on integers, in a random order.

It shares no code with the checker. All lanes of all ranks advance in small moves, in an order drawn at random, through
several loops, and a connection buffers `room` chunks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

from mpi_gpucomp.schedule import Algorithm, Lane, Place

Inputs = list[list[int]]
"""The input of every rank in a loop."""


class Deadlock(Exception):
    """No lane can advance, and not all have finished."""


def draw_inputs(algorithm: Algorithm, seed: int) -> Inputs:
    """Draw the inputs of one loop; chunks are large integers, so that no two sums are equal by chance."""
    numbers = random.Random(seed)
    block = algorithm.chunks // algorithm.ranks
    length = block if algorithm.collective in ("allgather", "gather") else algorithm.chunks
    return [[numbers.getrandbits(60) for _ in range(length)] for _ in range(algorithm.ranks)]


def outcome(algorithm: Algorithm, inputs: Inputs, rank: int) -> list[int] | None:
    """Return the output by the definition of the collective, or None for a rank without one."""
    ranks, root = algorithm.ranks, algorithm.root or 0
    k = algorithm.chunks // ranks
    own = slice(rank * k, rank * k + k)
    sums = [sum(column) for column in zip(*inputs, strict=True)]
    joined = [chunk for each in inputs for chunk in each]
    return {
        "broadcast": inputs[root],
        "reduce": sums if rank == root else None,
        "allreduce": sums,
        "allgather": joined,
        "reduce_scatter": sums[own],
        "alltoall": [chunk for each in inputs for chunk in each[own]],
        "gather": joined if rank == root else None,
        "scatter": inputs[root][own],
    }[algorithm.collective]


class Buffers:
    """The buffers of one rank in one loop; input and output may share a list."""

    def __init__(self, algorithm: Algorithm, inputs: Inputs, rank: int) -> None:
        result = outcome(algorithm, inputs, rank)
        length = 0 if result is None else len(result)
        given = list(inputs[rank])
        if algorithm.collective in ("broadcast", "scatter") and rank != algorithm.root:
            given = [None] * len(given) if algorithm.collective == "broadcast" else []
        self.lists = {"i": given, "o": [None] * length, "s": [None] * algorithm.programs[rank].scratch_chunks}
        self.starts = {"i": 0, "o": 0, "s": 0}
        if algorithm.in_place and given and length:
            at = rank * (algorithm.chunks // algorithm.ranks)
            if len(given) < length:
                self.lists["o"][at : at + len(given)] = given
                self.lists["i"], self.starts["i"] = self.lists["o"], at
            else:
                self.lists["o"], self.starts["o"] = given, at if len(given) > length else 0
        self.output = range(self.starts["o"], self.starts["o"] + length)

    def read(self, place: Place, chunk: int) -> int:
        value = self.lists[place.buffer][self.starts[place.buffer] + place.offset + chunk]
        assert value is not None, f"{place} is uninitialised"
        return value

    def write(self, place: Place, chunk: int, value: int) -> None:
        self.lists[place.buffer][self.starts[place.buffer] + place.offset + chunk] = value

    def result(self) -> list[int]:
        return [self.lists["o"][cell] for cell in self.output]


class Machine:
    """The state of all ranks."""

    def __init__(self, algorithm: Algorithm, loops: list[Inputs], room: int) -> None:
        self.algorithm, self.room = algorithm, room
        self.buffers = [[Buffers(algorithm, inputs, rank) for rank in range(algorithm.ranks)] for inputs in loops]
        self.wires: dict[tuple[int, int, int], deque[int]] = {}
        self.done: dict[tuple[int, int], int] = {}

    def lane(self, rank: int, number: int, lane: Lane) -> Iterator[Callable[[], bool] | None]:
        """Run a lane; yield the condition that it waits for, or None between moves."""
        incoming = self.wires.setdefault((lane.receive, rank, lane.channel), deque())
        outgoing = self.wires.setdefault((rank, lane.send, lane.channel), deque())
        lanes = self.algorithm.programs[rank].lanes
        for loop, buffers in enumerate(self.buffers):
            for step in lane.steps:
                for other, index in step.after:
                    steps = loop * len(lanes[other].steps) + index + 1
                    yield lambda other=other, steps=steps: self.done.get((rank, other), 0) >= steps
                for chunk in range(step.count if step.kind != "nop" else 0):
                    if step.kind.startswith("r") and step.kind != "re":
                        yield lambda: bool(incoming)
                        value = incoming.popleft()
                        if step.kind.startswith("rr"):
                            value += buffers[rank].read(step.source, chunk)
                    else:
                        value = buffers[rank].read(step.source, chunk)
                        if step.kind == "re":
                            value += buffers[rank].read(step.target, chunk)
                    yield None
                    if step.kind in ("r", "rcs", "rrc", "rrcs", "cpy", "re"):
                        buffers[rank].write(step.target, chunk, value)
                    if step.kind.endswith("s"):
                        yield lambda: len(outgoing) < self.room
                        outgoing.append(value)
                    yield None
                self.done[rank, number] = self.done.get((rank, number), 0) + 1


def run(algorithm: Algorithm, seed: int = 0, loops: int = 3, room: int = 1) -> None:
    """Run an algorithm in an order drawn from the seed, and compare the outputs with the definition."""
    inputs = [draw_inputs(algorithm, seed + loop) for loop in range(loops)]
    machine = Machine(algorithm, inputs, room)
    running = [
        [machine.lane(rank, number, lane), None]
        for rank, program in enumerate(algorithm.programs)
        for number, lane in enumerate(program.lanes)
    ]
    order = random.Random(seed)
    while running:
        order.shuffle(running)
        moved = False
        for entry in list(running):
            lane, waits = entry
            for _ in range(order.randint(1, 6)):
                if waits is not None and not waits():
                    break
                moved = True
                try:
                    waits = next(lane)
                except StopIteration:
                    running.remove(entry)
                    break
            entry[1] = waits
        if not moved:
            raise Deadlock
    assert not any(machine.wires.values()), "unreceived messages"
    for loop, given in enumerate(inputs):
        for rank in range(algorithm.ranks):
            expected = outcome(algorithm, given, rank)
            assert machine.buffers[loop][rank].result() == (expected or []), f"loop {loop}, rank {rank}"
            if not algorithm.in_place and algorithm.collective not in ("broadcast", "scatter"):
                assert machine.buffers[loop][rank].lists["i"] == given[rank], "the input was changed"
