"""Rails: several network paths to each peer, with failover between them."""

from mpi_gpucomp.transport.rails.discovery import Rails, resolve_rails
from mpi_gpucomp.transport.rails.link import Failover
from mpi_gpucomp.transport.rails.messages import Copies
from mpi_gpucomp.transport.rails.transport import RailsTransport

__all__ = ["Copies", "Failover", "Rails", "RailsTransport", "resolve_rails"]
