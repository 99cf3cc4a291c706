"""What is chosen where several ranks lie on each node."""

from __future__ import annotations

import pytest

from mpi_gpucomp._tuning.model import (
    ASSUMED_WITHIN,
    DEFAULT_CHUNK,
    Figures,
    NodeLayout,
    calibrated,
    default_algorithm,
    select,
)
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import CodecCost, LinkCost
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import Port, Topology

MESSAGE = 1 << 24
IN_ORDER = ((0, 1, 2, 3), (4, 5, 6, 7))
IN_TURN = ((0, 2, 4, 6), (1, 3, 5, 7))
APART = tuple((rank,) for rank in range(8))
NETWORK = LinkCost(5e-5, 4e-8)


@pytest.mark.parametrize(
    ("collective", "nodes", "expected"),
    [
        ("broadcast", IN_ORDER, "chain"),  # which enters each node once
        ("broadcast", IN_TURN, "two_level"),
        ("allreduce", IN_ORDER, "two_level"),
        ("allreduce", IN_TURN, "two_level"),
        ("allgather", IN_TURN, "two_level"),
        ("allreduce", APART, "ring"),
        ("allreduce", (tuple(range(8)),), "ring"),
        ("alltoall", IN_TURN, "pairwise"),
    ],
)
def test_two_levels_where_they_help(collective: str, nodes: tuple[tuple[int, ...], ...], expected: str):
    assert default_algorithm(collective, MESSAGE, nodes) == expected


def test_a_message_whose_length_is_not_known_gets_the_first():
    assert default_algorithm("allreduce", 0, IN_TURN) == "ring"


@pytest.mark.parametrize(("within", "expected"), [(ASSUMED_WITHIN, "two_level"), (NETWORK, "chain")])
def test_what_was_measured_decides(within: LinkCost, expected: str):
    placed = NodeLayout(IN_TURN, within, LinkCost(5e-5, 4e-8) if within is ASSUMED_WITHIN else LinkCost(5e-6, 1e-9))
    figures = Figures(NETWORK, ((MESSAGE, 1e9),), placed=placed)
    figures = calibrated("broadcast", 8, figures, (0, 0.0), (MESSAGE, 1.0))
    assert select("broadcast", MESSAGE, 8, figures).algorithm == expected


def test_it_is_the_simulation_of_the_tools():
    placed, plain = NodeLayout(IN_TURN, ASSUMED_WITHIN, NETWORK), CodecCost(1e-10, 1e-10)
    ports = tuple(
        Port(f"{number} {way}", frozenset(node), way, NETWORK.per_byte, "between")
        for number, node in enumerate(IN_TURN)
        for way in ("out", "in")
    )
    links = {"memory": ASSUMED_WITHIN, "network": NETWORK}
    topology = Topology("t", IN_TURN, links, "memory", "network", ports=ports, codecs={"none": plain}, per_chunk=1e-4)
    algorithm = build("allreduce", "two_level", 8, 0, IN_TURN)
    expected = simulate(algorithm, topology, MESSAGE, DEFAULT_CHUNK).seconds
    assert placed.seconds("allreduce", "two_level", MESSAGE, DEFAULT_CHUNK, plain, None, 1e-4) == expected
    # Lengths between two powers of two are in proportion.
    half = MESSAGE * 3 // 4
    assert placed.seconds("allreduce", "two_level", half, DEFAULT_CHUNK, plain, None, 1e-4) == expected * 3 / 4
