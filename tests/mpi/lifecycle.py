"""Check requests, names, callbacks, and the creation and release of communicators."""

from __future__ import annotations

import threading
import time

import numpy as np
from by_algorithm import error_of
from calls import RANK, RANKS, SIZE, WORLD
from comparison import Ledger
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.device import get_device
from mpi_gpucomp.request import Request

LARGE = 30_000
SUM = float(sum(RANKS))


def ranks(count: int = LARGE) -> np.ndarray:
    return np.full(count, RANK, np.float32)


# Requests


def mixed(comm: Communicator) -> tuple[list[np.ndarray], list[Request]]:
    """Start sums in the engine, passed through, and one directly with mpi4py."""
    sums = [ranks(count) for count in (LARGE, 3, LARGE, 10, LARGE)]
    requests = [comm.Iallreduce(MPI.IN_PLACE, one, codec="split" if one.size == LARGE else None) for one in sums]
    sums.append(ranks(5))
    return sums, [*requests, WORLD.Iallreduce(MPI.IN_PLACE, sums[-1])]


def summed(sums: list[np.ndarray]) -> bool:
    return all((one == SUM).all() for one in sums)


def requests(ledger: Ledger, comm: Communicator) -> None:
    sums, in_flight = mixed(comm)
    ledger.check(Request.Waitall(in_flight) is True and summed(sums), "Waitall")
    ledger.check(Request.Waitall(in_flight) is True, "Waitall once more")
    sums, in_flight = mixed(comm)
    while not Request.Testall(in_flight):
        time.sleep(0)
    ledger.check(summed(sums), "Testall")
    sums, in_flight = mixed(comm)
    order = [Request.Waitany(in_flight) for _ in in_flight]
    ledger.same("Waitany", sorted(order), list(range(len(in_flight))))
    ledger.same("Waitany when nothing is active", Request.Waitany(in_flight), MPI.UNDEFINED)
    ledger.check(summed(sums), "what Waitany has waited for")
    lower_case(ledger, comm)


def lower_case(ledger: Ledger, comm: Communicator) -> None:
    """Check the return values of the lower-case methods, which receive no object."""
    for count in (3, LARGE):
        ledger.same("wait", comm.Iallreduce(MPI.IN_PLACE, ranks(count), codec="split").wait(), None)
        request = comm.Iallreduce(MPI.IN_PLACE, ranks(count), codec="split")
        while (answer := request.test()) == (False, None):
            time.sleep(0)
        ledger.same("test", answer, (True, None))  # counted once: how often it is asked depends on the machine
    sums, in_flight = mixed(comm)
    ledger.same("waitall", Request.waitall(in_flight), [None] * len(in_flight))
    ledger.check(summed(sums), "what waitall has waited for")
    pair = [comm.Iallreduce(MPI.IN_PLACE, ranks(3)) for _ in range(2)]
    ledger.same("waitany", {Request.waitany(pair), Request.waitany(pair)}, {(0, None), (1, None)})
    ledger.same("testall", Request.testall(pair), (True, [None, None]))


def many_in_flight(ledger: Ledger, comm: Communicator) -> None:
    sums = [ranks(1000 + number) for number in range(60)]
    order = np.random.default_rng(RANK).permutation(60)
    in_flight = [comm.Iallreduce(MPI.IN_PLACE, sums[number], name=f"many.{number}") for number in order]
    Request.Waitall(in_flight)
    ledger.check(summed(sums), "60 in flight, in another order on every rank")
    sums = [ranks(1000 + number) for number in range(60)]
    Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, one, algorithm="ring") for one in sums])
    ledger.check(summed(sums), "60 in flight without names")


# Buffer arguments


def one_buffer_for_both(ledger: Ledger, comm: Communicator) -> None:
    """Expect an error on every rank from a reduction whose buffers are the same, which MPI does not allow."""
    for count in (7, LARGE):
        for method in ("Allreduce", "Scan", "Reduce_scatter_block"):
            buffer = np.arange(count * SIZE, dtype=np.float32)
            part = buffer[:count] if method == "Reduce_scatter_block" else buffer
            error = error_of(lambda method=method, one=buffer, other=part: getattr(comm, method)(one, other))
            wanted = (
                f"BufferSpecError: rank {RANK}: {method}: expected send and receive buffers in different memory, "
                "got the same memory. Pass MPI.IN_PLACE to send from it."
            )
            ledger.same(f"{method} of {count} from and to one buffer", error, wanted)


