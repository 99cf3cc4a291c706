"""The first stage of synthesis: which links each chunk takes.

A greedy routing is found at once. A mixed-integer program then searches for a better one, and among equally fast
routings for one with little traffic.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.synth.milp import MICRO, Model
from mpi_gpucomp.schedule.synth.problem import (
    ENCODED,
    RAW,
    Routing,
    arrivals,
    encoders,
    exact_on,
    expand_symmetry,
    prune_tree,
    recoding,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi_gpucomp.schedule.synth.problem import Problem

__all__ = ["MAX_BINARIES", "RoutingProgram", "greedy", "route"]


def greedy(problem: Problem) -> Routing:
    """Return a feasible routing: each chunk grows a tree, hop by hop, where it adds least to a bottleneck."""
    found = _GreedyTrees(problem)
    todo = {number: set(problem.chunks[number].to) for number in problem.representatives}
    everywhere = problem.topology.ranks - 1
    while any(todo.values()):
        for number, missing in todo.items():
            if not missing:
                continue
            if len(problem.chunks[number].to) == everywhere:
                missing.discard(found.reach_next(number))
            else:
                missing -= found.reach(number, min(missing))
    edges = {
        n: prune_tree(problem.chunks[n].source, found.edges[n], problem.chunks[n].to) for n in problem.representatives
    }
    return Routing(problem, expand_symmetry(problem, edges))


class _GreedyTrees:
    """The trees so far, and the loads that they cause."""

    def __init__(self, problem: Problem) -> None:
        """Start with the sources."""
        self._problem = problem
        self._loads: defaultdict[str, float] = defaultdict(float)
        self._out_links: defaultdict[int, list[int]] = defaultdict(list)
        for a, b in problem.links:
            self._out_links[a].append(b)
        self._images: defaultdict[int, list[dict[int, int]]] = defaultdict(list)
        for start, moved in problem.images:
            self._images[start].append({after: before for before, after in enumerate(moved)})
        self.edges: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._arrived: dict[int, dict[int, float]] = {
            n: {problem.chunks[n].source: 0.0} for n in problem.representatives
        }
        self._forms: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        """The forms in which a rank has a frame of a chunk."""
        self._exact: set[tuple[int, int]] = {(n, problem.chunks[n].source) for n in problem.representatives}
        """(Chunk, rank) pairs whose copy was never encoded."""

    def reach_next(self, number: int) -> int:
        """Add the cheapest hop of a chunk to a rank that does not have it; return the rank."""
        arrived = self._arrived[number]
        candidates = (
            (*self._cost(number, a, b, form, arrived[a]), a, b, form)
            for a in arrived
            for b in self._out_links[a]
            if b not in arrived and self._problem.allowed(number, a, b)
            for form in self._forms_of(number, a)
        )
        _, _, a, b, form = min(candidates)
        self._take(number, a, b, form)
        return b

    def reach(self, number: int, destination: int) -> set[int]:
        """Add the cheapest path of a chunk to a rank; return the ranks on the path."""
        arrived, before = self._arrived[number], dict[int, tuple[int, int]]()
        cost = {rank: 0.0 for rank in arrived}
        queue = [(0.0, rank) for rank in arrived]
        while queue:
            spent, a = heappop(queue)
            if a == destination:
                break
            for b in self._out_links[a]:
                for form in self._forms_of(number, a) if self._problem.allowed(number, a, b) else ():
                    total = spent + sum(self._cost(number, a, b, form, 0.0))
                    if total < cost.get(b, float("inf")):
                        cost[b], before[b] = total, (a, form)
                        heappush(queue, (total, b))
        path = [destination]
        while path[-1] not in arrived:
            path.append(before[path[-1]][0])
        for b, a in reversed(list(pairwise(path))):
            self._take(number, a, b, before[b][1])
        return set(path)

    def _forms_of(self, number: int, rank: int) -> Iterator[int]:
        """Yield the forms in which a rank may send a chunk; it must not be encoded twice."""
        for form in range(len(self._problem.codecs)):
            once = form == RAW or (number, rank) in self._exact or form in self._forms[number, rank]
            if once or len(self._problem.codecs) == 1:
                yield form

    def _cost(self, number: int, a: int, b: int, form: int, start: float) -> tuple[float, float]:
        """Return the cost of a hop: the time with its load, and the arrival of the chunk."""
        problem = self._problem
        loads = list(problem.loads(a, b, form))
        fresh = form not in self._forms[number, a]
        source = a == problem.chunks[number].source
        if fresh and not problem.mirrored:
            loads += problem.work_loads(a, problem.chunk_bytes * problem.codecs[form].encode)
        most = max(self._loads[name] + seconds for name, seconds in loads)
        waits = recoding(problem, source, form) if fresh else 0.0
        there = start + waits + problem.latency(a, b, form)
        return problem.loops * most + there, there

    def _take(self, number: int, a: int, b: int, form: int) -> None:
        problem = self._problem
        arrived = self._arrived[number]
        arrived[b] = self._cost(number, a, b, form, arrived[a])[1]
        fresh = form not in self._forms[number, a] and not problem.mirrored
        for back in self._images[number]:
            for name, seconds in problem.loads(back[a], back[b], form):
                self._loads[name] += seconds
            for name, seconds in (
                problem.work_loads(back[a], problem.chunk_bytes * problem.codecs[form].encode) if fresh else ()
            ):
                self._loads[name] += seconds
        if form == RAW and (number, a) in self._exact:
            self._exact.add((number, b))
        self._forms[number, a].add(form)
        self._forms[number, b].add(form)
        self.edges[number].append((a, b, form))


TOLERANCE = 1e-6
"""The relative difference of times that count as equal."""
CONNECTION = 0.5
"""The cost of a connection, in messages: each is a lane that a rank must poll."""
PREFERENCE = 1e-3
"""The weight of a sketch's preference for few or many connections, as a fraction of the time."""


