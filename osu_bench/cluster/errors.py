"""The error of a cluster that cannot be made or used."""

from __future__ import annotations

from mpi_gpucomp.errors import GpucompError

__all__ = ["ClusterError"]


class ClusterError(GpucompError, RuntimeError):
    """A cluster that is not there, is in use, or that the machine does not allow."""