def counts_left_out(ledger: Ledger, comm: Communicator) -> None:
    """Reduce-scatter blocks of different lengths without recvcounts, as mpi4py allows."""
    for count in (7, LARGE):
        for method in ("Reduce_scatter", "Ireduce_scatter"):
            values = np.arange(sum(count + rank for rank in RANKS), dtype=np.float32) % 11 + RANK
            got = [np.zeros(count + RANK, np.float32) for _ in range(2)]
            for where, room in zip((comm, WORLD), got, strict=True):
                request = getattr(where, method)(values, room)
                request and request.Wait()
                WORLD.Barrier()  # mpi4py's call waits holding the GIL: ours must have completed on all ranks
            ledger.check(got[0].tobytes() == got[1].tobytes(), f"{method} without counts", got[0][:5])


def strided_after_contiguous(ledger: Ledger, comm: Communicator) -> None:
    """Pass strided arrays after contiguous ones of the same length and type."""
    for _ in range(3):
        contiguous, spread = ranks(6), np.zeros(12, np.float32)
        comm.Bcast(contiguous, SIZE - 1)
        comm.Allreduce(MPI.IN_PLACE, contiguous)
        spread[::2] = RANK
        comm.Bcast(spread[::2], SIZE - 1)
        ledger.same("Bcast into gaps", spread.tolist(), [SIZE - 1, 0] * 6)
        spread[::2] = RANK
        total = ranks(6)
        comm.Allreduce(spread[::2], total)
        comm.Allreduce(total, spread[::2], MPI.MAX)
        ledger.same("Allreduce from and into gaps", (total.tolist(), spread.tolist()), ([SUM] * 6, [SUM, 0] * 6))


# Names and callbacks


def names(ledger: Ledger, comm: Communicator) -> None:
    comm.register("total", "allreduce", codec="split")
    comm.register("all", "Allgather")
    comm.completed()  # discard those of earlier checks
    total, gathered = ranks(), np.zeros(SIZE * LARGE, np.float32)
    calls = [("total", (MPI.IN_PLACE, total)), ("all", (ranks(), gathered))]
    in_flight = [comm.run(name, *arguments) for name, arguments in (calls[::-1] if RANK % 2 else calls)]
    Request.Waitall(in_flight)
    ledger.check(summed([total]) and (gathered == np.repeat(RANKS, LARGE)).all(), "registered", total[:5])
    ledger.same("completed", sorted(comm.completed()), ["all", "total"])
    ledger.same("completed once more", comm.completed(), [])
    error = error_of(lambda: comm.register("total", "bcast"))
    ledger.check("got a name that is registered already" in error, "a name twice", error)
    error = error_of(lambda: comm.run("tot", total))
    wanted = "SpecError: rank {}: run 'tot': expected a registered name: all, total, got 'tot'. {}"
    ledger.same("an unknown name", error, wanted.format(RANK, "Call register(name, collective) first."))


def callbacks(ledger: Ledger, comm: Communicator) -> None:
    """Expect callbacks from the engine and from pass-through calls."""
    called: list[int] = []
    for count in (3, LARGE):
        comm.Iallreduce(MPI.IN_PLACE, ranks(count), callback=lambda: called.append(1)).Wait()
        comm.Allreduce(MPI.IN_PLACE, ranks(count), callback=lambda: called.append(2))
        comm.Iallreduce(MPI.IN_PLACE, np.ones(count, int), MPI.BOR, callback=lambda: called.append(3)).Wait()
    ledger.same("callbacks", called, [1, 2, 3] * 2)


def callback_that_starts_another(ledger: Ledger, comm: Communicator) -> None:
    second, requests = ranks(), []

    def start() -> None:
        requests.append(comm.Iallreduce(MPI.IN_PLACE, second, name="second"))

    comm.Iallreduce(MPI.IN_PLACE, ranks(), name="first", callback=start).Wait()
    Request.Waitall(requests)
    ledger.check(summed([second]) and len(requests) == 1, "a callback that starts another", second[:5])


def callback_that_raises(ledger: Ledger) -> None:
    """Expect the exception in Wait and a PeerError on the other ranks; later calls succeed on all ranks."""
    if SIZE == 1:
        return
    comm = Communicator(WORLD, "split", passthrough_bytes=0)

    def fail() -> None:
        raise ValueError("not today")

    error = error_of_any(lambda: comm.Iallreduce(MPI.IN_PLACE, ranks(), callback=fail if RANK == 0 else None).Wait())
    ledger.same("a callback that raises", error, "ValueError: not today" if RANK == 0 else "no error")
    WORLD.Barrier()
    time.sleep(0.2)  # the error reaches the others before they call again
    error = error_of_any(lambda: comm.Allreduce(MPI.IN_PLACE, ranks()))
    ledger.check(error.startswith("PeerError") and "not today" in error, "the call after it", error)
    for number in range(3):
        values = ranks() + number
        comm.Allreduce(MPI.IN_PLACE, values)
        ledger.check(bool((values == SUM + SIZE * number).all()), "calls after that", values[:5])
    comm.Free()


