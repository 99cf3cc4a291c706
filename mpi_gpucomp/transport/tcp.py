"""Messages over our own sockets: between hosts, or on rails that the user has named.

Ranks of one host may use MPI beside it, whose shared memory is faster than a socket.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpi_gpucomp.core.library import core
from mpi_gpucomp.core.wire import Wire
from mpi_gpucomp.errors import RankFailedError
from mpi_gpucomp.transport.bootstrap import MpiBootstrap
from mpi_gpucomp.transport.mpi import MpiComms, drive_mpi, lost, revoke
from mpi_gpucomp.transport.rails.connections import TcpConnections

if TYPE_CHECKING:
    from collections.abc import Collection

    from mpi_gpucomp.errors import GpucompError
    from mpi_gpucomp.transport.rails.connections import Copies, Failover
    from mpi_gpucomp.transport.rails.discovery import Rails

__all__ = ["TcpWire"]

LARGEST_TAG = (1 << 31) - 1


class TcpWire(Wire):
    """Messages with the other ranks of an MPI communicator over sockets; MPI is used to discover them."""

    def __init__(self, comm: MPI.Intracomm, settings: Rails, near: Collection[int] = ()) -> None:
        """Connect all ranks; all raise if one cannot. Collective. Messages to `near` peers go over MPI."""
        self._caller, self._closed = comm, False
        self.connections = TcpConnections(MpiBootstrap(comm), settings, core())
        self._comms: MpiComms | None = None
        wire, largest = self.connections.handle, LARGEST_TAG
        if any(MpiBootstrap(comm).allgather(b"near" if near else b"")):
            self._comms = MpiComms(comm)
            largest = min(largest, self._comms.largest_tag)
            wire = core().gc_mux_wire(self._comms.wire, wire, (ctypes.c_int32 * len(near))(*near), len(near))
        super().__init__(wire, comm.rank, comm.size, largest)
        drive_mpi(self)

    def relays(self, bytes_per_second: float) -> bool:
        """Return True: bytes are forwarded as they arrive."""
        return True

    def error(self) -> GpucompError:
        """Return the fault as an error."""
        code, text = self.fault()
        if code:
            return lost(MPI.Exception(code), self.rank, self._caller)
        return RankFailedError(
            "rails",
            expected="all ranks reachable",
            got=text,
            remedy="Check the network and that rank. This communicator cannot be used any more.",
            rank=self.rank,
        )

    def revoke(self) -> None:
        """Broadcast the failure, also to ranks in native MPI calls where MPI can revoke."""
        super().revoke()
        if self._comms is not None:
            self._comms.revoke(*self.derived_comms)
        else:
            revoke(self._caller, *self.derived_comms)

    def close(self) -> None:
        """Close the connections once everything sent has arrived; collective."""
        if not self._closed:
            self._closed = True
            self.connections.close()
            if self._comms is not None:
                self._comms.free()
            super().close()

    def abandon(self) -> None:
        """Close the connections after a short wait for the peers that are alive."""
        if not self._closed:
            self._closed = True
            self.connections.abandon()

    # Statistics

    @property
    def copies(self) -> Copies:
        """Return the number and bytes of copies made within this rank."""
        return self.connections.copies

    def rail(self, peer: int) -> str:
        """Return the devices that carry the traffic to a peer now: eth0, eth0+eth1, or empty while all are down."""
        return self.connections.rail(peer)

    def down(self) -> list[tuple[int, str]]:
        """Return the peers and devices without a path, or with one that is not in use again yet."""
        return self.connections.down()

    def failovers(self) -> list[Failover]:
        """Return the paths that were lost so far."""
        return self.connections.failovers()
