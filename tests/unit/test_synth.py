"""Synthesised algorithms: correct, executable by the engine, optimal where proven, and as fast as the built-in ones."""

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
from mpi_gpucomp.schedule.synth.lowering import join_messages, order_hops
from mpi_gpucomp.schedule.synth.milp import Model
from mpi_gpucomp.schedule.synth.problem import Problem, chunks_of
from mpi_gpucomp.schedule.synth.routing import greedy, route
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
        Port(f"host {rank}, {direction}", frozenset({rank}), direction, 32e-9 if rank == 2 else 8e-9)
        for rank in range(4)
        for direction in ("out", "in")
    ),
)


def made(topology: Topology, collective: str, root: int = 0, seconds: float = 2.0, **options: object) -> Synthesis:
    return synthesise(topology, collective, 64 * MIB, MIB, root=root, seconds=seconds, **options)


def run(algorithm: Algorithm, codec: str = "none") -> None:
    """Run an algorithm on the engine with integers, and compare the result with the definition of the collective."""
    blocks = algorithm.ranks if COLLECTIVES[algorithm.collective].blocks else 1
    ranks = Ranks(algorithm, 700 if blocks == 1 else 130, codec, "float32")
    inputs = [x.copy() for x in ranks.inputs]
    ranks.drive()
    for rank in range(algorithm.ranks):
        output = expected(algorithm.collective, inputs, rank, algorithm.spec.root, "sum")
        if output is not None:
            np.testing.assert_array_equal(ranks.outputs[rank], output)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("topology", [NODES, SLOW_HOST, preset("ndv2", 8)], ids=lambda one: one.name)
def test_every_collective(collective: str, topology: Topology):
    for root, chunkup in ((0, 1), (topology.ranks - 1, 3)):
        algorithm = made(topology, collective, root, 0.5, sketch=Sketch(chunkup=chunkup)).algorithm
        check(algorithm, 1)
        run(algorithm, "split" if chunkup > 1 else "none")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_built_in_algorithms_are_not_faster(collective: str):
    for topology in (NODES, SLOW_HOST):
        ours = simulate(made(topology, collective, 1).algorithm, topology, 64 * MIB, MIB).seconds
        for info in algorithms(collective):
            known = build(collective, info.name, topology.ranks, 1, topology.nodes)
            assert ours <= 1.05 * simulate(known, topology, 64 * MIB, MIB).seconds, info.name


def test_bandwidth_limits_are_reached():
    wire = 64 * MIB * 8e-9
    times = {
        collective: simulate(made(NODES, collective).algorithm, NODES, 64 * MIB, MIB).seconds / wire
        for collective in ("broadcast", "allgather", "reduce_scatter", "allreduce", "alltoall")
    }
    # Fractions of the data that each node must send.
    assert times == pytest.approx(
        {"broadcast": 1.0, "allgather": 0.5, "reduce_scatter": 0.5, "allreduce": 1.0, "alltoall": 1.0}, rel=0.02
    )


def test_slow_host_has_the_least_traffic():
    ours = simulate(made(SLOW_HOST, "allreduce").algorithm, SLOW_HOST, 64 * MIB, MIB)
    ring = simulate(build("allreduce", "ring", 4), SLOW_HOST, 64 * MIB, MIB)
    assert ours.seconds == pytest.approx(64 * MIB * 32e-9, rel=0.06)
    assert ring.seconds > 1.4 * ours.seconds


def test_optimality_is_proven():
    found = made(NODES, "allgather")
    assert found.routing.proven
    assert found.routing.gap < 1e-3


def test_two_nodes_of_a_preset():
    found = synthesise(preset("ndv2", 16), "allgather", 64 * MIB, MIB, seconds=3)
    routing = found.routing
    # All 8 chunks of a node cross its network card once, at 105 us per MB.
    assert routing.bottleneck == pytest.approx(8 * MIB * 105e-12, rel=1e-6)
    run(found.algorithm)


def test_symmetric_ranks_have_equal_programs():
    topology = preset("dgx-a100", 16)
    algorithm = synthesise(topology, "allgather", 16 * MIB, MIB, seconds=2).algorithm
    counts = {tuple(sorted(len(lane.steps) for lane in program.lanes)) for program in algorithm.programs}
    assert len(counts) == 1


