"""The command `doctor` under mpirun: the MPI library in use, and the comparison of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import needs_mpirun, run

DIFFERENT = """
import os
from mpi4py import MPI
from mpi_gpucomp.cli.main import main
if MPI.COMM_WORLD.rank == 1:
    os.environ["MPI_GPUCOMP_RAILS"] = "nosuch0"
raise SystemExit(main(["doctor"]))
"""


@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_mpi_library_in_use(ranks: int):
    done = run(ranks, "-m", "mpi_gpucomp", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)["ranks"]
    assert len(reports) == ranks
    for report in reports:
        name, _, path = report["MPI"]["MPI library"].partition(", ")
        assert name and Path(path).is_file() and "libmpi" in Path(path).name
        assert report["MPI"]["thread level"] == "MPI_THREAD_MULTIPLE"
        assert report["MPI"]["GPU-aware"].startswith(("no: ", "yes: "))
        assert ("PML" in report["MPI"]) == name.startswith("Open MPI")
        assert report["devices and packages"]["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_mpich(mpich: Path, ranks: int):
    done = run(ranks, "-m", "mpi_gpucomp", "doctor", mpich=mpich)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{ranks} rank")
    line = next(line for line in done.stdout.splitlines() if line.strip().startswith("MPI library"))
    assert "MPICH" in line and str(mpich) in line


@needs_mpirun
def test_one_page_shows_the_differences_between_ranks():
    done = run(2, "-c", DIFFERENT)
    assert done.returncode == 1
    assert done.stdout.count("problems\n") == 1
    assert "rank 0: none (default)\n" in done.stdout
    assert "rank 1: nosuch0 (environment)\n" in done.stdout
    assert "\n  rank 1: MPI_GPUCOMP_RAILS: no network device nosuch0. This host has lo " in done.stdout
