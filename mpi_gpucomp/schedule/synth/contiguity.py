"""The third stage: chunks that follow each other on a link in one message, and exact times for all.

A message of k chunks takes alpha + k beta instead of k (alpha + beta), but it leaves when the last of them is there.
Only neighbours can go together: chunks of one source with following numbers. This matters where latency does; for long
chunks there is nothing to gain, and the greedy order stays.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.synth.problem import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.synth.problem import Hop, Problem
    from mpi_gpucomp.schedule.synth.routing import Routing

__all__ = ["MOST_HOPS", "MOST_TOGETHER", "Timed", "joined", "ordered"]


# The second stage: in which order the hops of a routing are made, and when, in one loop.
#
# Greedy, as TACCL does it: of the hops that could be made next, the one whose chunk has the longest way before it goes
# first, then the one that can begin soonest. A hop keeps its link, and the ports on its way, busy.


class Timed(NamedTuple):
    """A hop with its time, and how many hops of following chunks go with it in one message."""

    hop: Hop
    start: float
    end: float


def ordered(routing: Routing) -> list[Timed]:
    """Return all hops with their times, in the order of their beginnings."""
    problem = routing.problem
    behind = {hop: far for hops in routing.hops for hop, far in _distances(problem, hops).items()}
    onward: defaultdict[tuple[int, int], list[Hop]] = defaultdict(list)
    for hops in routing.hops:
        for hop in hops:
            onward[hop.chunk, hop.sender].append(hop)
    free: defaultdict[str, float] = defaultdict(float)
    sources = (hop for number, chunk in enumerate(problem.chunks) for hop in onward[number, chunk.source])
    line = [(_priority(problem, hop, 0.0, behind), hop, 0.0) for hop in sources]
    heapify(line)
    done: list[Timed] = []
    while line:
        known, hop, ready = heappop(line)
        start = max(ready, _free(problem, hop, free))
        if start > known[0]:
            # What it needs has been taken since: it stands in line again. Nothing ever becomes free sooner.
            heappush(line, (_priority(problem, hop, start, behind), hop, ready))
            continue
        for name, seconds in problem.loads(hop.sender, hop.receiver, hop.form):
            if not name.startswith(("stream", "processor")):
                free[name] = start + seconds
        end = start + problem.latency(hop.sender, hop.receiver, hop.form)
        done.append(Timed(hop, start, end))
        for other in onward[hop.chunk, hop.receiver]:
            heappush(line, (_priority(problem, other, end, behind), other, end))
    return sorted(done, key=lambda one: (one.start, one.end, one.hop))


def _priority(problem: Problem, hop: Hop, start: float, behind: dict[Hop, float]) -> tuple[float, ...]:
    """Put the earliest first among those that compete, the longest way first among the earliest."""
    in_order = problem.chunks[hop.chunk].source if problem.sketch.in_order else 0
    return start, in_order, -behind[hop], hop.chunk, hop.sender, hop.receiver


def _free(problem: Problem, hop: Hop, free: dict[str, float]) -> float:
    names = (name for name, _ in problem.loads(hop.sender, hop.receiver, hop.form))
    return max(free.get(name, 0.0) for name in names)


def _distances(problem: Problem, hops: list[Hop]) -> dict[Hop, float]:
    """Return for each hop how long its chunk still travels, to the last of the ranks that get it from there."""
    below: defaultdict[int, float] = defaultdict(float)
    found = {}
    for hop in reversed(hops):
        found[hop] = problem.latency(hop.sender, hop.receiver, hop.form) + below[hop.receiver]
        below[hop.sender] = max(below[hop.sender], found[hop])
    return found


MICRO = 1e6
MOST_TOGETHER = 6
MOST_HOPS = 120
"""More of them are left in the greedy order."""


def joined(problem: Problem, timed: Sequence[Timed], seconds: float) -> list[list[Timed]]:
    """Return the messages in the order of their beginnings, each with its hops in the order of their chunks."""
    alone = [[one] for one in timed]
    neighbours = _neighbours(problem, timed)
    if seconds <= 0 or len(timed) > MOST_HOPS or not neighbours:
        return alone
    program = _Program(problem, timed, neighbours)
    try:
        outcome = program.model.solve(seconds, program.start())
    except ScheduleError:
        return alone  # there was no time to find anything
    return program.messages(outcome.values)


def _neighbours(problem: Problem, timed: Sequence[Timed]) -> list[tuple[int, int]]:
    """Return the pairs of hops that may go together, by their numbers."""
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


class _Program:
    """Times of hops, and which of them go together."""

    def __init__(self, problem: Problem, timed: Sequence[Timed], neighbours: list[tuple[int, int]]) -> None:
        """Write the program down."""
        self._problem, self._timed, self.model = problem, timed, Model()
        self._latest = 2 * max(one.end for one in timed) * MICRO + 1.0
        self._end = self.model.real("end", cost=1.0)
        self._leaves = [self.model.real(f"leave_{_name(problem, one.hop)}") for one in timed]
        self._together = {
            pair: self.model.binary(f"together_{_name(problem, timed[pair[0]].hop)}") for pair in neighbours
        }
        self._first: dict[tuple[int, int], int] = {}
        self._add_ways()
        self._add_together()
        self._add_links()

    def _takes(self, number: int) -> float:
        hop = self._timed[number].hop
        return self._problem.latency(hop.sender, hop.receiver, hop.form) * MICRO

    def _alpha(self, number: int) -> float:
        link = self._problem.topology.link(*self._problem.real(*self._timed[number].hop[1:3]))
        assert link is not None
        return (link.latency + self._problem.topology.per_chunk) * MICRO

    def _add_ways(self) -> None:
        came = {(one.hop.chunk, one.hop.receiver): number for number, one in enumerate(self._timed)}
        for number, one in enumerate(self._timed):
            before = came.get((one.hop.chunk, one.hop.sender))
            name = _name(self._problem, one.hop)
            if before is not None:
                # A chunk leaves no sooner than it has arrived.
                terms = [(self._leaves[before], 1.0), (self._leaves[number], -1.0)]
                self.model.at_most(f"way_{name}", terms, -self._takes(before))
            # The end is when the last chunk has arrived.
            self.model.at_most(f"end_{name}", [(self._leaves[number], 1.0), (self._end, -1.0)], -self._takes(number))

    def _add_together(self) -> None:
        for (one, other), chosen in self._together.items():
            name = _name(self._problem, self._timed[one].hop)
            apart = self._takes(one) - self._alpha(one)
            # What goes together follows without a latency of its own: the second leaves when the first's bytes are out.
            terms = [(self._leaves[other], 1.0), (self._leaves[one], -1.0), (chosen, self._latest)]
            self.model.at_most(f"behind_{name}", terms, self._latest + apart)
        for (one, other), chosen in self._together.items():
            chain, last = [(chosen, 1.0)], other
            while len(chain) < MOST_TOGETHER:
                following = next((pair for pair in self._together if pair[0] == last), None)
                if following is None:
                    break
                chain.append((self._together[following], 1.0))
                last = following[1]
            if len(chain) == MOST_TOGETHER:
                # At most so many chunks go together.
                self.model.at_most(f"most_{one}_{other}", chain, MOST_TOGETHER - 1.0)

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
                # Parts of the same data keep their order.
                for early, late in pairwise(family):
                    self._add_behind(early, late)
            for one_family, other_family in combinations(families.values(), 2):
                for one, other in product(one_family, other_family):
                    self._add_order(one, other)

    def _part(self, number: int) -> int:
        return self._problem.chunks[self._timed[number].hop.chunk].part

    def _add_order(self, one: int, other: int) -> None:
        """Let one of two hops on a link be first, and the other behind it."""
        first = self.model.binary(f"first_{one}_{other}")
        self._first[one, other] = first
        for early, late, factor, limit in ((one, other, 1.0, 1.0), (other, one, -1.0, 0.0)):
            # The link is free again when a message is over.
            terms = [(self._leaves[early], 1.0), (self._leaves[late], -1.0), (first, factor * self._latest)]
            self.model.at_most(f"order_{early}_{late}", terms, limit * self._latest - self._takes(early))

    def _add_behind(self, early: int, late: int) -> None:
        terms = [(self._leaves[early], 1.0), (self._leaves[late], -1.0)]
        chosen = self._together.get((early, late))
        if chosen is not None:
            terms.append((chosen, -self._alpha(early)))
        # The link is free again when a message is over, or its bytes are out and the next goes with it.
        self.model.at_most(f"order_{early}_{late}", terms, -self._takes(early))

    def start(self) -> dict[int, float]:
        """Return the greedy times as values of the variables."""
        values = {self._end: max(one.end for one in self._timed) * MICRO}
        values |= {self._leaves[number]: one.start * MICRO for number, one in enumerate(self._timed)}
        for (one, other), variable in self._first.items():
            values[variable] = float(self._timed[one].start <= self._timed[other].start)
        return values

    def messages(self, values: Sequence[float]) -> list[list[Timed]]:
        """Return what a solution says: hops with their times, those together that it has joined."""
        follows = {one: other for (one, other), chosen in self._together.items() if values[chosen] > 0.5}
        timed = []
        for number, one in enumerate(self._timed):
            start = values[self._leaves[number]] / MICRO
            timed.append(Timed(one.hop, start, start + self._takes(number) / MICRO))
        heads = sorted(set(range(len(timed))) - set(follows.values()), key=lambda number: timed[number].start)
        found = []
        for head in heads:
            message = [head]
            while message[-1] in follows:
                message.append(follows[message[-1]])
            found.append([timed[number] for number in message])
        return _in_order(self._problem, found)


def _in_order(problem: Problem, messages: list[list[Timed]]) -> list[list[Timed]]:
    """Put messages so that all chunks of each are there before it leaves; one that never could is taken apart."""
    at = {(number, chunk.source) for number, chunk in enumerate(problem.chunks)}
    todo, done = list(messages), list[list[Timed]]()
    while todo:
        complete = (one for one in todo if all((timed.hop.chunk, timed.hop.sender) in at for timed in one))
        message = next(complete, None)
        if message is None:
            apart = next(one for one in todo if len(one) > 1)
            todo[todo.index(apart) : todo.index(apart) + 1] = [[timed] for timed in apart]
            continue
        todo.remove(message)
        done.append(message)
        at |= {(timed.hop.chunk, timed.hop.receiver) for timed in message}
    return done


def _name(problem: Problem, hop: Hop) -> str:
    return f"{problem.chunks[hop.chunk]}_from_{hop.sender}_to_{hop.receiver}"
