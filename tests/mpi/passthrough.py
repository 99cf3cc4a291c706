"""Check calls that are passed through to mpi4py: user-defined operations, derived datatypes, other methods."""

from __future__ import annotations

import numpy as np
from by_algorithm import error_of
from calls import RANK, SIZE, WORLD
from comparison import Ledger
from mpi4py import MPI

from mpi_gpucomp import Communicator

COUNTS = (3, 40_000)
PAIRS = np.dtype([("value", "f4"), ("place", "i4")])


def ordered(one: MPI.buffer, other: MPI.buffer, datatype: MPI.Datatype) -> None:
    """Combine operands in a way that depends on their order."""
    first, second = np.frombuffer(one, np.int32), np.frombuffer(other, np.int32)
    second[:] = first * 3 + second % 1000


def operations(ledger: Ledger, comm: Communicator, count: int) -> None:
    user_op = MPI.Op.Create(ordered, commute=False)
    for op, name in ((MPI.BOR, "BOR"), (user_op, "a user's operation"), (MPI.LXOR, "LXOR")):
        values = (np.arange(count) + RANK).astype(np.int32)
        for method in ("Allreduce", "Scan", "Exscan", "Reduce", "Iallreduce", "Ireduce", "Iscan"):
            got = [np.zeros_like(values) for _ in range(2)]
            for where, room in zip((comm, WORLD), got, strict=True):
                request = getattr(where, method)(values, room, op)
                request and request.Wait()
            ledger.check(got[0].tobytes() == got[1].tobytes(), f"{method} of {count} by {name}", got[0][:5])
        many = np.tile(values, SIZE)
        got = [np.zeros_like(values) for _ in range(2)]
        for where, room in zip((comm, WORLD), got, strict=True):
            where.Reduce_scatter_block(many, room, op)
        ledger.check(got[0].tobytes() == got[1].tobytes(), f"Reduce_scatter_block of {count} by {name}", got[0][:5])
    user_op.Free()


def places(ledger: Ledger, comm: Communicator, count: int) -> None:
    """Reduce with MINLOC."""
    values = np.zeros(count, PAIRS)
    values["value"], values["place"] = (np.arange(count) * 7 + RANK * 3) % 11, RANK
    got = [np.zeros_like(values) for _ in range(2)]
    for where, room in zip((comm, WORLD), got, strict=True):
        where.Allreduce([values, MPI.FLOAT_INT], [room, MPI.FLOAT_INT], MPI.MINLOC)
    ledger.check(got[0].tobytes() == got[1].tobytes(), f"MINLOC of {count}", got[0][:5])


def datatypes(ledger: Ledger, comm: Communicator, count: int) -> None:
    """Broadcast every second element by a derived datatype."""
    every_second = MPI.FLOAT.Create_vector(count, 1, 2).Commit()
    for start in (False, True):
        got = [np.full(2 * count, RANK, np.float32) for _ in range(2)]
        for where, buffer in zip((comm, WORLD), got, strict=True):
            spec = [buffer, 1, every_second]
            where.Ibcast(spec, SIZE - 1).Wait() if start else where.Bcast(spec, SIZE - 1)
        ledger.check(got[0].tobytes() == got[1].tobytes(), f"Bcast of {count} with gaps", got[0][:5])
    error = error_of(lambda: comm.Bcast([got[0], 1, every_second], codec="split"))
    wanted = (
        f"SpecError: rank {RANK}: Bcast: expected a call that the engine can run, as codec= requires, "
        "got a derived datatype. Pass an array of a basic type and one of SUM, PROD, MIN, MAX, or omit codec."
    )
    ledger.same("a codec with a derived datatype", error, wanted)
    every_second.Free()


def absolute_addresses(ledger: Ledger, comm: Communicator) -> None:
    values = np.full(10, RANK, np.float32)
    where = MPI.Datatype.Create_struct([10], [MPI.Get_address(values)], [MPI.FLOAT]).Commit()
    comm.Bcast([MPI.BOTTOM, 1, where], SIZE - 1)
    ledger.same("Bcast from MPI.BOTTOM", values.tolist(), [SIZE - 1] * 10)
    where.Free()


def methods_of_mpi4py(ledger: Ledger, comm: Communicator) -> None:
    comm.Set_name("of the test")
    ledger.same("Get_name", comm.Get_name(), "of the test")
    ledger.same("bcast", comm.bcast({"from": RANK}, SIZE - 1), {"from": SIZE - 1})
    ledger.same("allgather", comm.allgather(RANK), list(range(SIZE)))
    ledger.same("allreduce", comm.allreduce(RANK), sum(range(SIZE)))
    ledger.same("Get_rank", (comm.Get_rank(), comm.Get_size(), comm.rank, comm.size), (RANK, SIZE, RANK, SIZE))
    comm.Barrier()
    comm.barrier()
    comm.Ibarrier().Wait()
    ledger.check(MPI.Comm.Compare(comm.Get_group() and WORLD, WORLD) == MPI.IDENT, "Get_group")
    ledger.same("an unknown attribute", error_of_attribute(comm), "no attribute '_missing'")


def error_of_attribute(comm: Communicator) -> str:
    try:
        return str(comm._missing)
    except AttributeError as error:
        return str(error).partition("object has ")[2]


def check_passthrough(ledger: Ledger, comms: dict[str, Communicator]) -> None:
    for comm in comms.values():
        for count in COUNTS:
            operations(ledger, comm, count)
            places(ledger, comm, count)
            datatypes(ledger, comm, count)
        absolute_addresses(ledger, comm)
        methods_of_mpi4py(ledger, comm)
