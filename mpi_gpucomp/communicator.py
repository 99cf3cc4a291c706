"""The user's API: an MPI communicator with mpi4py's names and semantics, whose collectives compress and pipeline.

Large messages run as schedules on the engine. Small ones, and what our kernels do not support, are passed through to
the MPI library on a duplicate of the communicator. All ranks come to the same plan from what they know alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import config
from mpi_gpucomp._call.calls import check_options
from mpi_gpucomp._dispatch.dispatcher import Dispatcher
from mpi_gpucomp._dispatch.p2p import PointToPoint, copy_of
from mpi_gpucomp._dispatch.passthrough import method_salt
from mpi_gpucomp._dispatch.persistent import DeltaRequest
from mpi_gpucomp._dispatch.plan import Settings
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.engine.deadlock import LOW_BITS
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.request import PersistentRequest, Request
from mpi_gpucomp.transport.rails import Rails, resolve_rails
from mpi_gpucomp.transport.tcp import TcpWire

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Unpack

    from mpi_gpucomp._call.calls import CallOptions
    from mpi_gpucomp._dispatch.plan import Plan
    from mpi_gpucomp._dispatch.runtime import Runtime
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.monitor.process_monitor import Alarm
    from mpi_gpucomp.monitor.trace_buffer import LinkState
    from mpi_gpucomp.transport.rails.connections import Copies, Failover

__all__ = ["Communicator", "RailStats", "Stats"]

_Array, _Op = np.ndarray, MPI.Op
SENDS = frozenset(
    (
        *("Bsend", "Rsend", "Ssend", "Ibsend", "Irsend", "Issend"),
        *("Send_init", "Bsend_init", "Rsend_init", "Ssend_init"),
        *("send", "bsend", "ssend", "isend", "ibsend", "issend"),
    )
)
"""mpi4py's calls whose messages are received by those that expect frames."""
BCAST_SALT, ALLREDUCE_SALT = method_salt("Bcast"), method_salt("Allreduce")


def _is_contiguous(sendbuf: Any) -> bool:
    """Return True if mpi4py surely takes a send buffer as it is."""
    return sendbuf is MPI.IN_PLACE or (type(sendbuf) is _Array and sendbuf.flags.carray)


