"""The wire over MPI: a program in C++ with a library of one process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tcp_programs import HERE, SOURCES, compile_to

FLAGS = [f"-I{SOURCES}", "-Wno-cast-function-type", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
SECONDS = 60


def test_cancelled_receives_and_long_messages(tmp_path: Path) -> None:
    program = compile_to(tmp_path / "program", [HERE / "test_mpi_wire.cpp", SOURCES / "mpi_wire.cpp"], FLAGS)
    done = subprocess.run([program], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
