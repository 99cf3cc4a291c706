"""Synthesis of an algorithm for a topology: routing, ordering and joining of messages, lowering, and the check."""

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
from mpi_gpucomp.schedule.synth.lowering import add_copies, add_reductions, copy_own_blocks, join_messages, order_hops
from mpi_gpucomp.schedule.synth.problem import MIRRORED, Problem, Routing, chunks_of
from mpi_gpucomp.schedule.synth.routing import route
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
"""The fraction of the time for joining messages."""
CLEAR_GAIN = 0.97
"""The alternative lane layout is used if its simulated time is below this fraction of the default's."""
MAX_SIMULATED = 20_000
"""With more chunks, over all ranks and loops, the lane layouts are not compared by simulation."""


@dataclass(frozen=True)
class Synthesis:
    """A synthesised and checked algorithm, and its routing."""

    algorithm: Algorithm
    routing: Routing
    seconds: float
    """The time of the synthesis."""


def synthesise(
    topology: Topology,
    collective: str,
    nbytes: int,
    chunk: int,
    *,
    root: int = 0,
    sketch: Sketch | None = None,
    codec: CodecCost | None = None,
    mixed: bool = False,
    in_place: bool = False,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
) -> Synthesis:
    """Synthesise an algorithm for messages of `nbytes` in chunks of `chunk` bytes, in about `seconds`.

    With a `codec` every message is encoded or, if `mixed`, those over links where that pays. `progress` is called with
    the time of the best routing and the proven lower bound, in microseconds.
    """
    started = perf_counter()
    kind = COLLECTIVES[collective]
    _check(topology, collective, root, in_place=in_place, mixed=mixed)
    sketch = sketch or default_sketch(topology, rooted=kind.rooted)
    check_symmetries(sketch, topology)
    if kind.rooted:
        sketch = replace(sketch, symmetries=())
    codecs = (topology.codecs.get("none", FREE), codec) if codec and mixed else (codec or FREE,)
    problem = _problem(topology, sketch, collective, root, nbytes, chunk, codecs)
    routing = route(problem, seconds * (1 - CONTIGUITY_SHARE), progress)
    left = max(0.0, seconds - (perf_counter() - started))
    stages = [_stage(Routing(half, routing.hops), left) for half in problem.halves]
    name, in_place = f"synth_{collective}_{topology.hash}", in_place or collective == "broadcast"

    def lower(*, separate: bool) -> Algorithm:
        builder = ScheduleBuilder(name, collective, topology.ranks, root=root, in_place=in_place)
        return _lower(builder, stages, separate=separate)

    # A reducing lane blocks on its sum for longer than the simulation models: separate lanes are the default then.
    made = lower(separate=kind.reduces)
    if made.chunks * topology.ranks * problem.loops <= MAX_SIMULATED:
        other = lower(separate=not kind.reduces)
        times = [simulate(one, topology, nbytes, chunk, codec).seconds for one in (made, other)]
        made = other if times[1] < times[0] * CLEAR_GAIN else made
    return Synthesis(checked(made, in_flight=1), routing, perf_counter() - started)


def _problem(
    topology: Topology,
    sketch: Sketch,
    collective: str,
    root: int,
    nbytes: int,
    chunk: int,
    codecs: tuple[CodecCost, ...],
) -> Problem:
    """Return the routing problem: a reduction is reversed, an allreduce is routed once for both halves."""
    copied = "allgather" if collective == "allreduce" else MIRRORED.get(collective, collective)
    chunks = chunks_of(copied, topology.ranks, root, sketch.chunkup)
    in_loop = _chunks(collective, topology.ranks, sketch)
    chunk_bytes, loops = min(chunk, nbytes / in_loop), max(1.0, nbytes / (chunk * in_loop))
    mirrored, allreduce = collective in MIRRORED, collective == "allreduce"
    return Problem(topology, sketch, chunks, chunk_bytes, loops, codecs, mirrored, allreduce)


def _chunks(collective: str, ranks: int, sketch: Sketch) -> int:
    """Return the number of chunks in a loop."""
    by_rank = COLLECTIVES[collective].blocks or collective == "allreduce"
    return sketch.chunkup * (ranks if by_rank else 1)


def _lower(builder: ScheduleBuilder, stages: Sequence[tuple[Problem, Messages]], *, separate: bool) -> Algorithm:
    """Return the algorithm of the stages; `separate` puts receives and sends in separate lanes."""
    sketch = stages[0][0].sketch
    builder.chunks = _chunks(builder.collective, builder.ranks, sketch)
    copy_own_blocks(builder, sketch.chunkup)
    for stage, (problem, messages) in enumerate(stages):
        add = add_reductions if problem.mirrored else add_copies
        add(builder, problem, messages, stage, separate=separate)
    if builder.ranks == 1 and COLLECTIVES[builder.collective].reduces:
        builder.local_copy(0, i(0), o(0), builder.chunks)
    return builder.algorithm()


def _stage(routing: Routing, seconds: float) -> tuple[Problem, Messages]:
    """Order and join the hops of a routing; reductions keep the order of the copies that they reverse."""
    problem = routing.problem
    return problem, join_messages(problem, order_hops(routing), 0.0 if problem.mirrored else seconds)


def _check(topology: Topology, collective: str, root: int, *, in_place: bool, mixed: bool) -> None:
    if not 0 <= root < topology.ranks:
        expected = f"a rank from 0 to {topology.ranks - 1}"
        raise SpecError("root", expected=expected, got=str(root), remedy="Ranks are counted from 0.")
    if in_place and collective == "alltoall":
        raise SpecError(
            "synthesis",
            expected="an alltoall with a separate output",
            got="an alltoall in place",
            remedy="Use the algorithm pairwise, or send from another buffer.",
        )
    if mixed and COLLECTIVES[collective].reduces:
        raise SpecError(
            "synthesis",
            expected="a collective without reduction, to encode on some links only",
            got=collective,
            remedy="Encode on all links or none: partial sums are encoded again at every step.",
        )