class Communicator:
    """The ranks of an MPI communicator, on duplicates of it. Methods not defined here are mpi4py's."""

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
        wire: str | None = None,
    ) -> None:
        """Duplicate `comm`: collective, with the same arguments on all ranks.

        `codec` applies to all calls that name none; "auto" is lossless and chosen by measurement. `roles` gives codecs
        for kinds of data, such as {"gradients": "bound:rel=1e-3"} for calls with role="gradients". Messages of at most
        `passthrough_bytes` are passed through to the MPI library. At most `slots` collectives run at once, in chunks of
        `chunk` bytes (None: 256 KiB to 2 MiB, by message size and codec). Ranks in a circular wait get a DeadlockError
        after `timeout` seconds (None: never). `plans` is a directory of synthesised schedules; those made for nodes
        like these are used where they fit. `rails` are network devices, such as "eth0,eth1": messages use the first,
        and the next when that fails (None: as MPI_GPUCOMP_RAILS says; "": MPI carries all messages). `monitor` turns
        tracing on or off (None: as MPI_GPUCOMP_MONITOR says, on by default). `wire` carries messages between hosts:
        "tcp" (our sockets), "mpi", or "auto", which uses sockets where MPI itself would use TCP (None: as
        MPI_GPUCOMP_WIRE says, auto by default).
        """
        if chunk is not None:
            check_options("Communicator", {"chunk": chunk}, MPI.COMM_WORLD.rank)
        self._settings = Settings(
            codec,
            dict(roles or {}),
            chunk,
            slots,
            passthrough_bytes,
            timeout,
            plans,
            resolve_rails(rails) or "",
            monitor,
            config.WIRE.get(wire),
        )
        self._comm: MPI.Intracomm = (comm._comm if isinstance(comm, Communicator) else comm).Dup()
        self._freed = False
        self.rank, self.size = self._comm.rank, self._comm.size
        self._dispatcher = Dispatcher(self._comm, self._settings)
        self._runtime = self._dispatcher.runtime
        self._p2p = PointToPoint(self._comm, self._runtime, self._settings)
        self._engine, self._native = self._runtime.engine, self._runtime.native
        self._fast_path, self._detector = self._native.fast_path, self._engine.deadlock
        self._deltas = count()

    def __enter__(self) -> Communicator:
        """Return the communicator, to be freed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it, unless there was an error: then other ranks may not arrive."""
        if error is None:
            self.Free()

    def __getattr__(self, name: str) -> Any:
        """Return mpi4py's attribute, of our duplicate."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._p2p.mixed or self._comm if name in SENDS else self._comm, name)

    def Free(self) -> None:
        """Complete what is in flight, stop the progress thread and free the duplicates: collective.

        What cannot complete, because a rank has not started its part, ends with an error, which Wait raises. A broken
        communicator is left to MPI_Finalize: not all ranks would take part.
        """
        if self._freed:
            return
        if self._engine.broken is None:
            self._runtime.in_flight.end()
        broken = self._engine.broken is not None
        self._close(broken=broken)
        if not broken:
            self._comm.Free()

    def _close(self, *, broken: bool) -> None:
        self._freed = True
        self._dispatcher.close(broken=broken)
        self._p2p.close(broken=broken)
        self._fast_path.clear()
        self._engine.broken = self._engine.broken or SpecError(
            "communicator",
            expected="one that is in use",
            got="one that was freed",
            remedy="Make a new one.",
            rank=self.rank,
        )

    def Dup(self) -> Communicator:
        """Return another communicator of the same ranks and settings: collective."""
        return self._like(self._comm)

    def Split(self, color: int = 0, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks of the same color; None for MPI.UNDEFINED: collective."""
        return self._take_over(self._comm.Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Communicator | None:
        """Return a communicator of the ranks of the same type, such as MPI.COMM_TYPE_SHARED: collective."""
        return self._take_over(self._comm.Split_type(split_type, key, info))

    def Shrink(self) -> Communicator:
        """Return a communicator of the ranks that are alive, with an MPI that has ULFM: collective among them."""
        self._close(broken=True)
        survivors = self._take_over(self._comm.Shrink())
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

    # Plans

    def explain(self, method: str, /, *args: Any, **options: Unpack[CallOptions]) -> Plan:
        """Return how a blocking call of `method`, such as "Bcast", would run, and why: collective.

        Nothing is sent, except that codec="auto" measures a collective that was not measured before.
        """
        return self._dispatcher.explain(method, args, options)

    def calibrate(self, *methods: str) -> None:
        """Measure now what codec="auto" needs for these methods, such as "Bcast": collective.

        Blocking calls do so the first time. Non-blocking calls cannot wait for other ranks, and are passed through
        until their method is calibrated.
        """
        self._dispatcher.calibrate(methods or ("Bcast", "Allreduce"))

    def autotune(self, method: str, /, *args: Any, **options: Unpack[CallOptions]) -> Plan:
        """Repeat a call until codec="auto" has found the fastest plan for its size, and return that: collective.

        Otherwise the first 20 to 40 calls of each size rotate through the candidates. Reductions are not explored
        unless autotuned, so that their summation order stays the same from call to call.
        """
        return self._dispatcher.autotune(method, args, options)

    # Named collectives

    def register(self, name: str, collective: str, /, **options: Unpack[CallOptions]) -> None:
        """Register a collective under a name, to be run in any order among other named collectives."""
        self._runtime.names.register(name, collective, options)

    def run(self, name: str, /, *args: Any, **options: Unpack[CallOptions]) -> Request:
        """Start a registered collective, with the arguments of mpi4py's method."""
        return self._dispatcher.run_named(name, args, options)

    def completed(self) -> list[str]:
        """Return the names completed since the last call, in order."""
        self._runtime.driver.poll()
        return self._runtime.names.completed()

    # Introspection

    def stats(self) -> Stats:
        """Return what the engine has sent and received so far."""
        return _stats_of(self._runtime)

    def rail_stats(self) -> RailStats | None:
        """Return the state of the rails; None without rails."""
        return _rails_of(self._runtime)

    def codec_for(self, role: str | None = None) -> Codec | None:
        """Return the codec of a role, None if it has none; without a role, the default codec."""
        codec = self._settings.codec if role is None else self._settings.roles.get(role)
        return None if codec is None else get_codec(codec)

    # Collectives

    def Bcast(self, buf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Broadcast the root's buffer."""
        if type(buf) is not _Array or not buf.flags.carray or type(root) is not int or options:
            self._dispatcher.run("Bcast", (buf, root), options)
            return
        known = self._fast_path.get(key := (buf.nbytes, buf.dtype.char, root))
        if known is None or known[1].ttl <= 0:
            if (known := self._dispatcher.run("Bcast", (buf, root), options)) is not None:
                self._fast_path[key] = known
            return
        # Passthrough.run written out: every line counts in a path of three microseconds.
        (comm, lifetime), detector = known, self._detector
        lifetime.ttl -= 1
        detector.mpi_trace = (detector.mpi_trace * 31 + key[0] + root + BCAST_SALT) & LOW_BITS
        detector.mpi_calls += 1
        detector.in_mpi_call = "Bcast"
        try:
            comm.Bcast(buf, root)
        except MPI.Exception as error:
            self._native.check_dead(error)
            raise
        finally:
            detector.in_mpi_call = None

    def Reduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Unpack[CallOptions]
    ) -> None:
        """Reduce to the root."""
        self._dispatcher.run("Reduce", (sendbuf, recvbuf, op, root), options)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> None:
        """Reduce to all ranks."""
        usual = type(recvbuf) is _Array and recvbuf.flags.carray and _is_contiguous(sendbuf) and type(op) is _Op
        if not usual or options:
            self._dispatcher.run("Allreduce", (sendbuf, recvbuf, op), options)
            return
        known = self._fast_path.get(key := (recvbuf.nbytes, recvbuf.dtype.char, ~op.handle))
        if known is None or known[1].ttl <= 0:
            if (known := self._dispatcher.run("Allreduce", (sendbuf, recvbuf, op), options)) is not None:
                self._fast_path[key] = known
            return
        (comm, lifetime), detector = known, self._detector
        lifetime.ttl -= 1
        detector.mpi_trace = (detector.mpi_trace * 31 + key[0] + ALLREDUCE_SALT) & LOW_BITS
        detector.mpi_calls += 1
        detector.in_mpi_call = "Allreduce"
        try:
            comm.Allreduce(sendbuf, recvbuf, op)
        except MPI.Exception as error:
            self._native.check_dead(error)
            raise
        finally:
            detector.in_mpi_call = None

    def Allgather(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Gather to all ranks."""
        self._dispatcher.run("Allgather", (sendbuf, recvbuf), options)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Gather blocks of different lengths to all ranks."""
        self._dispatcher.run("Allgatherv", (sendbuf, recvbuf), options)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Gather to the root."""
        self._dispatcher.run("Gather", (sendbuf, recvbuf, root), options)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Gather blocks of different lengths to the root."""
        self._dispatcher.run("Gatherv", (sendbuf, recvbuf, root), options)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Scatter the root's buffer."""
        self._dispatcher.run("Scatter", (sendbuf, recvbuf, root), options)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> None:
        """Scatter blocks of different lengths of the root's buffer."""
        self._dispatcher.run("Scatterv", (sendbuf, recvbuf, root), options)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> None:
        """Reduce, and scatter the result in blocks of `recvcounts` elements."""
        recvcounts = self._dispatcher.share_counts("Reduce_scatter", sendbuf, recvbuf, recvcounts, options)
        self._dispatcher.run("Reduce_scatter", (sendbuf, recvbuf, recvcounts, op), options)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> None:
        """Reduce, and scatter the result in equal blocks."""
        self._dispatcher.run("Reduce_scatter_block", (sendbuf, recvbuf, op), options)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Exchange equal blocks among all ranks."""
        self._dispatcher.run("Alltoall", (sendbuf, recvbuf), options)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> None:
        """Exchange blocks of different lengths among all ranks."""
        self._dispatcher.run("Alltoallv", (sendbuf, recvbuf), options)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> None:
        """Compute the inclusive prefix reduction (passed through)."""
        self._dispatcher.run("Scan", (sendbuf, recvbuf, op), options)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> None:
        """Compute the exclusive prefix reduction (passed through)."""
        self._dispatcher.run("Exscan", (sendbuf, recvbuf, op), options)

    def Barrier(self) -> None:
        """Wait for all ranks."""
        self._native.barrier()

    # Persistent collectives

    def Bcast_init(self, buf: Any, root: int = 0, **options: Unpack[CallOptions]) -> PersistentRequest:
        """Prepare a persistent broadcast; codec="delta" sends only what has changed since the last one."""
        if options.get("codec") == "delta":
            return DeltaRequest(self._dispatcher, buf, root, options, f"delta {next(self._deltas)}")
        return PersistentRequest(self._dispatcher.prepare("Bcast", (buf, root), options))

    def Allreduce_init(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> PersistentRequest:
        """Prepare a persistent all-reduce."""
        return PersistentRequest(self._dispatcher.prepare("Allreduce", (sendbuf, recvbuf, op), options))

    # Non-blocking collectives

    def Ibcast(self, buf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start a broadcast."""
        return self._dispatcher.start("Bcast", (buf, root), options)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, **options: Unpack[CallOptions]
    ) -> Request:
        """Start a reduction to the root."""
        return self._dispatcher.start("Reduce", (sendbuf, recvbuf, op, root), options)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> Request:
        """Start a reduction to all ranks."""
        return self._dispatcher.start("Allreduce", (sendbuf, recvbuf, op), options)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start a gather to all ranks."""
        return self._dispatcher.start("Allgather", (sendbuf, recvbuf), options)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start a gather of blocks of different lengths to all ranks."""
        return self._dispatcher.start("Allgatherv", (sendbuf, recvbuf), options)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start a gather to the root."""
        return self._dispatcher.start("Gather", (sendbuf, recvbuf, root), options)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start a gather of blocks of different lengths to the root."""
        return self._dispatcher.start("Gatherv", (sendbuf, recvbuf, root), options)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start a scatter of the root's buffer."""
        return self._dispatcher.start("Scatter", (sendbuf, recvbuf, root), options)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, **options: Unpack[CallOptions]) -> Request:
        """Start a scatter of blocks of different lengths."""
        return self._dispatcher.start("Scatterv", (sendbuf, recvbuf, root), options)

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> Request:
        """Start a reduce-scatter in blocks of `recvcounts` elements."""
        recvcounts = self._dispatcher.share_counts("Ireduce_scatter", sendbuf, recvbuf, recvcounts, options)
        return self._dispatcher.start("Reduce_scatter", (sendbuf, recvbuf, recvcounts, op), options)

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]
    ) -> Request:
        """Start a reduce-scatter in equal blocks."""
        return self._dispatcher.start("Reduce_scatter_block", (sendbuf, recvbuf, op), options)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start an exchange of equal blocks among all ranks."""
        return self._dispatcher.start("Alltoall", (sendbuf, recvbuf), options)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, **options: Unpack[CallOptions]) -> Request:
        """Start an exchange of blocks of different lengths among all ranks."""
        return self._dispatcher.start("Alltoallv", (sendbuf, recvbuf), options)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> Request:
        """Start an inclusive prefix reduction (passed through)."""
        return self._dispatcher.start("Scan", (sendbuf, recvbuf, op), options)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, **options: Unpack[CallOptions]) -> Request:
        """Start an exclusive prefix reduction (passed through)."""
        return self._dispatcher.start("Exscan", (sendbuf, recvbuf, op), options)

    # Point-to-point: the sender's codec and chunk apply; the receiver's only tells that it expects frames.

    def Send(
        self,
        buf: Any,
        dest: int,
        tag: int = 0,
        *,
        codec: str | Codec | None = None,
        chunk: int | None = None,
        stream: object = None,
    ) -> None:
        """Send a message; as in MPI, a long one may wait for its receiver."""
        self._p2p.send(buf, dest, tag, codec, chunk, stream)

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        codec: str | Codec | None = None,
        stream: object = None,
    ) -> None:
        """Receive a message, which may be shorter than the buffer."""
        self._p2p.receive(buf, source, tag, status, codec, stream)

    def Isend(
        self,
        buf: Any,
        dest: int,
        tag: int = 0,
        *,
        codec: str | Codec | None = None,
        chunk: int | None = None,
        stream: object = None,
    ) -> Request:
        """Start a send."""
        return self._p2p.start_send(buf, dest, tag, codec, chunk, stream)

    def Irecv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        *,
        codec: str | Codec | None = None,
        stream: object = None,
    ) -> Request:
        """Start a receive."""
        return self._p2p.start_receive(buf, source, tag, codec, stream)

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
        stream: object = None,
    ) -> None:
        """Send a message and receive another, in either order."""
        self._p2p.exchange((sendbuf, dest, sendtag), (recvbuf, source, recvtag), status, codec, chunk, stream)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> None:
        """Send a message and receive another into the same buffer."""
        if self._p2p.mixed is None:
            self._comm.Sendrecv_replace(buf, dest, sendtag, source, recvtag, status)
            return
        self.Sendrecv(copy_of(buf), dest, sendtag, buf, source, recvtag, status)

    def Recv_init(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        """Prepare a persistent receive."""
        if self._p2p.mixed is None:
            return self._comm.Recv_init(buf, source, tag)
        return PersistentRequest(lambda: self.Irecv(buf, source, tag))

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Receive an object, which mpi4py's send has pickled."""
        if self._p2p.mixed is None or source == MPI.PROC_NULL:
            return self._comm.recv(buf, source, tag, status)
        return self.mprobe(source, tag).recv(status)

    def irecv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        """Start to receive an object, pickled into at most as many bytes as `buf` has (None: 32 KiB)."""
        if self._p2p.mixed is None or source == MPI.PROC_NULL:
            return self._comm.irecv(buf, source, tag)
        return self._p2p.start_object(buf, source, tag)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Send an object and receive another."""
        sent = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        sent.wait()
        return received

    # Probes see messages in frames and others; counts are those of the elements that were sent.

    def Probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Literal[True]:
        """Wait for a message."""
        self._p2p.wait_for(lambda: self._p2p.probe(source, tag, status))
        return True

    def Iprobe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> bool:
        """Return True if there is a message."""
        return self._p2p.probe(source, tag, status)

    def Mprobe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """Wait for a message, and return it to be received by its own methods."""
        return self._p2p.wait_for(lambda: self._p2p.matched_probe(source, tag, status))

    def Improbe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """Return a message, to be received by its own methods; None if there is none."""
        return self._p2p.matched_probe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def mprobe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """Wait for an object, and return its message."""
        return self._p2p.wait_for(lambda: self._p2p.matched_probe(source, tag, status, pickled=True))

    def improbe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None) -> Any:
        """Return the message of an object; None if there is none."""
        return self._p2p.matched_probe(source, tag, status, pickled=True)


@dataclass(frozen=True)
class Stats:
    """What this rank has sent and received through the engine; passed-through calls are not counted."""

    bytes_sent: int
    bytes_received: int
    wire: str = ""
    """What carries the messages of the engine: mpi, tcp, tcp+mpi (between and within hosts) or rails; and why."""
    # Known only with the monitor; peers are ranks of MPI.COMM_WORLD.
    links: tuple[LinkState, ...] = ()
    """The state of the link to each peer."""
    raw_bytes: int = 0
    encoded_bytes: int = 0
    """Bytes before and after encoding."""
    calls_started: int = 0
    calls_ended: int = 0
    alarms: tuple[Alarm, ...] = ()
    """Alarms that this rank knows of."""

    @property
    def ratio(self) -> float:
        """Return the compression ratio of everything that was encoded."""
        return self.raw_bytes / self.encoded_bytes if self.encoded_bytes else 1.0


class RailStats(NamedTuple):
    """Statistics of this rank's rails."""

    copies: Copies
    """Copies of messages within this rank; long messages are not copied."""
    failovers: list[Failover]
    """Paths that were lost, and the cost of each failover."""
    down: list[tuple[int, str]]
    """Peers and devices whose path is down, or up but not in use again yet."""


def _stats_of(runtime: Runtime) -> Stats:
    """Return the statistics of the wire, and of the monitor if there is one."""
    wire, monitor = runtime.wire, runtime.monitor
    if monitor is None:
        return Stats(wire.bytes_sent, wire.bytes_received, wire.title)
    trace = monitor.trace
    trace.recorder.collect()
    return Stats(
        wire.bytes_sent,
        wire.bytes_received,
        wire.title,
        tuple(monitor.process.links(trace)),
        trace.counters.raw_bytes,
        trace.counters.encoded_bytes,
        trace.begun,
        trace.ended,
        tuple(monitor.process.alarms.all),
    )


def _rails_of(runtime: Runtime) -> RailStats | None:
    """Return the statistics of the rails, if there are any."""
    wire = runtime.wire
    if not isinstance(wire, TcpWire):
        return None
    return RailStats(wire.copies, wire.failovers(), wire.down())
