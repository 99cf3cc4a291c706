"""A routing: which links each chunk takes, in which form, and what that costs in time.

A message is many loops of the same routing, one behind the other, so its time is about

    loops * bottleneck + fill

where the bottleneck is the most that any link, port or stream has to do in one loop, and the fill is the time of the
longest way in an empty network. For one loop this is TACCL's objective, for a chain the formula of a pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.synth.problem import CODED, PLAIN, Hop, Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.schedule.synth.problem import Problem

    Way = tuple[int, int, int]
    "Sender, receiver and form."

__all__ = ["MICRO", "Program", "Routing", "grown", "unfolded"]


@dataclass(frozen=True)
class Routing:
    """The hops of every chunk, each behind the one that brings the chunk to its sender."""

    problem: Problem
    hops: list[list[Hop]]
    proven: bool = False
    bound: float = 0.0
    """Seconds that no routing of this problem can be below, as far as is known."""

    @cached_property
    def loads(self) -> dict[str, float]:
        """Return the seconds that everything is busy in a loop."""
        found: defaultdict[str, float] = defaultdict(float)
        for hops in self.hops:
            for hop in hops:
                for name, seconds in self.problem.loads(hop.sender, hop.receiver, hop.form):
                    found[name] += seconds
            for rank, form in encoders(hops) if not self.problem.mirrored else ():
                seconds = self.problem.piece * self.problem.codings[form].encode
                for name, share in self.problem.coding_loads(rank, seconds):
                    found[name] += share
        return dict(found)

    @cached_property
    def bottleneck(self) -> float:
        """Return the most that anything has to do in a loop."""
        return max(self.loads.values(), default=0.0)

    @cached_property
    def fill(self) -> float:
        """Return the time until the last destination has its chunk, in an empty network."""
        return max((max(arrivals(self.problem, hops).values()) for hops in self.hops if hops), default=0.0)

    @property
    def seconds(self) -> float:
        """Return the time that it promises."""
        return self.problem.loops * self.bottleneck + self.fill

    @property
    def gap(self) -> float:
        """Return how much better the best routing could be at most, as a share."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


def encoders(hops: Sequence[Hop]) -> set[tuple[int, int]]:
    """Return who makes frames of a chunk, and in which form: those who send it in another than it came in."""
    came = {hop.receiver: hop.form for hop in hops}
    return {(hop.sender, hop.form) for hop in hops if came.get(hop.sender) != hop.form}


def exact_on(problem: Problem, hops: Sequence[Hop]) -> set[int]:
    """Return the ranks that a chunk has come to without having been encoded on its way."""
    found = {problem.chunks[hops[0].chunk].source} if hops else set()
    for hop in hops:
        if hop.form == PLAIN and hop.sender in found:
            found.add(hop.receiver)
    return found


def recoding(problem: Problem, rank_is_source: bool, form: int) -> float:
    """Return the seconds that a chunk waits where its form changes: what came is decoded, and encoded anew."""
    if problem.mirrored:
        return 0.0
    other = 0.0 if rank_is_source else problem.codings[1 - form if len(problem.codings) > 1 else form].decode
    return problem.piece * (problem.codings[form].encode + other)


def arrivals(problem: Problem, hops: Sequence[Hop]) -> dict[int, float]:
    """Return when a chunk comes to each rank, in an empty network."""
    if not hops:
        return {}
    source = problem.chunks[hops[0].chunk].source
    found, came = {source: 0.0}, dict[int, int]()
    for hop in hops:
        changed = came.get(hop.sender) != hop.form
        waits = recoding(problem, hop.sender == source, hop.form) if changed else 0.0
        found[hop.receiver] = found[hop.sender] + waits + problem.latency(hop.sender, hop.receiver, hop.form)
        came[hop.receiver] = hop.form
    return found


def grown(source: int, ways: Sequence[Way], to: frozenset[int]) -> list[Way]:
    """Put the ways of a chunk in order from its source on, and leave out those that lead nowhere."""
    onward: defaultdict[int, list[Way]] = defaultdict(list)
    for way in ways:
        onward[way[0]].append(way)
    order, todo, seen = list[tuple[int, int, int]](), [source], {source}
    while todo:
        for way in sorted(onward[todo.pop(0)]):
            if way[1] not in seen:
                seen.add(way[1])
                order.append(way)
                todo.append(way[1])
    needed = set(to)
    for way in reversed(order):
        if way[1] in needed:
            needed.add(way[0])
    return [way for way in order if way[1] in needed]


