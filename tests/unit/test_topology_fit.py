"""Topologies from measured times: fits, classes of links, ports, islands and shared uplinks."""

from __future__ import annotations

import random

import pytest

from mpi_gpucomp.cli.profile import (
    ContentionTest,
    Fit,
    build_topology,
    contention_tests,
    find_islands,
    fit_link,
    link_classes,
    shared_port,
)
from mpi_gpucomp.schedule.sketch import is_symmetry, rotation
from mpi_gpucomp.schedule.synth import synthesise
from mpi_gpucomp.schedule.topology import Port, Topology

SIZES = (1, 1 << 18, 1 << 20, 1 << 22)
HOST, UPLINK = 2e-8, 4e-8
NBYTES = 1 << 20


def times(latency: float, per_byte: float, noise: float = 0.0) -> list[tuple[int, float]]:
    drawn = random.Random(1)
    return [(n, (latency + n * per_byte) * (1 + drawn.uniform(-noise, noise))) for n in SIZES]


def test_exact_times_give_the_exact_fit():
    found = fit_link(times(50e-6, 8e-9))
    assert found.latency == pytest.approx(50e-6, rel=1e-3)
    assert found.per_byte == pytest.approx(8e-9, rel=1e-6)
    assert found.residual < 1e-9


def test_noise_hardly_changes_the_fit():
    found = fit_link(times(50e-6, 8e-9, 0.05))
    assert found.per_byte == pytest.approx(8e-9, rel=0.1)
    assert 0 < found.residual < 0.05


def test_one_long_message_is_enough_for_a_fit():
    assert fit_link(times(50e-6, 8e-9)[:2]).per_byte == pytest.approx(8e-9, rel=0.01)


def measured(nodes: tuple[tuple[int, ...], ...], rates: list[float], **slow: float) -> Topology:
    """Return the topology of nodes with these times per byte, and shared memory within a node."""
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    fits = {}
    for a in home:
        for b in home:
            if a != b:
                wire = max(rates[home[a]], rates[home[b]]) if home[a] != home[b] else 1e-10
                wire *= slow.get(f"from{a}to{b}", 1.0)
                fits[a, b] = Fit(2e-6 if home[a] == home[b] else 50e-6, wire, 0.01)
    return build_topology("measured", nodes, fits, "a test")


def test_nodes_of_one_speed():
    topology = measured(((0, 1), (2, 3)), [8e-9, 8e-9])
    assert topology.pairs == {}
    assert topology.class_of(0, 1) == "within nodes"
    assert topology.class_of(1, 2) == "between nodes"
    assert [(port.name, port.per_byte) for port in topology.ports] == [
        (f"node {node}, {direction}", 8e-9) for node in range(2) for direction in ("out", "in")
    ]


def test_ports_of_nearly_the_same_rate_get_the_same_rate():
    topology = measured(((0, 1), (2, 3)), [8e-9, 8.3e-9])
    assert len({port.per_byte for port in topology.ports}) == 1
    assert is_symmetry(topology, (2, 3, 0, 1))


def test_a_slow_host_has_a_slow_port():
    topology = measured(((0,), (1,), (2,)), [1e-9, 8e-9, 1e-9])
    assert topology.pairs == {}
    assert [port.per_byte for port in topology.ports] == [1e-9, 1e-9, 8e-9, 8e-9, 1e-9, 1e-9]
    for pair, per_byte in (((0, 2), 1e-9), ((0, 1), 8e-9), ((1, 2), 8e-9)):
        alone = topology.unloaded_link(*pair)
        assert alone is not None
        assert alone.per_byte == per_byte


def test_a_slow_link_between_two_hosts_is_a_class():
    both = {"from0to1": 4.0, "from1to0": 4.0}
    topology = measured(((0,), (1,), (2,)), [1e-9] * 3, **both)
    assert topology.pairs == {(0, 1): "slow 0", (1, 0): "slow 0"}
    assert topology.classes["slow 0"].per_byte == pytest.approx(4e-9)


def test_one_disturbed_measurement_has_no_effect():
    topology = measured(((0, 1, 2, 3),), [1e-9], from0to1=5.0)
    assert topology.pairs == {}
    assert topology.classes["within nodes"].per_byte == 1e-10


def test_classes_are_ordered_by_speed():
    fits = {
        (0, 1): Fit(1e-6, 1e-9, 0),
        (1, 0): Fit(1e-6, 1.1e-9, 0),
        (0, 2): Fit(1e-6, 5e-9, 0),
        (2, 0): Fit(1e-6, 5e-9, 0),
    }
    assert [pairs for _, pairs in link_classes(fits)] == [[(0, 1), (1, 0)], [(0, 2), (2, 0)]]


def single_rank_nodes(hosts: int) -> tuple[tuple[int, ...], ...]:
    return tuple((host,) for host in range(hosts))


def racked(hosts: int, racks: int, slow: dict[int, float] | None = None) -> dict[tuple[int, int], Fit]:
    """Return the fits of hosts in racks, round robin, some of which are slow."""
    ports = {host: (slow or {}).get(host, HOST) for host in range(hosts)}
    return {
        (a, b): Fit(5e-5, max(ports[a], ports[b], UPLINK if a % racks != b % racks else 0.0), 0.0)
        for a in range(hosts)
        for b in range(hosts)
        if a != b
    }


def test_hosts_of_a_rack_are_an_island():
    assert find_islands(single_rank_nodes(8), racked(8, 3)) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_hosts_of_one_switch_are_one_island():
    assert find_islands(single_rank_nodes(4), racked(4, 1)) == [[0, 1, 2, 3]]
    assert contention_tests(single_rank_nodes(4), [[0, 1, 2, 3]]) == []


def test_a_slow_host_is_an_island_without_contention_tests():
    found = find_islands(single_rank_nodes(4), racked(4, 1, {2: 8e-8}))
    assert found == [[0, 1, 3], [2]]
    assert contention_tests(single_rank_nodes(4), found) == []  # its own port explains the times


def test_islands_of_nodes_with_several_ranks():
    nodes = ((0, 4), (1, 5), (2, 6), (3, 7))
    fits = {
        pair: fit._replace(per_byte=1e-10) if pair[0] % 4 == pair[1] % 4 else fit for pair, fit in racked(8, 2).items()
    }
    found = find_islands(nodes, fits)
    assert found == [[0, 2], [1, 3]]
    out, back = contention_tests(nodes, found)[:2]
    assert out == ContentionTest(0, frozenset({0, 4, 2, 6}), "out", ((0, 1), (2, 3)))
    assert back == ContentionTest(0, frozenset({0, 4, 2, 6}), "in", ((1, 0), (3, 2)))


def test_concurrent_pairs_alternate_between_the_other_islands():
    found = [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert contention_tests(single_rank_nodes(8), found)[0].pairs == ((0, 1), (3, 2), (6, 4))
    assert contention_tests(single_rank_nodes(8), found)[-1].pairs == ((0, 2), (1, 5))


@pytest.mark.parametrize(("times", "shares"), [(1.1, False), (2.0, True)])
def test_a_port_is_shared_if_concurrent_pairs_are_slower(times: float, shares: bool):
    fits = racked(4, 2)
    test = contention_tests(single_rank_nodes(4), find_islands(single_rank_nodes(4), fits))[0]
    seconds = times * (5e-5 + NBYTES * UPLINK)
    port = shared_port(test, fits, NBYTES, seconds)
    expected = Port("island 0, out", frozenset({0, 2}), "out", seconds / 2 / NBYTES, "between")
    assert port == (expected if shares else None)


def test_a_broadcast_crosses_each_uplink_of_a_rack_once():
    nodes, fits = single_rank_nodes(8), racked(8, 2)
    measured = (
        shared_port(test, fits, NBYTES, len(test.pairs) * (5e-5 + NBYTES * UPLINK) * 1.02**number)
        for number, test in enumerate(contention_tests(nodes, find_islands(nodes, fits)))
    )
    topology = build_topology("racks", nodes, fits, "a test", [port for port in measured if port])
    assert topology.pairs == {}
    assert is_symmetry(topology, rotation(8, 1, 8))
    link = topology.unloaded_link(0, 1)
    assert link is not None
    assert link.per_byte == pytest.approx(UPLINK, rel=0.1)
    made = synthesise(topology, "broadcast", 1 << 24, 1 << 20, seconds=10).routing
    for hops in made.hops:
        assert sum(hop.sender % 2 != hop.receiver % 2 for hop in hops) == 1


def test_slow_links_without_a_shared_port_are_a_class():
    topology = build_topology("apart", single_rank_nodes(4), racked(4, 2), "a test")
    assert set(topology.pairs) == {(a, b) for a in range(4) for b in range(4) if a % 2 != b % 2}
