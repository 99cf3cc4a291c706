"""The user's API: mpi4py's names and semantics, compressed and pipelined."""

from mpi_gpucomp.comm.communicator import Communicator
from mpi_gpucomp.comm.request import Request

__all__ = ["Communicator", "Request"]
