"""Cases for `core_driver.cpp`: schedules, layouts, inputs and expected results, drawn from a seed.

Numbers are written as 64-bit integers. Elements are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from mpi_gpucomp.engine.program import _table
from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import Algorithm, Lane, Place, Program, Step
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.builder import ScheduleBuilder, i, o, s
from mpi_gpucomp.schedule.ir import BUFFERED_CHUNKS, COLLECTIVES, KINDS
from mpi_gpucomp.schedule.verify import check

UNDEFINED = -(1 << 63)
"""Any value is right."""
UNTOUCHED, UNREPRESENTABLE = 77, 99
OPS: dict[int, Callable[[int, int], int]] = {1: int.__add__, 2: int.__mul__, 3: min, 4: max}
LOOPBACK, MPI, BOTH = 0, 1, 2
FLIP, CUT, REPEAT, NO_MEMORY = 0, 1, 2, 4
Matrix = list[list[int]]


@dataclass
class Buffer:
    """A rank's input or output: its first element in the rank's memory, and its blocks."""

    at: int
    starts: list[int]
    counts: list[int]

    def indices(self, block: int) -> range:
        """Return the elements of a block."""
        start = self.at + self.starts[block]
        return range(start, start + self.counts[block])


ABSENT = Buffer(0, [], [])


# Schedules


@functools.cache
def table(ranks: int) -> list[Algorithm]:
    """Return every algorithm of the library, with every root, in place and not."""
    nodes = [range(ranks)[::2], range(ranks)[1::2]] if ranks > 1 else None
    return [
        build(collective, info.name, ranks, root, nodes=nodes, in_place=in_place)
        for collective in COLLECTIVES
        for info in algorithms(collective)
        for root in (range(ranks) if COLLECTIVES[collective].rooted else (0,))
        for in_place in (False, True)
    ]


def routed(random: Random, ranks: int) -> Algorithm:
    """Draw a schedule of random trees, through scratch and on several channels."""
    collective = random.choice(("broadcast", "allreduce", "alltoall", "allgather"))
    root = random.randrange(ranks)
    builder = ScheduleBuilder("routed", collective, ranks, root=root, in_place=collective == "broadcast")
    builder.chunks *= random.randint(1, 3)
    if random.random() < 0.3:
        builder.raw_channels.add(1)
    block = builder.chunks // ranks
    for chunk in range(builder.chunks):
        if collective == "broadcast":
            _spread(random, builder, root, o(chunk), o(chunk))
        elif collective == "allgather":
            root = chunk // block
            builder.local_copy(root, i(chunk % block), o(chunk))
            _spread(random, builder, root, o(chunk), o(chunk))
        elif collective == "allreduce":
            order = random.sample(range(ranks), ranks)
            for rank in order:
                builder.local_copy(rank, i(chunk), o(chunk))
            for sender, receiver in itertools.pairwise(order):
                builder.reduce(sender, o(chunk), receiver, o(chunk), channel=random.randrange(3))
            _spread(random, builder, order[-1], o(chunk), o(chunk))
        else:
            for sender in range(ranks):
                receiver, place = chunk // block, o(sender * block + chunk % block)
                if sender == receiver:
                    builder.local_copy(sender, i(chunk), place)
                elif ranks > 2 and random.random() < 0.5:
                    other = random.choice([rank for rank in range(ranks) if rank not in (sender, receiver)])
                    through = s(sender * builder.chunks + chunk)
                    builder.copy(sender, i(chunk), other, through, channel=random.randrange(3))
                    builder.copy(other, through, receiver, place, channel=random.randrange(3))
                else:
                    builder.copy(sender, i(chunk), receiver, place, channel=random.randrange(3))
    return builder.algorithm()


def _spread(random: Random, builder: ScheduleBuilder, root: int, source: Place, target: Place) -> None:
    have = [root]
    for rank in random.sample(range(builder.ranks), builder.ranks):
        if rank != root:
            builder.copy(random.choice(have), source, rank, target, channel=random.randrange(3))
            have.append(rank)


def exchange(random: Random, ranks: int) -> Algorithm:
    """Draw an all-to-all in which ranks send several chunks before they receive, as MSCCL's schedules may."""
    block = random.choice([2, 6, 8, 9])
    programs = []
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank]
        sources = random.sample(peers, len(peers))
        lanes = [Lane(None, None, 0, (Step("cpy", i(rank * block), o(rank * block), block),))]
        for to, origin in zip(peers, sources, strict=True):
            sends = [Step("s", i(to * block + n)) for n in range(block)]
            steps = sends[:]
            for n in range(block):
                latest = steps.index(Step("r", None, o(origin * block + n - 1))) + 1 if n else 0
                at = random.randint(latest, len(steps)) if random.random() < 0.3 else len(steps)
                steps.insert(at, Step("r", None, o(origin * block + n)))
            lanes.append(Lane(to, origin, 0, tuple(steps)))
        programs.append(Program(0, 0, 0, tuple(lanes)))
    return Algorithm("exchange", "alltoall", ranks, ranks * block, False, tuple(programs))


