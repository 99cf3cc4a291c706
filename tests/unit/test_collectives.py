"""Every built-in algorithm: correct for any number of ranks, with the costs that the documentation states."""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil, floor, log2
from pathlib import Path

import pytest
from interpreter import run

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule import COLLECTIVES, Algorithm, CollectiveSpec, steps_and_bytes
from mpi_gpucomp.schedule.algorithms import TABLE, algorithms, build
from mpi_gpucomp.schedule.ir import COLLECTIVE_OF, PASSTHROUGH_METHODS
from mpi_gpucomp.schedule.verify import check

NAMES = [(collective, info.name) for collective in COLLECTIVES for info in algorithms(collective)]
TWO_LEVEL = [(collective, name) for collective, name in NAMES if TABLE[collective][name].two_level]
RANKS = (1, 2, 3, 4, 5, 8, 11, 16)
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "ALGORITHMS.md"


def roots(collective: str, ranks: int) -> list[int]:
    if not COLLECTIVES[collective].rooted:
        return [0]
    return list(range(ranks)) if ranks < 6 else [0, ranks // 2, ranks - 1]


def test_collective_of_each_mpi4py_method():
    assert COLLECTIVE_OF == {
        "Bcast": "broadcast",
        "Reduce": "reduce",
        "Allreduce": "allreduce",
        "Allgather": "allgather",
        "Allgatherv": "allgather",
        "Reduce_scatter_block": "reduce_scatter",
        "Reduce_scatter": "reduce_scatter",
        "Alltoall": "alltoall",
        "Alltoallv": "alltoall",
        "Gather": "gather",
        "Gatherv": "gather",
        "Scatter": "scatter",
        "Scatterv": "scatter",
    }
    assert not set(PASSTHROUGH_METHODS) & set(COLLECTIVE_OF)
    assert all(one.mpi_name.capitalize() in one.methods for one in COLLECTIVES.values())


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_buffers_of_each_collective(collective: str):
    kind, spec = COLLECTIVES[collective], CollectiveSpec(collective, ranks=3, chunks=6)
    lengths = [spec.input_chunks(0), spec.output_chunks(0)]
    assert (kind.name, [length == 2 for length in lengths]) == (collective, [kind.block_input, kind.block_output])
    assert kind.block_buffers == ((False,) if kind.method == "Bcast" else (kind.block_input, kind.block_output))


def test_every_collective_has_algorithms():
    assert {collective: [info.name for info in algorithms(collective)] for collective in COLLECTIVES} == {
        "broadcast": ["chain", "tree", "binomial", "scatter_allgather", "two_level"],
        "reduce": ["chain", "binomial"],
        "allreduce": ["ring", "recursive_doubling", "reduce_scatter_allgather", "tree", "two_level"],
        "allgather": ["ring", "recursive_doubling", "bruck", "two_level"],
        "reduce_scatter": ["ring", "halving"],
        "alltoall": ["pairwise", "bruck"],
        "gather": ["linear", "binomial"],
        "scatter": ["linear", "binomial"],
    }


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_result(collective: str, name: str, ranks: int, in_place: bool):
    for root in roots(collective, ranks):
        algorithm = build(collective, name, ranks, root, in_place=in_place)
        assert (algorithm.collective, algorithm.name, algorithm.ranks) == (collective, name, ranks)
        assert algorithm.root == (root if COLLECTIVES[collective].rooted else None)
        check(algorithm, in_flight=1)
        run(algorithm, seed=root)


LAYOUTS = [
    [[0]],
    [[0, 1]],
    [[0], [1]],
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[3, 1, 4], [0], [5, 2]],
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]],
]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.parametrize(("collective", "name"), TWO_LEVEL)
def test_two_level_on_any_layout(collective: str, name: str, nodes: list[list[int]], in_place: bool):
    ranks = sum(map(len, nodes))
    for root in roots(collective, ranks):
        algorithm = build(collective, name, ranks, root, nodes, in_place)
        check(algorithm, in_flight=1)
        run(algorithm, seed=root)


@pytest.mark.parametrize("root", range(6))
def test_a_two_level_broadcast_enters_each_node_once(root: int):
    nodes = [[0, 1], [2, 3], [4, 5]]
    algorithm = build("broadcast", "two_level", 6, root, nodes)
    entered = [
        rank // 2
        for rank, program in enumerate(algorithm.programs)
        for lane in program.lanes
        for step in lane.steps
        if step.receives and lane.receive is not None and lane.receive // 2 != rank // 2
    ]
    assert sorted(entered) == sorted({0, 1, 2} - {root // 2})


def kinds(algorithm: Algorithm) -> list[list[list[str]]]:
    return [[[step.kind for step in lane.steps] for lane in program.lanes] for program in algorithm.programs]


def test_chains_forward_chunks_in_one_step():
    assert kinds(build("broadcast", "chain", 4)) == [[["s"]], [["rcs"]], [["rcs"]], [["r"]]]
    assert kinds(build("reduce", "chain", 4)) == [[["rrc"]], [["rrs"]], [["rrs"]], [["s"]]]


def test_a_ring_is_one_lane_that_stores_only_results():
    assert kinds(build("allreduce", "ring", 4)) == [[["s", "rrs", "rrs", "rrcs", "rcs", "rcs", "r"]] * 2] * 4
    assert kinds(build("reduce_scatter", "ring", 4)) == [[["s", "rrs", "rrs", "rrc"]]] * 4
    assert kinds(build("allgather", "ring", 4, in_place=True)) == [[["s", "rcs", "rcs", "r"]] * 2] * 4


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        *(("allgather", name) for name in ("ring", "recursive_doubling", "bruck", "two_level")),
        *(("broadcast", name) for name in ("chain", "tree", "binomial", "scatter_allgather", "two_level")),
        *(("allreduce", name) for name in ("ring", "recursive_doubling", "reduce_scatter_allgather", "tree")),
        ("reduce", "chain"),
        ("reduce_scatter", "ring"),
        ("alltoall", "pairwise"),
        ("gather", "linear"),
        ("scatter", "linear"),
    ],
)
def test_no_scratch(collective: str, name: str):
    for ranks in RANKS:
        assert not any(program.scratch_chunks for program in build(collective, name, ranks).programs)


