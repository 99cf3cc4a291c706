"""A plugin of pytest: GPU kernels are compiled from another folder, which `MPI_GPUCOMP_MUTANT` names."""

from __future__ import annotations

import os
from pathlib import Path

from mpi_gpucomp.device import library

VARIABLE = "MPI_GPUCOMP_MUTANT"

if VARIABLE in os.environ:
    library.__dict__["kernels_directory"] = lambda: Path(os.environ[VARIABLE])
