"""The methods of a communicator that move data, under mpi4py's names and with its arguments.

A call goes one of two ways. Large ones are schedules that the engine runs. Small ones, and what we have no kernels for,
go straight to MPI, on a duplicate of their own. Which way a call goes follows from what all ranks know alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.comm.delta import DeltaRequest
from mpi_gpucomp.comm.request import PersistentRequest, Request
from mpi_gpucomp.engine.watch import LOW_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Unpack

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.caller import Caller
    from mpi_gpucomp.comm.options import Options
    from mpi_gpucomp.comm.p2p import PointToPoint
    from mpi_gpucomp.comm.straight import Quick
    from mpi_gpucomp.engine.watch import Watch

__all__ = ["Methods"]

_Array = np.ndarray


def _is_plain(sendbuf: Any) -> bool:
    """Say whether mpi4py can surely send from an argument as it is."""
    return sendbuf is MPI.IN_PLACE or (type(sendbuf) is _Array and sendbuf.flags.carray)


class Methods:
    """Collectives, blocking, persistent and started, and messages between two ranks."""

    _plain: MPI.Intracomm
    """Ours alone, for MPI's own calls."""
    _caller: Caller
    _p2p: PointToPoint
    _watch: Watch
    _quick: Quick
    _deltas: Iterator[int]

    # Collectives

    def Bcast(self, buf: Any, root: int = 0, **options: Unpack[Options]) -> None:
        """Send the root's buffer to all."""
        if type(buf) is not _Array or not buf.flags.carray or options:
            self._caller.block("Bcast", (buf, root), options)
            return
        known = self._quick.get(kind := (buf.nbytes, buf.dtype.char, root))
        if known is None or known[1].left <= 0:
            if (known := self._caller.block("Bcast", (buf, root), options)) is not None:
                self._quick[kind] = known
            return
        # Watch.note and Straight.call written out: of three microseconds every line takes its share
        (on, calls), watch = known, self._watch
        calls.left -= 1
        watch.trace = (watch.trace * 31 + kind[0] + root) & LOW_BITS
        watch.steps += 1
        watch.outside = "Bcast"
        try:
            on.Bcast(buf, root)
        except MPI.Exception as error:
            self._caller.straight.check_dead(error)
            raise
        finally:
            watch.outside = None

    def Reduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Unpack[Options]
    ) -> None:
        """Reduce all buffers into the root's."""
        self._caller.block("Reduce", (sendbuf, recvbuf, op, root), options)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]) -> None:
        """Reduce all buffers into everybody's."""
        if type(recvbuf) is not _Array or not recvbuf.flags.carray or not _is_plain(sendbuf) or options:
            self._caller.block("Allreduce", (sendbuf, recvbuf, op), options)
            return
        known = self._quick.get(kind := (recvbuf.nbytes, recvbuf.dtype.char, ~op.handle))
        if known is None or known[1].left <= 0:
            if (known := self._caller.block("Allreduce", (sendbuf, recvbuf, op), options)) is not None:
                self._quick[kind] = known
            return
        (on, calls), watch = known, self._watch
        calls.left -= 1
        watch.trace = (watch.trace * 31 + kind[0]) & LOW_BITS
        watch.steps += 1
        watch.outside = "Allreduce"
        try:
            on.Allreduce(sendbuf, recvbuf, op)
        except MPI.Exception as error:
            self._caller.straight.check_dead(error)
            raise
        finally:
            watch.outside = None

    def Allgather(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> None:
        """Collect the buffers of all ranks everywhere."""
        self._caller.block("Allgather", (sendbuf, recvbuf), options)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> None:
        """Collect buffers of different lengths everywhere."""
        self._caller.block("Allgatherv", (sendbuf, recvbuf), options)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> None:
        """Collect the buffers of all ranks at the root."""
        self._caller.block("Gather", (sendbuf, recvbuf, root), options)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> None:
        """Collect buffers of different lengths at the root."""
        self._caller.block("Gatherv", (sendbuf, recvbuf, root), options)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> None:
        """Send every rank its share of the root's buffer."""
        self._caller.block("Scatter", (sendbuf, recvbuf, root), options)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> None:
        """Send every rank a share of its own length of the root's buffer."""
        self._caller.block("Scatterv", (sendbuf, recvbuf, root), options)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, **options: Unpack[Options]
    ) -> None:
        """Reduce all buffers, each rank getting so many elements of the result."""
        recvcounts = self._caller.shares(sendbuf, recvbuf, recvcounts, options)
        self._caller.block("Reduce_scatter", (sendbuf, recvbuf, recvcounts, op), options)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]
    ) -> None:
        """Reduce all buffers, each rank getting its share of the result."""
        self._caller.block("Reduce_scatter_block", (sendbuf, recvbuf, op), options)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> None:
        """Send every rank its share of every rank's buffer."""
        self._caller.block("Alltoall", (sendbuf, recvbuf), options)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> None:
        """Send every rank shares of different lengths."""
        self._caller.block("Alltoallv", (sendbuf, recvbuf), options)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]) -> None:
        """Reduce the buffers of the ranks up to this one (by MPI's own)."""
        self._caller.block("Scan", (sendbuf, recvbuf, op), options)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]) -> None:
        """Reduce the buffers of the ranks before this one (by MPI's own)."""
        self._caller.block("Exscan", (sendbuf, recvbuf, op), options)

    def Barrier(self) -> None:
        """Wait until all ranks are here."""
        self._caller.straight.barrier()

    # Started again and again

    def Bcast_init(self, buf: Any, root: int = 0, **options: Unpack[Options]) -> PersistentRequest:
        """Prepare to send the root's buffer to all, whenever it is started; codec="delta" sends what has changed."""
        if options.get("codec") == "delta":
            return DeltaRequest(self._caller, buf, root, options, f"delta {next(self._deltas)}")
        return PersistentRequest(self._caller.prepare("Bcast", (buf, root), options))

    def Allreduce_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]
    ) -> PersistentRequest:
        """Prepare to reduce all buffers into everybody's, whenever it is started."""
        return PersistentRequest(self._caller.prepare("Allreduce", (sendbuf, recvbuf, op), options))

    # The same, started only

    def Ibcast(self, buf: Any, root: int = 0, **options: Unpack[Options]) -> Request:
        """Start to send the root's buffer to all."""
        return self._caller.begin("Bcast", (buf, root), options)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Unpack[Options]
    ) -> Request:
        """Start to reduce all buffers into the root's."""
        return self._caller.begin("Reduce", (sendbuf, recvbuf, op, root), options)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]) -> Request:
        """Start to reduce all buffers into everybody's."""
        return self._caller.begin("Allreduce", (sendbuf, recvbuf, op), options)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> Request:
        """Start to collect the buffers of all ranks everywhere."""
        return self._caller.begin("Allgather", (sendbuf, recvbuf), options)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> Request:
        """Start to collect buffers of different lengths everywhere."""
        return self._caller.begin("Allgatherv", (sendbuf, recvbuf), options)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> Request:
        """Start to collect the buffers of all ranks at the root."""
        return self._caller.begin("Gather", (sendbuf, recvbuf, root), options)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> Request:
        """Start to collect buffers of different lengths at the root."""
        return self._caller.begin("Gatherv", (sendbuf, recvbuf, root), options)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> Request:
        """Start to send every rank its share of the root's buffer."""
        return self._caller.begin("Scatter", (sendbuf, recvbuf, root), options)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[Options]) -> Request:
        """Start to send every rank a share of its own length of the root's buffer."""
        return self._caller.begin("Scatterv", (sendbuf, recvbuf, root), options)

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, **options: Unpack[Options]
    ) -> Request:
        """Start to reduce all buffers, each rank getting so many elements of the result."""
        recvcounts = self._caller.shares(sendbuf, recvbuf, recvcounts, options)
        return self._caller.begin("Reduce_scatter", (sendbuf, recvbuf, recvcounts, op), options)

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]
    ) -> Request:
        """Start to reduce all buffers, each rank getting its share of the result."""
        return self._caller.begin("Reduce_scatter_block", (sendbuf, recvbuf, op), options)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> Request:
        """Start to send every rank its share of every rank's buffer."""
        return self._caller.begin("Alltoall", (sendbuf, recvbuf), options)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[Options]) -> Request:
        """Start to send every rank shares of different lengths."""
        return self._caller.begin("Alltoallv", (sendbuf, recvbuf), options)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]) -> Request:
        """Start to reduce the buffers of the ranks up to this one (by MPI's own)."""
        return self._caller.begin("Scan", (sendbuf, recvbuf, op), options)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[Options]) -> Request:
        """Start to reduce the buffers of the ranks before this one (by MPI's own)."""
        return self._caller.begin("Exscan", (sendbuf, recvbuf, op), options)

    # Point to point: the sender's codec and chunk count; a receiver's codec says only that frames come, whichever

    def Send(
        self, buf: Any, dest: int, tag: int = 0, *, codec: str | Codec | None = None, chunk: int | None = None
    ) -> None:
        """Send a message; like MPI's own, a long one may wait for its receiver."""
        self._p2p.send(buf, dest, tag, codec, chunk)

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        codec: str | Codec | None = None,
    ) -> None:
        """Receive a message, which may be shorter than the buffer."""
        self._p2p.receive(buf, source, tag, status, codec)

    def Isend(
        self, buf: Any, dest: int, tag: int = 0, *, codec: str | Codec | None = None, chunk: int | None = None
    ) -> Request:
        """Start to send a message."""
        return self._p2p.start_send(buf, dest, tag, codec, chunk)

    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, codec: str | Codec | None = None
    ) -> Request:
        """Start to receive a message."""
        return self._p2p.start_receive(buf, source, tag, codec)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        codec: str | Codec | None = None,
        chunk: int | None = None,
    ) -> None:
        """Send a message and receive another, whichever comes first."""
        self._p2p.exchange((sendbuf, dest, sendtag), (recvbuf, source, recvtag), status, codec, chunk)
