"""Carries calls out: decides which way a call goes, and makes it a job of the engine or a call of MPI's own."""

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
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.codec import find
from mpi_gpucomp.codec.auto import Auto
from mpi_gpucomp.collectives import algorithms, build
from mpi_gpucomp.collectives.select import DEFAULT_CHUNK
from mpi_gpucomp.comm import specs
from mpi_gpucomp.comm.forms import FORMS, Form, Place
from mpi_gpucomp.comm.options import Choice
from mpi_gpucomp.comm.packing import Packing, device_of
from mpi_gpucomp.comm.plain import Detour, can_do, passes
from mpi_gpucomp.comm.request import PlainRequest, Request
from mpi_gpucomp.comm.tuning import Decision, Tuner
from mpi_gpucomp.device import order_after
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.job import Job
from mpi_gpucomp.engine.layout import Layout
from mpi_gpucomp.engine.meeting import Meeting
from mpi_gpucomp.engine.progress import Crank
from mpi_gpucomp.engine.task import Task
from mpi_gpucomp.errors import BufferError, GpucompError, ScheduleError, SpecError
from mpi_gpucomp.schedule import xml
from mpi_gpucomp.schedule.check import checked
from mpi_gpucomp.schedule.ir import Algorithm
from mpi_gpucomp.transport.aware import cuda_aware
from mpi_gpucomp.transport.mpi import MpiTransport, dead_ranks, lost, means_death

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.options import Options
    from mpi_gpucomp.device import Device

__all__ = ["Caller", "Settings"]

INLINE_BYTES = 1 << 16
"""Chunks below this size are coded by the thread that waits for them."""
REVOKED_SECONDS = 1.0
"""How long a call of MPI's own may take to come back once it was revoked; an MPI with no ULFM does not even say so."""
LEAVE_SECONDS = 10.0
"""How long the end of the interpreter waits for collectives that nobody has waited for."""
FINALIZE_SECONDS = 3.0
"""How long the end of MPI may take when ranks are dead."""
MOST_COMPLETED = 1 << 16
"""Names that are kept for somebody to ask what was completed; nobody may ever do so."""
SHORT = 1 << 18
"""Up to so many bytes, MPI's own is as fast as a schedule that does not compress."""


class Settings(NamedTuple):
    """What a communicator was made with."""

    codec: str | Codec
    roles: dict[str, str | Codec]
    chunk: int
    slots: int
    small: int
    timeout: float | None


class Registered(NamedTuple):
    """A collective with a name: mpi4py's method, and options."""

    method: str
    options: Options