def buffered_chain(random: Random) -> Algorithm:
    """Return a chain of three ranks whose last one takes what was forwarded last before the rest."""
    count, three = random.choice((1, 7, BUFFERED_CHUNKS, BUFFERED_CHUNKS)), 3
    chunks = range(count)
    forwards = tuple(Step("rcs", None, o(n)) for n in chunks)
    receives = [Step("r", None, o(n)) for n in chunks]
    programs = (
        Program(0, 0, 0, (Lane(1, None, 0, tuple(Step("s", o(n)) for n in chunks)),)),
        Program(0, 0, 0, (Lane(2, 0, 0, forwards), Lane(2, None, 1, (Step("s", o(0), after=((0, count - 1),)),)))),
        Program(
            *(0, 0, 1),
            (
                Lane(None, 1, 0, (replace(receives[0], after=((1, 0),)), *receives[1:])),
                Lane(None, 1, 1, (Step("r", None, s(0)),)),
            ),
        ),
    )
    return Algorithm("buffered chain", "broadcast", three, count, True, programs, root=0)


def mutant(random: Random, ranks: int) -> Algorithm:
    """Return an algorithm of the library with changed steps."""
    algorithm = random.choice(table(ranks))
    for _ in range(random.randint(1, 2)):
        rank = random.randrange(ranks)
        program = algorithm.programs[rank]
        places = [(number, index) for number, lane in enumerate(program.lanes) for index in range(len(lane.steps))]
        if not places:
            continue
        number, index = random.choice(places)
        lane = program.lanes[number]
        steps = list(lane.steps)
        step = steps[index]
        other = random.randrange(len(steps))
        how = random.randrange(4)
        if how == 0:
            steps[index], steps[other] = steps[other], steps[index]
        elif how == 1:
            steps[index] = replace(step, after=())
        elif how == 2:
            steps[index] = replace(step, kind=random.choice(KINDS))
        else:
            steps[index] = replace(step, target=Place(random.choice("ios"), random.randrange(4)))
        lanes = (*program.lanes[:number], replace(lane, steps=tuple(steps)), *program.lanes[number + 1 :])
        programs = (*algorithm.programs[:rank], replace(program, lanes=lanes), *algorithm.programs[rank + 1 :])
        algorithm = replace(algorithm, programs=programs)
    return algorithm


def schedule(random: Random, ranks: int) -> Algorithm:
    """Draw a schedule that the checker accepts."""
    while True:
        kind = random.random()
        if kind < 0.45 or ranks == 1:
            return random.choice(table(ranks))
        if kind < 0.7:
            found = routed(random, ranks)
        elif kind < 0.85 and ranks <= 3:
            found = exchange(random, ranks)
        elif kind < 0.93 and ranks == 3:
            found = buffered_chain(random)
        else:
            found = mutant(random, ranks)
        try:
            check(found, BUFFERED_CHUNKS)
        except ScheduleError:
            continue
        return found


