"""The dispatcher: from the arguments of a call to its plan, and from the plan to the runtime."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._call.buffers import read_blocks
from mpi_gpucomp._call.calls import find_method, parse_call
from mpi_gpucomp._dispatch.plan import Route
from mpi_gpucomp._dispatch.policy import Policy
from mpi_gpucomp._dispatch.runtime import Runtime
from mpi_gpucomp._tuning.tuner import Tuner
from mpi_gpucomp.device import gpu_in_use
from mpi_gpucomp.device.producer import stream_handle
from mpi_gpucomp.errors import AgreementError, DeadlockError, PeerError, RankFailedError, SpecError
from mpi_gpucomp.schedule.ir import COLLECTIVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp._call.calls import Call, CallOptions
    from mpi_gpucomp._dispatch.plan import Lifetime, Plan, Settings
    from mpi_gpucomp.request import Request

__all__ = ["Dispatcher", "PreparedCall"]


class Dispatcher:
    """Plans and runs the calls of one communicator."""

    def __init__(self, comm: MPI.Intracomm, settings: Settings) -> None:
        """Take a communicator for exclusive use: collective."""
        self.runtime = Runtime(comm, settings)
        self._rank, self._size = comm.rank, comm.size
        self.tuner = Tuner(self.runtime)
        self._policy = Policy(self.runtime, settings, self.tuner)

    def close(self, *, broken: bool = False) -> None:
        """Stop progress and free what MPI holds: collective, unless the communicator is `broken`."""
        self.runtime.stop()
        if not broken and self.runtime.engine.broken is None:
            self.tuner.close()
        self.runtime.close(broken=broken)

    def run(self, method: str, args: tuple[Any, ...], options: CallOptions) -> tuple[MPI.Intracomm, Lifetime] | None:
        """Run a blocking call.

        If later calls with the same signature may bypass dispatch, return the communicator to use and for how long.
        """
        try:
            call, plan = self._planned(method, args, options, blocking=True)
            return self._execute(plan, call)
        except MPI.Exception as error:
            self.runtime.native.check_dead(error)
            raise

    def _execute(self, plan: Plan, call: Call) -> tuple[MPI.Intracomm, Lifetime] | None:
        if plan.race is None:
            return self.runtime.execute(plan, call)
        start = perf_counter()
        try:
            return self.runtime.execute(plan, call)
        finally:
            self.tuner.observe(plan, call, perf_counter() - start)

    def start(self, method: str, args: tuple[Any, ...], options: CallOptions) -> Request:
        """Start a non-blocking call."""
        try:
            call, plan = self._planned(method, args, options, blocking=False)
            return self.runtime.start(plan, call)
        except MPI.Exception as error:
            self.runtime.native.check_dead(error)
            raise

    def prepare(self, method: str, args: tuple[Any, ...], options: CallOptions) -> PreparedCall:
        """Plan a non-blocking call once, to be started any number of times."""
        call, plan = self._planned(method, args, options, blocking=False)
        return PreparedCall(self.runtime, plan, call)

    def _planned(
        self, method: str, args: tuple[Any, ...], options: CallOptions, *, blocking: bool, explore: bool = True
    ) -> tuple[Call, Plan]:
        """Parse and plan a call. Whatever goes wrong with that on this rank is reported to the others."""
        if self.runtime.engine.broken is not None:
            raise self.runtime.engine.broken
        call = None
        try:
            call = parse_call(method, args, options, self._rank, self._size, blocking=blocking)
            return call, self._policy.plan(call, explore=explore)
        except Exception as error:
            self._report(call.title if call else method, options.get("name"), error)
            raise

    def _find(self, title: str, method: str) -> str:
        """Return mpi4py's name of a collective."""
        try:
            return find_method(title, method, self._rank)
        except Exception as error:
            self._report(title, None, error)
            raise

    def _report(self, title: str, name: object, error: Exception) -> None:
        """Report an error of this rank to the ranks that make the same call."""
        # Errors of a comparison are those of all ranks that joined it: a report would be one call more than they make.
        if not isinstance(error, (AgreementError, DeadlockError, PeerError, RankFailedError)):
            self.runtime.report(title, name if isinstance(name, str) else "", error)

    # Named collectives

    def run_named(self, name: str, args: tuple[Any, ...], options: CallOptions) -> Request:
        """Start a registered collective."""
        try:
            known = self.runtime.names.find(name)
        except Exception as error:
            self._report(f"run {name!r}", name, error)
            raise
        return self.start(known.method, args, {**known.options, **options, "name": name})

    # Tuning

    def calibrate(self, methods: tuple[str, ...]) -> None:
        """Measure what these methods need for `auto`: collective."""
        for wanted in methods:
            bare = _bare(wanted)
            known = next((one for one in COLLECTIVES.values() if _bare(one.method) == bare), None)
            if known is None:
                error = SpecError(
                    "calibrate",
                    expected=f"some of {', '.join(one.method for one in COLLECTIVES.values())}",
                    got=repr(wanted),
                    remedy="Name the methods that will be called.",
                    rank=self._rank,
                )
                self._report("calibrate", None, error)
                raise error
            device = gpu_in_use() or "host"
            measured = self.tuner.is_calibrated(known.name)
            self.runtime.agree("calibrate", known.name)
            if not measured or self.tuner.misses_gpus(known.name, device):
                self.tuner.calibrate(known.name, device)

    def autotune(self, method: str, args: tuple[Any, ...], options: CallOptions) -> Plan:
        """Repeat a call until `auto` has found the fastest plan for it, and return that."""
        method = self._find("autotune", method)
        self.runtime.native.fast_path.clear()  # calls that bypass dispatch now may find a better plan
        self.tuner.racing_reductions = True
        try:
            while True:
                call, plan = self._planned(method, args, options, blocking=True)
                self._execute(plan, call)
                if plan.race is None:
                    return self._with_comm(plan, call)
        finally:
            self.tuner.racing_reductions = False

    def explain(self, method: str, args: tuple[Any, ...], options: CallOptions) -> Plan:
        """Return the plan that a blocking call would get, without running it."""
        method = self._find("explain", method)
        call, plan = self._planned(method, args, options, blocking=True, explore=False)
        return self._with_comm(plan, call)

    def _with_comm(self, plan: Plan, call: Call) -> Plan:
        """Name the communicator of a passed-through call, which has the name of its algorithm."""
        if plan.route is Route.ENGINE:
            return plan
        comm = self.runtime.native.comm_for(call, plan)
        return replace(plan, comm=None if comm is self.runtime.comm else comm)

    # Arguments that take all ranks

    def share_counts(self, title: str, sendbuf: Any, recvbuf: Any, recvcounts: Any, options: CallOptions) -> Any:
        """Return the counts of a reduce-scatter; where they are left out the ranks exchange them, as in mpi4py.

        The ranks of a named call may all be elsewhere, so there they are not exchanged.
        """
        if recvcounts is not None or sendbuf is MPI.IN_PLACE or options.get("name") is not None:
            return recvcounts
        counts = np.zeros(self._size, np.int64)
        try:
            stream = stream_handle(options.get("stream"))
            read = partial(read_blocks, topic=title, rank=self._rank, stream=stream)
            own = read(recvbuf, writable=True, allow_unaligned=True).counts[0]
        except Exception:
            own = -1  # raised again when the call itself is parsed, and reported to the other ranks
        call = parse_call("Allgather", (np.array([own]), counts), {}, self._rank, self._size)
        call = replace(call, part_of=title)
        try:
            self.runtime.execute(self._policy.plan(call), call)
        except MPI.Exception as error:
            self.runtime.native.check_dead(error)
            raise
        return counts.tolist() if counts.min() >= 0 else None


class PreparedCall:
    """A non-blocking call that was planned, and can be started any number of times."""

    def __init__(self, runtime: Runtime, plan: Plan, call: Call) -> None:
        """Start nothing yet."""
        self._runtime, self._plan, self._call = runtime, plan, call
        # The events that the call has are of now; a later start has to follow what the caller does until then.
        self._on_gpu = any(one is not None and one.buffer.device != "host" for one in (call.sent, call.received))

    def __call__(self) -> Request:
        """Start the call behind the producers of its buffers, which are this thread's current streams."""
        return self.behind_producers()()

    def behind_producers(self) -> Callable[[], Request]:
        """Return what starts the call, in any thread, behind what its producers have queued until now."""
        plan, call = self._plan, self._call
        if self._on_gpu:
            rank, size = self._runtime.rank, self._runtime.size
            call = parse_call(call.method, call.args, call.options, rank, size, blocking=False)
        return lambda: self._runtime.start(plan, call)


def _bare(method: str) -> str:
    """Return what the variants of a method have in common: one measurement serves all."""
    return method.lower().removeprefix("i").removesuffix("v").removesuffix("_block")
