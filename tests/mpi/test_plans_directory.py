"""A communicator with a library of synthesised schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import needs_mpirun, run

from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.cost import LinkCost
from mpi_gpucomp.schedule.msccl_xml import add_schedule
from mpi_gpucomp.schedule.synth import synthesise
from mpi_gpucomp.schedule.topology import Topology

HERE = Path(__file__).parent


def machine(*nodes: tuple[int, ...]) -> Topology:
    links = {"memory": LinkCost(1e-6, 1e-10), "network": LinkCost(1e-5, 1e-9)}
    return Topology("a machine", nodes, links, "memory", "network" if len(nodes) > 1 else None)


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    here = machine((0, 1, 2))
    for collective in ("allreduce", "allgather", "broadcast"):
        made = synthesise(here, collective, 1 << 20, 1 << 18, seconds=1.0)
        add_schedule(tmp_path, made.algorithm, here, 1 << 10, 1 << 24)
    # This one would be preferred if the ranks were on nodes like its own.
    elsewhere = build("allreduce", "recursive_doubling", 3)
    add_schedule(tmp_path, elsewhere, machine((0, 1), (2,)), 1 << 18, 1 << 20)
    return tmp_path


@needs_mpirun
def test_schedules_are_used_where_they_fit(plans: Path):
    done = run(3, str(HERE / "schedule_library.py"), str(plans))
    assert done.returncode == 0, done.stderr
    made = machine((0, 1, 2)).hash
    assert done.stdout.splitlines() == [
        f"allreduce 0 synth_allreduce_{made}",
        "allreduce 0 ring",
        f"allgather 0 synth_allgather_{made}",
        f"broadcast 0 synth_broadcast_{made}",
        "broadcast 1 chain",
        "allreduce 0 tree",
    ]


@needs_mpirun
def test_a_missing_directory_is_an_error(tmp_path: Path):
    done = run(2, str(HERE / "schedule_library.py"), str(tmp_path / "none"))
    assert done.returncode != 0
    assert f"plans: expected a directory, got '{tmp_path / 'none'}'. Fill one with" in done.stderr
