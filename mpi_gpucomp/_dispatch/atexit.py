"""The end of the interpreter: nobody is left waiting for a rank that goes, and no thread calls an MPI that is gone."""

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
    from mpi_gpucomp._dispatch.dispatcher import Caller

__all__ = ["OPEN"]

LEAVE_SECONDS = 10.0
"""How long the end of the interpreter waits for collectives that nobody has waited for."""
FINALIZE_SECONDS = 3.0
"""How long the end of MPI may take when ranks are dead."""
OPEN: weakref.WeakSet[Caller] = weakref.WeakSet()
"""Those that were not closed."""


def _leave_one(caller: Caller) -> None:
    """End with the interpreter, and take the job along if others would wait for this rank for ever."""
    error = getattr(sys, "last_value", None)
    if error is None:
        until = time.monotonic() + LEAVE_SECONDS
        caller.driver.wait_until(lambda: caller.engine.under_way is None or time.monotonic() > until)
    caller.driver.close()
    under_way = caller.engine.under_way or (error and caller.engine.broken_off)
    if under_way:
        why = f"with {type(error).__name__}" if error else "without waiting for it"
        said = f"rank {caller.rank} ends {why} in the middle of {under_way}, and the whole job with it"
        print(said, file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
    if error is not None:
        caller.engine.leave(error)
    caller.transport.abandon()


@atexit.register
def _leave() -> None:
    """End the threads that call MPI: they must be gone before it is, and mpi4py ends it after these handlers."""
    for caller in list(OPEN):
        if MPI.Is_finalized():
            caller.driver.close()
        else:
            _leave_one(caller)
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
