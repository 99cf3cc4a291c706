"""Rails: several network paths to each peer, with failover between them. Only `transport` imports MPI."""

from mpi_gpucomp.transport.rails.discovery import Rails, resolve_rails
from mpi_gpucomp.transport.rails.records import Copies, Failover

__all__ = ["Copies", "Failover", "Rails", "resolve_rails"]
