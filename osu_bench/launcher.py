"""Which mpirun there is, which MPI it belongs to, and how it wants to be called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpi_gpucomp.errors import DeviceError, SpecError

__all__ = ["MPICH", "OPEN_MPI", "Launcher", "find"]

OPEN_MPI, MPICH = "openmpi", "mpich"
# Systems that have both tell them apart by such endings.
PROGRAMS = {
    OPEN_MPI: ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"),
    MPICH: ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpirun.mpich"),
}
ANY = ("mpirun", "mpiexec")


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks."""

    mpi: str
    """OPEN_MPI or MPICH."""
    program: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that make mpi4py take this MPI; they come on top of the caller's own."""

    @property
    def flags(self) -> list[str]:
        """Options for any machine: by default Open MPI refuses root, and more ranks than cores."""
        return ["--allow-run-as-root", "--oversubscribe"] if self.mpi == OPEN_MPI else []

    def command(self, ranks: int, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """Return the command that runs a program on several ranks of this machine."""
        return [self.program, *self.flags, *options, "-n", str(ranks), *program]


def find(mpi: str | None = None, prefix: Path | str | None = None) -> Launcher:
    """Find the launcher of an MPI (of whichever is there where it is None).

    With a prefix, as of `pip install --prefix`, it is taken from there, for the mpi4py of this Python.
    """
    if mpi not in (None, *PROGRAMS):
        remedy = "Name one of the two."
        raise SpecError("MPI", expected=f"one of {', '.join(PROGRAMS)}", got=f"'{mpi}'", remedy=remedy)
    if prefix is not None:
        return _below(Path(prefix).absolute(), mpi)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return _first(mpi, beside, "none beside Python or on PATH")


def _below(prefix: Path, mpi: str | None) -> Launcher:
    found = _first(mpi, str(prefix / "bin"), f"none in {prefix / 'bin'}")
    libraries = os.pathsep.join(filter(None, (str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
    return Launcher(found.mpi, found.program, {"MPI4PY_MPIABI": found.mpi, "LD_LIBRARY_PATH": libraries})


def _first(mpi: str | None, path: str, otherwise: str) -> Launcher:
    for name in ANY if mpi is None else PROGRAMS[mpi]:
        program = shutil.which(name, path=path)
        kind = program and _kind(program)
        if program and kind and mpi in (None, kind):
            return Launcher(kind, program)
    wanted = " or ".join(PROGRAMS) if mpi is None else mpi
    remedy = f"Install one: pip install mpi_gpucomp[{mpi or OPEN_MPI}]."
    raise DeviceError("MPI launcher", expected=f"mpirun or mpiexec of {wanted}", got=otherwise, remedy=remedy)


def _kind(program: str) -> str | None:
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    if "Open MPI" in asked.stdout or "OpenRTE" in asked.stdout:
        return OPEN_MPI
    return MPICH if "HYDRA" in asked.stdout else None
