"""Islands of nodes, found from links that were measured alone and several at once."""

from __future__ import annotations

import pytest

from mpi_gpucomp.cli.profile import Fit, Trial, island_port, islands, topology_of, trials
from mpi_gpucomp.schedule.sketch import is_symmetry, rotation
from mpi_gpucomp.schedule.synth import synthesise
from mpi_gpucomp.schedule.topology import Port

HOST, UPLINK = 2e-8, 4e-8
NBYTES = 1 << 20


def alone(hosts: int) -> tuple[tuple[int, ...], ...]:
    return tuple((host,) for host in range(hosts))


def racked(hosts: int, racks: int, slow: dict[int, float] | None = None) -> dict[tuple[int, int], Fit]:
    """Measure hosts that were dealt out to racks in turn, some of which have slow cards."""
    cards = {host: (slow or {}).get(host, HOST) for host in range(hosts)}
    return {
        (a, b): Fit(5e-5, max(cards[a], cards[b], UPLINK if a % racks != b % racks else 0.0), 0.0)
        for a in range(hosts)
        for b in range(hosts)
        if a != b
    }


def test_hosts_of_a_rack_are_an_island():
    assert islands(alone(8), racked(8, 3)) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_hosts_of_one_switch_are_one_island():
    assert islands(alone(4), racked(4, 1)) == [[0, 1, 2, 3]]
    assert trials(alone(4), [[0, 1, 2, 3]]) == []


def test_a_slow_host_is_by_itself_and_tells_nothing_about_the_others():
    found = islands(alone(4), racked(4, 1, {2: 8e-8}))
    assert found == [[0, 1, 3], [2]]
    assert trials(alone(4), found) == []  # its own card explains it


def test_nodes_of_several_ranks():
    nodes = ((0, 4), (1, 5), (2, 6), (3, 7))
    fits = {
        pair: fit._replace(per_byte=1e-10) if pair[0] % 4 == pair[1] % 4 else fit for pair, fit in racked(8, 2).items()
    }
    found = islands(nodes, fits)
    assert found == [[0, 2], [1, 3]]
    out, back = trials(nodes, found)[:2]
    assert out == Trial(0, frozenset({0, 4, 2, 6}), "out", ((0, 1), (2, 3)))
    assert back == Trial(0, frozenset({0, 4, 2, 6}), "in", ((1, 0), (3, 2)))


def test_pairs_at_once_go_to_other_islands_in_turn():
    found = [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert trials(alone(8), found)[0].pairs == ((0, 1), (3, 2), (6, 4))
    assert trials(alone(8), found)[-1].pairs == ((0, 2), (1, 5))


@pytest.mark.parametrize(("times", "shares"), [(1.1, False), (2.0, True)])
def test_a_port_is_shared_if_pairs_hold_each_other_up(times: float, shares: bool):
    fits = racked(4, 2)
    trial = trials(alone(4), islands(alone(4), fits))[0]
    seconds = times * (5e-5 + NBYTES * UPLINK)
    port = island_port(trial, fits, NBYTES, seconds)
    expected = Port("island 0, out", frozenset({0, 2}), "out", seconds / 2 / NBYTES, "between")
    assert port == (expected if shares else None)


def test_a_topology_with_racks_is_even_and_its_broadcast_crosses_each_uplink_once():
    nodes, fits = alone(8), racked(8, 2)
    measured = (
        island_port(trial, fits, NBYTES, len(trial.pairs) * (5e-5 + NBYTES * UPLINK) * 1.02**number)
        for number, trial in enumerate(trials(nodes, islands(nodes, fits)))
    )
    topology = topology_of("racks", nodes, fits, "a test", [port for port in measured if port])
    assert topology.pairs == {}
    assert is_symmetry(topology, rotation(8, 1, 8))
    link = topology.unloaded_link(0, 1)
    assert link is not None
    assert link.per_byte == pytest.approx(UPLINK, rel=0.1)
    made = synthesise(topology, "broadcast", 1 << 24, 1 << 20, seconds=10).routing
    for hops in made.hops:
        assert sum(hop.sender % 2 != hop.receiver % 2 for hop in hops) == 1


def test_slow_ways_that_nothing_shares_are_a_class_of_their_own():
    topology = topology_of("apart", alone(4), racked(4, 2), "a test")
    assert set(topology.pairs) == {(a, b) for a in range(4) for b in range(4) if a % 2 != b % 2}