# Layouts and results


class Call:
    """The memory of every rank before and after a collective, whose blocks have lengths of their own."""

    def __init__(self, random: Random, algorithm: Algorithm, op: int, most: int) -> None:
        """Draw lengths and elements."""
        self.algorithm, self._random, self._op = algorithm, random, op
        self._what, self._ranks = COLLECTIVES[algorithm.collective], algorithm.ranks
        counts = self._counts(most)
        self.buffers = [self._placed(rank, counts) for rank in range(self._ranks)]
        self.values = [self._drawn(*pair) for pair in self.buffers]
        self.expected = [self._outcome(rank) for rank in range(self._ranks)]
        self.longest = max((n for pair in self.buffers for buffer in pair for n in buffer.counts), default=0)

    def _counts(self, most: int) -> Matrix:
        """Return the length of each block, by owner; of an all-to-all by sender and receiver."""
        draw = lambda: self._random.choice((0, 1, self._random.randint(1, most), most))  # noqa: E731
        if not self._what.blocks:
            return [[draw()]]
        even = self._random.random() < 0.4
        first = draw()
        rows = self._ranks if self._what.name == "alltoall" else 1
        found = [[first if even else draw() for _ in range(self._ranks)] for _ in range(rows)]
        if self._what.name == "alltoall" and self.algorithm.in_place:
            found = [[found[min(a, b)][max(a, b)] for b in range(self._ranks)] for a in range(self._ranks)]
        return found

    def _placed(self, rank: int, counts: Matrix) -> tuple[Buffer, Buffer]:
        name, root, everyone = self._what.name, self.algorithm.root or 0, range(self._ranks)
        blocks = {
            "alltoall": (counts[rank % len(counts)], [row[rank % len(row)] for row in counts]),
            "allgather": ([counts[0][rank % len(counts[0])]], counts[0]),
            "reduce_scatter": (counts[0], [counts[0][rank % len(counts[0])]]),
        }
        blocks["gather"], blocks["scatter"] = blocks["allgather"], blocks["reduce_scatter"]
        sent, received = blocks.get(name, (counts[0], counts[0]))
        has_input = name != "scatter" or rank == root
        has_output = name not in ("reduce", "gather") or rank == root
        longer = self._spaced(0, sent if len(sent) >= len(received) else received)
        if name == "broadcast":
            return longer, longer
        if self.algorithm.in_place and has_input and has_output:
            if len(sent) == len(received):
                return longer, longer
            own = Buffer(longer.at, [longer.starts[rank]], [longer.counts[rank]])
            return (own, longer) if len(sent) < len(received) else (longer, own)
        first = self._spaced(0, sent) if has_input else ABSENT
        end = max((first.at + start + n for start, n in zip(first.starts, first.counts, strict=True)), default=0)
        assert len(everyone) >= len(sent)
        return first, self._spaced(end, received) if has_output else ABSENT

    def _spaced(self, at: int, counts: list[int]) -> Buffer:
        """Place blocks with gaps, which must stay as they are."""
        starts, end = [], 0
        for count in counts:
            end += self._random.choice((0, 0, 1, 5))
            starts.append(end)
            end += count
        return Buffer(at + self._random.randint(0, 3), starts, counts)

    def _drawn(self, source: Buffer, target: Buffer) -> list[int]:
        ends = [buffer.indices(n).stop for buffer in (source, target) for n in range(len(buffer.counts))]
        values = [UNTOUCHED] * (max(ends, default=0) + 3)
        for block in range(len(source.counts)):
            large = self._random.random() < 0.3
            for at in source.indices(block):
                values[at] = self._random.randint(-2, 2) * (1 if self._op == 2 or not large else 1000)
            if self._random.random() < 0.2 and self._op != 2 and source.counts[block]:
                values[source.indices(block)[0]] = UNREPRESENTABLE
        return values

    def _block(self, rank: int, block: int) -> list[int]:
        source = self.buffers[rank][0]
        return [self.values[rank][at] for at in source.indices(block)]

    def _result(self, rank: int, block: int) -> list[int]:
        name, root = self._what.name, self.algorithm.root or 0
        if self._what.reduces:
            each = [self._block(peer, rank if name == "reduce_scatter" else 0) for peer in range(self._ranks)]
            return [functools.reduce(OPS[self._op], column) for column in zip(*each, strict=True)]
        origin = block if name in ("alltoall", "allgather", "gather") else root
        return self._block(origin, rank if name in ("alltoall", "scatter") else 0)

    def _outcome(self, rank: int) -> list[int]:
        source, target = self.buffers[rank]
        expected = list(self.values[rank])
        if self.algorithm.in_place and self._what.name == "reduce_scatter":
            for block in range(len(source.counts)):
                for at in source.indices(block):
                    expected[at] = UNDEFINED
        for block in range(len(target.counts)):
            for at, value in zip(target.indices(block), self._result(rank, block), strict=True):
                expected[at] = value
        return expected


