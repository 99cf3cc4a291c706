"""Run under mpirun: requests that are dropped, outlive their communicator or hold buffers; prints what went wrong."""

from __future__ import annotations

import array
import faulthandler
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._dispatch import in_flight, passthrough

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
ROUTES: dict[str, dict[str, Any]] = {
    "native": {},
    "engine": {"codec": "split", "algorithm": "ring"},
}
SUM = float(sum(range(SIZE)))
wrong: list[str] = []


def check(right: object, what: str, got: object = "") -> None:
    if not right:
        wrong.append(f"rank {RANK}: {what} {got}")


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Free


def free_completes_collectives() -> None:
    for route, options in ROUTES.items():
        for count in (100, 300_000):
            comm = Communicator(WORLD)
            sums = [np.full(count, RANK, np.float32) for _ in range(3)]
            requests = [comm.Iallreduce(MPI.IN_PLACE, one, **options) for one in sums]
            comm.Free()
            for one, request in zip(sums, requests, strict=True):
                check(error_of(request.Wait) == "no error" and (one == SUM).all(), f"{route} {count}", one[:3])


def free_completes_messages() -> None:
    for codec in (None, "split"):
        for count in (100, 300_000):
            comm = Communicator(WORLD)
            got = np.zeros(count, np.float32)
            receive = comm.Irecv(got, LEFT, 3, codec=codec)
            send = comm.Isend(np.full(count, RANK, np.float32), RIGHT, 3, codec=codec)
            comm.Free()
            errors = error_of(receive.Wait), error_of(send.Wait)
            check(errors == ("no error",) * 2 and (got == LEFT).all(), f"messages {codec} {count}", errors)


def free_ends_messages_without_a_match() -> None:
    for codec in (None, "split"):
        for method, other in (("Irecv", "send"), ("Isend", "receive")):
            comm = Communicator(WORLD)
            request = getattr(comm, method)(np.zeros(300_000, np.float32), RIGHT, 3, codec=codec)
            comm.Free()
            expected = (
                f"SpecError: rank {RANK}: {method}: expected a matching {other} before Free, got none when all ranks "
                "had called Free. Wait for messages before Free."
            )
            check(error_of(request.Wait) == expected, f"{method} {codec}", error_of(request.Wait))


def free_ends_calls_that_a_rank_has_not_joined() -> None:
    for options in ROUTES.values():
        comm = Communicator(WORLD)
        request = comm.Iallreduce(MPI.IN_PLACE, np.zeros(100, np.float32), **options) if RANK else None
        comm.Free()
        if request is not None:
            error = error_of(request.Wait)
            check("before Free, got Free, which all ranks have called, rank 0 without starting it" in error, error)


def free_compares_native_calls() -> None:
    comm = Communicator(WORLD)
    values = np.zeros(100, np.float32)
    for _ in range(2):
        comm.Bcast(values)
    if RANK == 0 and SIZE > 1:
        comm.Bcast(values)
    error = error_of(comm.Free)
    check(error.startswith(f"AgreementError: rank {RANK}: Free") or SIZE == 1, "native calls that differ", error)


def free_after_an_error_on_one_rank() -> None:
    comm = Communicator(WORLD)
    if RANK == 0:
        check("SpecError" in error_of(lambda: comm.Bcast(np.zeros(3), root=99)), "a wrong root")
    check(error_of(comm.Free) == "no error", "Free after an error on one rank")


# Buffers


def buffers_keep_their_size() -> None:
    for options in ({}, {"codec": "split"}):
        for count in (100, 300_000):
            for buffer in (bytearray(8 * count), array.array("d", [0.0] * count)):
                comm = Communicator(WORLD)
                request = comm.Ibcast([buffer, MPI.DOUBLE], **options)
                check("BufferError" in error_of(buffer.pop), f"{type(buffer).__name__} {count} {options} resized")
                request.Wait()
                check(error_of(buffer.pop) == "no error", f"{type(buffer).__name__} {count} {options} still exported")
                comm.Free()


def dropped_requests() -> None:
    for options in ROUTES.values():
        comm = Communicator(WORLD)
        kept = np.full(100, RANK, np.float64)
        for number in range(100):
            comm.Iallreduce(MPI.IN_PLACE, np.full(100, float(number)), **options)
            comm.Isend(np.full(100, float(number)), RIGHT, number)
            comm.Irecv(np.zeros(100), LEFT, number)
            np.zeros(100)  # takes the memory of the one before, if that was freed
        comm.Iallreduce(MPI.IN_PLACE, kept, **options).Wait()
        gc.collect()
        check((kept == SUM).all(), "the call after dropped ones", kept[:3])
        comm.Free()


# Callbacks


def callbacks_need_no_wait() -> None:
    """Expect a callback as soon as the call has completed, whatever the route; without Wait, Test or another call."""
    for route, options in ROUTES.items():
        for count in (100, 300_000):
            comm, called = Communicator(WORLD), list[int]()
            total = np.full(count, RANK, np.float64)
            request = comm.Iallreduce(
                MPI.IN_PLACE, total, callback=lambda total=total, called=called: called.append(total[-1]), **options
            )
            while not called:  # for ever, if it is not called
                time.sleep(1e-3)
            request.Wait()
            check(called == [SUM], f"callback, {route} {count}", called)
            comm.Free()


def callbacks_that_raise() -> None:
    comm, called = Communicator(WORLD), list[int]()

    def fail() -> None:
        called.append(1)
        raise ValueError("not today")

    request = comm.Iallreduce(MPI.IN_PLACE, np.zeros(100), callback=fail if RANK == 0 else None)
    while RANK == 0 and not called:
        time.sleep(1e-3)
    error = error_of(request.Wait)
    check(error == ("ValueError: not today" if RANK == 0 else "no error"), "a callback that raises", error)
    WORLD.Barrier()
    error = error_of(lambda: comm.Allreduce(MPI.IN_PLACE, np.zeros(300_000), codec="split"))
    check("not today" in error, "the call after it", error)
    comm.Free()


# Comparisons


def a_comparison_that_completes_during_a_call() -> None:
    """Start a call whose class is being compared, and let the comparison complete before the call is deferred."""
    comm = Communicator(WORLD)
    native, accepts = comm._native, passthrough.mpi4py_accepts
    first = comm.Iallreduce(MPI.IN_PLACE, np.zeros(100))

    def wait_for_comparison(call: Any) -> bool:
        while native._checks:
            time.sleep(1e-3)
        return accepts(call)

    passthrough.mpi4py_accepts = wait_for_comparison
    total = np.full(100, RANK, np.float64)
    second = comm.Iallreduce(MPI.IN_PLACE, total)
    passthrough.mpi4py_accepts = accepts
    first.Wait()
    second.Wait()
    check((total == SUM).all(), "a call that was deferred last", total[:3])
    comm.Free()


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    in_flight.GRACE = 0.1
    free_completes_collectives()
    free_completes_messages()
    free_ends_messages_without_a_match()
    if SIZE > 1:
        free_ends_calls_that_a_rank_has_not_joined()
    free_compares_native_calls()
    free_after_an_error_on_one_rank()
    buffers_keep_their_size()
    dropped_requests()
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        callbacks_need_no_wait()
        callbacks_that_raise()
        a_comparison_that_completes_during_a_call()
    everyone = WORLD.gather(wrong)
    if RANK == 0:
        print(json.dumps([text for texts in everyone or [] for text in texts]))


if __name__ == "__main__":
    main()
