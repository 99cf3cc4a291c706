"""Commands that measure nothing run where there is no MPI library."""

from __future__ import annotations

import subprocess
import sys

import pytest

NO_MPI = "import sys; sys.modules['mpi4py.MPI'] = None; sys.argv = [{name!r}, *{arguments!r}]; "
START = {
    "mpi_gpucomp": "from mpi_gpucomp.cli.main import main; sys.exit(main())",
    "osu_bench": "from osu_bench.command import main; sys.exit(main())",
}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mpi_gpucomp", ["codecs"]),
        ("mpi_gpucomp", ["algorithms"]),
        ("mpi_gpucomp", ["doctor"]),
        ("osu_bench", ["--version"]),
    ],
)
def test_a_command_starts_without_mpi(name: str, arguments: list[str]) -> None:
    program = NO_MPI.format(name=name, arguments=arguments) + START[name]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout
