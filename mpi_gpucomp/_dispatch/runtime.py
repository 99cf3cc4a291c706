"""The runtime of a communicator: what its calls run on, the execution of plans, its named collectives, and its end.

At interpreter exit no rank is left waiting for one that exits, and no thread calls MPI after MPI_Finalize.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import config
from mpi_gpucomp._call.balance import Balance
from mpi_gpucomp._call.calls import check_options, find_method
from mpi_gpucomp._call.staging import PackedBuffers, device_of, mpi4py_accepts
from mpi_gpucomp._dispatch.in_flight import OpenRequests
from mpi_gpucomp._dispatch.passthrough import Passthrough
from mpi_gpucomp._dispatch.plan import Route
from mpi_gpucomp.device import gpu_in_use, order_after
from mpi_gpucomp.engine.agreement import AgreementCheck
from mpi_gpucomp.engine.coder import INLINE_BYTES, Coder
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.program import Layout
from mpi_gpucomp.engine.progress import ProgressDriver
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.engine.task import CollectiveTask
from mpi_gpucomp.errors import RankFailedError, SpecError
from mpi_gpucomp.monitor import settings as monitor_settings
from mpi_gpucomp.monitor.detector import attach, ignore_messages
from mpi_gpucomp.monitor.process_monitor import process_monitor
from mpi_gpucomp.monitor.recorder import gpu_range
from mpi_gpucomp.request import Request
from mpi_gpucomp.transport.bootstrap import MpiBootstrap
from mpi_gpucomp.transport.gpu_aware import cuda_aware
from mpi_gpucomp.transport.mpi import SEGMENT_BYTES, MpiWire, dead_ranks
from mpi_gpucomp.transport.rails import Rails
from mpi_gpucomp.transport.selection import MPI_WIRE, TCP_WIRE, WireSelection, select_wire
from mpi_gpucomp.transport.tcp import TcpWire

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import Call, CallOptions
    from mpi_gpucomp._dispatch.plan import Lifetime, Plan, Settings
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Device
    from mpi_gpucomp.monitor.detector import AnomalyDetector

__all__ = [
    "NameRegistry",
    "NamedCollective",
    "Nodes",
    "Runtime",
    "agree_on_gpus",
    "agree_segment_bytes",
    "attach_monitor",
    "nodes_of",
    "offset_to_first",
    "processor_name",
    "world_ranks",
]

MAX_COMPLETED = 1 << 16
"""Completed names that are kept for `completed()`, which may never be called."""

DRAIN_SECONDS = 10.0
"""How long exit waits for collectives in flight that were never waited for."""
FINALIZE_SECONDS = 3.0
"""How long MPI_Finalize may take when ranks are dead."""

_open: weakref.WeakSet[Runtime] = weakref.WeakSet()
"""Runtimes that have not been closed."""


def agree_on_gpus(comm: MPI.Intracomm) -> bool:
    """Return True if every rank uses a GPU: collective."""
    uses = np.array([gpu_in_use() is not None], np.int64)
    comm.Allreduce(MPI.IN_PLACE, uses, MPI.MIN)
    return bool(uses[0])


def agree_segment_bytes(comm: MPI.Intracomm) -> int:
    """Return the smallest segment size that any rank has set, or 0 for unsegmented messages: collective."""
    # From GPU memory a CUDA-aware MPI would copy each segment separately, and wait for that.
    setting, got = config.SEGMENT_BYTES, ""
    try:
        wanted = setting.get()
    except SpecError as error:
        wanted, got = -1, error.got
    if wanted is None:
        wanted = 0 if cuda_aware().aware else SEGMENT_BYTES
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([wanted], np.int64), sizes)
    if sizes.min() < 0:
        raise setting.error(got or f"an invalid value on rank {sizes.argmin()}", rank=comm.rank)
    return int(sizes.min())


Nodes = tuple[tuple[int, ...], ...]


class Runtime:
    """Everything that the calls of one communicator run on, and how plans are executed on it."""

    def __init__(self, comm: MPI.Intracomm, settings: Settings) -> None:
        """Take a communicator for exclusive use: collective."""
        self.comm, self._settings = comm, settings
        self.rank, self.size = comm.rank, comm.size
        self.nodes = nodes_of(comm)
        self.on_gpus = agree_on_gpus(comm)
        """Whether every rank used a GPU when the communicator was made: then default chunks suit GPUs."""
        self.wire = _make_wire(comm, self.nodes, settings)
        self.engine = Engine(self.wire, settings.slots, settings.timeout)
        self.monitor = attach_monitor(self.engine, comm, settings.monitor)
        self.driver = ProgressDriver(self.engine, background=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        self.in_flight = OpenRequests(self.engine, self.driver)
        self.balance = Balance(comm.rank, comm.size)
        self.native = Passthrough(
            comm,
            self.engine,
            self.driver,
            self.wire.derived_comms,
            self.in_flight,
            self.balance,
            on_rails=bool(settings.rails),
        )
        self.names = NameRegistry(comm.rank)
        self._coders: dict[tuple[str | int, str, bool], Coder] = {}
        weakref.finalize(self, self.driver.close).atexit = False
        _open.add(self)

    def stop(self) -> None:
        """Stop the progress thread and the coders' streams."""
        _open.discard(self)
        self.driver.close()
        self.engine.observer.close()
        for coder in self._coders.values():
            with suppress(Exception):  # raised before, where it was waited for
                coder.close()

    def close(self, *, broken: bool) -> None:
        """Close the wire: collective, unless the communicator is `broken`."""
        if broken or self.engine.broken is not None:
            self.wire.abandon()
        else:
            self.wire.close()

    def execute(self, plan: Plan, call: Call) -> tuple[MPI.Intracomm, Lifetime] | None:
        """Run a blocking call.

        If later calls with the same signature may bypass dispatch, return the communicator to use and for how long.
        """
        if plan.route is Route.ENGINE:
            job = self._submit(plan, call, background=False)
            self.driver.wait(job)
            if job.error is not None:
                raise job.error
            return None
        comm = self.native.run(call, plan)
        if (callback := self.native.callback_of(call)) is not None:
            callback()
        if plan.lifetime is None or not self.driver.background or not mpi4py_accepts(call):
            return None
        return comm, plan.lifetime

    def start(self, plan: Plan, call: Call) -> Request:
        """Start a non-blocking call."""
        if plan.route is Route.ENGINE:
            return Request(self._submit(plan, call, background=True), self.driver, call)
        return self.native.start(call, plan)

    def agree(self, topic: str, signature: str) -> None:
        """Wait until all ranks have passed the same signature; raise if they do not."""
        self.native.agree(topic, signature)

    def report(self, title: str, name: str, error: Exception) -> None:
        """Report a call that this rank could not make to the ranks that join it."""
        text = str(error).removeprefix(f"rank {self.rank}: ").removesuffix(".")  # the list of ranks has both
        self.driver.submit(Job(AgreementCheck(title), f"{title}: {type(error).__name__}: {text}", name=name))

    def _submit(self, plan: Plan, call: Call, *, background: bool) -> Job:
        """Hand a collective to the engine."""
        codec, algorithm = plan.codec, plan.algorithm
        assert codec is not None and algorithm is not None
        device = device_of(call.sent, call.received)
        packed = PackedBuffers(device, raw=codec.name == "none")
        sent = packed.device_view(call.sent, writable=False)
        received = packed.device_view(call.received, writable=True)
        if call.deferred_output and received is not None:
            received = packed.deferred_output(received)
        chunk = plan.chunk_elements(call)
        if call.counts is not None:
            chunk = min(chunk, max(1, -(-max(call.counts, default=0) // algorithm.chunks)))
        dtype = call.blocks.buffer.dtype
        coder = self._coder(codec, device, chunk * dtype.itemsize < INLINE_BYTES)
        for blocks in (call.sent, call.received):
            if blocks and blocks.buffer.device == device.name:
                order_after(blocks.buffer, coder.stream)
        name = call.options.get("name") or ""
        with self.driver.lock:
            task = CollectiveTask(
                algorithm,
                Layout(algorithm.spec, sent, received, chunk),
                dtype,
                coder,
                self.wire,
                self.engine.free_tag(),
                name=call.collective,
                op=call.op,
                same_everywhere=call.collective in ("allreduce", "allgather"),
                update_root=call.collective == "broadcast" and call.options.get("replicate", False),
                raw=codec.name == "none",
                before=packed.pack if packed.needed else None,
                after=packed.unpack if packed.needed else None,
            )
            priority = call.options.get("priority", 0)
            local = call.counts is None
            job = Job(
                task,
                plan.signature(call),
                name=name,
                priority=priority,
                everyone=local,
                balance=self.balance.of(call) if local else 0,
                counts=self.balance.describe(call) if local else "",
            )
            job.on_done = self.names.completion_callback(name, call.options)
        self.driver.submit(job, background=background)
        return job

    def _coder(self, codec: Codec, device: Device, inline: bool) -> Coder:
        """Return the coder that all collectives of this kind on the host share; on a GPU each has one of its own."""
        reaches = self.wire.kind == "mpi" and cuda_aware().aware
        if device.name != "host":
            return Coder(codec, device, wire_reaches_gpu=reaches, annotate=gpu_range)
        key = (codec.spec if codec.shared else id(codec)), device.name, inline
        if key not in self._coders:
            self._coders[key] = Coder(codec, device, inline=inline, annotate=gpu_range)
        return self._coders[key]

    def forget_codec(self, codec: Codec) -> None:
        """Close the coders of a codec that is no longer in use."""
        for key in [key for key in self._coders if key[0] == id(codec)]:
            with suppress(Exception):  # raised before, where it was waited for
                self._coders.pop(key).close()


def _make_wire(comm: MPI.Intracomm, nodes: Nodes, settings: Settings) -> MpiWire | TcpWire:
    """Make the wire of all ranks: collective."""
    if isinstance(settings.rails, Rails):
        rails = TcpWire(comm, settings.rails)
        rails.kind = "rails"
        return rails
    selected = select_wire(MpiBootstrap(comm), len(nodes), settings.wire or config.WIRE.default)
    local = frozenset(next(node for node in nodes if comm.rank in node))
    if selected.kind == TCP_WIRE:
        try:
            return _make_tcp_wire(comm, selected, local if settings.wire != TCP_WIRE else frozenset())
        except RankFailedError as error:  # on all ranks
            if settings.wire == TCP_WIRE:
                raise
            selected = WireSelection(MPI_WIRE, f"sockets cannot connect all ranks: {error.got}")
    # Messages between nodes are segmented where that pays.
    segment_bytes = agree_segment_bytes(comm) if len(nodes) > 1 else 0
    return MpiWire(comm, segment_bytes, frozenset(range(comm.size)) - local, selected.why)


def _make_tcp_wire(comm: MPI.Intracomm, selected: WireSelection, local: frozenset[int]) -> TcpWire:
    """Connect the ranks over sockets, with MPI within nodes: collective."""
    found = Rails(selected.network, config.RAIL_TIMEOUT.get(), config.RAIL_LIMIT.get())
    wire = TcpWire(comm, found, local - {comm.rank})
    wire.kind, wire.why = TCP_WIRE, selected.why
    return wire


def processor_name() -> str:
    """Return the name of the machine that this rank runs on."""
    return MPI.Get_processor_name()


def nodes_of(comm: MPI.Intracomm) -> Nodes:
    """Return the ranks of each node, in the order of their first rank: collective."""
    # A hash of fixed size instead of the name: one short message, whatever the names are.
    own = np.frombuffer(blake2b(processor_name().encode(), digest_size=8).digest(), np.int64)
    marks = np.empty(comm.size, np.int64)
    comm.Allgather(own, marks)
    found: dict[int, list[int]] = {}
    for rank, mark in enumerate(marks.tolist()):
        found.setdefault(mark, []).append(rank)
    return tuple(map(tuple, found.values()))


class NamedCollective(NamedTuple):
    """mpi4py's method and the options of a named collective."""

    method: str
    options: CallOptions


class NameRegistry:
    """The named collectives of one communicator."""

    def __init__(self, rank: int) -> None:
        """Start empty, on this rank."""
        self._rank = rank
        self._registered: dict[str, NamedCollective] = {}
        self._completed: deque[str] = deque(maxlen=MAX_COMPLETED)

    def register(self, name: str, collective: str, options: CallOptions) -> None:
        """Register a name for a collective and its options."""
        method = find_method(f"register {name!r}", collective, self._rank)
        if name in self._registered:
            raise SpecError(
                f"register {name!r}",
                expected="a new name",
                got="a name that is registered already",
                remedy="Choose another name.",
                rank=self._rank,
            )
        check_options(f"register {name!r}", options, self._rank)
        self._registered[name] = NamedCollective(method, options)

    def find(self, name: str) -> NamedCollective:
        """Return the collective registered under a name."""
        known = self._registered.get(name)
        if known is None:
            raise SpecError(
                f"run {name!r}",
                expected=f"a registered name: {', '.join(sorted(self._registered)) or 'there is none'}",
                got=repr(name),
                remedy="Call register(name, collective) first.",
                rank=self._rank,
            )
        return known

    def completed(self) -> list[str]:
        """Return the names completed since the last call, in order."""
        return [self._completed.popleft() for _ in range(len(self._completed))]

    def completion_callback(self, name: str, options: CallOptions) -> Callable[[Job], None] | None:
        """Return what a job calls when it has ended: it records the name, and calls the user's callbacks."""
        callback, on_error = options.get("callback"), options.get("on_error")

        def on_done(job: Job) -> None:
            if name:
                self._completed.append(name)
            if job.error is not None and on_error is not None:
                on_error(job.error)
            elif callback is not None and job.error is None:
                callback()

        return on_done if name or callback or on_error else None


def _exit_runtime(runtime: Runtime) -> None:
    """Close a runtime, and abort the job if other ranks would wait for this one forever."""
    error = getattr(sys, "last_value", None)
    if error is None:
        until = time.monotonic() + DRAIN_SECONDS
        runtime.driver.wait_until(lambda: runtime.engine.active_call is None or time.monotonic() > until)
    runtime.driver.close()
    in_flight = runtime.engine.active_call or (error and runtime.engine.aborted_call)
    if in_flight:
        why = f"with {type(error).__name__}" if error else "without waiting for it"
        text = f"rank {runtime.rank} exits {why} during {in_flight}: aborting the job"
        print(text, file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
    if error is not None:
        runtime.engine.abort(error)
    runtime.wire.abandon()


@atexit.register
def _on_exit() -> None:
    """Stop the threads that call MPI: mpi4py finalizes MPI after these handlers."""
    for runtime in list(_open):
        if MPI.Is_finalized():
            runtime.driver.close()
        else:
            _exit_runtime(runtime)
    if MPI.Is_initialized() and not MPI.Is_finalized() and dead_ranks(MPI.COMM_WORLD):
        _finalize_with_dead_ranks()


def _finalize_with_dead_ranks() -> None:
    """Finalize MPI, or exit the process if that takes too long: Open MPI may wait for dead ranks."""
    status = int(getattr(sys, "last_value", None) is not None)
    timer = threading.Timer(FINALIZE_SECONDS, os._exit, [status])
    timer.daemon = True
    timer.start()
    ctypes.CDLL(MPI.__file__).MPI_Finalize()  # unlike mpi4py's call this releases the GIL
    timer.cancel()


# Attaches the monitor to an engine, and measures by how much the ranks' clocks differ.

ROUNDS = 8
TAG = 0
_clocks: list[tuple[int, int]] = []
"""The offset and uncertainty measured with the first communicator of all ranks."""


def attach_monitor(engine: Engine, comm: MPI.Intracomm, wanted: bool | None) -> AnomalyDetector | None:
    """Let the process's monitor observe an engine, if it is enabled; all ranks call it, whatever each of them wants."""
    if not _clocks and comm.size == MPI.COMM_WORLD.size:
        _clocks.append(offset_to_first(comm))
    chosen = monitor_settings.read()
    if not (chosen.on if wanted is None else wanted):
        ignore_messages(engine)
        return None
    world = MPI.COMM_WORLD
    process = process_monitor(replace(chosen, on=True), world.rank, world.size)
    if _clocks:
        process.set_clock(*_clocks[0])
    return attach(engine, world_ranks(comm), process)


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator in the world; ranks outside of it keep their number."""
    found = comm.Get_group().Translate_ranks(range(comm.size), MPI.COMM_WORLD.Get_group())
    return [own if rank == MPI.UNDEFINED else rank for own, rank in enumerate(found)]


def offset_to_first(comm: MPI.Intracomm) -> tuple[int, int]:
    """Return the offset from this clock to that of rank 0, and its uncertainty; all ranks call it.

    The ranks are a binomial tree: in each round every rank that is measured measures another one.
    """
    offset = uncertainty = 0
    known = 1
    while known < comm.size:
        if comm.rank < known and comm.rank + known < comm.size:
            _answer(comm, comm.rank + known, offset, uncertainty)
        elif known <= comm.rank < 2 * known:
            offset, uncertainty = _ask(comm, comm.rank - known)
        known *= 2
    return offset, uncertainty


def _answer(comm: MPI.Intracomm, peer: int, offset: int, uncertainty: int) -> None:
    """Send a peer the time, the offset and the uncertainty of this clock, in every round."""
    message = np.zeros(3, np.int64)
    for _ in range(ROUNDS):
        comm.Recv(message[:1], peer, TAG)
        message[:] = perf_counter_ns(), offset, uncertainty
        comm.Send(message, peer, TAG)


def _ask(comm: MPI.Intracomm, peer: int) -> tuple[int, int]:
    """Measure the offset to a peer's clock; the fastest round trip is the most certain."""
    message, best = np.zeros(3, np.int64), (0, 1 << 62)
    for _ in range(ROUNDS):
        sent = perf_counter_ns()
        comm.Send(message[:1], peer, TAG)
        comm.Recv(message, peer, TAG)
        back = perf_counter_ns()
        clock, offset, uncertainty = message.tolist()
        if (back - sent) // 2 + uncertainty < best[1]:
            best = clock + offset - (sent + back) // 2, (back - sent) // 2 + uncertainty
    return best
