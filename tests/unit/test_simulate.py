"""Simulated schedules against formulas, limits and counts that follow from elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_topology import two_nodes

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule import cost
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.cost import CodecCost, LinkCost, chain_seconds, steps_and_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate import Simulation, simulate
from mpi_gpucomp.schedule.simulate.network import Clock, Flow, Network
from mpi_gpucomp.schedule.topology import Port, ProcessorModel, Topology, even_nodes, preset

MIB = 1 << 20
WIRE = LinkCost(50e-6, 8e-9)


def hosts(ranks: int, ports: tuple[Port, ...] = (), **changes: object) -> Topology:
    """Make hosts of one rank each, joined by the same links."""
    topology = Topology("hosts", even_nodes(ranks, 1), {"wire": WIRE}, None, "wire", {}, ports)
    return replace(topology, **changes)


def card(rank: int, way: str) -> Port:
    return Port(f"rank {rank}, {way}", frozenset({rank}), way, WIRE.per_byte)


def cards(ranks: int) -> tuple[Port, ...]:
    return tuple(card(rank, way) for rank in range(ranks) for way in ("out", "in"))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("loops", [1, 2, 37])
@pytest.mark.parametrize(
    "coding", [None, CodecCost(0.7e-9, 0.9e-9, 4.0), CodecCost(9e-9, 1e-9, 2.0), CodecCost(1e-9, 9e-9, 2.0)]
)
def test_a_chain_takes_what_the_formula_says(ranks: int, loops: int, coding: CodecCost | None):
    found = simulate(build("broadcast", "chain", ranks), hosts(ranks), loops * MIB, MIB, coding)
    assert found.seconds == pytest.approx(chain_seconds(loops * MIB, MIB, ranks, WIRE, coding or CodecCost()), rel=1e-9)


def test_a_ring_takes_2_n_minus_1_steps_for_each_of_its_two_halves():
    ranks, chunk = 4, MIB
    nbytes = 8 * chunk
    found = simulate(build("allreduce", "ring", ranks), hosts(ranks, cards(ranks)), nbytes, chunk)
    steps = 2 * (ranks - 1)
    least = 2 * steps * chunk * WIRE.per_byte
    assert least < found.seconds < least + 2 * steps * WIRE.latency + 1e-6
    assert found.busiest()[1] == 2 * steps * chunk


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm_moves_what_was_counted(collective: str):
    ranks = 6
    for row in algorithms(collective):
        algorithm = build(collective, row.name, ranks)
        found = simulate(algorithm, hosts(ranks, cards(ranks)), algorithm.chunks * 1000, 1000)
        sent, received = [0.0] * ranks, [0.0] * ranks
        for (sender, receiver), (nbytes, _) in found.links.items():
            sent[sender] += nbytes
            received[receiver] += nbytes
        traffic = steps_and_bytes(algorithm)
        assert (max(sent), max(received)) == (
            traffic.sent * algorithm.chunks * 1000,
            traffic.received * algorithm.chunks * 1000,
        )
        assert found.seconds >= traffic.steps * WIRE.latency
        assert found.seconds >= max(seconds for _, seconds in found.loads.values()) * (1 - 1e-9)


def test_a_chunk_is_encoded_once_and_decoded_by_all():
    coding = CodecCost(1e-9, 1e-9, 2.0)
    found = simulate(build("broadcast", "tree", 7), hosts(7), 4 * MIB, MIB, coding)
    done = [(record.kind, record.rank) for record in found.records if record.kind != "send"]
    assert done.count(("encode", 0)) == 4
    assert sum(kind == "encode" for kind, _ in done) == 4
    assert [done.count(("decode", rank)) for rank in range(7)] == [0, 4, 4, 4, 4, 4, 4]


def test_sums_are_encoded_again_at_every_step():
    found = simulate(build("reduce", "chain", 4), hosts(4), MIB, MIB, CodecCost(1e-9, 1e-9, 2.0))
    kinds = [(record.rank, record.kind) for record in sorted(found.records, key=lambda one: one.start)]
    assert [kind for rank, kind in kinds if rank == 2] == ["reduce", "encode", "send"]
    assert [kind for rank, kind in kinds if rank == 0] == ["reduce"]


def test_what_shares_a_port_takes_turns():
    topology = hosts(4, cards(4))
    star = build("scatter", "linear", 4)
    alone = simulate(star, hosts(4), 4 * MIB, MIB).seconds
    assert simulate(star, topology, 4 * MIB, MIB).seconds == pytest.approx(3 * alone - 2 * WIRE.latency)


def test_shares_are_max_min_fair():
    clock = Clock()
    arrived: dict[str, float] = {}
    network = Network(clock, [100.0, 10.0])
    for name, nbytes, through in (("both", 100.0, [0, 1]), ("first", 900.0, [0])):
        flow = Flow(nbytes, 1e9, through, lambda name=name: arrived.update({name: clock.now}))
        clock.at(0.0, lambda flow=flow: network.join(flow))
    clock.run()
    assert arrived == pytest.approx({"both": 10.0, "first": 10.0})


def test_a_share_grows_when_another_leaves():
    clock = Clock()
    arrived: dict[str, float] = {}
    network = Network(clock, [100.0])
    for name, nbytes, start in (("short", 100.0, 0.0), ("long", 1000.0, 1.0)):
        flow = Flow(nbytes, 60.0, [0], lambda name=name: arrived.update({name: clock.now}))
        clock.at(start, lambda flow=flow: network.join(flow))
    clock.run()
    # 60 alone, then 50 each until the short one is through; the long one goes on with 60.
    assert arrived == pytest.approx({"short": 1.8, "long": 1.8 + (1000 - 40) / 60})


def test_cores_are_shared():
    coding = CodecCost(0.0, 20e-9, 4.0)
    own = simulate(build("broadcast", "chain", 5), hosts(5), 8 * MIB, MIB, coding)
    shared = hosts(5, processors=(ProcessorModel(frozenset(range(5)), 1),))
    one_core = simulate(build("broadcast", "chain", 5), shared, 8 * MIB, MIB, coding)
    work = 4 * 8 * MIB * coding.decode
    assert work <= one_core.seconds <= work + 1.1 * 2 * MIB * WIRE.per_byte
    assert own.seconds < one_core.seconds / 2


def test_the_critical_path_adds_up():
    for name in ("chain", "scatter_allgather"):
        found = simulate(build("broadcast", name, 4), two_nodes(pairs={}), 8 * MIB, MIB, CodecCost(1e-9, 1e-9, 2.0))
        path = found.critical_path()
        assert path[0].what == "rank 0 encodes"
        assert sum(segment.seconds for segment in path) == pytest.approx(found.seconds, rel=0.02)


def test_the_trace_has_every_record():
    found = simulate(build("broadcast", "chain", 3), hosts(3), 2 * MIB, MIB)
    events = [event for event in found.trace()["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["tid"], event["name"]) for event in events][:2] == [
        (0, 2, "send loop 0"),
        (0, 2, "send loop 1"),
    ]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(found.seconds * 1e6)


def test_nothing_to_do():
    assert simulate(build("broadcast", "chain", 1), hosts(1), MIB, MIB).seconds == 0.0
    assert simulate(build("broadcast", "chain", 3), hosts(3), 0, MIB).busiest() == ("none", 0.0, 0.0)


def test_what_does_not_fit():
    with pytest.raises(SpecError) as caught:
        simulate(build("broadcast", "chain", 4), hosts(3), MIB, MIB)
    assert str(caught.value) == (
        "topology hosts: expected 4 ranks, as algorithm chain has, got 3. "
        "Build the algorithm for the ranks of the topology."
    )
    with pytest.raises(SpecError) as caught:
        simulate(build("broadcast", "chain", 8), preset("ndv2", 8), MIB, MIB)
    assert str(caught.value) == (
        "topology ndv2, 1 node: expected a link from rank 3 to rank 4, which the schedule uses, got none. "
        "Choose an algorithm, or synthesise one, that keeps to the links that there are."
    )


def test_chunks_are_neither_short_nor_long():
    assert cost.default_chunk_bytes(1 << 30, coded=True) == 2 * MIB
    assert cost.default_chunk_bytes(1, coded=False) == MIB // 4
    assert [cost.default_chunk_bytes(n * MIB, coded=False) // MIB for n in (64, 256, 1024, 65536)] == [1, 2, 4, 4]
    assert cost.default_chunk_bytes(64 * MIB, coded=False, shared=True) == 2 * MIB


def paper(codec: str | None, algorithm: str, ranks: int, nbytes: int) -> Simulation:
    topology = preset("v100-ib", ranks)
    coding = topology.codecs[codec] if codec else None
    return simulate(build("broadcast", algorithm, ranks), topology, nbytes, MIB // 2, coding)


def test_the_direction_of_the_papers_result():
    """A compressed chain against MPI's binomial tree and against the plain chain, on 8 nodes over InfiniBand."""
    nbytes = 32 * MIB
    compressed = paper("zfp:rate=8", "chain", 8, nbytes).seconds
    assert compressed < 0.35 * paper(None, "chain", 8, nbytes).seconds
    assert compressed < 0.2 * paper(None, "binomial", 8, nbytes).seconds
