"""Several ways to each peer: when one breaks, what was on it goes on over another."""

from mpi_gpucomp.transport.rails.link import Failover
from mpi_gpucomp.transport.rails.messages import Copies
from mpi_gpucomp.transport.rails.settings import Rails, chosen
from mpi_gpucomp.transport.rails.transport import RailsTransport

__all__ = ["Copies", "Failover", "Rails", "RailsTransport", "chosen"]
