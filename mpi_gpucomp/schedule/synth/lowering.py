"""The last stages of synthesis, from routes to a schedule: order the hops, join messages, and lower them to steps.

Ordering is greedy, as in TACCL: of the hops that can be made next, the one that can start earliest goes first, and
among those the one whose chunk has the longest remaining path. A hop occupies its link and the ports on its path.

Joining saves latency: a message of k chunks takes alpha + k beta instead of k (alpha + beta), but it leaves when the
last of them has arrived. Only consecutive chunks of one source can be joined. For long chunks there is nothing to gain.

Lowering assigns a place to each chunk, adds the messages as transfers in their order, and reverses reductions.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.builder import ScheduleBuilder, i, o, s
from mpi_gpucomp.schedule.synth.milp import MICRO, Model
from mpi_gpucomp.schedule.synth.problem import RAW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.ir import Place
    from mpi_gpucomp.schedule.synth.problem import Chunk, Hop, Problem, Routing

    Messages = Sequence[Sequence["TimedHop"]]

__all__ = [
    "TimedHop",
    "add_copies",
    "add_reductions",
    "copy_own_blocks",
    "join_messages",
    "order_hops",
]

MAX_JOINED = 6
"""Chunks in a message."""
MAX_HOPS = 120
"""With more hops the greedy order is kept."""

FORMS = 2
CHANNELS_EACH = 2
"""Channels of a stage with separate lanes.

