"""Synthesised algorithms: right, run by the engine, as good as can be, and better than those of the table."""

from __future__ import annotations

import numpy as np
import pytest
from running import Ranks, expected
from test_topology import two_nodes

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.cost import CodecCost, LinkCost
from mpi_gpucomp.schedule.ir import COLLECTIVES, Algorithm
from mpi_gpucomp.schedule.msccl_xml import XmlHeader, read, read_header, write
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.sketch import Sketch
from mpi_gpucomp.schedule.synth import Synthesis, synthesise
from mpi_gpucomp.schedule.synth.contiguity import joined, ordered
from mpi_gpucomp.schedule.synth.problem import Model, Problem, chunks_of
from mpi_gpucomp.schedule.synth.routes import greedy, route
from mpi_gpucomp.schedule.topology import Port, Topology, even_nodes, preset
from mpi_gpucomp.schedule.verify import check

MIB = 1 << 20
NODES = two_nodes(pairs={}, processors=(), per_chunk=0.0)
SLOW_HOST = Topology(
    "one slow host",
    even_nodes(4, 1),
    {"wire": LinkCost(50e-6, 8e-9)},
    None,
    "wire",
    {},
    tuple(
        Port(f"host {rank}, {way}", frozenset({rank}), way, 32e-9 if rank == 2 else 8e-9)
        for rank in range(4)
        for way in ("out", "in")
    ),
)


def made(topology: Topology, collective: str, root: int = 0, seconds: float = 2.0, **options: object) -> Synthesis:
    return synthesise(topology, collective, 64 * MIB, MIB, root=root, seconds=seconds, **options)


def run(algorithm: Algorithm, codec: str = "none") -> None:
    """Let the engine run it on whole numbers, and compare the result with the collective's definition."""
    blocks = algorithm.ranks if COLLECTIVES[algorithm.collective].blocks else 1
    ranks = Ranks(algorithm, 700 if blocks == 1 else 130, codec, "float32")
    given = [x.copy() for x in ranks.inputs]
    ranks.drive()
    for rank in range(algorithm.ranks):
        wanted = expected(algorithm.collective, given, rank, algorithm.spec.root, "sum")
        if wanted is not None:
            np.testing.assert_array_equal(ranks.outputs[rank], wanted)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("topology", [NODES, SLOW_HOST, preset("ndv2", 8)], ids=lambda one: one.name)
def test_every_collective_is_right_and_runs(collective: str, topology: Topology):
    for root, chunkup in ((0, 1), (topology.ranks - 1, 3)):
        algorithm = made(topology, collective, root, 0.5, sketch=Sketch(chunkup=chunkup)).algorithm
        check(algorithm, 1)
        run(algorithm, "split" if chunkup > 1 else "none")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_none_of_the_table_is_better(collective: str):
    for topology in (NODES, SLOW_HOST):
        ours = simulate(made(topology, collective, 1).algorithm, topology, 64 * MIB, MIB).seconds
        for row in algorithms(collective):
            known = build(collective, row.name, topology.ranks, 1, topology.nodes)
            assert ours <= 1.05 * simulate(known, topology, 64 * MIB, MIB).seconds, row.name


def test_the_limits_of_the_wire_are_reached():
    wire = 64 * MIB * 8e-9
    times = {
        collective: simulate(made(NODES, collective).algorithm, NODES, 64 * MIB, MIB).seconds / wire
        for collective in ("broadcast", "allgather", "reduce_scatter", "allreduce", "alltoall")
    }
    # Each node sends all, half, half, all, and half of what it has and as much for its second rank.
    assert times == pytest.approx(
        {"broadcast": 1.0, "allgather": 0.5, "reduce_scatter": 0.5, "allreduce": 1.0, "alltoall": 1.0}, rel=0.02
    )


def test_one_slow_host_sends_and_receives_no_more_than_it_must():
    ours = simulate(made(SLOW_HOST, "allreduce").algorithm, SLOW_HOST, 64 * MIB, MIB)
    ring = simulate(build("allreduce", "ring", 4), SLOW_HOST, 64 * MIB, MIB)
    assert ours.seconds == pytest.approx(64 * MIB * 32e-9, rel=0.06)
    assert ring.seconds > 1.4 * ours.seconds


def test_the_best_is_proven():
    found = made(NODES, "allgather")
    assert found.routing.proven
    assert found.routing.gap < 1e-3


def test_two_nodes_of_a_known_machine():
    found = synthesise(preset("ndv2", 16), "allgather", 64 * MIB, MIB, seconds=3)
    routing = found.routing
    # All chunks of a node cross the one card once: 8 of 105 us per MB, in each of 4 loops.
    assert routing.bottleneck == pytest.approx(8 * MIB * 105e-12, rel=1e-6)
    run(found.algorithm)


def test_symmetry_does_the_same_everywhere():
    topology = preset("dgx-a100", 16)
    algorithm = synthesise(topology, "allgather", 16 * MIB, MIB, seconds=2).algorithm
    counts = {tuple(sorted(len(lane.steps) for lane in program.lanes)) for program in algorithm.programs}
    assert len(counts) == 1


