"""Simulations against closed formulas, bandwidth limits and traffic counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from schedules import i, lane, o, program, s
from test_topology import two_nodes

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule import Algorithm, ScheduleBuilder, Step, cost
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.cost import CodecCost, LinkCost, MessageCost, StagingCost, chain_seconds, steps_and_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.simulate import Simulation, simulate
from mpi_gpucomp.schedule.simulate.resources import EventQueue, FairNetwork, Flow
from mpi_gpucomp.schedule.sketch import Sketch
from mpi_gpucomp.schedule.synth.problem import Problem, chunks_of
from mpi_gpucomp.schedule.topology import (
    Port,
    ProcessorModel,
    Topology,
    even_nodes,
    preset,
    read_topology,
    write_topology,
)

MIB, SEGMENT = 1 << 20, 1 << 16
WIRE = LinkCost(50e-6, 8e-9)
CHAIN = build("broadcast", "chain", 4)


def hosts(ranks: int, ports: tuple[Port, ...] = (), **changes: object) -> Topology:
    """Return hosts of one rank each, with equal links."""
    topology = Topology("hosts", even_nodes(ranks, 1), {"wire": WIRE}, None, "wire", {}, ports)
    return replace(topology, **changes)


def card(rank: int, direction: str) -> Port:
    return Port(f"rank {rank}, {direction}", frozenset({rank}), direction, WIRE.per_byte)


def cards(ranks: int) -> tuple[Port, ...]:
    return tuple(card(rank, direction) for rank in range(ranks) for direction in ("out", "in"))


@pytest.mark.parametrize("relay_bytes", [0, SEGMENT, 2 * MIB])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("loops", [1, 2, 37])
@pytest.mark.parametrize(
    "codec", [None, CodecCost(0.7e-9, 0.9e-9, 4.0), CodecCost(9e-9, 1e-9, 2.0), CodecCost(1e-9, 9e-9, 2.0)]
)
def test_chain_matches_the_formula(ranks: int, loops: int, codec: CodecCost | None, relay_bytes: int):
    topology = hosts(ranks, relay_bytes=relay_bytes)
    found = simulate(build("broadcast", "chain", ranks), topology, loops * MIB, MIB, codec)
    expected = chain_seconds(loops * MIB, MIB, ranks, WIRE, codec or CodecCost(), relay_bytes)
    assert found.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("relay_bytes", "expected"),
    # Three latencies, 80 MB at 8 ns per byte, and two more hops: of a segment or of a chunk of 10 MB.
    [(100_000, 3 * 50e-6 + 0.64 + 2 * 0.0008), (0, 3 * 50e-6 + 0.64 + 2 * 0.08)],
)
def test_chain_of_four_ranks_by_hand(relay_bytes: int, expected: float):
    topology = hosts(4, cards(4), relay_bytes=relay_bytes)
    assert simulate(CHAIN, topology, 80_000_000, 10_000_000).seconds == pytest.approx(expected, rel=1e-9)


def test_messages_between_nodes_are_relayed_by_default():
    assert hosts(4).relay_bytes == SEGMENT
    found = simulate(CHAIN, hosts(4), MIB, MIB).seconds
    assert found == pytest.approx(3 * WIRE.latency + (MIB + 2 * SEGMENT) * WIRE.per_byte)


def test_messages_inside_a_node_are_not_relayed():
    one_node = hosts(4, nodes=(tuple(range(4)),), within="wire", between=None)
    assert simulate(CHAIN, one_node, MIB, MIB).seconds == pytest.approx(3 * WIRE.seconds(MIB))
    # With two nodes, one hop of the chain is between nodes: what it brings stays there, and what it sends was there.
    two = hosts(4, nodes=((0, 1), (2, 3)), within="wire")
    assert simulate(CHAIN, two, MIB, MIB).seconds == pytest.approx(3 * WIRE.seconds(MIB))


def test_a_relay_ends_after_its_source():
    """A fast link behind a slow one sends the last segment when it has arrived."""
    fast = LinkCost(10e-6, 1e-9)
    topology = hosts(3, classes={"wire": WIRE, "fast": fast}, pairs={(1, 2): "fast"})
    found = simulate(build("broadcast", "chain", 3), topology, MIB, MIB).seconds
    assert found == pytest.approx(WIRE.seconds(MIB) + fast.seconds(SEGMENT))


def test_a_slow_link_behind_a_fast_one_starts_with_the_first_segment():
    slow = LinkCost(10e-6, 80e-9)
    topology = hosts(3, classes={"wire": WIRE, "slow": slow}, pairs={(1, 2): "slow"})
    found = simulate(build("broadcast", "chain", 3), topology, MIB, MIB).seconds
    assert found == pytest.approx(WIRE.seconds(SEGMENT) + slow.seconds(MIB))


def test_relays_share_a_port():
    """Two chains of three hosts through one uplink, which each gets half of."""
    builder = ScheduleBuilder("two", "allgather", 6)
    for first in (0, 3):
        for rank in (first, first + 1):
            builder.copy(rank, i(0) if rank == first else o(first), rank + 1, o(first))
    uplink = Port("uplink", frozenset({1, 4}), "out", WIRE.per_byte)
    found = simulate(builder.algorithm(), hosts(6, (uplink,)), 6 * MIB, MIB).seconds
    assert found == pytest.approx(2 * WIRE.latency + (SEGMENT + 2 * MIB) * WIRE.per_byte)


def test_sums_are_not_relayed():
    found = simulate(build("reduce", "chain", 4), hosts(4), MIB, MIB).seconds
    assert found == pytest.approx(3 * WIRE.seconds(MIB))


def test_a_connection_buffers_eight_chunks():
    """Rank 1 takes its chunks late: eight have arrived by then, and the ninth follows."""
    fast, slow = LinkCost(0.0, 1e-9), LinkCost(0.0, 1e-6)
    topology = hosts(3, classes={"wire": fast, "slow": slow}, pairs={(0, 2): "slow"})
    times = {}
    for chunks in (8, 9):
        sends, receives = ([Step(kind, o(n), o(n)) for n in range(chunks)] for kind in ("s", "r"))
        late = lane(replace(receives[0], after=((1, 0),)), *receives[1:], receive=0)
        programs = (
            program(lane(*sends, send=1), lane(sends[0], send=2)),
            program(late, lane(Step("r", None, s(0)), receive=2), scratch=1),
            program(lane(receives[0], receive=0), lane(replace(sends[0], after=((0, 0),)), send=1)),
        )
        algorithm = Algorithm("late", "broadcast", 3, chunks, True, programs, root=0)
        times[chunks] = simulate(algorithm, topology, chunks * 1000, 1000).seconds
    reply = slow.seconds(1000) + fast.seconds(1000)
    assert times == pytest.approx({8: reply, 9: reply + fast.seconds(1000)})


def test_ring_takes_2_n_minus_1_steps_per_half():
    ranks, chunk = 4, MIB
    nbytes = 8 * chunk
    found = simulate(build("allreduce", "ring", ranks), hosts(ranks, cards(ranks)), nbytes, chunk)
    steps = 2 * (ranks - 1)
    least = 2 * steps * chunk * WIRE.per_byte
    assert least < found.seconds < least + 2 * steps * WIRE.latency + 1e-6
    assert found.busiest()[1] == 2 * steps * chunk


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_traffic_of_every_algorithm(collective: str):
    ranks = 6
    for info in algorithms(collective):
        algorithm = build(collective, info.name, ranks)
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


def test_chunks_are_encoded_once_and_decoded_by_all():
    codec = CodecCost(1e-9, 1e-9, 2.0)
    found = simulate(build("broadcast", "tree", 7), hosts(7), 4 * MIB, MIB, codec)
    done = [(record.kind, record.rank) for record in found.records if record.kind != "send"]
    assert done.count(("encode", 0)) == 4
    assert sum(kind == "encode" for kind, _ in done) == 4
    assert [done.count(("decode", rank)) for rank in range(7)] == [0, 4, 4, 4, 4, 4, 4]


def test_sums_are_encoded_again_at_every_step():
    found = simulate(build("reduce", "chain", 4), hosts(4), MIB, MIB, CodecCost(1e-9, 1e-9, 2.0))
    kinds = [(record.rank, record.kind) for record in sorted(found.records, key=lambda one: one.start)]
    assert [kind for rank, kind in kinds if rank == 2] == ["reduce", "encode", "send"]
    assert [kind for rank, kind in kinds if rank == 0] == ["reduce"]


def test_messages_share_a_port():
    topology = hosts(4, cards(4))
    star = build("scatter", "linear", 4)
    alone = simulate(star, hosts(4), 4 * MIB, MIB).seconds
    assert simulate(star, topology, 4 * MIB, MIB).seconds == pytest.approx(3 * alone - 2 * WIRE.latency)


def test_rates_are_max_min_fair():
    events = EventQueue()
    arrived: dict[str, float] = {}
    network = FairNetwork(events, [100.0, 10.0])
    for name, nbytes, through in (("both", 100.0, [0, 1]), ("first", 900.0, [0])):
        flow = Flow(nbytes, 1e9, through, lambda name=name: arrived.update({name: events.now}))
        events.at(0.0, lambda flow=flow: network.start(flow))
    events.run()
    assert arrived == pytest.approx({"both": 10.0, "first": 10.0})


def test_rates_grow_when_a_message_ends():
    events = EventQueue()
    arrived: dict[str, float] = {}
    network = FairNetwork(events, [100.0])
    for name, nbytes, start in (("short", 100.0, 0.0), ("long", 1000.0, 1.0)):
        flow = Flow(nbytes, 60.0, [0], lambda name=name: arrived.update({name: events.now}))
        events.at(start, lambda flow=flow: network.start(flow))
    events.run()
    # The short one gets 60 alone, then both get 50; the long one ends with 60.
    assert arrived == pytest.approx({"short": 1.8, "long": 1.8 + (1000 - 40) / 60})


def test_cores_are_shared():
    codec = CodecCost(0.0, 20e-9, 4.0)
    own = simulate(build("broadcast", "chain", 5), hosts(5), 8 * MIB, MIB, codec)
    shared = hosts(5, processors=(ProcessorModel(frozenset(range(5)), 1),))
    one_core = simulate(build("broadcast", "chain", 5), shared, 8 * MIB, MIB, codec)
    work = 4 * 8 * MIB * codec.decode
    assert work <= one_core.seconds <= work + 1.1 * 2 * MIB * WIRE.per_byte
    assert own.seconds < one_core.seconds / 2


def test_critical_path_adds_up():
    for name in ("chain", "scatter_allgather"):
        found = simulate(build("broadcast", name, 4), two_nodes(pairs={}), 8 * MIB, MIB, CodecCost(1e-9, 1e-9, 2.0))
        path = found.critical_path()
        assert path[0].activity == "rank 0 encodes"
        assert sum(part.seconds for part in path) == pytest.approx(found.seconds, rel=0.02)


@pytest.mark.parametrize(("collective", "name"), [("broadcast", "chain"), ("allgather", "ring")])
@pytest.mark.parametrize("chunk", [MIB, SEGMENT * 3 // 2])
def test_critical_path_of_relays_adds_up(collective: str, name: str, chunk: int):
    ranks = 5
    busy = hosts(ranks, message_cost=MessageCost(MESSAGE, PER_BYTE))
    # With message costs the wait for a first segment is in no record.
    for topology, missing in ((hosts(ranks), 0.01), (hosts(ranks, cards(ranks), per_chunk=1e-4), 0.01), (busy, 0.1)):
        found = simulate(build(collective, name, ranks), topology, 10 * MIB, chunk)
        assert all(record.cause < number for number, record in enumerate(found.records))
        assert sum(part.seconds for part in found.critical_path()) == pytest.approx(found.seconds, rel=missing)


def test_trace_has_every_record():
    found = simulate(build("broadcast", "chain", 3), hosts(3), 2 * MIB, MIB)
    events = [event for event in found.trace()["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["tid"], event["name"]) for event in events][:2] == [
        (0, 2, "send loop 0"),
        (1, 3, "send loop 0"),
    ]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(found.seconds * 1e6)


def test_nothing_to_do():
    assert simulate(build("broadcast", "chain", 1), hosts(1), MIB, MIB).seconds == 0.0
    assert simulate(build("broadcast", "chain", 3), hosts(3), 0, MIB).busiest() == ("none", 0.0, 0.0)


def test_algorithm_does_not_fit_the_topology():
    with pytest.raises(SpecError) as caught:
        simulate(build("broadcast", "chain", 4), hosts(3), MIB, MIB)
    assert str(caught.value) == (
        "topology hosts: expected 4 ranks, as in algorithm chain, got 3. "
        "Build the algorithm for the ranks of the topology."
    )
    with pytest.raises(SpecError) as caught:
        simulate(build("broadcast", "chain", 8), preset("ndv2", 8), MIB, MIB)
    assert str(caught.value) == (
        "topology ndv2, 1 node: expected a link from rank 3 to rank 4, which the schedule uses, got none. "
        "Choose an algorithm that uses existing links, or synthesise one."
    )


def test_default_chunk_bytes():
    assert cost.default_chunk_bytes(1 << 30, coded=True) == 2 * MIB
    assert cost.default_chunk_bytes(1, coded=False) == MIB // 4
    assert [cost.default_chunk_bytes(n * MIB, coded=False) // MIB for n in (64, 256, 1024, 65536)] == [1, 2, 4, 4]
    for longer in ({"shared": True}, {"relayed": True}):
        assert cost.default_chunk_bytes(64 * MIB, coded=False, **longer) == 2 * MIB
        assert cost.default_chunk_bytes(64 * MIB, coded=True, **longer) == 2 * MIB
    on_gpu = [cost.default_chunk_bytes(n * MIB, coded=True, gpu=True) for n in (1, 64, 256, 1024)]
    assert on_gpu == [MIB, 42 << 16, 170 << 16, 16 * MIB]


LAUNCH, FRAME = 4e-6, 4e-6
"""Seconds that a kernel takes at least, and that header and checksum of a chunk take."""


@pytest.mark.parametrize(
    ("kernels", "encode", "decode", "ratio", "most"),
    [(2, 7.6, 4.6, 4.0, 0.55), (3, 11.7, 7.7, 3.34, 0.55), (4, 16.5, 8.4, 1.5, 0.85)],
    ids=["zfp:rate=8", "bound:abs=1e-4", "split of bfloat16"],
)
def test_compression_pays_between_gpus(kernels: int, encode: float, decode: float, ratio: float, most: float):
    """A model: microseconds of kernels for 4 MiB at an A100's memory bandwidth, as the simulated machine has them."""
    topology, nbytes = preset("a100-hdr", 4), 64 * MIB
    raw = simulate(CHAIN, topology, nbytes, cost.default_chunk_bytes(nbytes, coded=False)).seconds
    chunk = cost.default_chunk_bytes(nbytes, coded=True, gpu=True)
    seconds = [
        max(launches * LAUNCH, us * 1e-6 * chunk / (4 * MIB) + FRAME)
        for launches, us in ((kernels, encode), (2, decode))
    ]
    codec = CodecCost(seconds[0] / chunk, seconds[1] / chunk, ratio)
    assert simulate(CHAIN, topology, nbytes, chunk, codec).seconds <= most * raw


