"""Carries calls out: decides which way a call goes, and makes it a job of the engine or a call of MPI's own."""

from __future__ import annotations

import weakref
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call import buffers as specs
from mpi_gpucomp._call.calls import FORMS, Form, Place
from mpi_gpucomp._call.staging import Packing, device_of, passes
from mpi_gpucomp._dispatch.atexit import OPEN
from mpi_gpucomp._dispatch.passthrough import Straight
from mpi_gpucomp._dispatch.plan import Calls
from mpi_gpucomp._dispatch.policy import Chooser, Planned
from mpi_gpucomp._dispatch.registry import Names
from mpi_gpucomp._dispatch.runtime import agreed_cut, attach_monitor, nodes_of
from mpi_gpucomp._tuning.model import DEFAULT_CHUNK
from mpi_gpucomp._tuning.tuner import EVER, Tuner
from mpi_gpucomp.device import order_after
from mpi_gpucomp.engine.agreement import AgreementCheck
from mpi_gpucomp.engine.coder import INLINE_BYTES, Coder
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.layout import Layout
from mpi_gpucomp.engine.progress import ProgressDriver
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.engine.task import Task
from mpi_gpucomp.errors import BufferSpecError, GpucompError
from mpi_gpucomp.monitor.nvtx import gpu_range
from mpi_gpucomp.request import Request
from mpi_gpucomp.transport.gpu_aware import cuda_aware
from mpi_gpucomp.transport.mpi import MpiTransport
from mpi_gpucomp.transport.rails import Rails
from mpi_gpucomp.transport.rails.transport import RailsTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._dispatch.plan import CallOptions, Choice, Settings
    from mpi_gpucomp._dispatch.runtime import Nodes
    from mpi_gpucomp._tuning.tuner import Trial
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Device

__all__ = ["Caller"]