class RoutingProgram:
    """The routing as a mixed-integer program."""

    def __init__(self, problem: Problem, first: Routing) -> None:
        """Add variables and constraints; `first` is an upper bound of the time."""
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
        """Seconds by which the preferences of the sketch may have changed the objective."""
        for number in problem.representatives:
            self._add_variables(number)
            self._add_receives(number)
            self._add_node_cuts(number)
            self._add_times(number)
            if len(problem.codecs) > 1:
                self._add_exactness(number)
        self._add_loads()
        if problem.sketch.connections:
            self._add_preferences()

    def _add_variables(self, number: int) -> None:
        problem, model, name = self._problem, self.model, self._problem.chunks[number]
        for a, b in problem.links:
            for form in range(len(problem.codecs)) if problem.allowed(number, a, b) else ():
                suffix = "_coded" if form else ""
                self._sent[number, a, b, form] = model.binary(f"send_{name}_from_{a}_to_{b}{suffix}")
                self._keys_into[number, b].append((number, a, b, form))
        earliest = _earliest_arrivals(problem, name.source)
        for rank in range(problem.topology.ranks):
            # Nothing arrives earlier than by the shortest path.
            lower = earliest.get(rank, 0.0) * MICRO * (1 - 1e-9)
            upper = max(self._largest, lower)
            self._arrival[number, rank] = model.real(f"arrival_{name}_at_{rank}", lower=lower, upper=upper)
            for form, coding in enumerate(problem.codecs):
                if coding.encode and not problem.mirrored:
                    self._encodes[number, rank, form] = model.real(f"encode_{name}_at_{rank}_{form}", upper=1.0)

    def _edges_into(self, number: int, rank: int) -> list[int]:
        return [self._sent[key] for key in self._keys_into[number, rank]]

    def _add_receives(self, number: int) -> None:
        problem, model, chunk = self._problem, self.model, self._problem.chunks[number]
        for rank in range(problem.topology.ranks):
            into = [(variable, 1.0) for variable in self._edges_into(number, rank)]
            if rank in chunk.to:
                # A destination receives the chunk exactly once.
                model.exactly(f"receive_{chunk}_at_{rank}", into, 1.0)
            elif rank != chunk.source and into:
                # Any other rank receives it at most once.
                model.at_most(f"relay_{chunk}_at_{rank}", into, 1.0)
        for (own, a, b, form), variable in self._sent.items():
            if own == number and a != chunk.source and a not in chunk.to:
                # A rank that is neither source nor destination sends it only if it has received it.
                had = [(other, -1.0) for other in self._edges_into(number, a)]
                model.at_most(f"relayed_{chunk}_from_{a}_to_{b}_{form}", [(variable, 1.0), *had], 0.0)

    def _add_exactness(self, number: int) -> None:
        """Forbid encoding a chunk that has been decoded: a lossy error would be introduced twice."""
        model, chunk = self.model, self._problem.chunks[number]
        for rank in range(self._problem.topology.ranks):
            self._exact[number, rank] = model.real(f"exact_{chunk}_at_{rank}", upper=1.0)
        for rank in range(self._problem.topology.ranks):
            coded = [(self._sent[key], 1.0) for key in self._keys_into[number, rank] if key[3] == ENCODED]
            # A chunk that arrives encoded is not exact.
            model.at_most(f"inexact_{chunk}_at_{rank}", [(self._exact[number, rank], 1.0), *coded], 1.0)
        for (own, a, b, form), variable in self._sent.items():
            here, there = self._exact[number, a], self._exact[number, b]
            if own != number:
                continue
            if form == RAW:
                # A chunk that arrives raw is as exact as at its sender.
                model.at_most(f"kept_{chunk}_from_{a}_to_{b}", [(there, 1.0), (here, -1.0), (variable, 1.0)], 1.0)
            else:
                # A rank that sends it encoded has the exact chunk, or forwards an encoded one.
                came = [(self._sent[key], -1.0) for key in self._keys_into[number, a] if key[3] == ENCODED]
                model.at_most(f"once_{chunk}_from_{a}_to_{b}", [(variable, 1.0), (here, -1.0), *came], 0.0)

    def _add_node_cuts(self, number: int) -> None:
        """Add redundant constraints that tighten the relaxation."""
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
                # A chunk that is needed outside its node, or inside another, crosses that node's border.
                self.model.at_most(f"border_{chunk}_of_node_{at}", across, -1.0)

    def _add_times(self, number: int) -> None:
        problem, model, chunk = self._problem, self.model, self._problem.chunks[number]
        for (own, a, b, form), variable in self._sent.items():
            if own != number:
                continue
            encodes = self._encodes.get((number, a, form))
            if encodes is not None:
                # A rank encodes a chunk that it sends encoded, unless it has arrived encoded.
                came = [(self._sent[key], -1.0) for key in self._keys_into[number, a] if key[3] == form]
                model.at_most(f"frame_{chunk}_from_{a}_to_{b}", [(variable, 1.0), (encodes, -1.0), *came], 0.0)
            # A chunk arrives after it was at the sender, was encoded there, and passed the link: no cycles.
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
                    seconds = problem.chunk_bytes * problem.codecs[form].encode
                    for name, share in problem.work_loads(back[rank], seconds):
                        loads[name].append((variable, share * MICRO))
        known = set()
        for name, terms in loads.items():
            key = frozenset(terms), len(terms)
            if key not in known:
                # No load exceeds the bottleneck; loads that symmetry makes equal are added once.
                model.at_most(f"load_{name.replace(' ', '_')}", [*terms, (self._bottleneck, -1.0)], 0.0)
                known.add(key)

    def _add_preferences(self) -> None:
        problem, model = self._problem, self.model
        inside = [(a, b) for a, b in problem.links if problem.topology.node_of(a) == problem.topology.node_of(b)]
        weight = PREFERENCE * self._largest / max(1, len(inside)) * problem.sketch.connections
        self.slack = abs(weight) * len(inside) / MICRO
        for a, b in inside:
            self._used[a, b] = model.real(f"used_{a}_to_{b}", cost=weight, upper=1.0)
            own = [variable for (_, c, d, _), variable in self._sent.items() if (c, d) == (a, b)]
            if weight > 0:
                for variable in own:
                    # A connection is used if a chunk uses it.
                    model.at_most(f"use_{a}_to_{b}_{variable}", [(variable, 1.0), (self._used[a, b], -1.0)], 0.0)
            else:
                # A connection is used only if a chunk uses it.
                model.at_most(f"use_{a}_to_{b}", [(self._used[a, b], 1.0), *((one, -1.0) for one in own)], 0.0)

    def minimise_traffic(self, best: Routing, seconds: float) -> Routing:
        """Return an equally fast routing with the least traffic, over few distinct connections.

        In the objective, links below the bottleneck are free; their messages still cost CPU time.
        """
        model, problem = self.model, self._problem
        if seconds <= 0:
            return best
        aims = [(self._bottleneck, problem.loops), (self._fill, 1.0)]
        # The time must not increase.
        model.at_most("as_fast", aims, best.seconds * MICRO * (1 + TOLERANCE))
        takes = {
            variable: sum(load for _, load in problem.loads(a, b, form)) * MICRO
            for (_, a, b, form), variable in self._sent.items()
        }
        weight = CONNECTION * sum(takes.values()) / len(takes)
        for (_, a, b, _), variable in self._sent.items():
            link = problem.canonical_link[a, b]
            if link not in self._connected:
                self._connected[link] = model.real(f"connected_{link[0]}_to_{link[1]}", upper=1.0)
            # A connection is needed by every chunk that uses it, or one of its equivalents.
            terms = [(variable, 1.0), (self._connected[link], -1.0)]
            model.at_most(f"connect_{a}_to_{b}_{variable}", terms, 0.0)
        model.minimise(takes | dict.fromkeys(self._connected.values(), weight) | {self._fill: PREFERENCE})
        try:
            outcome = model.solve(seconds, self.start(best))
        except ScheduleError:
            return best  # out of time
        found = Routing(problem, expand_symmetry(problem, self.edges(outcome.values)))
        return found if found.seconds <= best.seconds * (1 + 2 * TOLERANCE) else best

    def start(self, first: Routing) -> dict[int, float]:
        """Return a routing as values of the variables."""
        values = {self._bottleneck: first.bottleneck * MICRO, self._fill: first.fill * MICRO}
        for number in self._problem.representatives:
            hops = first.hops[number]
            for hop in hops:
                values[self._sent[number, hop.sender, hop.receiver, hop.form]] = 1.0
                link = self._problem.canonical_link[hop.sender, hop.receiver]
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

    def edges(self, values: Sequence[float]) -> dict[int, list[tuple[int, int, int]]]:
        """Return the edges of each chunk in a solution."""
        chosen: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for (number, a, b, form), variable in self._sent.items():
            if values[variable] > 0.5:
                chosen[number].append((a, b, form))
        chunks = self._problem.chunks
        return {n: prune_tree(chunks[n].source, chosen[n], chunks[n].to) for n in self._problem.representatives}


