"""The command `explain` under mpirun: the call that it describes to the communicator."""

from __future__ import annotations

from launch import needs_mpirun, run

PROGRAM = """
from mpi4py import MPI
from mpi_gpucomp import Communicator
from mpi_gpucomp.cli import main as program
from mpi_gpucomp.cli.explain import COMMAND
from mpi_gpucomp.schedule.ir import COLLECTIVES

def explain(self, method, *args, **options):
    texts = ["SUM" if isinstance(one, MPI.Op) else str(getattr(one, "nbytes", one)) for one in args]
    return f"{method}({', '.join(texts)}) {options}"

Communicator.explain = explain
if COMMAND not in program.COMMANDS:
    program.COMMANDS += (COMMAND,)
for collective in COLLECTIVES:
    assert program.main(["explain", collective, "--size", "1K", "--root", "1", "--chunk", "64K"]) == 0
"""


@needs_mpirun
def test_the_call_that_is_explained():
    done = run(2, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Bcast of 1 KB float32, 2 ranks"
    assert lines[1::2] == [
        f"{call} {{'chunk': 65536}}"
        for call in (
            "Bcast(1024, 1)",
            "Reduce(1024, 1024, SUM, 1)",
            "Allreduce(1024, 1024, SUM)",
            "Allgather(512, 1024)",
            "Reduce_scatter_block(1024, 512, SUM)",
            "Alltoall(1024, 1024)",
            "Gather(512, 1024, 1)",
            "Scatter(1024, 512, 1)",
        )
    ]
