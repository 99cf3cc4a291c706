"""The command `synthesize`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_topology import two_nodes

from mpi_gpucomp.schedule.check import check
from mpi_gpucomp.schedule.plans import Plans
from mpi_gpucomp.schedule.topology_file import write_topology
from mpi_gpucomp.schedule.xml import facts, read
from mpi_gpucomp.tools.main import main

MADE = """\
topology      two nodes (48ee46b5d728)
algorithm     allgather, 4 ranks, 4 chunks in a loop
message       64 MB in chunks of 1 MB, codec none
routing       277.2 ms, the best within the sketch; solved in
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_topology(two_nodes(pairs={}), tmp_path / "topo.json")
    return str(tmp_path / "topo.json")


def test_a_file_and_a_directory_of_plans(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]):
    output, plans = tmp_path / "made.xml", tmp_path / "plans"
    words = ["--topology", file, "-o", str(output), "--plans", str(plans), "--time", "5"]
    assert main(["synthesize", "allgather", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith(MADE.rstrip())
    assert "\nof the table  274.1 ms by two_level\n" in said
    check(read(output), 1)
    topology = two_nodes(pairs={})
    assert facts(output).topology == topology.hash
    found = Plans(plans, topology.nodes).find("allgather", 4, 64 << 20)
    assert found is not None
    assert found.programs == read(output).programs
    assert Plans(plans).find("allgather", 4, 64 << 10) is None
    assert main(["explain", "allgather", "--topology", file, "--plans", str(plans), "--codec", "none"]) == 0
    assert capsys.readouterr().out.splitlines()[3].startswith(f"synth_allgather_{topology.hash}  none")
    assert Plans(plans, ((0, 2), (1, 3))).find("allgather", 4, 64 << 20) is None


def test_no_plan_where_the_table_is_as_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--topology", "gigabit", "--ranks", "4", "--plans", str(tmp_path), "--time", "3"]
    assert main(["synthesize", "allgather", *words]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("no plan is written: ")
    assert said.endswith(" of the table is about as quick")
    assert not list(tmp_path.iterdir())


def test_a_sketch_and_a_codec(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]):
    sketch = tmp_path / "sketch.json"
    sketch.write_text(json.dumps({"internode_sketch": {"internode_conn": {"1": [0]}}, "nnodes": 2}))
    words = ["--topology", file, "--sketch", str(sketch), "--codec", "zfp:rate=8", "--chunkup", "2", "--time", "2"]
    assert main(["synthesize", "bcast", *words, "--root", "3", "-o", str(tmp_path / "made.xml")]) == 0
    assert "broadcast, 4 ranks, 2 chunks in a loop" in capsys.readouterr().out
    made = read(tmp_path / "made.xml")
    assert made.root == 3
    crossing = {
        (rank, lane.send)
        for rank, program in enumerate(made.programs)
        for lane in program.lanes
        if lane.send is not None and lane.send // 2 != rank // 2
    }
    assert crossing == {(3, 0)}


def test_mistakes(file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["synthesize", "bcast", "--topology", file, "--chunkup", "0"]) == 2
    assert capsys.readouterr().err == (
        "python -m mpi_gpucomp: option --chunkup: expected 1 or more, got 0. "
        "Cut each rank's data into one chunk or more.\n"
    )
