"""Native MPI beside collectives over sockets: a rank that waits for one progresses the other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from launch import run

if TYPE_CHECKING:
    from pathlib import Path


def test_waiting_on_sockets_progresses_native_messages(any_mpi: Path | None) -> None:
    # Open MPI's shared memory needs no help of the sender for long messages; its sockets do.
    environment = {"MPI_GPUCOMP_RAILS": "127.0.0.1", "OMPI_MCA_btl": "self,tcp"}
    done = run(2, "tests/mpi/native_beside.py", mpich=any_mpi, environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == [[True] * 3, [True] * 6]
