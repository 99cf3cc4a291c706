"""The command `synthesize`: its summary, files, schedule libraries and errors."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from test_topology import two_nodes

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.cli.synthesize import _write_plan
from mpi_gpucomp.schedule.cost import PER_MB, LinkCost
from mpi_gpucomp.schedule.msccl_xml import ScheduleLibrary, read, read_header
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.synth import synthesise
from mpi_gpucomp.schedule.topology import DIRECTIONS, Port, Topology, write_topology
from mpi_gpucomp.schedule.verify import check

MADE = """\
topology   two nodes (48ee46b5d728)
algorithm  allgather, 4 ranks, 4 chunks per loop
message    64 MB in chunks of 1 MB, codec none
routing    277.2 ms, optimal within the sketch; solved in
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_topology(two_nodes(pairs={}), tmp_path / "topo.json")
    return str(tmp_path / "topo.json")


def racks(folder: Path, hosts: int, racks: int) -> Topology:
    """Write the topology of hosts in racks, round robin, with uplinks of the bandwidth of half a host."""
    islands = [frozenset(range(rack, hosts, racks)) for rack in range(racks)]
    sets = {frozenset({host}): 20000 for host in range(hosts)} | dict.fromkeys(islands, 40000)
    ports = [
        Port(f"{sorted(ranks)}, {direction}", ranks, direction, beta * PER_MB)
        for ranks, beta in sets.items()
        for direction in DIRECTIONS
    ]
    nodes = tuple((host,) for host in range(hosts))
    made = Topology(f"{racks} racks", nodes, {"lan": LinkCost(5e-5, 20000 * PER_MB)}, None, "lan", ports=tuple(ports))
    write_topology(made, folder / "racks.json")
    return made


def test_a_file_and_a_schedule_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made, plans, topology = tmp_path / "made.xml", tmp_path / "plans", racks(tmp_path, 5, 3)
    file = str(tmp_path / "racks.json")
    words = ["--topology", file, "-o", str(made), "--plans", str(plans), "--time", "5"]
    assert main(["synthesize", "allgather", *words]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"topology   3 racks ({topology.hash})\nalgorithm  allgather, 5 ranks")
    assert output.splitlines()[-1].startswith(f"wrote {plans}/allgather-5ranks-{topology.hash}-")
    check(read(made), 1)
    assert read_header(made).topology == topology.hash
    found = ScheduleLibrary(plans, topology.nodes).find("allgather", 5, 64 << 20)
    assert found is not None
    assert found.programs == read(made).programs
    assert ScheduleLibrary(plans).find("allgather", 5, 64 << 10) is None
    assert (
        main(["simulate", "allgather", "--compare", "--topology", file, "--plans", str(plans), "--codec", "none"]) == 0
    )
    assert capsys.readouterr().out.splitlines()[3].startswith(f"synth_allgather_{topology.hash}  none")
    assert ScheduleLibrary(plans, ((0, 2), (1, 3), (4,))).find("allgather", 5, 64 << 20) is None


def test_no_plan_if_the_two_level_default_is_as_fast(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["synthesize", "allgather", "--topology", file, "--plans", str(tmp_path), "--time", "5"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(MADE.rstrip())
    assert "\nbuilt-in   272.2 ms with two_level\n" in output
    last = "no plan written: two_level, which communicators use by default, is about as fast"
    assert output.splitlines()[-1] == last


@pytest.mark.parametrize(("share", "expected"), [(0.95, "synth_broadcast"), (0.85, "tree")])
def test_the_plan_may_be_a_built_in_algorithm(tmp_path: Path, share: float, expected: str):
    plans, topology = tmp_path / "plans", racks(tmp_path, 4, 2)
    made = synthesise(topology, "broadcast", 1 << 24, 1 << 20, seconds=2.0)
    found = simulate(made.algorithm, topology, 1 << 24, 1 << 20)
    known = [(share * found.seconds, "tree"), (2 * found.seconds, "chain")]
    args = Namespace(plans=plans, size=1 << 24, root=0, in_place=False)
    output = _write_plan(made, found, known, args)
    prefix = "tree is faster than the synthesized schedule: wrote it to " if expected == "tree" else "wrote "
    assert output.startswith(f"{prefix}{plans}/broadcast-4ranks-")
    plan = ScheduleLibrary(plans, topology.nodes).find("broadcast", 4, 1 << 24)
    assert plan is not None
    assert plan.name.startswith(expected)


def test_no_plan_if_the_default_is_as_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--topology", "gigabit", "--ranks", "4", "--plans", str(tmp_path), "--time", "3"]
    assert main(["synthesize", "allgather", *words]) == 0
    output = capsys.readouterr().out.splitlines()[-1]
    assert output == "no plan written: ring, which communicators use by default, is about as fast"
    assert not list(tmp_path.iterdir())


def test_a_sketch_and_a_codec(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]):
    sketch = tmp_path / "sketch.json"
    sketch.write_text(json.dumps({"internode_sketch": {"internode_conn": {"1": [0]}}, "nnodes": 2}))
    words = ["--topology", file, "--sketch", str(sketch), "--codec", "zfp:rate=8", "--chunkup", "2", "--time", "2"]
    assert main(["synthesize", "bcast", *words, "--root", "3", "-o", str(tmp_path / "made.xml")]) == 0
    assert "broadcast, 4 ranks, 2 chunks per loop" in capsys.readouterr().out
    made = read(tmp_path / "made.xml")
    assert made.root == 3
    crossing = {
        (rank, lane.send)
        for rank, program in enumerate(made.programs)
        for lane in program.lanes
        if lane.send is not None and lane.send // 2 != rank // 2
    }
    assert crossing == {(3, 0)}


def test_an_invalid_chunkup(file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["synthesize", "bcast", "--topology", file, "--chunkup", "0"]) == 2
    assert capsys.readouterr().err == (
        "python -m mpi_gpucomp: option --chunkup: expected at least 1, got 0. "
        "Divide the data of each rank into at least one chunk.\n"
    )
