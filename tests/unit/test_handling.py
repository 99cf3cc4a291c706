"""What messages cost the ranks at their ends, in the simulation."""

from __future__ import annotations

import pytest
from test_simulate import MIB, WIRE, hosts

from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import CodecCost, MessageCost
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.sketch import Sketch
from mpi_gpucomp.schedule.synth.problem import Problem, chunks_of
from mpi_gpucomp.schedule.topology import ProcessorModel

CHAIN = build("broadcast", "chain", 4)
MESSAGE, PER_BYTE, WAIT = 1e-3, 1e-9, 4e-3
ALL = frozenset(range(4))


def test_one_chunk_is_handled_twice_on_each_hop_and_noticed_once():
    found = simulate(CHAIN, hosts(4, message_cost=MessageCost(MESSAGE, PER_BYTE, WAIT)), MIB, MIB).seconds
    hop = WIRE.seconds(MIB) + 2 * (MESSAGE + MIB * PER_BYTE) + WAIT
    assert found == pytest.approx(3 * hop)


def test_handling_overlaps_with_the_wire():
    """Where the wire is the limit, all but the first and the last chunk are handled while others travel."""
    loops = 32
    plain = simulate(CHAIN, hosts(4), loops * MIB, MIB).seconds
    found = simulate(CHAIN, hosts(4, message_cost=MessageCost(MESSAGE, PER_BYTE, WAIT)), loops * MIB, MIB).seconds
    assert found == pytest.approx(plain + 3 * (2 * (MESSAGE + MIB * PER_BYTE) + WAIT))


@pytest.mark.parametrize("cores", [1, 2, 0.5])
def test_many_short_messages_are_limited_by_the_cores(cores: float):
    topology = hosts(4, message_cost=MessageCost(MESSAGE), processors=(ProcessorModel(ALL, cores),))
    loops = 100
    found = simulate(CHAIN, topology, loops * 4, 4).seconds
    ends = 2 * 3 * loops
    assert found == pytest.approx(ends * MESSAGE / cores, rel=0.1)


def test_frames_cost_their_part():
    coding, frame = CodecCost(1e-9, 1e-9, 4.0), 5e-3
    with_frames, without = (
        simulate(CHAIN, hosts(4, message_cost=MessageCost(MESSAGE, frame=one)), MIB, MIB, coding).seconds
        for one in (frame, 0.0)
    )
    assert with_frames == pytest.approx(without + 2 * frame)  # made once, and read by the last
    raw = [simulate(CHAIN, hosts(4, message_cost=MessageCost(MESSAGE, frame=one)), MIB, MIB) for one in (frame, 0.0)]
    assert raw[0].seconds == raw[1].seconds


def test_a_sum_waits_until_its_frame_is_noticed():
    algorithm, coding = build("allreduce", "ring", 2), CodecCost(1e-9, 1e-9, 4.0)
    soon, late = (
        simulate(algorithm, hosts(2, message_cost=MessageCost(MESSAGE, wait=wait)), 4 * MIB, MIB, coding).seconds
        for wait in (0.0, WAIT)
    )
    # Two messages one after the other, and a frame is made for each.
    assert late - soon == pytest.approx(4 * WAIT)


def test_the_critical_path_still_adds_up():
    topology = hosts(4, message_cost=MessageCost(MESSAGE, PER_BYTE), processors=(ProcessorModel(ALL, 2),))
    found = simulate(CHAIN, topology, 8 * MIB, MIB)
    path = found.critical_path()
    assert path[0].what == "rank 0 handles"
    assert sum(segment.seconds for segment in path) == pytest.approx(found.seconds, rel=0.02)
    assert sum(record.kind == "handle" for record in found.records) == 2 * 3 * 8


def test_a_solver_counts_it_too():
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
