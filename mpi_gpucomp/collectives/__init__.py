"""What must move: the algorithms of every collective, by name, each checked before anyone gets it."""

from mpi_gpucomp.collectives.row import Row
from mpi_gpucomp.collectives.table import algorithms, build

__all__ = ["Row", "algorithms", "build"]