def test_the_root_of_a_broadcast_receives_nothing():
    for info in algorithms("broadcast"):
        for ranks in RANKS:
            assert not any(step.receives for _, _, step in build("broadcast", info.name, ranks).programs[0].steps())


def documented() -> list[tuple[str, ...]]:
    lines = DOCUMENT.read_text().splitlines()
    return [
        tuple(cell.strip(" `") for cell in line.split("|")[1:-1]) for line in lines if re.match(r"\| \w+ \| \w+ ", line)
    ][1:]


def test_the_documentation_lists_every_algorithm():
    assert [row[:2] for row in documented()] == NAMES


@pytest.mark.parametrize("row", documented(), ids=lambda row: f"{row[0]}-{row[1]}")
def test_costs_match_the_documentation(row: tuple[str, ...]):
    collective, name, valid_for, *formulas = row
    if valid_for == "m p":
        cases = [(m * p, m, p) for m in (2, 3, 4) for p in (2, 3, 5)]
    else:
        cases = [(n, 1, n) for n in range(2, 18) if valid_for == "any" or n & n - 1 == 0]
    for n, m, p in cases:
        nodes = [range(p * node, p * node + p) for node in range(m)]
        names = {"n": Fraction(n), "m": Fraction(m), "p": Fraction(p), "log2": log2, "floor": floor, "ceil": ceil}
        expected = [Fraction(eval(formula, names | {"min": min})) for formula in formulas]
        assert list(steps_and_bytes(build(collective, name, n, nodes=nodes))) == expected, n


@pytest.mark.parametrize(("collective", "name"), [("allgather", "bruck"), ("alltoall", "bruck")])
def test_bruck_takes_log2_steps_for_any_number_of_ranks(collective: str, name: str):
    for ranks in range(2, 18):
        assert steps_and_bytes(build(collective, name, ranks)).steps <= ceil(log2(ranks))


@pytest.mark.parametrize("name", ["recursive_doubling", "reduce_scatter_allgather"])
def test_folding_costs_two_steps_and_a_vector(name: str):
    for ranks in range(2, 18):
        cost = steps_and_bytes(build("allreduce", name, ranks))
        core = steps_and_bytes(build("allreduce", name, 1 << ranks.bit_length() - 1))
        assert core.steps <= cost.steps <= core.steps + 2
        assert cost.sent <= core.sent + 1 and cost.received <= core.received + 1


def test_an_algorithm_is_built_once():
    first = build("allreduce", "ring", 5)
    assert build("allreduce", "ring", 5, root=3, nodes=[[0]]) is first
    assert build("allreduce", "ring", 5, in_place=True) is not first
    assert build("broadcast", "chain", 5) is build("broadcast", "chain", 5, in_place=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("brodcast", "chain", 4),
            "collective: expected one of broadcast, reduce, allreduce, allgather, reduce_scatter, alltoall, gather, "
            "scatter, got 'brodcast'. Did you mean broadcast?",
        ),
        (
            ("reduce", "rings", 4),
            "reduce algorithm: expected one of chain, binomial, got 'rings'. "
            "List them with `python -m mpi_gpucomp algorithms`.",
        ),
        (
            ("reduce", "chains", 4),
            "reduce algorithm: expected one of chain, binomial, got 'chains'. Did you mean chain?",
        ),
        (("reduce", "chain", 0), "number of ranks: expected 1 or more, got 0. Ranks are counted from 0."),
        (("reduce", "chain", 4, 4), "root: expected a rank from 0 to 3, got 4. Ranks are counted from 0."),
        (
            ("broadcast", "two_level", 3, 0, [[0, 1], [1, 2]]),
            "nodes: expected every rank from 0 to 2 on exactly one node, and no empty node, "
            "got [[0, 1], [1, 2]]. List the ranks of each node, such as [[0, 1], [2, 3]].",
        ),
    ],
)
def test_invalid_arguments(arguments: tuple[object, ...], message: str):
    with pytest.raises(SpecError) as caught:
        build(*arguments)
    assert str(caught.value) == message
