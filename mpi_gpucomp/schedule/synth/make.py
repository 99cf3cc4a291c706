"""From a topology and a collective to an algorithm: routing, ordering, contiguity, lowering, and the check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.builder import ScheduleBuilder, i, o
from mpi_gpucomp.schedule.cost import FREE
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.sketch import check_symmetries, default_sketch
from mpi_gpucomp.schedule.synth.contiguity import joined, ordered
from mpi_gpucomp.schedule.synth.lowering import add_copies, add_reductions, keep_own
from mpi_gpucomp.schedule.synth.problem import MIRRORED, Problem, chunks_of
from mpi_gpucomp.schedule.synth.routes import route
from mpi_gpucomp.schedule.synth.routing import Routing
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp.schedule.cost import CodecCost
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.sketch import Sketch
    from mpi_gpucomp.schedule.synth.lowering import Messages
    from mpi_gpucomp.schedule.topology import Topology

    Progress = Callable[[float, float], None]

__all__ = ["Synthesis", "synthesise"]

DEFAULT_SECONDS = 30.0
CONTIGUITY_SHARE = 0.25
"""Which part of the time the third stage may take."""
CLEARLY = 0.97
"""How much quicker a schedule with other lanes must be in the simulation to be taken instead of the usual one."""
MOST_SIMULATED = 20_000
"""With more chunks on more ranks it would take too long to try out which lanes are better."""


@dataclass(frozen=True)
class Synthesis:
    """An algorithm that was made, checked, and what is known about it."""

    algorithm: Algorithm
    routing: Routing
    seconds: float
    """What the solving took."""


def synthesise(
    topology: Topology,
    collective: str,
    nbytes: int,
    chunk: int,
    *,
    root: int = 0,
    sketch: Sketch | None = None,
    coding: CodecCost | None = None,
    mixed: bool = False,
    in_place: bool = False,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
) -> Synthesis:
    """Make an algorithm for messages of `nbytes` in chunks of `chunk` bytes, in about so many seconds at most.

    With a `coding` every message is encoded or, if `mixed`, those over links where that pays. `progress` hears what the
    routing promises and the bound that was proven, in microseconds.
    """
    begun = perf_counter()
    kind = COLLECTIVES[collective]
    _check(topology, collective, root, in_place=in_place, mixed=mixed)
    sketch = sketch or default_sketch(topology, rooted=kind.rooted)
    check_symmetries(sketch, topology)
    if kind.rooted:
        sketch = replace(sketch, symmetries=())
    codings = (topology.codecs.get("none", FREE), coding) if coding and mixed else (coding or FREE,)
    problem = _problem(topology, sketch, collective, root, nbytes, chunk, codings)
    routing = route(problem, seconds * (1 - CONTIGUITY_SHARE), progress)
    left = max(0.0, seconds - (perf_counter() - begun))
    stages = [_stage(Routing(half, routing.hops), left) for half in problem.halves]
    name, in_place = f"synth_{collective}_{topology.hash}", in_place or collective == "broadcast"

    def lowered(*, apart: bool) -> Algorithm:
        plan = ScheduleBuilder(name, collective, topology.ranks, root=root, in_place=in_place)
        return _lowered(plan, stages, apart=apart)

    # A lane that makes a sum is held up by it, for longer than a simulation knows: those are better kept apart.
    made = lowered(apart=kind.reduces)
    if made.chunks * topology.ranks * problem.loops <= MOST_SIMULATED:
        other = lowered(apart=not kind.reduces)
        times = [simulate(one, topology, nbytes, chunk, coding).seconds for one in (made, other)]
        made = other if times[1] < times[0] * CLEARLY else made
    return Synthesis(checked(made), routing, perf_counter() - begun)


def _problem(
    topology: Topology,
    sketch: Sketch,
    collective: str,
    root: int,
    nbytes: int,
    chunk: int,
    codings: tuple[CodecCost, ...],
) -> Problem:
    """Return what is to be routed: of a reduction what it is backwards, of an all-reduce both halves at once."""
    copied = "allgather" if collective == "allreduce" else MIRRORED.get(collective, collective)
    chunks = chunks_of(copied, topology.ranks, root, sketch.chunkup)
    in_loop = _chunks(collective, topology.ranks, sketch)
    piece, loops = min(chunk, nbytes / in_loop), max(1.0, nbytes / (chunk * in_loop))
    mirrored, both = collective in MIRRORED, collective == "allreduce"
    return Problem(topology, sketch, chunks, piece, loops, codings, mirrored, both)


def _chunks(collective: str, ranks: int, sketch: Sketch) -> int:
    """Return the chunks of a loop."""
    by_rank = COLLECTIVES[collective].blocks or collective == "allreduce"
    return sketch.chunkup * (ranks if by_rank else 1)


def _lowered(plan: ScheduleBuilder, stages: Sequence[tuple[Problem, Messages]], *, apart: bool) -> Algorithm:
    """Make a schedule of the stages."""
    sketch = stages[0][0].sketch
    plan.chunks = _chunks(plan.collective, plan.ranks, sketch)
    keep_own(plan, sketch.chunkup)
    for stage, (problem, messages) in enumerate(stages):
        add = add_reductions if problem.mirrored else add_copies
        add(plan, problem, messages, stage, apart=apart)
    if plan.ranks == 1 and COLLECTIVES[plan.collective].reduces:
        plan.local_copy(0, i(0), o(0), plan.chunks)
    return plan.algorithm()


def _stage(routing: Routing, seconds: float) -> tuple[Problem, Messages]:
    """Put the hops of a routing in order; sums are ordered by the copies that they are backwards."""
    problem = routing.problem
    return problem, joined(problem, ordered(routing), 0.0 if problem.mirrored else seconds)


def _check(topology: Topology, collective: str, root: int, *, in_place: bool, mixed: bool) -> None:
    if not 0 <= root < topology.ranks:
        expected = f"a rank from 0 to {topology.ranks - 1}"
        raise SpecError("root", expected=expected, got=str(root), remedy="Ranks are counted from 0.")
    if in_place and collective == "alltoall":
        raise SpecError(
            "synthesis",
            expected="an all-to-all with an output of its own",
            got="one in place",
            remedy="Use the algorithm pairwise, or send from another buffer.",
        )
    if mixed and COLLECTIVES[collective].reduces:
        raise SpecError(
            "synthesis",
            expected="a collective that copies, to encode on some links alone",
            got=collective,
            remedy="Encode everywhere or nowhere: sums are encoded anew at every step.",
        )