def paper_setup(spec: str | None, algorithm: str, ranks: int, nbytes: int) -> Simulation:
    topology = preset("v100-ib", ranks)
    codec = topology.codecs[spec] if spec else None
    return simulate(build("broadcast", algorithm, ranks), topology, nbytes, MIB // 2, codec)


COPY = StagingCost(2e-9, 1e-6)
ON_GPUS = {"staging": COPY, "relay_bytes": 0}


def test_staged_messages_without_a_codec():
    """A chunk is copied out once and in on every rank; on the way the copies are beside the link."""
    found = simulate(CHAIN, hosts(4, **ON_GPUS), 8 * MIB, MIB).seconds
    assert found == pytest.approx(
        COPY.seconds(MIB) + (8 + 2) * WIRE.seconds(MIB) - 7 * WIRE.latency + COPY.seconds(MIB)
    )
    direct = hosts(4, relay_bytes=0, staging=COPY._replace(raw=False))
    assert (
        simulate(CHAIN, direct, 8 * MIB, MIB).seconds == simulate(CHAIN, hosts(4, relay_bytes=0), 8 * MIB, MIB).seconds
    )


@pytest.mark.parametrize("slowest", ["encode", "copy", "wire", "decode"])
def test_stages_of_a_gpu_overlap(slowest: str):
    """Beyond the first chunk, the slowest stage alone determines the time of a broadcast."""
    stages = dict.fromkeys(("encode", "copy", "wire", "decode"), 1e-9) | {slowest: 5e-9}
    ratio, loops, kernel = 4.0, 32, CodecCost(stages["encode"], stages["decode"], 4.0)
    staging = StagingCost(stages["copy"] * ratio)
    topology = hosts(2, staging=staging, classes={"wire": LinkCost(0.0, stages["wire"] * ratio)})
    found = simulate(build("broadcast", "chain", 2), topology, loops * MIB, MIB, kernel).seconds
    first = (stages["encode"] + 2 * stages["copy"] + stages["wire"] + stages["decode"]) * MIB
    assert found == pytest.approx(first + (loops - 1) * 5e-9 * MIB)


def test_sums_on_gpus_pass_every_stage():
    """A chunk of a chain reduction is copied in, added, encoded and copied out before it can be sent on."""
    topology, kernel = hosts(3, **ON_GPUS), CodecCost(1e-9, 2e-9, 2.0)
    found = simulate(build("reduce", "chain", 3), topology, MIB, MIB, kernel).seconds
    encode, out = kernel.encode * MIB, COPY.seconds(MIB / 2)
    hop = encode + out + WIRE.seconds(MIB / 2) + out + kernel.decode * MIB
    assert found == pytest.approx(2 * hop)


def test_a_staged_topology_survives_its_file(tmp_path: Path):
    path = tmp_path / "gpus.json"
    write_topology(hosts(4, staging=COPY), path)
    assert read_topology(path).staging == COPY
    path.write_text(path.read_text().replace('"raw": true', '"raw": 1'))
    with pytest.raises(SpecError, match="staging: raw: expected true or false, got 1"):
        read_topology(path)


def test_trend_of_the_paper():
    """A compressed chain against a raw chain and a binomial tree, on 8 nodes over InfiniBand."""
    nbytes = 32 * MIB
    compressed = paper_setup("zfp:rate=8", "chain", 8, nbytes).seconds
    assert compressed < 0.35 * paper_setup(None, "chain", 8, nbytes).seconds
    assert compressed < 0.2 * paper_setup(None, "binomial", 8, nbytes).seconds


MESSAGE, PER_BYTE, WAIT = 1e-3, 1e-9, 4e-3
ALL = frozenset(range(4))


def test_message_cost_of_one_chunk():
    costs = MessageCost(MESSAGE, PER_BYTE, WAIT)
    found = simulate(CHAIN, hosts(4, message_cost=costs, relay_bytes=0), MIB, MIB).seconds
    hop = WIRE.seconds(MIB) + 2 * costs.seconds(MIB) + WAIT
    assert found == pytest.approx(3 * hop)
    relayed = simulate(CHAIN, hosts(4, message_cost=costs), MIB, MIB).seconds
    assert relayed == pytest.approx(hop + 2 * (WIRE.seconds(SEGMENT) + costs.seconds(SEGMENT) + WAIT))


def test_message_cost_overlaps_with_the_link():
    """If the link is the bottleneck, only the first and the last chunk pay for it."""
    loops = 32
    costs = MessageCost(MESSAGE, PER_BYTE, WAIT)
    free = simulate(CHAIN, hosts(4, relay_bytes=0), loops * MIB, MIB).seconds
    found = simulate(CHAIN, hosts(4, message_cost=costs, relay_bytes=0), loops * MIB, MIB).seconds
    assert found == pytest.approx(free + 3 * (2 * (MESSAGE + MIB * PER_BYTE) + WAIT))


@pytest.mark.parametrize("cores", [1, 2, 0.5])
def test_short_messages_are_limited_by_the_cores(cores: float):
    topology = hosts(4, message_cost=MessageCost(MESSAGE), processors=(ProcessorModel(ALL, cores),))
    loops = 100
    found = simulate(CHAIN, topology, loops * 4, 4).seconds
    ends = 2 * 3 * loops
    assert found == pytest.approx(ends * MESSAGE / cores, rel=0.1)


def test_cost_of_frames():
    codec, frame = CodecCost(1e-9, 1e-9, 4.0), 5e-3
    with_frames, without = (
        simulate(CHAIN, hosts(4, message_cost=MessageCost(MESSAGE, frame=one)), MIB, MIB, codec).seconds
        for one in (frame, 0.0)
    )
    assert with_frames == pytest.approx(without + 2 * frame)  # encoded once, and decoded by the last rank
    raw = [simulate(CHAIN, hosts(4, message_cost=MessageCost(MESSAGE, frame=one)), MIB, MIB) for one in (frame, 0.0)]
    assert raw[0].seconds == raw[1].seconds


def test_encoded_sums_are_noticed_late():
    algorithm, codec = build("allreduce", "ring", 2), CodecCost(1e-9, 1e-9, 4.0)
    early, late = (
        simulate(algorithm, hosts(2, message_cost=MessageCost(MESSAGE, wait=wait)), 4 * MIB, MIB, codec).seconds
        for wait in (0.0, WAIT)
    )
    # Two messages in sequence, each encoded once.
    assert late - early == pytest.approx(4 * WAIT)


def test_critical_path_with_message_costs():
    topology = hosts(4, message_cost=MessageCost(MESSAGE, PER_BYTE), processors=(ProcessorModel(ALL, 2),))
    found = simulate(CHAIN, topology, 8 * MIB, MIB)
    path = found.critical_path()
    assert path[0].activity == "rank 0 handles"
    assert sum(part.seconds for part in path) == pytest.approx(found.seconds, rel=0.02)
    assert sum(record.kind == "handle" for record in found.records) == 2 * 3 * 8


def test_solver_counts_message_costs():
    topology = hosts(
        3, message_cost=MessageCost(MESSAGE, PER_BYTE), processors=(ProcessorModel(frozenset(range(3)), 2),)
    )
    problem = Problem(topology, Sketch(), chunks_of("broadcast", 3, 0, 1), float(MIB), 1.0)
    loads = problem.loads(0, 1, 0)
    seconds = MESSAGE + MIB * PER_BYTE
    assert [load for load in loads if load[0].startswith(("stream", "processor"))] == [
        ("stream messages of 0", seconds),
        ("processor 0", seconds / 2),
        ("stream messages of 1", seconds),
        ("processor 0", seconds / 2),
    ]
