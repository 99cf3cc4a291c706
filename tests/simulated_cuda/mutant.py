"""GPU kernels are compiled from another folder, which the environment variable `MPI_GPUCOMP_MUTANT` names."""

from __future__ import annotations

import os
from pathlib import Path

from mpi_gpucomp.device import library

__all__ = ["VARIABLE", "use_mutant"]

VARIABLE = "MPI_GPUCOMP_MUTANT"


def use_mutant() -> None:
    """Compile that folder's kernels, if the variable is set."""
    if VARIABLE in os.environ:
        library.__dict__["kernels_directory"] = lambda: Path(os.environ[VARIABLE])
