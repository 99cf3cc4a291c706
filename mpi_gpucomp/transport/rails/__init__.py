"""Rails: several network paths to each peer, with failover between them. Only `transport` imports MPI."""

from mpi_gpucomp.transport.rails.discovery import Rails, resolve_rails

__all__ = ["Rails", "resolve_rails"]
