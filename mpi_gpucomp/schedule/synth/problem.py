"""What is to be routed: chunks with a source and destinations, over the links that a sketch leaves.

Reductions are mirrored: a reduce-scatter is an all-gather run backwards, on links that go the other way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import DeviceError, ScheduleError, SpecError
from mpi_gpucomp.schedule.cost import FREE
from mpi_gpucomp.schedule.sketch import rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.sketch import Sketch
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["MIRRORED", "Chunk", "Hop", "Model", "Outcome", "Problem", "chunks_of"]

MIRRORED = {"reduce": "broadcast", "reduce_scatter": "allgather"}
"""Reductions, and what they are backwards."""
PLAIN, CODED = 0, 1


class Chunk(NamedTuple):
    """Data that starts on one rank and must come to others."""

    source: int
    part: int
    """Which of the source's chunks for these destinations it is."""
    to: frozenset[int]

    def __str__(self) -> str:
        """Name it for people: source, destination if there is one, number."""
        (one, *others) = sorted(self.to)
        return f"{self.source}_{self.part}" if others else f"{self.source}_for_{one}_{self.part}"


class Hop(NamedTuple):
    """A chunk on a link, plain (0) or encoded (1)."""

    chunk: int
    sender: int
    receiver: int
    form: int


def chunks_of(collective: str, ranks: int, root: int, each: int) -> list[Chunk]:
    """Return the chunks of a collective that does not reduce, so many for each block."""
    everybody = frozenset(range(ranks))
    pairs: list[tuple[int, frozenset[int]]]
    if collective == "broadcast":
        pairs = [(root, everybody - {root})]
    elif collective == "allgather":
        pairs = [(rank, everybody - {rank}) for rank in range(ranks)]
    elif collective == "alltoall":
        pairs = [(a, frozenset({b})) for a in range(ranks) for b in range(ranks) if a != b]
    elif collective == "gather":
        pairs = [(rank, frozenset({root})) for rank in range(ranks) if rank != root]
    else:
        pairs = [(root, frozenset({rank})) for rank in range(ranks) if rank != root]
    return [Chunk(source, index, to) for source, to in pairs for index in range(each)]


