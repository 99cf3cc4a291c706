"""Selection of algorithms with several ranks on each node."""

from __future__ import annotations

import pytest

from mpi_gpucomp._tuning.model import (
    ASSUMED_WITHIN,
    DEFAULT_CHUNK,
    Measurements,
    NodeLayout,
    best,
    default_algorithm,
    fit,
)
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import CodecCost, LinkCost
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import Port, Topology

MESSAGE = 1 << 24
IN_ORDER = ((0, 1, 2, 3), (4, 5, 6, 7))
ROUND_ROBIN = ((0, 2, 4, 6), (1, 3, 5, 7))
APART = tuple((rank,) for rank in range(8))
NETWORK = LinkCost(5e-5, 4e-8)


@pytest.mark.parametrize(
    ("collective", "nodes", "expected"),
    [
        ("broadcast", IN_ORDER, "chain"),  # enters each node once
        ("broadcast", ROUND_ROBIN, "two_level"),
        ("allreduce", IN_ORDER, "two_level"),
        ("allreduce", ROUND_ROBIN, "two_level"),
        ("allgather", ROUND_ROBIN, "two_level"),
        ("allreduce", APART, "ring"),
        ("allreduce", (tuple(range(8)),), "ring"),
        ("alltoall", ROUND_ROBIN, "pairwise"),
    ],
)
def test_two_level_algorithms_where_they_help(collective: str, nodes: tuple[tuple[int, ...], ...], expected: str):
    assert default_algorithm(collective, MESSAGE, nodes) == expected


def test_a_message_of_unknown_length_gets_the_first_algorithm():
    assert default_algorithm("allreduce", 0, ROUND_ROBIN) == "ring"


@pytest.mark.parametrize(("within", "expected"), [(ASSUMED_WITHIN, "two_level"), (NETWORK, "chain")])
def test_measurements_decide(within: LinkCost, expected: str):
    layout = NodeLayout(ROUND_ROBIN, within, LinkCost(5e-5, 4e-8) if within is ASSUMED_WITHIN else LinkCost(5e-6, 1e-9))
    measured = Measurements(NETWORK, ((MESSAGE, 1e9),), layout=layout)
    measured = fit("broadcast", 8, measured, (0, 0.0), (MESSAGE, 1.0))
    assert best("broadcast", MESSAGE, 8, measured).algorithm == expected


def test_the_simulator_agrees():
    layout, raw = NodeLayout(ROUND_ROBIN, ASSUMED_WITHIN, NETWORK), CodecCost(1e-10, 1e-10)
    ports = tuple(
        Port(f"{number} {way}", frozenset(node), way, NETWORK.per_byte, "between")
        for number, node in enumerate(ROUND_ROBIN)
        for way in ("out", "in")
    )
    links = {"memory": ASSUMED_WITHIN, "network": NETWORK}
    topology = Topology("t", ROUND_ROBIN, links, "memory", "network", ports=ports, codecs={"none": raw}, per_chunk=1e-4)
    algorithm = build("allreduce", "two_level", 8, 0, ROUND_ROBIN)
    expected = simulate(algorithm, topology, MESSAGE, DEFAULT_CHUNK).seconds
    assert layout.seconds("allreduce", "two_level", MESSAGE, DEFAULT_CHUNK, raw, None, 1e-4) == expected
    # Lengths between two powers of two are in proportion.
    half = MESSAGE * 3 // 4
    assert layout.seconds("allreduce", "two_level", half, DEFAULT_CHUNK, raw, None, 1e-4) == expected * 3 / 4