def test_joined_chunks():
    far = Topology("far apart", even_nodes(3, 1), {"wire": LinkCost(1e-3, 1e-12)}, None, "wire", {(0, 2): None})
    problem = Problem(far, Sketch(chunkup=4), chunks_of("broadcast", 3, 0, 4), 1000, 1)
    timed = order_hops(greedy(problem))
    messages = join_messages(problem, timed, 5.0)
    assert sorted(one.hop for message in messages for one in message) == sorted(one.hop for one in timed)
    ends = [max(one.end for one in some) for some in (timed, [one for message in messages for one in message])]
    assert ends == pytest.approx([5e-3, 2e-3], rel=1e-3), "five latencies of a millisecond, or two"
    algorithm = synthesise(far, "broadcast", 4000, 1000, sketch=Sketch(chunkup=4), seconds=4).algorithm
    counts = [step.count for program in algorithm.programs for _, _, step in program.steps()]
    assert counts == [4, 4, 4]
    run(algorithm)


def test_at_most_six_chunks_are_joined():
    far = Topology("far apart", even_nodes(2, 1), {"wire": LinkCost(1e-3, 1e-12)}, None, "wire")
    problem = Problem(far, Sketch(chunkup=8), chunks_of("scatter", 2, 0, 8), 1000, 1)
    messages = join_messages(problem, order_hops(greedy(problem)), 3.0)
    assert len(messages) == 2
    assert max(map(len, messages)) <= 6


def test_a_codec_moves_the_bottleneck():
    raw = made(NODES, "broadcast")
    encoded = made(NODES, "broadcast", codec=CodecCost(1e-9, 1e-9, 4.0))
    assert encoded.routing.bottleneck == pytest.approx(raw.routing.bottleneck / 4)
    slow = made(NODES, "broadcast", codec=CodecCost(10e-9, 1e-9, 4.0))
    assert slow.routing.bottleneck == pytest.approx(2 * MIB * 10e-9), "the root encodes every chunk"


def test_senders_of_the_sketch():
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
    for preference in (1, -1):
        problem = Problem(full, Sketch(connections=preference, chunkup=2), chunks_of("broadcast", 8, 0, 2), MIB, 32)
        used[preference] = len({hop[1:3] for hops in route(problem, 2.0).hops for hop in hops})
    assert used[1] <= used[-1]


def test_greedy_routing_without_time_to_solve():
    found = made(NODES, "allgather", seconds=0.0)
    assert not found.routing.proven
    assert found.routing.gap == 1.0
    run(found.algorithm)


def test_errors():
    with pytest.raises(SpecError) as caught:
        made(NODES, "broadcast", sketch=Sketch(internode={}))
    assert str(caught.value) == (
        "topology two nodes: expected a path from rank 0 to rank 2, got none that the sketch allows. "
        "Allow more links between nodes in the sketch (internode_conn)."
    )
    with pytest.raises(SpecError) as caught:
        made(NODES, "alltoall", in_place=True)
    assert str(caught.value) == (
        "synthesis: expected an alltoall with a separate output, got an alltoall in place. "
        "Use the algorithm pairwise, or send from another buffer."
    )
    with pytest.raises(SpecError, match="root: expected a rank from 0 to 3, got 4"):
        made(NODES, "broadcast", 4)
    with pytest.raises(SpecError, match=r"symmetry_offsets \[1, 4\]: expected a symmetry of topology two nodes"):
        made(NODES, "allgather", sketch=Sketch(symmetries=((1, 4),)))


def test_small_program_with_known_solution():
    model = Model()
    apples, pears = model.binary("apples", cost=-3.0), model.real("pears", cost=-2.0, upper=5.0)
    model.at_most("basket", [(apples, 2.0), (pears, 1.0), (pears, 1.0)], 9.0)
    found = model.solve(5.0)
    assert list(found.values) == pytest.approx([1.0, 3.5])
    assert (found.objective, found.proven, found.gap) == (pytest.approx(-10.0), True, pytest.approx(0.0))


def test_in_place():
    for collective in ("allgather", "allreduce", "reduce_scatter", "gather", "scatter", "reduce"):
        assert made(NODES, collective, in_place=True, seconds=0.5).algorithm.in_place


def test_xml_round_trip():
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
