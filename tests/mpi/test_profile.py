"""The command `profile` under mpirun, and a schedule for the topology that it writes."""

from __future__ import annotations

from pathlib import Path

from launch import needs_mpirun, run

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.schedule.topology import read_topology


@needs_mpirun
def test_a_profile_of_this_machine(tmp_path: Path):
    file = tmp_path / "topo.json"
    done = run(3, "-m", "mpi_gpucomp", "profile", "-o", str(file), "--codec", "none", "zfp:rate=8")
    assert done.returncode == 0, done.stderr
    assert "3 ranks on 1 nodes" in done.stdout
    topology = read_topology(file)
    assert topology.nodes == ((0, 1, 2),)
    assert len(list(topology.links())) == 6
    assert 3.9 < topology.codecs["zfp:rate=8"].ratio < 4
    assert main(["synthesize", "allgather", "--topology", str(file), "--time", "1"]) == 0


@needs_mpirun
def test_one_rank_is_an_error(tmp_path: Path):
    done = run(1, "-m", "mpi_gpucomp", "profile", "-o", str(tmp_path / "topo.json"))
    assert done.returncode == 2
    message = (
        "profile: expected at least 2 ranks, got 1. Start it under mpirun: mpirun -n 4 gpucomp profile -o topo.json."
    )
    assert message in done.stderr