# The file


def _list(numbers: list[int]) -> array[int]:
    return array("q", [len(numbers), *numbers])


def _case(
    random: Random, ranks: int, network: tuple[int, int, int], seed: int, *, chunk: int, external: bool, damage: int
) -> array[int]:
    """Draw one collective; `damage` is how a message or an allocation fails, -1 not at all."""
    op = random.choice((1, 1, 1, 2, 3, 4))
    call = Call(random, schedule(random, ranks), op, most=random.choice((7, 40, 300, 8 * chunk)))
    goal = call.algorithm.spec
    per_block = goal.block if COLLECTIVES[goal.collective].blocks else goal.chunks
    # MPI aborts where a message is longer than its receive.
    raw = random.random() < 0.3 if damage != NO_MEMORY and (damage != REPEAT or network[0] == LOOPBACK) else False
    coded = not raw and random.random() < 0.6
    updates_own = coded and random.random() < 0.3
    numbers = array("q", (ranks, *network, chunk, per_block, op, raw, updates_own, external, random.random() < 0.4))
    numbers.extend((coded, call.longest))
    numbers.extend((-1 if damage < 0 else random.randrange(ranks), random.randrange(12), max(0, damage), seed))
    for rank in range(ranks):
        numbers += _list(list(_table(call.algorithm, rank)))
        for buffer in call.buffers[rank]:
            numbers.append(buffer.at)
            numbers += _list(buffer.starts)
            numbers += _list(buffer.counts)
        numbers += _list(call.values[rank])
        numbers += _list(call.expected[rank])
    return numbers


def batch(seed: int) -> array[int]:
    """Draw cases that run at once."""
    random = Random(seed)
    ranks = random.choice((1, 2, 2, 3, 3, 4, 5))
    wire = random.choice((LOOPBACK, LOOPBACK, MPI, BOTH))
    network = wire, random.choice((0, 200)), random.choice((0, 3))
    loses = wire == LOOPBACK and ranks > 1 and random.random() < 0.1
    preempts = not loses and random.random() < 0.6
    damages = (FLIP, CUT, REPEAT, NO_MEMORY) if wire == LOOPBACK else (FLIP, CUT, REPEAT)
    damage = random.choice(damages) if not loses and random.random() < 0.4 else -1
    size = random.choice((1, 2, 3))
    numbers = array("q", (size, preempts, loses))
    for number in range(size):
        chunk = random.choice((1, 8, 50, 50, 200, 700))
        external = random.random() < 0.2 if damage != NO_MEMORY else number == 0
        case = _case(random, ranks, network, seed, chunk=chunk, external=external, damage=damage if number == 0 else -1)
        numbers += case
    return numbers


def batches(first: int, count: int) -> Iterator[array[int]]:
    """Draw the batches of some seeds."""
    for seed in range(first, first + count):
        yield batch(seed)