class Caller:
    """The calls of one communicator."""

    def __init__(self, plain: MPI.Intracomm, settings: Settings) -> None:
        """Let all ranks make one, on a communicator that nobody else uses."""
        self._plain, self._settings = plain, settings
        self.rank, self.size = plain.rank, plain.size
        self._codecs = {role: find(codec) for role, codec in {**settings.roles, "": settings.codec}.items()}
        self.transport = MpiTransport(plain)
        self.engine = Engine(self.transport, settings.slots, settings.timeout)
        self.engine.watch.stuck_outside = self._end_it
        self.crank = Crank(self.engine, background=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        self._coders: dict[tuple[str | int, str, bool], Coder] = {}
        self._tuner = Tuner(plain, self._run_plainly)
        self._registered: dict[str, Registered] = {}
        self._completed: deque[str] = deque(maxlen=MOST_COMPLETED)
        self._agreed: set[object] = set()
        """Kinds of calls of MPI's own that all ranks were found to make alike."""
        self.quick: set[tuple[int, str, int] | None] = set()
        """Those on numpy's arrays that can be told by length, type and root or operation, to lose no time on them."""
        weakref.finalize(self, self.crank.close).atexit = False
        _open.add(self)

    def close(self, *, broken: bool = False) -> None:
        """End the thread and the streams; all ranks do, unless some are `broken`, and free what MPI holds."""
        _open.discard(self)
        self.crank.close()
        for coder in self._coders.values():
            with suppress(Exception):  # what went wrong was raised where it was waited for
                coder.close()
        if not broken and self.engine.broken is None:
            self.transport.close()

    def leave(self) -> None:
        """End with the interpreter, and take the job along if others would wait for this rank for ever."""
        error = getattr(sys, "last_value", None)
        if error is None:
            until = time.monotonic() + LEAVE_SECONDS
            self.crank.wait_until(lambda: self.engine.under_way is None or time.monotonic() > until)
        self.crank.close()
        under_way = self.engine.under_way
        if under_way:
            why = f"with {type(error).__name__}" if error else "without waiting for it"
            said = f"rank {self.rank} ends {why} in the middle of {under_way}, and the whole job with it"
            print(said, file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)
        if error is not None:
            self.engine.leave(error)

    def check_dead(self, error: MPI.Exception) -> None:
        """Raise our error instead of MPI's where a rank is dead, and let all ranks hear of it."""
        if means_death(error, self._plain):
            with self.crank.lock:
                self.engine.give_up(lost(error, self.rank, self._plain))
                assert self.engine.broken is not None
                raise self.engine.broken from error

    # Calls

    def block(self, method: str, args: tuple[Any, ...], options: Options) -> bool:
        """Carry out a call; say whether the next one like it may go straight to MPI without asking here."""
        try:
            return self._block(method, args, options)
        except MPI.Exception as error:
            self.check_dead(error)
            raise

    def _block(self, method: str, args: tuple[Any, ...], options: Options) -> bool:
        form, choice = self._understood(method, args, options, blocking=True)
        if form is None or choice.algorithm is None:
            self._straight(method, form, args, choice)
            if (told := self._told_by_mpi(method, options)) is not None:
                told()
            return (
                form is not None and self.crank.background and passes(form, args) and self._is_small(form, choice.codec)
            )
        Request(self._submit(form, choice, options, background=False), self.crank, form).Wait()
        return False

    def begin(self, method: str, args: tuple[Any, ...], options: Options) -> Request:
        """Start a call."""
        try:
            return self.prepare(method, args, options)()
        except MPI.Exception as error:
            self.check_dead(error)
            raise

    def prepare(self, method: str, args: tuple[Any, ...], options: Options) -> Callable[[], Request]:
        """Read a call once, and return what starts it, as often as one likes."""
        form, choice = self._understood(method, args, options, blocking=False)
        if form is None or choice.algorithm is None:
            told = self._told_by_mpi(method, options)
            return lambda: self._start_straight(method, form, args, choice, told)
        return lambda: Request(self._submit(form, choice, options, background=True), self.crank, form)

    def shares(self, sendbuf: Any, recvbuf: Any, recvcounts: Any, options: Options) -> Any:
        """Return what each rank gets of a reduce-scatter; where nobody says it, all ranks tell each other as in mpi4py.

        Those with a name cannot: their ranks may all be somewhere else.
        """
        if recvcounts is not None or sendbuf is MPI.IN_PLACE or options.get("name") is not None:
            return recvcounts
        counts = np.zeros(self.size, np.int64)
        try:
            blocks = specs.blocks(recvbuf, writable=True, topic="Reduce_scatter", rank=self.rank, anywhere=True)
            own = blocks.counts[0] if blocks else -1
        except BufferError:
            own = -1  # it is read again, and refused, once all are there
        self.block("Allgather", (np.array([own]), counts), {})
        return counts.tolist() if counts.min() >= 0 else None

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.engine.watch.note(0)
        self._call("Barrier", ())

    def _understood(
        self, method: str, args: tuple[Any, ...], options: Options, *, blocking: bool
    ) -> tuple[Form | None, Choice]:
        """Read a call and choose its way. If it is wrong, the other ranks hear so."""
        try:
            form = FORMS[method](Place(method, self.rank, self.size), *args)
            return form, self._choose(method, form, options, blocking=blocking)
        except GpucompError as error:
            name = options.get("name") or ""
            job = Job(Meeting(method), f"an error: {error}", name=name, trace=0 if name else self.engine.watch.trace)
            self.crank.submit(job)
            raise

    def _choose(self, method: str, form: Form | None, options: Options, *, blocking: bool) -> Choice:
        name, wanted = options.get("name"), options.get("algorithm")
        if form is None or form.collective == "scan":
            self._check_mpi_can(method, form, options)
            return Choice(None, None)
        codec = self._codec(form, options)
        free = name is None and wanted is None
        if free and self._is_small(form, codec):
            return Choice(codec, None)
        chunk = options.get("chunk") or self._settings.chunk
        if isinstance(codec, Auto):
            codec = self._tuner.codec
            if free and form.counts is not None and can_do(form):
                decision = self._decide(method, form, blocking=blocking)
                codec = codec if decision.encoded else find("none")
                wanted, chunk = decision.algorithm, options.get("chunk") or decision.chunk
                if wanted is None:
                    return Choice(self._tuner.codec, None)
        piece = max(1, chunk // form.some.buffer.dtype.itemsize)
        return Choice(codec, self._algorithm(form, wanted), piece)

    def _decide(self, method: str, form: Form, *, blocking: bool) -> Decision:
        """Let `auto` decide; the first time it measures, once all ranks have said that they want the same."""
        if not self._tuner.knows(form.collective):
            if not blocking:
                name = algorithms(form.collective)[0].name
                return Decision(name, self._settings.chunk, encoded=True)
            meeting = Job(Meeting(method), f"{form.said}, auto", trace=self.engine.watch.trace)
            self.crank.submit(meeting, background=False)
            Request(meeting, self.crank).Wait()
            self._tuner.measure(form.collective, form.some.buffer.device)
        assert form.counts is not None
        nbytes = sum(form.counts) * form.some.buffer.dtype.itemsize
        return self._tuner.decide(form, nbytes, blocking=blocking)

    def _check_mpi_can(self, method: str, form: Form | None, options: Options) -> None:
        """Raise where the caller asks for more than MPI can do."""
        if form is not None and not can_do(form):
            raise BufferError(
                method,
                expected="elements of a type that MPI has operations for",
                got=str(form.some.buffer.dtype),
                remedy="Convert them to float32 first.",
                rank=self.rank,
            )
        asked = [key for key in ("name", "algorithm", "codec") if options.get(key) is not None]
        if asked:
            raise SpecError(
                method,
                expected=f"elements and an operation that can go with {', '.join(asked)}",
                got="a collective, a derived datatype, an operation or elements that only MPI knows",
                remedy=f"Leave {', '.join(asked)} out.",
                rank=self.rank,
            )

    def _codec(self, form: Form, options: Options) -> Codec:
        """Return the codec of a call; the communicator's own stands back where it cannot hold the elements."""
        dtype = form.some.buffer.dtype
        explicit = options.get("codec")
        if explicit is not None:
            codec = find(explicit)
            codec.check_dtype(dtype)
            return codec
        role = options.get("role") or ""
        if role not in self._codecs:
            known = ", ".join(sorted(filter(None, self._codecs)))
            raise SpecError(
                "role",
                expected=f"one of {known}" if known else "none: the communicator has no roles",
                got=repr(role),
                remedy="Give the communicator a codec for it: Communicator(..., roles={...}).",
                rank=self.rank,
            )
        codec = self._codecs[role]
        return codec if dtype.name in codec.dtypes else find("none")

    def _is_small(self, form: Form, codec: Codec | None) -> bool:
        """Say whether MPI's own is at least as fast, from what all ranks know."""
        if codec is None or not can_do(form):
            return False
        if form.counts is None:
            # Open MPI 5 gives wrong results in MPI_Ialltoallv in place where some counts are 0.
            return codec.name == "none" and not (form.collective == "alltoall" and form.in_place)
        nbytes = sum(form.counts) * form.some.buffer.dtype.itemsize
        return nbytes <= (max(SHORT, self._settings.small) if codec.name == "none" else self._settings.small)

    def _algorithm(self, form: Form, wanted: str | Algorithm | None) -> Algorithm:
        """Return the schedule for a call: by its name, from a file, or as given."""
        if isinstance(wanted, str) and not wanted.endswith(".xml"):
            return build(form.collective, wanted, self.size, form.root, in_place=form.in_place)
        if wanted is None:
            name = algorithms(form.collective)[0].name
            return build(form.collective, name, self.size, form.root, in_place=form.in_place)
        given = checked(wanted) if isinstance(wanted, Algorithm) else _from_file(wanted)
        self._check_fits(given, form)
        return given

    def _check_fits(self, given: Algorithm, form: Form) -> None:
        # The root alone says that it works in place; to the others a schedule is the same either way.
        elsewhere = form.root != self.rank and form.collective in ("reduce", "gather", "scatter")
        wanted = form.collective, self.size, given.in_place if elsewhere else form.in_place, form.root
        got = given.collective, given.ranks, given.in_place, given.goal.root
        if wanted != got:
            kind = "{} on {} ranks, in place: {}, root {}"
            raise ScheduleError(
                f"algorithm {given.name}",
                expected=kind.format(*wanted),
                got=kind.format(*got),
                remedy="Load a schedule that was made for this call.",
                rank=self.rank,
            )

    def _run_plainly(self, method: str, buffers: tuple[object, ...]) -> None:
        """Carry out a method by the first schedule of its collective, with no codec."""
        collective = "reduce_scatter" if method == "Reduce_scatter_block" else {"Bcast": "broadcast"}.get(method)
        name = algorithms(collective or method.lower())[0].name
        self.block(method, buffers, {"algorithm": name, "codec": "none", "chunk": DEFAULT_CHUNK})

    # The engine's way

    def _submit(self, form: Form, choice: Choice, options: Options, *, background: bool) -> Job:
        assert choice.codec is not None and choice.algorithm is not None
        device = device_of(form.sent, form.received)
        packing = Packing(device, wire=choice.codec.name == "none")
        sent, received = packing.via(form.sent, writable=False), packing.via(form.received, writable=True)
        if form.lands_at_start and received is not None:
            received = packing.landing(received)
        piece = choice.piece
        if form.counts is not None:
            piece = min(piece, max(1, -(-max(form.counts, default=0) // choice.algorithm.chunks)))
        layout = Layout(choice.algorithm.goal, sent, received, piece)
        dtype = form.some.buffer.dtype
        coder = self._coder(choice.codec, device, piece * dtype.itemsize < INLINE_BYTES)
        for blocks in (form.sent, form.received):
            if blocks and blocks.buffer.device == device.name:
                order_after(blocks.buffer, coder.stream)
        name = options.get("name") or ""
        with self.crank.lock:
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
                plain=choice.codec.name == "none",
                before=packing.fill if packing.needed else None,
                after=packing.empty if packing.needed else None,
            )
            said = f"{form.said}, {choice.codec.spec}, {choice.algorithm.name}, chunks of {choice.piece}"
            job = Job(
                task,
                said,
                name=name,
                priority=options.get("priority", 0),
                uneven=form.counts is None,
                trace=0 if name else self.engine.watch.trace,
            )
            job.when_done = self._told(name, options)
        self.crank.submit(job, background=background)
        return job

    def _told(self, name: str, options: Options) -> Any:
        callback = options.get("callback")

        def told(job: Job) -> None:
            if name:
                self._completed.append(name)
            if callback is not None and job.error is None:
                callback()

        return told if name or callback else None

    def _coder(self, codec: Codec, device: Device, inline: bool) -> Coder:
        """Return the coder that all collectives of this kind share, stream and all."""
        key = (id(codec) if isinstance(codec, Auto) else codec.spec), device.name, inline
        if key not in self._coders:
            self._coders[key] = Coder(codec, device, inline=inline, wire_reaches_gpu=cuda_aware().aware)
        return self._coders[key]

    # MPI's way

    def _straight(self, method: str, form: Form | None, args: tuple[Any, ...], choice: Choice) -> None:
        """Make a call of MPI's own; the first of its kind only when all ranks have said that they do."""
        meeting = self._meeting(method, form, choice)
        if meeting is not None:
            self.crank.submit(meeting, background=False)
            Request(meeting, self.crank).Wait()
        self.engine.watch.note(sum(_extent(form)))
        self._plainly(method, form, args)

    def _plainly(self, method: str, form: Form | None, args: tuple[Any, ...]) -> Any:
        """Call MPI, by way of the host where it cannot reach the elements."""
        if form is None or passes(form, args):
            return self._call(method, args)
        detour = Detour(method, form, args)
        try:
            return self._call(method, detour.args)
        finally:
            detour.finish()

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call MPI, and go on with what is under way meanwhile if no thread does.

        Then all ranks do the same, busy or not: MPI does not match a collective that blocks with one that does not.
        """
        if self.crank.background:
            self.engine.watch.outside = method
            try:
                return getattr(self._plain, method)(*args)
            finally:
                self.engine.watch.outside = None
        request = getattr(self._plain, f"I{method.lower()}")(*args)
        while not request.Test():
            self.crank.turn()
        return None

    def _told_by_mpi(self, method: str, options: Options) -> Callable[[], None] | None:
        """Return what calls back for a call of MPI's own; if it raises, the other ranks hear so at their next call."""
        callback = options.get("callback")
        if callback is None:
            return None

        def told() -> None:
            try:
                callback()
            except Exception as error:
                with self.crank.lock:
                    self.engine.alarm(Job(Meeting(method)), error)
                raise

        return told

    def _start_straight(
        self, method: str, form: Form | None, args: tuple[Any, ...], choice: Choice, told: Callable[[], None] | None
    ) -> Request:
        meeting = self._meeting(method, form, choice)
        if meeting is not None:
            self.crank.submit(meeting)
        self.engine.watch.note(sum(_extent(form)))
        if form is None or passes(form, args):
            request, detour = getattr(self._plain, f"I{method.lower()}")(*args), None
        else:
            detour = Detour(method, form, args)
            request = getattr(self._plain, f"I{method.lower()}")(*detour.args)
        return PlainRequest(request, meeting, self.crank, (args, form), detour, self.check_dead, told)

    def _meeting(self, method: str, form: Form | None, choice: Choice) -> Job | None:
        """Return the call in which the ranks compare what they are about to do, unless they have done so before."""
        nbytes, root = _extent(form)
        codec = f", {choice.codec.spec}" if choice.codec else ""
        said = f"{form.said if form else 'elements that only MPI knows'}{codec}, by MPI's own"
        kind = (method, nbytes.bit_length(), form.some.buffer.dtype.name, root, form.op, codec) if form else (method,)
        if self.size == 1 or kind in self._agreed:
            return None
        self._agreed.add(kind)
        job = Job(Meeting(method), said, trace=self.engine.watch.trace)
        job.when_done = self._forget_if_wrong
        return job

    def _forget_if_wrong(self, meeting: Job) -> None:
        """Ask again from now on: when ranks disagree, so do their memories of what they agreed on."""
        if meeting.error is not None:
            self._agreed.clear()
            self.quick.clear()

    def _end_it(self, error: Exception) -> None:
        """End a call of MPI's own that will never come back: revoke it where MPI can, else end the job, saying why."""
        step = self.engine.watch.steps
        with suppress(MPI.Exception, NotImplementedError):
            self._plain.Revoke()
        time.sleep(REVOKED_SECONDS)
        if self.engine.watch.outside is not None and self.engine.watch.steps == step:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)

    # Names

    def register(self, name: str, collective: str, options: Options) -> None:
        """Keep the options of a named collective."""
        method = next((known for known in FORMS if known.lower() == collective.lower()), None)
        if method is None or name in self._registered:
            raise SpecError(
                f"register {name!r}",
                expected=f"one of {', '.join(map(str.lower, FORMS))}, and a name that is not taken",
                got=f"{collective!r}" if method is None else "a name that stands for a collective already",
                remedy="Choose another name, or mpi4py's name of the collective.",
                rank=self.rank,
            )
        self._registered[name] = Registered(method, options)

    def run(self, name: str, args: tuple[Any, ...], options: Options) -> Request:
        """Start a named collective that was registered."""
        known = self._registered.get(name)
        if known is None:
            raise SpecError(
                f"run {name!r}",
                expected=f"a registered name: {', '.join(sorted(self._registered)) or 'there is none'}",
                got=repr(name),
                remedy="Call register(name, collective) first.",
                rank=self.rank,
            )
        return self.begin(known.method, args, {**known.options, **options, "name": name})

    def completed(self) -> list[str]:
        """Return the names of what was completed since the last time, in that order."""
        self.crank.turn()
        return [self._completed.popleft() for _ in range(len(self._completed))]


_open: weakref.WeakSet[Caller] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """End the threads that call MPI: they must be gone before it is, and mpi4py ends it after these handlers."""
    for caller in list(_open):
        if MPI.Is_finalized():
            caller.crank.close()
        else:
            caller.leave()
    if MPI.Is_initialized() and not MPI.Is_finalized() and dead_ranks(MPI.COMM_WORLD):
        _finalize_without_the_dead()


def _finalize_without_the_dead() -> None:
    """End MPI, or the process where that takes too long: Open MPI's end may wait for ranks that are dead."""
    status = int(getattr(sys, "last_value", None) is not None)
    watch = threading.Timer(FINALIZE_SECONDS, os._exit, [status])
    watch.daemon = True
    watch.start()
    ctypes.CDLL(MPI.__file__).MPI_Finalize()  # unlike mpi4py's own this lets other threads run
    watch.cancel()


def _extent(form: Form | None) -> tuple[int, int]:
    """Return the bytes of a call, as far as all ranks know them, and its root."""
    return (sum(form.counts or ()) * form.some.buffer.dtype.itemsize, form.root) if form else (0, 0)


@lru_cache(maxsize=64)
def _from_file(path: str) -> Algorithm:
    """Read and check a schedule once."""
    return checked(xml.read(Path(path)))
