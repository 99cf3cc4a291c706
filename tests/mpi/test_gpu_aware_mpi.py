"""Detection of GPU-aware MPI with the installed library, compared with a C program."""

from __future__ import annotations

import subprocess
from ast import literal_eval
from pathlib import Path

import pytest
from launch import LAUNCHER, needs_mpirun, run

pytestmark = needs_mpirun

IMPORTS = "from mpi4py import MPI; from mpi_gpucomp.transport.gpu_aware import cuda_aware; "
QUERY = f"{IMPORTS}all = MPI.COMM_WORLD.gather(tuple(cuda_aware())); all and print(*all, sep='\\n')"
HERE = "print(tuple(cuda_aware()))"
AROUND = f"import mpi4py; mpi4py.rc.initialize = False; {IMPORTS}{HERE}; MPI.Init(); {HERE}; MPI.Finalize(); {HERE}"
PROGRAM = """
#include <mpi.h>
#include <stdio.h>
int MPIX_Query_cuda_support(void);
int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    printf("%d\\n", MPIX_Query_cuda_support());
    return MPI_Finalize();
}
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPI_GPUCOMP_CUDA_AWARE", "MPIR_CVAR_ENABLE_GPU"):
        monkeypatch.delenv(name, raising=False)


def lines(ranks: int, program: str) -> list[str]:
    done = run(ranks, "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_rank_agrees_with_a_c_program(tmp_path: Path) -> None:
    assert LAUNCHER is not None
    compiler = Path(LAUNCHER.program).with_name("mpicc")
    (tmp_path / "query.c").write_text(PROGRAM)
    command = [compiler, "-o", tmp_path / "query", tmp_path / "query.c"]
    try:
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot compile a C program with MPI: {error}")
    reported = lines(1, f"import os; os.execv('{tmp_path}/query', ['query'])")
    found = [literal_eval(line) for line in lines(2, QUERY)]
    assert [aware for aware, _ in found] == [reported == ["1"]] * 2
    if reported == ["0"]:
        name = lines(1, "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0].splitlines()[0])")[0]
        who = "MPIX_GPU_query_support" if name.startswith("MPICH") else "MPIX_Query_cuda_support"
        assert [why for _, why in found] == [f"{' '.join(name.split())}: {who}() reports no"] * 2


def test_the_result_without_initialised_mpi_is_not_cached() -> None:
    before, during, after = lines(1, AROUND)
    assert before == after == "(False, 'MPI is not initialised, or already finalised')"
    assert during == lines(1, QUERY)[0] != before


def test_the_setting_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI_GPUCOMP_CUDA_AWARE", "1")
    assert lines(2, QUERY) == ["(True, 'MPI_GPUCOMP_CUDA_AWARE is 1')"] * 2