class Caller:
    """The calls of one communicator."""

    def __init__(self, plain: MPI.Intracomm, settings: Settings) -> None:
        """Let all ranks make one, on a communicator that nobody else uses."""
        self._plain, self._settings = plain, settings
        self.rank, self.size = plain.rank, plain.size
        nodes = nodes_of(plain)
        self.transport = _transport(plain, nodes, settings)
        self.engine = Engine(self.transport, settings.slots, settings.timeout)
        self.monitor = attach_monitor(self.engine, plain, settings.monitor)
        self.driver = ProgressDriver(self.engine, background=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        self._coders: dict[tuple[str | int, str, bool], Coder] = {}
        self.straight = Straight(
            plain, self.engine, self.driver, self.transport.derived_comms, railed=bool(settings.rails)
        )
        self.names = Names(plain.rank)
        self.trial: Trial[Any] | None = None
        """What the last call was a part of."""
        self._planned = Planned(plain.size, nodes, settings)
        self._tuner = Tuner(
            plain,
            nodes,
            self._run_plainly,
            self.straight.improve,
            self.straight.meet,
            self.transport.derived_comms.extend,
        )
        self._chooser = Chooser(plain.rank, nodes, settings, self._tuner, self.straight.meet)
        weakref.finalize(self, self.driver.close).atexit = False
        OPEN.add(self)

    def close(self, *, broken: bool = False) -> None:
        """End the thread and the streams; all ranks do, unless some are `broken`, and free what MPI holds."""
        OPEN.discard(self)
        self.driver.close()
        self.engine.observer.close()
        for coder in self._coders.values():
            with suppress(Exception):  # what went wrong was raised where it was waited for
                coder.close()
        if not broken and self.engine.broken is None:
            self._tuner.close()
            self.transport.close()
        else:
            self.transport.abandon()

    # Calls

    def block(self, method: str, args: tuple[Any, ...], options: CallOptions) -> tuple[MPI.Intracomm, Calls] | None:
        """Carry out a call; return where MPI may be called for the next ones like it, where nobody has to be asked."""
        try:
            return self._block(method, args, options)
        except MPI.Exception as error:
            self.straight.check_dead(error)
            raise

    def _block(self, method: str, args: tuple[Any, ...], options: CallOptions) -> tuple[MPI.Intracomm, Calls] | None:
        form, choice = self._understood(method, args, options, blocking=True)
        start = perf_counter()
        try:
            return self._carry_out(method, form, args, options, choice)
        finally:
            self.trial = choice.trial
            if choice.trial is not None:
                assert form is not None
                choice.trial.note((perf_counter() - start) / form.nbytes)

    def _carry_out(
        self, method: str, form: Form | None, args: tuple[Any, ...], options: CallOptions, choice: Choice
    ) -> tuple[MPI.Intracomm, Calls] | None:
        if form is None or choice.algorithm is None:
            on = self.straight.block(method, form, args, choice)
            if (told := self.straight.told(method, options)) is not None:
                told()
            if form is None or not passes(form, args) or not self.driver.background:
                return None
            calls = Calls(EVER) if self._chooser.is_small(form, choice.codec) else choice.lasting
            return (on, calls) if calls else None
        Request(self._submit(form, choice, options, background=False), self.driver, form).Wait()
        return None

    def begin(self, method: str, args: tuple[Any, ...], options: CallOptions) -> Request:
        """Start a call."""
        try:
            return self.prepare(method, args, options)()
        except MPI.Exception as error:
            self.straight.check_dead(error)
            raise

    def prepare(self, method: str, args: tuple[Any, ...], options: CallOptions) -> Callable[[], Request]:
        """Read a call once, and return what starts it, as often as one likes."""
        form, choice = self._understood(method, args, options, blocking=False)
        if form is None or choice.algorithm is None:
            told = self.straight.told(method, options)
            return lambda: self.straight.start(method, form, args, choice, told)
        return lambda: Request(self._submit(form, choice, options, background=True), self.driver, form)

    def autotune(self, method: str, args: tuple[Any, ...], options: CallOptions) -> str:
        """Make a call until `auto` knows the best way for it, and describe that."""
        self.straight.quick.clear()  # what goes straight to MPI now may find a better way
        self._tuner.settling = True
        try:
            self.block(method, args, options)
            while self.trial is not None:
                self.block(method, args, options)
        finally:
            self._tuner.settling = False
        form, choice = self._understood(method, args, options, blocking=True)
        if form is None or choice.algorithm is None or choice.codec is None:
            return f"MPI's own, {self.straight.algorithm(method, form, choice)}"
        chunk = choice.piece * form.some.buffer.dtype.itemsize
        return f"{choice.algorithm.name}, {choice.codec.spec}, chunks of {chunk >> 10} KiB"

    def calibrate(self, methods: tuple[str, ...]) -> None:
        """Measure for `auto` now."""
        self._chooser.calibrate(methods)

    def run(self, name: str, args: tuple[Any, ...], options: CallOptions) -> Request:
        """Start a named collective that was registered."""
        known = self.names.find(name)
        return self.begin(known.method, args, {**known.options, **options, "name": name})

    def shares(self, sendbuf: Any, recvbuf: Any, recvcounts: Any, options: CallOptions) -> Any:
        """Return what each rank gets of a reduce-scatter; where nobody says it, all ranks tell each other as in mpi4py.

        Those with a name cannot: their ranks may all be somewhere else.
        """
        if recvcounts is not None or sendbuf is MPI.IN_PLACE or options.get("name") is not None:
            return recvcounts
        counts = np.zeros(self.size, np.int64)
        try:
            blocks = specs.blocks(recvbuf, writable=True, topic="Reduce_scatter", rank=self.rank, anywhere=True)
            own = blocks.counts[0] if blocks else -1
        except BufferSpecError:
            own = -1  # it is read again, and refused, once all are there
        self.block("Allgather", (np.array([own]), counts), {})
        return counts.tolist() if counts.min() >= 0 else None

    def _understood(
        self, method: str, args: tuple[Any, ...], options: CallOptions, *, blocking: bool
    ) -> tuple[Form | None, Choice]:
        """Read a call and choose its way. If it is wrong, the other ranks hear so."""
        if self.engine.broken is not None:
            raise self.engine.broken
        try:
            form = FORMS[method](Place(method, self.rank, self.size), *args)
            return form, self._chooser.choose(method, form, self._planned.options(form, options), blocking=blocking)
        except GpucompError as error:
            self.driver.submit(Job(AgreementCheck(method), f"an error: {error}", name=options.get("name") or ""))
            raise

    def _run_plainly(self, method: str, buffers: tuple[object, ...], algorithm: str) -> None:
        """Carry out a method by a schedule, with no codec."""
        self.block(method, buffers, {"algorithm": algorithm, "codec": "none", "chunk": DEFAULT_CHUNK})

    # The engine's way

    def _submit(self, form: Form, choice: Choice, options: CallOptions, *, background: bool) -> Job:
        assert choice.codec is not None and choice.algorithm is not None
        device = device_of(form.sent, form.received)
        packing = Packing(device, wire=choice.codec.name == "none")
        sent, received = packing.via(form.sent, writable=False), packing.via(form.received, writable=True)
        if form.lands_at_start and received is not None:
            received = packing.landing(received)
        piece = choice.piece
        if form.counts is not None:
            piece = min(piece, max(1, -(-max(form.counts, default=0) // choice.algorithm.chunks)))
        layout = Layout(choice.algorithm.spec, sent, received, piece)
        dtype = form.some.buffer.dtype
        coder = self._coder(choice.codec, device, piece * dtype.itemsize < INLINE_BYTES)
        for blocks in (form.sent, form.received):
            if blocks and blocks.buffer.device == device.name:
                order_after(blocks.buffer, coder.stream)
        name = options.get("name") or ""
        with self.driver.lock:
            task = Task(
                choice.algorithm,
                layout,
                dtype,
                coder,
                self.transport,
                self.engine.free_tag(),
                name=form.collective,
                op=form.op,
                same_everywhere=form.collective in ("allreduce", "allgather"),
                root_too=form.collective == "broadcast" and options.get("replicate", False),
                plain=choice.codec.name == "none",
                before=packing.fill if packing.needed else None,
                after=packing.empty if packing.needed else None,
            )
            said = f"{form.said}, {choice.codec.spec}, {choice.algorithm.name}, chunks of {choice.piece}"
            job = Job(task, said, name=name, priority=options.get("priority", 0), everyone=form.counts is None)
            job.when_done = self.names.told(name, options)
        self.driver.submit(job, background=background)
        return job

    def _coder(self, codec: Codec, device: Device, inline: bool) -> Coder:
        """Return the coder that all collectives of this kind share, stream and all."""
        key = (codec.spec if codec.shared else id(codec)), device.name, inline
        if key not in self._coders:
            reaches = not self._settings.rails and cuda_aware().aware
            self._coders[key] = Coder(codec, device, inline=inline, wire_reaches_gpu=reaches, annotate=gpu_range)
        return self._coders[key]

    def forget(self, codec: Codec) -> None:
        """Close the coders of a codec that will not be used any more, nor is now."""
        for key in [key for key in self._coders if key[0] == id(codec)]:
            with suppress(Exception):  # what went wrong was raised where it was waited for
                self._coders.pop(key).close()


def _transport(comm: MPI.Intracomm, nodes: Nodes, settings: Settings) -> MpiTransport | RailsTransport:
    """Let all ranks make what carries their messages; those between nodes are cut where that pays."""
    if isinstance(settings.rails, Rails):
        return RailsTransport(comm, settings.rails)
    near = next(node for node in nodes if comm.rank in node)
    cut = agreed_cut(comm) if len(nodes) > 1 else None
    return MpiTransport(comm, cut, frozenset(range(comm.size)) - frozenset(near))
