"""Calls of MPI's own, made for a Communicator: compared among the ranks first, watched, and their errors understood."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI

from mpi_gpucomp._call.staging import Detour, passes
from mpi_gpucomp._tuning.mpi_algorithms import DEFAULT
from mpi_gpucomp.engine.agreement import AgreementCheck
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.request import PlainRequest, Request
from mpi_gpucomp.transport.mpi import lost, means_death

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import Form
    from mpi_gpucomp._dispatch.plan import CallOptions, Calls, Choice
    from mpi_gpucomp._tuning.mpi_algorithms import Better
    from mpi_gpucomp.engine.engine import Engine
    from mpi_gpucomp.engine.progress import ProgressDriver

__all__ = ["Quick", "Straight"]

Quick: TypeAlias = "dict[tuple[int, str, int], tuple[MPI.Intracomm, Calls]]"

REVOKED_SECONDS = 1.0
"""How long a call of MPI's own may take to come back once it was revoked; an MPI with no ULFM does not even say so."""


class Straight:
    """The way of one communicator to MPI."""

    def __init__(
        self,
        plain: MPI.Intracomm,
        engine: Engine,
        driver: ProgressDriver,
        derived_comms: list[MPI.Intracomm],
        *,
        railed: bool,
    ) -> None:
        """Call the methods of `plain`, which nobody else uses; `derived_comms` are those that are revoked with it.

        Where the ranks are `railed`, what can do without MPI does.
        """
        self._kin, self._railed = derived_comms, railed
        self._plain, self._engine, self._driver, self._watch = plain, engine, driver, engine.watch
        engine.watch.stuck_outside = self._end_it
        self._agreed: set[object] = set()
        """Kinds of calls that all ranks were found to make alike."""
        self._better: dict[str, list[Better]] = {}
        self.quick: Quick = {}
        """Where to call those on numpy's arrays that are told by length, type, root or operation, to lose no time.

        And for how many calls that holds.
        """

    def improve(self, method: str, better: Better) -> None:
        """Use another communicator for messages of some lengths from now on; all ranks are told the same."""
        self._better.setdefault(method, []).append(better)
        self._kin.append(better.comm)
        self.quick.clear()

    def block(self, method: str, form: Form | None, args: tuple[Any, ...], choice: Choice) -> MPI.Intracomm:
        """Make a call of MPI's own, the first of its kind only when all ranks have said that they do; return where."""
        meeting = self._meeting(method, form, choice)
        if meeting is not None:
            self._hold(meeting)
        self._watch.note(sum(_extent(form)))
        on = self._where(method, form, choice)
        self._plainly(method, form, args, on)
        return on

    def _where(self, method: str, form: Form | None, choice: Choice) -> MPI.Intracomm:
        suited = (better.comm for better in self._better.get(method, ()) if better.suits(_extent(form)[0]))
        return choice.on or next(suited, self._plain)

    def algorithm(self, method: str, form: Form | None, choice: Choice) -> str:
        """Return the name of the algorithm that MPI's own takes."""
        on = self._where(method, form, choice)
        return DEFAULT if on is self._plain else on.Get_name()

    def _plainly(self, method: str, form: Form | None, args: tuple[Any, ...], on: MPI.Intracomm) -> None:
        """Call MPI, by way of the host where it cannot reach the elements."""
        if form is None or passes(form, args):
            self.call(method, args, on)
            return
        detour = Detour(method, form, args)
        try:
            self.call(method, detour.args, on)
        finally:
            detour.finish()

    def call(self, method: str, args: tuple[Any, ...], on: MPI.Intracomm) -> Any:
        """Call MPI, and go on with what is under way meanwhile if no thread does.

        Then all ranks do the same, busy or not: MPI does not match a collective that blocks with one that does not.
        """
        if self._driver.background:
            self._watch.outside = method
            try:
                return getattr(on, method)(*args)
            finally:
                self._watch.outside = None
        request = getattr(self._plain, f"I{method.lower()}")(*args)
        while not request.Test():
            self._driver.turn()
        return None

    def told(self, method: str, options: CallOptions) -> Callable[[], None] | None:
        """Return what calls back for a call of MPI's own; if it raises, the other ranks hear so at their next call."""
        callback = options.get("callback")
        if callback is None:
            return None

        def told() -> None:
            try:
                callback()
            except Exception as error:
                with self._driver.lock:
                    self._engine.alarm(Job(AgreementCheck(method)), error)
                raise

        return told

    def start(
        self, method: str, form: Form | None, args: tuple[Any, ...], choice: Choice, told: Callable[[], None] | None
    ) -> Request:
        """Start a call of MPI's own; `told` is called when it is complete."""
        meeting = self._meeting(method, form, choice)
        if meeting is not None:
            self._driver.submit(meeting)
        self._watch.note(sum(_extent(form)))
        if form is None or passes(form, args):
            request, detour = getattr(self._plain, f"I{method.lower()}")(*args), None
        else:
            detour = Detour(method, form, args)
            request = getattr(self._plain, f"I{method.lower()}")(*detour.args)
        return PlainRequest(request, meeting, self._driver, (args, form), detour, self.check_dead, told)

    def _meeting(self, method: str, form: Form | None, choice: Choice) -> Job | None:
        """Return the call in which the ranks compare what they are about to do, unless they have done so before."""
        nbytes, root = _extent(form)
        codec = f", {choice.codec.spec}" if choice.codec else ""
        said = f"{form.said if form else 'elements that only MPI knows'}{codec}, by MPI's own"
        kind = (method, nbytes.bit_length(), form.some.buffer.dtype.name, root, form.op, codec) if form else (method,)
        if self._plain.size == 1 or kind in self._agreed:
            return None
        self._agreed.add(kind)
        job = Job(AgreementCheck(method), said, everyone=True)
        job.when_done = self._forget_if_wrong
        return job

    def _forget_if_wrong(self, meeting: Job) -> None:
        """Ask again from now on: when ranks disagree, so do their memories of what they agreed on."""
        if meeting.error is not None:
            self._agreed.clear()
            self.quick.clear()

    def _end_it(self, error: Exception) -> None:
        """End a call of MPI's own that will never come back: revoke it where MPI can, else end the job, saying why."""
        step = self._watch.steps
        with suppress(MPI.Exception, NotImplementedError):
            for comm in (self._plain, *self._kin):
                comm.Revoke()
        time.sleep(REVOKED_SECONDS)
        if self._watch.outside is not None and self._watch.steps == step:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)

    def check_dead(self, error: MPI.Exception) -> None:
        """Raise our error instead of MPI's where a rank is dead, and let all ranks hear of it."""
        if means_death(error, self._plain):
            with self._driver.lock:
                self._engine.give_up(lost(error, self._plain.rank, self._plain))
                assert self._engine.broken is not None
                raise self._engine.broken from error

    def meet(self, method: str, said: str) -> None:
        """Wait until all ranks have said the same of a call; raise if they do not."""
        self._hold(Job(AgreementCheck(method), said, everyone=True))

    def _hold(self, meeting: Job) -> None:
        self._driver.submit(meeting, background=False)
        Request(meeting, self._driver).Wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._railed:
            self._hold(Job(AgreementCheck("Barrier"), everyone=True))  # in which all ranks hear of all
            return
        self._watch.note(0)
        try:
            self.call("Barrier", (), self._plain)
        except MPI.Exception as error:
            self.check_dead(error)
            raise


def _extent(form: Form | None) -> tuple[int, int]:
    """Return the bytes of a call, as far as all ranks know them, and its root."""
    return (form.nbytes, form.root) if form else (0, 0)