def test_chunks_that_go_together():
    far = Topology("far apart", even_nodes(3, 1), {"wire": LinkCost(1e-3, 1e-12)}, None, "wire", {(0, 2): None})
    problem = Problem(far, Sketch(chunkup=4), chunks_of("broadcast", 3, 0, 4), 1000, 1)
    timed = ordered(greedy(problem))
    messages = joined(problem, timed, 5.0)
    assert sorted(one.hop for message in messages for one in message) == sorted(one.hop for one in timed)
    ends = [max(one.end for one in some) for some in (timed, [one for message in messages for one in message])]
    assert ends == pytest.approx([5e-3, 2e-3], rel=1e-3), "five turns of a millisecond each, or two"
    algorithm = synthesise(far, "broadcast", 4000, 1000, sketch=Sketch(chunkup=4), seconds=4).algorithm
    counts = [step.count for program in algorithm.programs for _, _, step in program.steps()]
    assert counts == [4, 4, 4]
    run(algorithm)


def test_at_most_six_go_together():
    far = Topology("far apart", even_nodes(2, 1), {"wire": LinkCost(1e-3, 1e-12)}, None, "wire")
    problem = Problem(far, Sketch(chunkup=8), chunks_of("scatter", 2, 0, 8), 1000, 1)
    messages = joined(problem, ordered(greedy(problem)), 3.0)
    assert len(messages) == 2
    assert max(map(len, messages)) <= 6


def test_a_codec_moves_the_bottleneck():
    plain = made(NODES, "broadcast")
    coded = made(NODES, "broadcast", coding=CodecCost(1e-9, 1e-9, 4.0))
    assert coded.routing.bottleneck == pytest.approx(plain.routing.bottleneck / 4)
    slow = made(NODES, "broadcast", coding=CodecCost(10e-9, 1e-9, 4.0))
    assert slow.routing.bottleneck == pytest.approx(2 * MIB * 10e-9), "the root encodes every chunk"


def test_a_senders_map_is_kept():
    sketch = Sketch(internode={0: frozenset({0}), 1: frozenset({1})}, sender_of={0: 1, 1: 1})
    problem = Problem(NODES, sketch, chunks_of("allgather", 4, 0, 1), MIB, 8)
    found = route(problem, 1.0)
    crossing = {
        (hop.sender, hop.receiver) for hops in found.hops for hop in hops if hop.sender // 2 != hop.receiver // 2
    }
    assert crossing == {(1, 3), (3, 1)}


def test_few_and_many_connections():
    full = preset("dgx-a100", 8)
    used = {}
    for wish in (1, -1):
        problem = Problem(full, Sketch(connections=wish, chunkup=2), chunks_of("broadcast", 8, 0, 2), MIB, 32)
        used[wish] = len({hop[1:3] for hops in route(problem, 2.0).hops for hop in hops})
    assert used[1] <= used[-1]


def test_without_a_solver_the_greedy_routing_stays():
    found = made(NODES, "allgather", seconds=0.0)
    assert not found.routing.proven
    assert found.routing.gap == 1.0
    run(found.algorithm)


def test_what_cannot_be():
    with pytest.raises(SpecError) as caught:
        made(NODES, "broadcast", sketch=Sketch(internode={}))
    assert str(caught.value) == (
        "topology two nodes: expected a way from rank 0 to rank 2, got none that the sketch leaves. "
        "Let the sketch have more links between nodes (internode_conn)."
    )
    with pytest.raises(SpecError) as caught:
        made(NODES, "alltoall", in_place=True)
    assert str(caught.value) == (
        "synthesis: expected an all-to-all with an output of its own, got one in place. "
        "Use the algorithm pairwise, or send from another buffer."
    )
    with pytest.raises(SpecError, match="root: expected a rank from 0 to 3, got 4"):
        made(NODES, "broadcast", 4)
    with pytest.raises(SpecError, match=r"symmetry_offsets \[1, 4\]: expected a symmetry of topology two nodes"):
        made(NODES, "allgather", sketch=Sketch(symmetries=((1, 4),)))


def test_a_small_program_with_a_known_answer():
    model = Model()
    apples, pears = model.binary("apples", cost=-3.0), model.real("pears", cost=-2.0, upper=5.0)
    model.at_most("basket", [(apples, 2.0), (pears, 1.0), (pears, 1.0)], 9.0)
    found = model.solve(5.0)
    assert list(found.values) == pytest.approx([1.0, 3.5])
    assert (found.objective, found.proven, found.gap) == (pytest.approx(-10.0), True, pytest.approx(0.0))


def test_in_place():
    for collective in ("allgather", "allreduce", "reduce_scatter", "gather", "scatter", "reduce"):
        assert made(NODES, collective, in_place=True, seconds=0.5).algorithm.in_place


def test_xml_there_and_back():
    algorithm = made(NODES, "allreduce").algorithm
    text = write(algorithm, XmlHeader("abc", 10, 1 << 40))
    assert read_header(text) == XmlHeader("abc", 10, 1 << 40)
    assert read_header(write(algorithm)) == XmlHeader()
    again = read(text)
    check(again, 1)
    run(again)


@pytest.mark.parametrize("nodes", [((0,),), ((0, 1),), ((0, 2, 3), (1,)), ((1,), (0,), (2, 3))])
def test_few_ranks_and_uneven_nodes(nodes: tuple[tuple[int, ...], ...]):
    links = {"memory": LinkCost(1e-6, 1e-10), "network": LinkCost(1e-5, 1e-9)}
    topology = Topology("uneven", nodes, links, "memory", "network")
    for collective in COLLECTIVES:
        run(synthesise(topology, collective, MIB, MIB // 4, seconds=0.3).algorithm)
