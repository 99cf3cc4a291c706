"""The communicator: how it is made and freed, what it was made with, and what it tells of itself.

What it does is in `Methods`.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._dispatch.dispatcher import Caller
from mpi_gpucomp._dispatch.p2p import PointToPoint
from mpi_gpucomp._dispatch.persistent import DeltaRequest
from mpi_gpucomp._dispatch.plan import Settings
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.engine.deadlock import LOW_BITS
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.request import PersistentRequest, Request
from mpi_gpucomp.stats import RailStats, Stats, rails_of, stats_of
from mpi_gpucomp.transport.rails import Rails, resolve_rails

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from typing_extensions import Unpack

    from mpi_gpucomp._dispatch.passthrough import Quick
    from mpi_gpucomp._dispatch.plan import CallOptions
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.engine.deadlock import DeadlockDetector

__all__ = ["Communicator", "Methods", "Request"]


# The methods of a communicator that move data, under mpi4py's names and with its arguments.
#
# A call goes one of two ways. Large ones are schedules that the engine runs. Small ones, and what we have no
# kernels for,
# go straight to MPI, on a duplicate of their own. Which way a call goes follows from what all ranks know alike.

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
    _watch: DeadlockDetector
    _quick: Quick
    _deltas: Iterator[int]

    # Collectives

    def Bcast(self, buf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
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
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Unpack[CallOptions]
    ) -> None:
        """Reduce all buffers into the root's."""
        self._caller.block("Reduce", (sendbuf, recvbuf, op, root), options)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> None:
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

    def Allgather(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Collect the buffers of all ranks everywhere."""
        self._caller.block("Allgather", (sendbuf, recvbuf), options)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Collect buffers of different lengths everywhere."""
        self._caller.block("Allgatherv", (sendbuf, recvbuf), options)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Collect the buffers of all ranks at the root."""
        self._caller.block("Gather", (sendbuf, recvbuf, root), options)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Collect buffers of different lengths at the root."""
        self._caller.block("Gatherv", (sendbuf, recvbuf, root), options)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Send every rank its share of the root's buffer."""
        self._caller.block("Scatter", (sendbuf, recvbuf, root), options)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Send every rank a share of its own length of the root's buffer."""
        self._caller.block("Scatterv", (sendbuf, recvbuf, root), options)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> None:
        """Reduce all buffers, each rank getting so many elements of the result."""
        recvcounts = self._caller.shares(sendbuf, recvbuf, recvcounts, options)
        self._caller.block("Reduce_scatter", (sendbuf, recvbuf, recvcounts, op), options)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> None:
        """Reduce all buffers, each rank getting its share of the result."""
        self._caller.block("Reduce_scatter_block", (sendbuf, recvbuf, op), options)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Send every rank its share of every rank's buffer."""
        self._caller.block("Alltoall", (sendbuf, recvbuf), options)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Send every rank shares of different lengths."""
        self._caller.block("Alltoallv", (sendbuf, recvbuf), options)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> None:
        """Reduce the buffers of the ranks up to this one (by MPI's own)."""
        self._caller.block("Scan", (sendbuf, recvbuf, op), options)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> None:
        """Reduce the buffers of the ranks before this one (by MPI's own)."""
        self._caller.block("Exscan", (sendbuf, recvbuf, op), options)

    def Barrier(self) -> None:
        """Wait until all ranks are here."""
        self._caller.straight.barrier()

    # Started again and again

    def Bcast_init(self, buf: Any, root: int = 0, **options: Unpack[CallOptions]) -> PersistentRequest:
        """Prepare to send the root's buffer to all, whenever it is started; codec="delta" sends what has changed."""
        if options.get("codec") == "delta":
            return DeltaRequest(self._caller, buf, root, options, f"delta {next(self._deltas)}")
        return PersistentRequest(self._caller.prepare("Bcast", (buf, root), options))

    def Allreduce_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> PersistentRequest:
        """Prepare to reduce all buffers into everybody's, whenever it is started."""
        return PersistentRequest(self._caller.prepare("Allreduce", (sendbuf, recvbuf, op), options))

    # The same, started only

    def Ibcast(self, buf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start to send the root's buffer to all."""
        return self._caller.begin("Bcast", (buf, root), options)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Unpack[CallOptions]
    ) -> Request:
        """Start to reduce all buffers into the root's."""
        return self._caller.begin("Reduce", (sendbuf, recvbuf, op, root), options)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> Request:
        """Start to reduce all buffers into everybody's."""
        return self._caller.begin("Allreduce", (sendbuf, recvbuf, op), options)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start to collect the buffers of all ranks everywhere."""
        return self._caller.begin("Allgather", (sendbuf, recvbuf), options)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start to collect buffers of different lengths everywhere."""
        return self._caller.begin("Allgatherv", (sendbuf, recvbuf), options)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start to collect the buffers of all ranks at the root."""
        return self._caller.begin("Gather", (sendbuf, recvbuf, root), options)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start to collect buffers of different lengths at the root."""
        return self._caller.begin("Gatherv", (sendbuf, recvbuf, root), options)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start to send every rank its share of the root's buffer."""
        return self._caller.begin("Scatter", (sendbuf, recvbuf, root), options)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start to send every rank a share of its own length of the root's buffer."""
        return self._caller.begin("Scatterv", (sendbuf, recvbuf, root), options)

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> Request:
        """Start to reduce all buffers, each rank getting so many elements of the result."""
        recvcounts = self._caller.shares(sendbuf, recvbuf, recvcounts, options)
        return self._caller.begin("Reduce_scatter", (sendbuf, recvbuf, recvcounts, op), options)

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> Request:
        """Start to reduce all buffers, each rank getting its share of the result."""
        return self._caller.begin("Reduce_scatter_block", (sendbuf, recvbuf, op), options)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start to send every rank its share of every rank's buffer."""
        return self._caller.begin("Alltoall", (sendbuf, recvbuf), options)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start to send every rank shares of different lengths."""
        return self._caller.begin("Alltoallv", (sendbuf, recvbuf), options)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> Request:
        """Start to reduce the buffers of the ranks up to this one (by MPI's own)."""
        return self._caller.begin("Scan", (sendbuf, recvbuf, op), options)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> Request:
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


class Communicator(Methods):
    """The ranks of an MPI communicator, on duplicates of it; what it does not define itself is mpi4py's."""

    def __init__(
        self,
        comm: MPI.Intracomm | Communicator,
        codec: str | Codec = "auto",
        *,
        roles: Mapping[str, str | Codec] | None = None,
        chunk: int | None = None,
        slots: int = 2,
        passthrough_bytes: int = 1 << 15,
        timeout: float | None = 60.0,
        plans: str | None = None,
        rails: str | Rails | None = None,
        monitor: bool | None = None,
    ) -> None:
        """Let all ranks of `comm` make one, with the same settings.

        `roles` gives codecs for kinds of data, such as {"gradients": "bound:rel=1e-3"}; calls say role="gradients".
        Messages of at most `passthrough_bytes` are handed to the MPI library. At most `slots` collectives run at
        once, in chunks of `chunk` bytes (None: 256 KiB to 2 MiB, by message size and codec).
        Ranks that wait for each other in a circle get a DeadlockError after `timeout` seconds (None: never).
        `plans` is a directory of synthesised schedules; those made for nodes like these are used where they fit.
        `rails` are network devices, such as "eth0,eth1": all goes over the first, and over the next when that one
        breaks (None: as MPI_GPUCOMP_RAILS says; "": over MPI).
        `monitor` says whether to record what goes on (None: as the environment says, which is yes by default).
        """
        paths = resolve_rails(rails) or ""
        self._settings = Settings(
            codec, dict(roles or {}), chunk, slots, passthrough_bytes, timeout, plans, paths, monitor
        )
        self._plain: MPI.Intracomm = (comm._plain if isinstance(comm, Communicator) else comm).Dup()
        self._freed = False
        self.rank, self.size = self._plain.rank, self._plain.size
        self._caller = Caller(self._plain, self._settings)
        self._p2p = PointToPoint(self._plain, self._caller, self._settings)
        self._quick, self._engine = self._caller.straight.quick, self._caller.engine
        self._watch = self._engine.watch
        self._deltas = count()

    def __enter__(self) -> Communicator:
        """Use it for the length of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it, unless something went wrong and peers may not come."""
        if error is None:
            self.Free()

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to mpi4py, on our duplicate."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._plain, name)

    def Free(self) -> None:
        """End the background thread and free the duplicates: all ranks do, when nothing is under way.

        One that cannot be used any more is left to the end of MPI: not all ranks would come.
        """
        broken = self._engine.broken is not None
        if self._freed:
            return
        self._close(broken=broken)
        if not broken:
            self._plain.Free()

    def _close(self, *, broken: bool) -> None:
        self._freed = True
        self._caller.close(broken=broken)
        self._p2p.close(broken=broken)
        self._quick.clear()
        self._engine.broken = self._engine.broken or SpecError(
            "communicator",
            expected="one that is in use",
            got="one that was freed",
            remedy="Make a new one.",
            rank=self.rank,
        )

    def Dup(self) -> Communicator:
        """Make another one with the same ranks and settings."""
        return self._like(self._plain)

    def Split(self, color: int = 0, key: int = 0) -> Communicator | None:
        """Make one for each color, with the same settings; None where the color is MPI.UNDEFINED."""
        return self._take_over(self._plain.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Communicator | None:
        """Make one for each machine (MPI.COMM_TYPE_SHARED) or the like."""
        return self._take_over(self._plain.Split_type(split_type, key, info))

    def Shrink(self) -> Communicator:
        """Make one of the ranks that are still alive (an MPI with ULFM)."""
        self._close(broken=True)
        survivors = self._take_over(self._plain.Shrink())
        assert survivors is not None, "this rank is alive"
        return survivors

    def _take_over(self, part: MPI.Comm) -> Communicator | None:
        if not isinstance(part, MPI.Intracomm) or part == MPI.COMM_NULL:
            return None
        try:
            return self._like(part)
        finally:
            part.Free()

    def _like(self, comm: MPI.Intracomm) -> Communicator:
        return type(self)(comm, **self._settings._asdict())

    def calibrate(self, *methods: str) -> None:
        """Measure now what codec="auto" decides these methods by, such as "Bcast": all ranks call it together.

        Blocking calls do so the first time by themselves. Those with an I cannot wait for others, and are MPI's own
        until their method is known.
        """
        self._caller.calibrate(methods or ("Bcast", "Allreduce"))

    def autotune(self, method: str, /, *args: Any, **options: Unpack[CallOptions]) -> str:
        """Call a method, by its name, until codec="auto" has found the fastest way for such a message; return which.

        All ranks do, together. Without it the first two or three dozen calls of each size take the ways in turns, and
        sums, which are to be the same in every call, go by what the model expects.
        """
        return self._caller.autotune(method, args, options)

    # Names

    def register(self, name: str, collective: str, /, **options: Unpack[CallOptions]) -> None:
        """Give a collective a name and options, to be run by `run` in any order among others with names."""
        self._caller.names.register(name, collective, options)

    def run(self, name: str, /, *args: Any, **options: Unpack[CallOptions]) -> Request:
        """Start a registered collective on buffers; its arguments are those of mpi4py's method."""
        return self._caller.run(name, args, options)

    def completed(self) -> list[str]:
        """Return the names that were completed since the last time somebody asked, in that order."""
        self._caller.driver.turn()
        return self._caller.names.completed()

    def stats(self) -> Stats:
        """Say what has gone over the wire so far, of what does not go straight to MPI."""
        return stats_of(self._caller)

    def codec_for(self, role: str | None = None) -> Codec | None:
        """Return the codec of a role, if it has one; without a role, that of everything else."""
        codec = self._settings.codec if role is None else self._settings.roles.get(role)
        return None if codec is None else get_codec(codec)

    def rail_stats(self) -> RailStats | None:
        """Say what has become of the rails; None where there are none."""
        return rails_of(self._caller)


# The user's API: mpi4py's names and semantics, compressed and pipelined.
