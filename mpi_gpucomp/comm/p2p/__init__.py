"""Messages from rank to rank: compressed and pipelined, or MPI's own."""

from mpi_gpucomp.comm.p2p.calls import MessageRequest, PointToPoint

__all__ = ["MessageRequest", "PointToPoint"]