def unfolded(problem: Problem, ways: dict[int, list[Way]]) -> list[list[Hop]]:
    """Return the hops of all chunks from the ways of those that stand for the others."""
    hops = []
    for number, (start, moved) in enumerate(problem.images):
        back = {after: before for before, after in enumerate(moved)}
        hops.append([Hop(number, back[a], back[b], form) for a, b, form in ways[start]])
    return hops


# The routing as a mixed-integer program: its variables, and a sentence for each of its constraints.

MICRO = 1e6
"""The program counts in microseconds, so that its numbers are neither tiny nor huge."""
ALIKE = 1e-6
"""By which share the times of two routings may differ that count as equally quick."""
CONNECTION = 0.5
"""What another connection costs, in messages: each is a lane that a rank has to look after."""
PREFERENCE = 1e-3
"""What part of the time a sketch's wish for few or many connections is worth."""


class Program:
    """Variables and constraints, with the numbers of the variables by what they mean."""

    def __init__(self, problem: Problem, first: Routing) -> None:
        """Write the program down; `first` bounds what is worth looking at."""
        self._problem, self.model = problem, Model()
        self._largest = max(first.seconds * MICRO, 1.0)
        self._bottleneck = self.model.real("bottleneck", cost=problem.loops)
        self._fill = self.model.real("fill", cost=1.0)
        self._sent: dict[tuple[int, int, int, int], int] = {}
        self._keys_into: defaultdict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
        self._encodes: dict[tuple[int, int, int], int] = {}
        self._arrival: dict[tuple[int, int], int] = {}
        self._used: dict[tuple[int, int], int] = {}
        self._exact: dict[tuple[int, int], int] = {}
        self._connected: dict[tuple[int, int], int] = {}
        self.slack = 0.0
        """Seconds by which wishes of the sketch may have moved the objective."""
        for number in problem.representatives:
            self._add_variables(number)
            self._add_receives(number)
            self._add_borders(number)
            self._add_times(number)
            if len(problem.codings) > 1:
                self._add_exactness(number)
        self._add_loads()
        if problem.sketch.connections:
            self._add_wishes()

    def _add_variables(self, number: int) -> None:
        problem, model, name = self._problem, self.model, self._problem.chunks[number]
        for a, b in problem.links:
            for form in range(len(problem.codings)) if problem.allowed(number, a, b) else ():
                suffix = "_coded" if form else ""
                self._sent[number, a, b, form] = model.binary(f"send_{name}_from_{a}_to_{b}{suffix}")
                self._keys_into[number, b].append((number, a, b, form))
        soonest = _soonest(problem, name.source)
        for rank in range(problem.topology.ranks):
            # Nothing arrives sooner than by the shortest way.
            lower = soonest.get(rank, 0.0) * MICRO * (1 - 1e-9)
            upper = max(self._largest, lower)
            self._arrival[number, rank] = model.real(f"arrival_{name}_at_{rank}", lower=lower, upper=upper)
            for form, coding in enumerate(problem.codings):
                if coding.encode and not problem.mirrored:
                    self._encodes[number, rank, form] = model.real(f"encode_{name}_at_{rank}_{form}", upper=1.0)

    def _ways_into(self, number: int, rank: int) -> list[int]:
        return [self._sent[key] for key in self._keys_into[number, rank]]

    def _add_receives(self, number: int) -> None:
        problem, model, chunk = self._problem, self.model, self._problem.chunks[number]
        for rank in range(problem.topology.ranks):
            into = [(variable, 1.0) for variable in self._ways_into(number, rank)]
            if rank in chunk.to:
                # A destination receives the chunk exactly once.
                model.exactly(f"receive_{chunk}_at_{rank}", into, 1.0)
            elif rank != chunk.source and into:
                # Any other rank receives it once at most.
                model.at_most(f"relay_{chunk}_at_{rank}", into, 1.0)
        for (own, a, b, form), variable in self._sent.items():
            if own == number and a != chunk.source and a not in chunk.to:
                # Who is neither source nor destination sends it only if it has received it.
                had = [(other, -1.0) for other in self._ways_into(number, a)]
                model.at_most(f"relayed_{chunk}_from_{a}_to_{b}_{form}", [(variable, 1.0), *had], 0.0)

    def _add_exactness(self, number: int) -> None:
        """Let no chunk be encoded that has been decoded: its error would be made twice."""
        model, chunk = self.model, self._problem.chunks[number]
        for rank in range(self._problem.topology.ranks):
            self._exact[number, rank] = model.real(f"exact_{chunk}_at_{rank}", upper=1.0)
        for rank in range(self._problem.topology.ranks):
            coded = [(self._sent[key], 1.0) for key in self._keys_into[number, rank] if key[3] == CODED]
            # What comes encoded is not exact.
            model.at_most(f"inexact_{chunk}_at_{rank}", [(self._exact[number, rank], 1.0), *coded], 1.0)
        for (own, a, b, form), variable in self._sent.items():
            here, there = self._exact[number, a], self._exact[number, b]
            if own != number:
                continue
            if form == PLAIN:
                # What comes plain is as exact as it was.
                model.at_most(f"kept_{chunk}_from_{a}_to_{b}", [(there, 1.0), (here, -1.0), (variable, 1.0)], 1.0)
            else:
                # Who encodes has the exact chunk, or passes on what came encoded.
                came = [(self._sent[key], -1.0) for key in self._keys_into[number, a] if key[3] == CODED]
                model.at_most(f"once_{chunk}_from_{a}_to_{b}", [(variable, 1.0), (here, -1.0), *came], 0.0)

    def _add_borders(self, number: int) -> None:
        """Say what follows from the rest, but helps the solver to see it."""
        problem, chunk = self._problem, self._problem.chunks[number]
        for at, node in enumerate(map(frozenset, problem.topology.nodes)):
            here = chunk.source in node
            crosses = bool(chunk.to - node) if here else bool(chunk.to & node)
            across = [
                (variable, -1.0)
                for (own, a, b, _), variable in self._sent.items()
                if own == number and ((a in node) == here) and ((b in node) != here)
            ]
            if crosses and len(node) > 1:
                # A chunk that is needed on the other side of a node's border crosses it.
                self.model.at_most(f"border_{chunk}_of_node_{at}", across, -1.0)

    def _add_times(self, number: int) -> None:
        problem, model, chunk = self._problem, self.model, self._problem.chunks[number]
        for (own, a, b, form), variable in self._sent.items():
            if own != number:
                continue
            encodes = self._encodes.get((number, a, form))
            if encodes is not None:
                # A rank encodes a chunk that it sends encoded, unless it has come to it that way.
                came = [(self._sent[key], -1.0) for key in self._keys_into[number, a] if key[3] == form]
                model.at_most(f"frame_{chunk}_from_{a}_to_{b}", [(variable, 1.0), (encodes, -1.0), *came], 0.0)
            # A chunk arrives no sooner than it was at the sender, was encoded there, and took the link: no circles.
            takes = problem.latency(a, b, form) * MICRO
            waits = recoding(problem, a == chunk.source, form) * MICRO if encodes is not None else 0.0
            terms = [(self._arrival[number, a], 1.0), (self._arrival[number, b], -1.0)]
            terms += [(variable, self._largest + takes)] + ([(encodes, waits)] if encodes is not None else [])
            model.at_most(f"time_{chunk}_from_{a}_to_{b}_{form}", terms, self._largest)
        for rank in sorted(chunk.to):
            # The fill is the last arrival.
            terms = [(self._arrival[number, rank], 1.0), (self._fill, -1.0)]
            model.at_most(f"fill_{chunk}_at_{rank}", terms, 0.0)

    def _add_loads(self) -> None:
        problem, model = self._problem, self.model
        loads: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        by_start: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        for number, a, b, form in self._sent:
            by_start[number].append((a, b, form, self._sent[number, a, b, form]))
        for start, moved in problem.images:
            back = {after: before for before, after in enumerate(moved)}
            for a, b, form, variable in by_start[start]:
                for name, seconds in problem.loads(back[a], back[b], form):
                    loads[name].append((variable, seconds * MICRO))
            for (number, rank, form), variable in self._encodes.items():
                if number == start:
                    seconds = problem.piece * problem.codings[form].encode
                    for name, share in problem.coding_loads(back[rank], seconds):
                        loads[name].append((variable, share * MICRO))
        known = set()
        for name, terms in loads.items():
            alike = frozenset(terms), len(terms)
            if alike not in known:
                # Nothing is busy for longer in a loop than the bottleneck; what symmetry makes equal is said once.
                model.at_most(f"load_{name.replace(' ', '_')}", [*terms, (self._bottleneck, -1.0)], 0.0)
                known.add(alike)

    def _add_wishes(self) -> None:
        problem, model = self._problem, self.model
        inside = [(a, b) for a, b in problem.links if problem.topology.node_of(a) == problem.topology.node_of(b)]
        worth = PREFERENCE * self._largest / max(1, len(inside)) * problem.sketch.connections
        self.slack = abs(worth) * len(inside) / MICRO
        for a, b in inside:
            self._used[a, b] = model.real(f"used_{a}_to_{b}", cost=worth, upper=1.0)
            own = [variable for (_, c, d, _), variable in self._sent.items() if (c, d) == (a, b)]
            if worth > 0:
                for variable in own:
                    # A connection is used by every chunk that takes it.
                    model.at_most(f"use_{a}_to_{b}_{variable}", [(variable, 1.0), (self._used[a, b], -1.0)], 0.0)
            else:
                # A connection counts as used only if some chunk takes it.
                model.at_most(f"use_{a}_to_{b}", [(self._used[a, b], 1.0), *((one, -1.0) for one in own)], 0.0)

    def sparing(self, best: Routing, seconds: float) -> Routing:
        """Return a routing that is as quick, sends no more than it must, and over few different connections.

        Links with time to spare cost nothing in the model; ranks and their processors have better things to do.
        """
        model, problem = self.model, self._problem
        if seconds <= 0:
            return best
        aims = [(self._bottleneck, problem.loops), (self._fill, 1.0)]
        # The time stays what it was.
        model.at_most("as_quick", aims, best.seconds * MICRO * (1 + ALIKE))
        takes = {
            variable: sum(load for _, load in problem.loads(a, b, form)) * MICRO
            for (_, a, b, form), variable in self._sent.items()
        }
        worth = CONNECTION * sum(takes.values()) / len(takes)
        for (_, a, b, _), variable in self._sent.items():
            link = problem.alike[a, b]
            if link not in self._connected:
                self._connected[link] = model.real(f"connected_{link[0]}_to_{link[1]}", upper=1.0)
            # A connection is there for every chunk that takes it, or takes one that symmetry makes of it.
            terms = [(variable, 1.0), (self._connected[link], -1.0)]
            model.at_most(f"connect_{a}_to_{b}_{variable}", terms, 0.0)
        model.aim(takes | dict.fromkeys(self._connected.values(), worth) | {self._fill: PREFERENCE})
        try:
            outcome = model.solve(seconds, self.start(best))
        except ScheduleError:
            return best  # no time was left to look for one
        found = Routing(problem, unfolded(problem, self.ways(outcome.values)))
        return found if found.seconds <= best.seconds * (1 + 2 * ALIKE) else best

    def start(self, first: Routing) -> dict[int, float]:
        """Return a routing as values of the variables."""
        values = {self._bottleneck: first.bottleneck * MICRO, self._fill: first.fill * MICRO}
        for number in self._problem.representatives:
            hops = first.hops[number]
            for hop in hops:
                values[self._sent[number, hop.sender, hop.receiver, hop.form]] = 1.0
                link = self._problem.alike[hop.sender, hop.receiver]
                if link in self._connected:
                    values[self._connected[link]] = 1.0
                if (hop.sender, hop.receiver) in self._used:
                    values[self._used[hop.sender, hop.receiver]] = 1.0
            for rank, form in encoders(hops):
                if (number, rank, form) in self._encodes:
                    values[self._encodes[number, rank, form]] = 1.0
            for rank, seconds in arrivals(self._problem, hops).items():
                values[self._arrival[number, rank]] = seconds * MICRO
            for rank in exact_on(self._problem, hops) if self._exact else ():
                values[self._exact[number, rank]] = 1.0
        return values

    def ways(self, values: Sequence[float]) -> dict[int, list[tuple[int, int, int]]]:
        """Return the ways of each chunk that a solution has chosen."""
        chosen: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for (number, a, b, form), variable in self._sent.items():
            if values[variable] > 0.5:
                chosen[number].append((a, b, form))
        chunks = self._problem.chunks
        return {n: grown(chunks[n].source, chosen[n], chunks[n].to) for n in self._problem.representatives}


def _soonest(problem: Problem, source: int) -> dict[int, float]:
    """Return the least time in which a chunk can come from its source to each rank."""
    onward: defaultdict[int, list[int]] = defaultdict(list)
    for a, b in problem.links:
        onward[a].append(b)
    found, line = dict[int, float](), [(0.0, source)]
    while line:
        spent, a = heappop(line)
        if a not in found:
            found[a] = spent
            for b in onward[a]:
                if b not in found:
                    quickest = min(problem.latency(a, b, form) for form in range(len(problem.codings)))
                    heappush(line, (spent + quickest, b))
    return found
