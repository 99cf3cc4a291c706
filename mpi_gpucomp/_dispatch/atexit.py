"""Interpreter exit: no rank is left waiting for one that exits, and no thread calls MPI after MPI_Finalize."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpi_gpucomp.transport.mpi import dead_ranks

if TYPE_CHECKING:
    from mpi_gpucomp._dispatch.runtime import Runtime

__all__ = ["OPEN"]

DRAIN_SECONDS = 10.0
"""How long exit waits for collectives in flight that were never waited for."""
FINALIZE_SECONDS = 3.0
"""How long MPI_Finalize may take when ranks are dead."""
OPEN: weakref.WeakSet[Runtime] = weakref.WeakSet()
"""Runtimes that have not been closed."""


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
    for runtime in list(OPEN):
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
