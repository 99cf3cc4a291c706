"""Messages over MPI, on a duplicate of the caller's communicator, so that no tag meets the caller's."""

from __future__ import annotations

from mpi4py import MPI

from mpi_gpucomp.transport.base import Transfer, Transport

__all__ = ["MpiTransport"]

_memory = MPI.memory.fromaddress


class _Sent(Transfer):
    def __init__(self, request: MPI.Request, nbytes: int) -> None:
        self._test, self.nbytes = request.Test, nbytes

    def done(self) -> bool:
        """Ask MPI."""
        return self._test()

    def cancel(self) -> bool:
        """Refuse: MPI does not take sends back."""
        return False


class _Received(Transfer):
    def __init__(self, request: MPI.Request) -> None:
        self._request, self._status = request, MPI.Status()
        self.nbytes = 0
        self._done = False

    def done(self) -> bool:
        """Ask MPI; the status is read once."""
        if not self._done and self._request.Test(self._status):
            self.nbytes = self._status.Get_count(MPI.BYTE)
            self._done = True
        return self._done

    def cancel(self) -> bool:
        """Ask MPI to take the receive back, and wait for its answer, which does not depend on the peer."""
        if self._done:
            return False
        self._request.Cancel()
        self._request.Wait(self._status)
        if self._status.Is_cancelled():
            return True
        self.nbytes, self._done = self._status.Get_count(MPI.BYTE), True
        return False


class MpiTransport(Transport):
    """The other ranks of an MPI communicator."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate the communicator: all its ranks do."""
        self._comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        largest = self._comm.Get_attr(MPI.TAG_UB)
        self.largest_tag = largest if isinstance(largest, int) else 32767

    def send(self, peer: int, tag: int, address: int, nbytes: int) -> Transfer:
        """Start to send."""
        return _Sent(self._comm.Isend([_memory(address, nbytes), MPI.BYTE], peer, tag), nbytes)

    def receive(self, peer: int, tag: int, address: int, room: int) -> Transfer:
        """Start to receive."""
        return _Received(self._comm.Irecv([_memory(address, room), MPI.BYTE], peer, tag))

    def arrived(self, peer: int, tag: int) -> bool:
        """Ask MPI."""
        return self._comm.Iprobe(peer, tag)

    def close(self) -> None:
        """Free the duplicate: all ranks do."""
        self._comm.Free()
