"""Whether the MPI that is here takes GPU memory, compared with what a C program hears from it."""

from __future__ import annotations

import subprocess
from ast import literal_eval
from pathlib import Path

import pytest
from launch import LAUNCHER, needs_mpirun, run

pytestmark = needs_mpirun

START = "from mpi4py import MPI; from mpi_gpucomp.transport.gpu_aware import cuda_aware; "
ASK = f"{START}said = MPI.COMM_WORLD.gather(tuple(cuda_aware())); said and print(*said, sep='\\n')"
HERE = "print(tuple(cuda_aware()))"
AROUND = f"import mpi4py; mpi4py.rc.initialize = False; {START}{HERE}; MPI.Init(); {HERE}; MPI.Finalize(); {HERE}"
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
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPI_GPUCOMP_CUDA_AWARE", "MPIR_CVAR_ENABLE_GPU"):
        monkeypatch.delenv(name, raising=False)


def lines(ranks: int, program: str) -> list[str]:
    done = run(ranks, "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_rank_hears_what_a_c_program_hears(tmp_path: Path) -> None:
    assert LAUNCHER is not None
    compiler = Path(LAUNCHER.program).with_name("mpicc")
    (tmp_path / "ask.c").write_text(PROGRAM)
    command = [compiler, "-o", tmp_path / "ask", tmp_path / "ask.c"]
    try:
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C program that asks MPI: {error}")
    heard = lines(1, f"import os; os.execv('{tmp_path}/ask', ['ask'])")
    verdicts = [literal_eval(line) for line in lines(2, ASK)]
    assert [aware for aware, _ in verdicts] == [heard == ["1"]] * 2
    if heard == ["0"]:
        name = lines(1, "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0].splitlines()[0])")[0]
        who = "MPIX_GPU_query_support" if name.startswith("MPICH") else "MPIX_Query_cuda_support"
        assert [why for _, why in verdicts] == [f"{' '.join(name.split())}: {who}() says no"] * 2


def test_mpi_that_is_not_running_is_a_no_that_is_not_kept() -> None:
    before, during, after = lines(1, AROUND)
    assert before == after == "(False, 'MPI is not initialised, or finalised already')"
    assert during == lines(1, ASK)[0] != before


def test_the_users_word_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI_GPUCOMP_CUDA_AWARE", "1")
    assert lines(2, ASK) == ["(True, 'MPI_GPUCOMP_CUDA_AWARE is 1')"] * 2
