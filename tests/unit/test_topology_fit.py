"""Topologies from measured times."""

from __future__ import annotations

import random

import pytest

from mpi_gpucomp.cli.profile import Fit, fitted, grouped, topology_of
from mpi_gpucomp.schedule.sketch import is_symmetry
from mpi_gpucomp.schedule.topology import Topology

SIZES = (1, 1 << 18, 1 << 20, 1 << 22)


def times(latency: float, per_byte: float, noise: float = 0.0) -> list[tuple[int, float]]:
    drawn = random.Random(1)
    return [(n, (latency + n * per_byte) * (1 + drawn.uniform(-noise, noise))) for n in SIZES]


def test_a_straight_line_is_found():
    found = fitted(times(50e-6, 8e-9))
    assert found.latency == pytest.approx(50e-6, rel=1e-3)
    assert found.per_byte == pytest.approx(8e-9, rel=1e-6)
    assert found.residual < 1e-9


def test_noise_hardly_moves_it():
    found = fitted(times(50e-6, 8e-9, 0.05))
    assert found.per_byte == pytest.approx(8e-9, rel=0.1)
    assert 0 < found.residual < 0.05


def test_one_long_message_is_enough():
    assert fitted(times(50e-6, 8e-9)[:2]).per_byte == pytest.approx(8e-9, rel=0.01)


def measured(nodes: tuple[tuple[int, ...], ...], rates: list[float], **slow: float) -> Topology:
    """Make the topology of nodes whose cards have these times per byte, with memory between ranks of a node."""
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    fits = {}
    for a in home:
        for b in home:
            if a != b:
                wire = max(rates[home[a]], rates[home[b]]) if home[a] != home[b] else 1e-10
                wire *= slow.get(f"from{a}to{b}", 1.0)
                fits[a, b] = Fit(2e-6 if home[a] == home[b] else 50e-6, wire, 0.01)
    return topology_of("measured", nodes, fits, "a test")


def test_nodes_with_cards_of_one_speed():
    topology = measured(((0, 1), (2, 3)), [8e-9, 8e-9])
    assert topology.pairs == {}
    assert topology.class_of(0, 1) == "within nodes"
    assert topology.class_of(1, 2) == "between nodes"
    assert [(port.name, port.per_byte) for port in topology.ports] == [
        (f"node {node}, {way}", 8e-9) for node in range(2) for way in ("out", "in")
    ]


def test_ports_that_are_nearly_equal_are_equal():
    topology = measured(((0, 1), (2, 3)), [8e-9, 8.3e-9])
    assert len({port.per_byte for port in topology.ports}) == 1
    assert is_symmetry(topology, (2, 3, 0, 1))


def test_a_slow_host_has_a_slow_card_and_the_others_do_not():
    topology = measured(((0,), (1,), (2,)), [1e-9, 8e-9, 1e-9])
    assert topology.pairs == {}
    assert [port.per_byte for port in topology.ports] == [1e-9, 1e-9, 8e-9, 8e-9, 1e-9, 1e-9]
    for pair, per_byte in (((0, 2), 1e-9), ((0, 1), 8e-9), ((1, 2), 8e-9)):
        alone = topology.unloaded_link(*pair)
        assert alone is not None
        assert alone.per_byte == per_byte


def test_a_slow_way_between_two_is_a_class_of_its_own():
    both = {"from0to1": 4.0, "from1to0": 4.0}
    topology = measured(((0,), (1,), (2,)), [1e-9] * 3, **both)
    assert topology.pairs == {(0, 1): "slow 0", (1, 0): "slow 0"}
    assert topology.classes["slow 0"].per_byte == pytest.approx(4e-9)


def test_one_disturbed_measurement_is_none():
    topology = measured(((0, 1, 2, 3),), [1e-9], from0to1=5.0)
    assert topology.pairs == {}
    assert topology.classes["within nodes"].per_byte == 1e-10


def test_classes_are_by_speed():
    fits = {
        (0, 1): Fit(1e-6, 1e-9, 0),
        (1, 0): Fit(1e-6, 1.1e-9, 0),
        (0, 2): Fit(1e-6, 5e-9, 0),
        (2, 0): Fit(1e-6, 5e-9, 0),
    }
    assert [pairs for _, pairs in grouped(fits)] == [[(0, 1), (1, 0)], [(0, 2), (2, 0)]]