@dataclass(frozen=True)
class Problem:
    """A routing to be found: among `loops` equal rounds, each with chunks of `piece` bytes."""

    topology: Topology
    sketch: Sketch
    chunks: list[Chunk]
    piece: float
    loops: float
    codings: tuple[CodecCost, ...] = (FREE,)
    """The forms that a chunk may travel in: plain, and encoded if there is a second."""
    mirrored: bool = False
    """Whether it is a reduction: messages go the other way, and every one is encoded and decoded again."""
    both: bool = False
    """Whether it is an all-reduce: every way is taken backwards with sums, and then forwards with the results."""

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        """All links that may be used, in the direction of the routing."""
        found = [
            (a, b)
            for a in range(self.topology.ranks)
            for b in range(self.topology.ranks)
            if a != b and self._usable(a, b)
        ]
        reached = _reached(self.topology.ranks, found, self.chunks[0].source) if self.chunks else set()
        for chunk in self.chunks:
            missing = chunk.to - reached if chunk.source == self.chunks[0].source else set()
            if missing:
                raise SpecError(
                    f"topology {self.topology.name}",
                    expected=f"a way from rank {chunk.source} to rank {min(missing)}",
                    got="none that the sketch leaves",
                    remedy="Let the sketch have more links between nodes (internode_conn).",
                )
        return found

    @cached_property
    def halves(self) -> tuple[Problem, ...]:
        """What it consists of: the sums and the results of an all-reduce, or itself."""
        if not self.both:
            return (self,)
        return replace(self, both=False, mirrored=True), replace(self, both=False)

    def _usable(self, a: int, b: int) -> bool:
        ways = [half.real(a, b) for half in self.halves]
        exist = all(self.topology.link(*way) is not None for way in ways)
        return exist and all(self.sketch.allows(self.topology, *way) for way in ways)

    def real(self, a: int, b: int) -> tuple[int, int]:
        """Return sender and receiver of what goes along a link of the routing."""
        return (b, a) if self.mirrored else (a, b)

    def allowed(self, chunk: int, a: int, b: int) -> bool:
        """Say whether a chunk may take a link: not into its source, and out of its node by its sender."""
        source, topology = self.chunks[chunk].source, self.topology
        if b == source:
            return False
        leaves = topology.node_of(a) == topology.node_of(source) != topology.node_of(b)
        sender = self.sketch.sender_of.get(topology.position(source))
        return not leaves or self.mirrored or sender in (None, topology.position(a))

    def seconds(self, a: int, b: int, form: int) -> float:
        """Return what a message takes on a link of its own, besides coding."""
        link = self.topology.link(*self.real(a, b))
        assert link is not None
        return link.latency + self.topology.per_chunk + self.piece / self.codings[form].ratio * link.per_byte

    def latency(self, a: int, b: int, form: int) -> float:
        """Return the time until a chunk has come over a link that is free, decoding not included."""
        if self.both:
            return sum(half.latency(a, b, form) for half in self.halves)
        alone = self.topology.unloaded_link(*self.real(a, b))
        assert alone is not None
        coding = self.codings[form]
        again = self.piece * (coding.encode + coding.decode) if self.mirrored else 0.0
        nbytes, handling = self.piece / coding.ratio, self.topology.message_cost
        return alone.seconds(nbytes) + self.topology.per_chunk + 2 * handling.seconds(nbytes) + handling.wait + again

    def loads(self, a: int, b: int, form: int) -> tuple[tuple[str, float], ...]:
        """Return everything that a message keeps busy, and for how long; encoding of copies is counted elsewhere."""
        key = a, b, form
        if key not in self._known:
            self._known[key] = tuple(load for half in self.halves for load in half._loads(*key))
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], tuple[tuple[str, float], ...]]:
        return {}

    def _loads(self, a: int, b: int, form: int) -> Iterator[tuple[str, float]]:
        sender, receiver = self.real(a, b)
        coding = self.codings[form]
        yield f"link {sender} to {receiver}", self.seconds(a, b, form)
        for number in self.topology.ports_of(sender, receiver):
            port = self.topology.ports[number]
            yield port.name, self.piece / coding.ratio * port.per_byte
        handled = self.topology.message_cost.seconds(self.piece / coding.ratio)
        yield from self.coding_loads(sender, handled, "messages of")
        yield from self.coding_loads(receiver, handled, "messages of")
        yield from self.coding_loads(receiver, self.piece * coding.decode)
        if self.mirrored:
            yield from self.coding_loads(sender, self.piece * coding.encode)

    def coding_loads(self, rank: int, seconds: float, what: str = "of") -> Iterator[tuple[str, float]]:
        """Yield what a rank's coding keeps busy: its stream, and its part of cores that are shared."""
        if seconds:
            yield f"stream {what} {rank}", seconds
            for number, processor in enumerate(self.topology.processors):
                if rank in processor.ranks:
                    yield f"processor {number}", seconds / processor.cores

    @cached_property
    def images(self) -> list[tuple[int, tuple[int, ...]]]:
        """For each chunk the one that stands for all that are alike, and where the ranks go on the way to it."""
        number = {chunk: at for at, chunk in enumerate(self.chunks)}
        identity = tuple(range(self.topology.ranks))
        turns = [rotation(self.topology.ranks, *one) for one in self.sketch.symmetries]
        found: list[tuple[int, tuple[int, ...]] | None] = [None] * len(self.chunks)
        for start in range(len(self.chunks)):
            if found[start] is not None:
                continue
            found[start] = start, identity
            todo = [start]
            while todo:
                at = todo.pop()
                _, back = found[at] or (start, identity)
                for turn in turns:
                    source, part, to = self.chunks[at]
                    image = number.get(Chunk(turn[source], part, frozenset(turn[rank] for rank in to)))
                    if image is not None and found[image] is None:
                        undone = {after: before for before, after in enumerate(turn)}
                        found[image] = start, tuple(back[undone[rank]] for rank in range(len(turn)))
                        todo.append(image)
        return [one for one in found if one is not None]

    @cached_property
    def alike(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each link the first of those that symmetry maps onto it."""
        turns = [rotation(self.topology.ranks, *one) for one in self.sketch.symmetries]
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for link in self.links:
            todo = [] if link in found else [link]
            while todo:
                a, b = todo.pop()
                if (a, b) not in found:
                    found[a, b] = link
                    todo += [(turn[a], turn[b]) for turn in turns]
        return found

    @cached_property
    def representatives(self) -> list[int]:
        """The chunks that stand for others, or for themselves alone."""
        return sorted({start for start, _ in self.images})


def _reached(ranks: int, links: list[tuple[int, int]], source: int) -> set[int]:
    onward: list[list[int]] = [[] for _ in range(ranks)]
    for a, b in links:
        onward[a].append(b)
    seen, todo = {source}, [source]
    while todo:
        for other in onward[todo.pop()]:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


# A mixed-integer program with names, solved by HiGHS.

GAP = 1e-3
"""Where the proven gap is below this, a solution counts as the best."""


class Outcome(NamedTuple):
    """A solution: the value of every variable, the objective, and the bound that was proven for it."""

    values: Sequence[float]
    objective: float
    bound: float
    proven: bool

    @property
    def gap(self) -> float:
        """Return how much better the best could be at most, as a share of what was found."""
        return max(0.0, 1 - self.bound / self.objective) if self.objective else 0.0


class Model:
    """Variables and constraints, each with a name, to be minimised."""

    def __init__(self) -> None:
        """Begin with none."""
        self.names: list[str] = []
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self.rows: list[tuple[str, list[tuple[int, float]], float, float]] = []

    def binary(self, name: str, cost: float = 0.0) -> int:
        """Add a choice; return its number."""
        return self._add(name, cost, 0.0, 1.0, whole=True)

    def real(self, name: str, cost: float = 0.0, lower: float = 0.0, upper: float = float("inf")) -> int:
        """Add a number, from 0 on unless something else is said."""
        return self._add(name, cost, lower, upper, whole=False)

    def _add(self, name: str, cost: float, lower: float, upper: float, *, whole: bool) -> int:
        self.names.append(name)
        self._costs.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._whole.append(whole)
        return len(self.names) - 1

    def aim(self, costs: Mapping[int, float]) -> None:
        """Minimise something else from now on."""
        self._costs = [costs.get(number, 0.0) for number in range(len(self.names))]

    def at_most(self, name: str, terms: Sequence[tuple[int, float]], limit: float) -> None:
        """Let a sum of variables, each with its factor, stay within a limit."""
        self.rows.append((name, _together(terms), float("-inf"), limit))

    def exactly(self, name: str, terms: Sequence[tuple[int, float]], value: float) -> None:
        """Let a sum of variables have a value."""
        self.rows.append((name, _together(terms), value, value))

    def solve(
        self,
        seconds: float,
        start: Mapping[int, float] | None = None,
        progress: Callable[[float, float], None] | None = None,
    ) -> Outcome:
        """Return the best that is found in so many seconds, starting from a solution if there is one.

        `progress` is called with the objective and the bound whenever the solver has news.
        """
        solver = self._loaded(seconds)
        if start is not None:
            solution = highs().HighsSolution()
            solution.col_value = [start.get(number, 0.0) for number in range(len(self.names))]
            solver.setSolution(solution)
        if progress is not None:
            solver.cbMipLogging += lambda event: progress(
                event.data_out.mip_primal_bound, event.data_out.mip_dual_bound
            )
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != 2:
            raise ScheduleError(
                "solver",
                expected=f"a solution within {seconds:g} seconds",
                got=solver.modelStatusToString(solver.getModelStatus()),
                remedy="Give it more time, or a sketch with fewer links and more symmetry.",
            )
        proven = solver.getModelStatus() == highs().HighsModelStatus.kOptimal
        objective = info.objective_function_value
        return Outcome(list(solver.getSolution().col_value), objective, min(info.mip_dual_bound, objective), proven)

    def _loaded(self, seconds: float) -> Any:
        import numpy as np

        package = highs()
        lp = package.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.names), len(self.rows)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_, lp.col_upper_ = np.array(self._lower), np.array(self._upper)
        lp.row_lower_ = np.array([low for _, _, low, _ in self.rows])
        lp.row_upper_ = np.array([high for _, _, _, high in self.rows])
        terms = [row[1] for row in self.rows]
        lp.a_matrix_.format_ = package.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *map(len, terms)])
        lp.a_matrix_.index_ = np.array([number for row in terms for number, _ in row], np.int32)
        lp.a_matrix_.value_ = np.array([factor for row in terms for _, factor in row], np.float64)
        kinds = package.HighsVarType
        lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self._whole]
        lp.col_names_, lp.row_names_ = self.names, [row[0] for row in self.rows]
        solver = package.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", float(seconds))
        solver.setOptionValue("mip_rel_gap", GAP)
        solver.passModel(lp)
        return solver


def _together(terms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Add up the factors of a variable that is there more than once."""
    found: dict[int, float] = {}
    for number, factor in terms:
        found[number] = found.get(number, 0.0) + factor
    return list(found.items())


def highs() -> Any:
    """Return the solver's package, which is an extra."""
    try:
        import highspy
    except ImportError as error:
        remedy = "Install the extra: pip install mpi_gpucomp[synth]."
        raise DeviceError("synthesis", expected="the solver HiGHS (highspy)", got="none", remedy=remedy) from error
    return highspy