def _earliest_arrivals(problem: Problem, source: int) -> dict[int, float]:
    """Return the earliest arrival of a chunk at each rank."""
    out_links: defaultdict[int, list[int]] = defaultdict(list)
    for a, b in problem.links:
        out_links[a].append(b)
    found, queue = dict[int, float](), [(0.0, source)]
    while queue:
        spent, a = heappop(queue)
        if a not in found:
            found[a] = spent
            for b in out_links[a]:
                if b not in found:
                    fastest = min(problem.latency(a, b, form) for form in range(len(problem.codecs)))
                    heappush(queue, (spent + fastest, b))
    return found


MAX_BINARIES = 20_000
"""With more binary variables the solver would not improve the first routing."""
TRAFFIC_SHARE = 0.3
"""The fraction of the time for minimising the traffic."""


def route(problem: Problem, seconds: float, progress: Callable[[float, float], None] | None = None) -> Routing:
    """Return the best routing found in time; it is at least as fast as the greedy one."""
    first = greedy(problem)
    if seconds <= 0 or not 0 < _count_binaries(problem) <= MAX_BINARIES:
        return first
    started = perf_counter()
    program = RoutingProgram(problem, first)
    try:
        outcome = program.model.solve(seconds * (1 - TRAFFIC_SHARE), program.start(first), progress)
    except ScheduleError:
        return first  # out of time
    found = Routing(problem, expand_symmetry(problem, program.edges(outcome.values)))
    best = min(first, found, key=lambda routing: routing.seconds)
    reduced = program.minimise_traffic(best, seconds - (perf_counter() - started))
    return replace(reduced, proven=outcome.proven, bound=max(0.0, outcome.bound / MICRO - program.slack))


def _count_binaries(problem: Problem) -> int:
    """Return the number of binary variables."""
    allowed = (problem.allowed(number, a, b) for number in problem.representatives for a, b in problem.links)
    return sum(allowed) * len(problem.codecs)
