"""The core and the engine in processes that cannot import MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("rank_without_mpi.py")
START = "import runpy, sys; sys.modules['mpi4py'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
SIZE, SECONDS = 3, 120


def test_collectives_without_mpi(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", START, PROGRAM, tmp_path, str(rank), str(SIZE)] for rank in range(SIZE)]
    ranks = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in commands]
    try:
        found = [(rank.communicate(timeout=SECONDS), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for (out, err), status in found:
        assert (status, out) == (0, "passed\n"), err