A lane that receives and forwards a chunk cannot receive the next one until it has sent it. If messages leave on another
channel than they arrive on, receives and sends are in separate lanes.
"""


class TimedHop(NamedTuple):
    """A hop with its start and end."""

    hop: Hop
    start: float
    end: float


def order_hops(routing: Routing) -> list[TimedHop]:
    """Return all hops with their times, by start."""
    problem = routing.problem
    remaining = {hop: far for hops in routing.hops for hop, far in _distances(problem, hops).items()}
    out_links: defaultdict[tuple[int, int], list[Hop]] = defaultdict(list)
    for hops in routing.hops:
        for hop in hops:
            out_links[hop.chunk, hop.sender].append(hop)
    free: defaultdict[str, float] = defaultdict(float)
    sources = (hop for number, chunk in enumerate(problem.chunks) for hop in out_links[number, chunk.source])
    queue = [(_priority(problem, hop, 0.0, remaining), hop, 0.0) for hop in sources]
    heapify(queue)
    done: list[TimedHop] = []
    while queue:
        known, hop, ready = heappop(queue)
        start = max(ready, _free(problem, hop, free))
        if start > known[0]:
            # Its resources have been taken meanwhile: queue it again. Nothing ever becomes free earlier.
            heappush(queue, (_priority(problem, hop, start, remaining), hop, ready))
            continue
        for name, seconds in problem.loads(hop.sender, hop.receiver, hop.form):
            if not name.startswith(("stream", "processor")):
                free[name] = start + seconds
        end = start + problem.latency(hop.sender, hop.receiver, hop.form)
        done.append(TimedHop(hop, start, end))
        for other in out_links[hop.chunk, hop.receiver]:
            heappush(queue, (_priority(problem, other, end, remaining), other, end))
    return sorted(done, key=lambda one: (one.start, one.end, one.hop))


def _priority(problem: Problem, hop: Hop, start: float, remaining: dict[Hop, float]) -> tuple[float, ...]:
    """Order hops by start, then by the longest remaining path."""
    in_order = problem.chunks[hop.chunk].source if problem.sketch.in_order else 0
    return start, in_order, -remaining[hop], hop.chunk, hop.sender, hop.receiver


def _free(problem: Problem, hop: Hop, free: dict[str, float]) -> float:
    names = (name for name, _ in problem.loads(hop.sender, hop.receiver, hop.form))
    return max(free.get(name, 0.0) for name in names)


def _distances(problem: Problem, hops: list[Hop]) -> dict[Hop, float]:
    """Return for each hop the time until its chunk has reached the last rank of the subtree."""
    below: defaultdict[int, float] = defaultdict(float)
    found = {}
    for hop in reversed(hops):
        found[hop] = problem.latency(hop.sender, hop.receiver, hop.form) + below[hop.receiver]
        below[hop.sender] = max(below[hop.sender], found[hop])
    return found


def join_messages(problem: Problem, timed: Sequence[TimedHop], seconds: float) -> list[list[TimedHop]]:
    """Return the messages by start, each with its hops in the order of their chunks."""
    unjoined = [[one] for one in timed]
    neighbours = _neighbours(problem, timed)
    if seconds <= 0 or len(timed) > MAX_HOPS or not neighbours:
        return unjoined
    program = _JoiningProgram(problem, timed, neighbours)
    try:
        outcome = program.model.solve(seconds, program.start())
    except ScheduleError:
        return unjoined  # out of time
    return program.messages(outcome.values)


def _neighbours(problem: Problem, timed: Sequence[TimedHop]) -> list[tuple[int, int]]:
    """Return the pairs of hops that may share a message, by number."""
    at = {one.hop: number for number, one in enumerate(timed)}
    number = {chunk: position for position, chunk in enumerate(problem.chunks)}
    found = []
    for hop, here in at.items():
        chunk = problem.chunks[hop.chunk]
        after = number.get(chunk._replace(part=chunk.part + 1))
        following = at.get(hop._replace(chunk=after)) if after is not None else None
        if following is not None:
            found.append((here, following))
    return found


class _JoiningProgram:
    """The joining of messages as a mixed-integer program."""

    def __init__(self, problem: Problem, timed: Sequence[TimedHop], neighbours: list[tuple[int, int]]) -> None:
        """Add variables and constraints."""
        self._problem, self._timed, self.model = problem, timed, Model()
        self._latest = 2 * max(one.end for one in timed) * MICRO + 1.0
        self._end = self.model.real("end", cost=1.0)
        self._leaves = [self.model.real(f"leave_{_name(problem, one.hop)}") for one in timed]
        self._joins = {pair: self.model.binary(f"join_{_name(problem, timed[pair[0]].hop)}") for pair in neighbours}
        self._first: dict[tuple[int, int], int] = {}
        self._add_paths()
        self._add_joins()
        self._add_links()

    def _takes(self, number: int) -> float:
        hop = self._timed[number].hop
        return self._problem.latency(hop.sender, hop.receiver, hop.form) * MICRO

    def _alpha(self, number: int) -> float:
        link = self._problem.topology.link(*self._problem.real(*self._timed[number].hop[1:3]))
        assert link is not None
        return (link.latency + self._problem.topology.per_chunk) * MICRO

    def _add_paths(self) -> None:
        came = {(one.hop.chunk, one.hop.receiver): number for number, one in enumerate(self._timed)}
        for number, one in enumerate(self._timed):
            before = came.get((one.hop.chunk, one.hop.sender))
            name = _name(self._problem, one.hop)
            if before is not None:
                # A chunk leaves after it has arrived.
                terms = [(self._leaves[before], 1.0), (self._leaves[number], -1.0)]
                self.model.at_most(f"path_{name}", terms, -self._takes(before))
            # The end is when the last chunk has arrived.
            self.model.at_most(f"end_{name}", [(self._leaves[number], 1.0), (self._end, -1.0)], -self._takes(number))

    def _add_joins(self) -> None:
        for (one, other), chosen in self._joins.items():
            name = _name(self._problem, self._timed[one].hop)
            separate = self._takes(one) - self._alpha(one)
            # Of two joined chunks the second leaves, without a latency, when the first has left.
            terms = [(self._leaves[other], 1.0), (self._leaves[one], -1.0), (chosen, self._latest)]
            self.model.at_most(f"joined_{name}", terms, self._latest + separate)
        for (one, other), chosen in self._joins.items():
            chain, last = [(chosen, 1.0)], other
            while len(chain) < MAX_JOINED:
                following = next((pair for pair in self._joins if pair[0] == last), None)
                if following is None:
                    break
                chain.append((self._joins[following], 1.0))
                last = following[1]
            if len(chain) == MAX_JOINED:
                # A message has at most MAX_JOINED chunks.
                self.model.at_most(f"most_{one}_{other}", chain, MAX_JOINED - 1.0)

    def _add_links(self) -> None:
        on_link: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, timed in enumerate(self._timed):
            on_link[timed.hop.sender, timed.hop.receiver].append(number)
        for numbers in on_link.values():
            families: defaultdict[tuple[int, frozenset[int]], list[int]] = defaultdict(list)
            for number in sorted(numbers, key=lambda number: self._part(number)):
                chunk = self._problem.chunks[self._timed[number].hop.chunk]
                families[chunk.source, chunk.to].append(number)
            for family in families.values():
                # Chunks of the same block keep their order.
                for early, late in pairwise(family):
                    self._add_sequence(early, late)
            for one_family, other_family in combinations(families.values(), 2):
                for one, other in product(one_family, other_family):
                    self._add_order(one, other)

    def _part(self, number: int) -> int:
        return self._problem.chunks[self._timed[number].hop.chunk].part

    def _add_order(self, one: int, other: int) -> None:
        """Order two hops on a link."""
        first = self.model.binary(f"first_{one}_{other}")
        self._first[one, other] = first
        for early, late, factor, limit in ((one, other, 1.0, 1.0), (other, one, -1.0, 0.0)):
            # The link is free when the message has arrived.
            terms = [(self._leaves[early], 1.0), (self._leaves[late], -1.0), (first, factor * self._latest)]
            self.model.at_most(f"order_{early}_{late}", terms, limit * self._latest - self._takes(early))

    def _add_sequence(self, early: int, late: int) -> None:
        terms = [(self._leaves[early], 1.0), (self._leaves[late], -1.0)]
        chosen = self._joins.get((early, late))
        if chosen is not None:
            terms.append((chosen, -self._alpha(early)))
        # The link is free when the message has arrived, or its bytes have left and the next is joined to it.
        self.model.at_most(f"order_{early}_{late}", terms, -self._takes(early))

    def start(self) -> dict[int, float]:
        """Return the greedy times as values of the variables."""
        values = {self._end: max(one.end for one in self._timed) * MICRO}
        values |= {self._leaves[number]: one.start * MICRO for number, one in enumerate(self._timed)}
        for (one, other), variable in self._first.items():
            values[variable] = float(self._timed[one].start <= self._timed[other].start)
        return values

    def messages(self, values: Sequence[float]) -> list[list[TimedHop]]:
        """Return the messages of a solution."""
        follows = {one: other for (one, other), chosen in self._joins.items() if values[chosen] > 0.5}
        timed = []
        for number, one in enumerate(self._timed):
            start = values[self._leaves[number]] / MICRO
            timed.append(TimedHop(one.hop, start, start + self._takes(number) / MICRO))
        heads = sorted(set(range(len(timed))) - set(follows.values()), key=lambda number: timed[number].start)
        found = []
        for head in heads:
            message = [head]
            while message[-1] in follows:
                message.append(follows[message[-1]])
            found.append([timed[number] for number in message])
        return _in_order(self._problem, found)


def _in_order(problem: Problem, messages: list[list[TimedHop]]) -> list[list[TimedHop]]:
    """Order messages so that all chunks of each have arrived before it leaves; split those without such an order."""
    at = {(number, chunk.source) for number, chunk in enumerate(problem.chunks)}
    todo, done = list(messages), list[list[TimedHop]]()
    while todo:
        complete = (one for one in todo if all((timed.hop.chunk, timed.hop.sender) in at for timed in one))
        message = next(complete, None)
        if message is None:
            separate = next(one for one in todo if len(one) > 1)
            todo[todo.index(separate) : todo.index(separate) + 1] = [[timed] for timed in separate]
            continue
        todo.remove(message)
        done.append(message)
        at |= {(timed.hop.chunk, timed.hop.receiver) for timed in message}
    return done


def _name(problem: Problem, hop: Hop) -> str:
    return f"{problem.chunks[hop.chunk]}_from_{hop.sender}_to_{hop.receiver}"


class _Places:
    """The place of each chunk on each rank: in scratch on a rank that only forwards it."""

    def __init__(self, builder: ScheduleBuilder, problem: Problem) -> None:
        self._builder, self._problem = builder, problem
        self._each = problem.sketch.chunkup
        self._scratch: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def of(self, number: int, rank: int) -> Place:
        """Return the place of a chunk on a rank."""
        chunk = self._problem.chunks[number]
        return self._own(chunk, rank) or self.scratch(number, rank)

    def scratch(self, number: int, rank: int) -> Place:
        """Return the place of a chunk in scratch."""
        known = self._scratch[rank]
        return s(known.setdefault(number, len(known)))

    def _own(self, chunk: Chunk, rank: int) -> Place | None:
        each, (source, part, to) = self._each, chunk
        block = source * each + part
        match self._builder.collective:
            case "broadcast" | "reduce":
                return o(part)
            case "allreduce":
                return o(block)
            case "allgather":
                return i(part) if rank == source else o(block)
            case "gather":
                return i(part) if rank == source else o(block) if rank in to else None
            case "scatter":
                return i(min(to) * each + part) if rank == source else o(part) if rank in to else None
            case _:
                return i(min(to) * each + part) if rank == source else o(block) if rank in to else None


def copy_own_blocks(builder: ScheduleBuilder, each: int) -> None:
    """Copy the blocks that do not leave their rank."""
    for rank in range(builder.ranks):
        if builder.collective in ("allgather", "alltoall") or (builder.collective == "gather" and rank == builder.root):
            source = i(rank * each) if builder.collective == "alltoall" else i(0)
            builder.local_copy(rank, source, o(rank * each), each)
        elif builder.collective == "scatter" and rank == builder.root:
            builder.local_copy(rank, i(rank * each), o(0), each)


def _depths(messages: Messages) -> dict[tuple[int, int], int]:
    """Return the number of hops that bring each chunk to each rank."""
    depths: dict[tuple[int, int], int] = {}
    for one in sorted((one for message in messages for one in message), key=lambda one: one.start):
        chunk, sender, receiver, _ = one.hop
        depths[chunk, receiver] = depths.get((chunk, sender), 0) + 1
    return depths


def add_copies(builder: ScheduleBuilder, problem: Problem, messages: Messages, stage: int, *, separate: bool) -> None:
    """Add the messages of a routing; `separate` puts receives and sends in separate lanes."""
    places, depths = _Places(builder, problem), _depths(messages)
    for message in messages:
        for first, count in _runs(places, message):
            hop = first.hop
            source, target = places.of(hop.chunk, hop.sender), places.of(hop.chunk, hop.receiver)
            channel = _channel(stage, depths[hop.chunk, hop.receiver], separate)
            if len(problem.codecs) > 1:
                # Each form has its own channels, so that a frame of one form is not forwarded as the other.
                channel = FORMS * channel + hop.form
                if hop.form == RAW:
                    builder.raw_channels.add(channel)
            builder.copy(hop.sender, source, hop.receiver, target, count, channel=channel)


def _runs(places: _Places, message: Sequence[TimedHop]) -> list[tuple[TimedHop, int]]:
    """Split a message into runs of chunks that are consecutive in memory at both ends."""
    runs: list[tuple[TimedHop, int]] = []
    for one in message:
        hop = one.hop
        if runs and runs[-1][0].hop.form == hop.form:
            head, count = runs[-1]
            ends = [(places.of(head.hop.chunk, rank), places.of(hop.chunk, rank)) for rank in hop[1:3]]
            if all((a.buffer, a.offset + count) == (b.buffer, b.offset) for a, b in ends):
                runs[-1] = head, count + 1
                continue
        runs.append((one, 1))
    return runs


def _channel(stage: int, depth: int, separate: bool) -> int:
    return CHANNELS_EACH * stage + depth % CHANNELS_EACH if separate else stage


def add_reductions(
    builder: ScheduleBuilder, problem: Problem, messages: Messages, stage: int, *, separate: bool
) -> None:
    """Add the messages of a routing in reverse order and direction, as reductions."""
    places, depths = _Places(builder, problem), _depths(messages)
    sums: dict[tuple[int, int], Place] = {}
    for message in sorted(messages, key=lambda message: -message[-1].end):
        for one in message:
            number, receiver, sender, _ = one.hop
            chunk = problem.chunks[number]
            initial = i(chunk.source * problem.sketch.chunkup + chunk.part) if _by_block(builder) else i(chunk.part)
            if builder.collective == "allreduce":
                target = places.of(number, receiver)
            elif receiver == chunk.source:
                target = o(chunk.part)
            else:
                target = places.scratch(number, receiver)
            source, operand = sums.get((number, sender), initial), sums.get((number, receiver), initial)
            channel = _channel(stage, depths[number, sender], separate)
            builder.reduce(sender, source, receiver, target, operand=operand, channel=channel)
            sums[number, receiver] = target


def _by_block(builder: ScheduleBuilder) -> bool:
    return builder.collective in ("reduce_scatter", "allreduce")