def error_of_any(call: object) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def persistent(ledger: Ledger, comm: Communicator) -> None:
    """Start persistent requests several times, on buffers that change in between."""
    for count in (3, LARGE):
        sent, total, values = ranks(count), ranks(count), ranks(count)
        for options in ({}, {"codec": "split", "algorithm": "ring"}):
            again = comm.Allreduce_init(sent, total, **options)
            for number in range(3):
                sent[:] = RANK + number
                again.Start()
                ledger.check("still active" in error_of_any(again.Start), "a second start")
                again.Wait()
                ledger.check(bool((total == SUM + SIZE * number).all()), f"Allreduce_init {number}", total[:5])
            again.Free()
            ledger.check("was freed" in error_of_any(again.Start), "a start after Free")
        roots = [comm.Bcast_init(values, root) for root in RANKS]
        for root, request in enumerate(roots):
            values[:] = RANK
            request.Start()
            while not request.Test():
                pass
            ledger.check(bool((values == root).all()), f"Bcast_init {root}", values[:5])


# Communicators


def nested(ledger: Ledger) -> None:
    """Create a communicator from another one, calibrate it, and expect an error after Free."""
    with Communicator(WORLD, "mpc") as outer:
        comm = Communicator(outer)
        comm.calibrate("Allreduce")
        wrong = (
            "rank 0: calibrate: expected some of Bcast, Reduce, Allreduce, Allgather, Reduce_scatter_block, Alltoall, "
        )
        wrong += "Gather, Scatter, got 'Bkast'. Name the methods that will be called."
        ledger.same(
            "calibrate", error_of_any(lambda: comm.calibrate("Bkast")), f"SpecError: {wrong.replace('0', str(RANK), 1)}"
        )
        total = ranks()
        comm.Iallreduce(MPI.IN_PLACE, total).Wait()
        ledger.check(summed([total]), "a communicator of a communicator", total[:5])
        comm.Free()
        comm.Free()
        freed = "communicator: expected one that is in use, got one that was freed. Make a new one."
        ledger.same("use after Free", error_of_any(lambda: comm.Bcast(total)), f"SpecError: rank {RANK}: {freed}")


def parts(ledger: Ledger, comm: Communicator) -> None:
    """Use the results of Dup, Split and Split_type."""
    with comm.Dup() as twin:
        total = ranks()
        twin.Allreduce(MPI.IN_PLACE, total, codec="split")
        ledger.check(summed([total]), "Dup", total[:5])
    part = comm.Split(RANK % 2, -RANK)
    mine = [rank for rank in reversed(RANKS) if rank % 2 == RANK % 2]
    assert part is not None
    with part:
        total = np.zeros(part.size * LARGE, np.float32)
        part.Allgather(ranks(), total, codec="split")
        ledger.same("Split", (part.size, total[::LARGE].tolist()), (len(mine), mine))
    lonely = comm.Split(0 if RANK == 0 else MPI.UNDEFINED)
    ledger.same("Split with no color", lonely is None, RANK != 0)
    lonely and lonely.Free()
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert here is not None
    with here:
        theirs = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        ledger.same("Split_type", here.size, theirs.size)
        theirs.Free()


def check_no_leaks(ledger: Ledger, cycles: int) -> None:
    """Create and free more communicators than MPI can hold at a time."""
    threads, held = threading.active_count(), get_device("host").pool.statistics.in_use
    for cycle in range(cycles):
        with Communicator(WORLD, "split", passthrough_bytes=0, chunk=5000) as comm:
            total = ranks(2000)
            comm.Allreduce(MPI.IN_PLACE, total[::2])
            if cycle % 10 == 0:
                comm.Iallreduce(MPI.IN_PLACE, total, codec="none", algorithm="ring").Wait()
                comm.Bcast(total, codec="mpc")
    ledger.same("threads left", threading.active_count(), threads)
    ledger.same("bytes held", get_device("host").pool.statistics.in_use, held)


def check_lifecycle(ledger: Ledger, comms: dict[str, Communicator]) -> None:
    for comm in comms.values():
        for test in (requests, many_in_flight, one_buffer_for_both, counts_left_out, strided_after_contiguous):
            test(ledger, comm)
        for test in (names, callbacks, callback_that_starts_another, persistent, parts):
            test(ledger, comm)
    callback_that_raises(ledger)
    nested(ledger)
