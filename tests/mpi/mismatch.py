"""Run under mpirun: ranks whose calls do not match each other; every rank reports the error that it gets.

mismatch.py collectives [CASE ...]    different collectives in the same place
mismatch.py types [CASE ...]          elements of different types
mismatch.py arguments [CASE ...]      an exception on one rank while its arguments are read
mismatch.py options [CASE ...]        options that do not exist
mismatch.py counts [CASE ...]         counts of v-variants that differ

Each case has a communicator of its own, so that nothing was compared before, and ends with calls that must succeed.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.request import Request

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ODD = RANK == 1
COUNTS = (1000, 60_000)
"""Elements of a message that goes to the MPI library, and of one that the engine runs."""
TUNED = 600_000
"""Elements of a message that `auto` plans by measurement: the ranks compare calls before that."""
GUARD = 4096
UNTOUCHED = 77

Call = Callable[[Communicator], Any]


class Guarded:
    """A receive buffer between two guard zones."""

    def __init__(self, count: int, dtype: str) -> None:
        self._memory = np.full(count + 2 * GUARD, UNTOUCHED, dtype)
        self.array = self._memory[GUARD:-GUARD]

    def is_untouched(self) -> bool:
        return bool((self._memory == UNTOUCHED).all())


class Unreadable:
    """A buffer object that raises when it is read."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        if name == self._protocol:
            raise ZeroDivisionError(f"no {name} today")
        raise AttributeError(name)

    def __buffer__(self, flags: int) -> memoryview:
        raise ZeroDivisionError("no buffer today")


def report(comm: Communicator, call: Call) -> str:
    """Make a call, wait for it, and return the error."""
    try:
        result = call(comm)
        if isinstance(result, Request):
            result.Wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def is_usable(comm: Communicator) -> bool:
    """Return True if collectives still work."""
    return report(comm, use) == "no error"


def use(comm: Communicator) -> None:
    """Run collectives, short and long, blocking and non-blocking, and verify their results."""
    for count in COUNTS:
        values = np.full(count, RANK, np.float32)
        comm.Bcast(values, SIZE - 1)
        total = np.zeros(count, np.float32)
        comm.Iallreduce(values, total).Wait()
        comm.Barrier()
        assert (values == SIZE - 1).all()
        assert (total == SIZE * (SIZE - 1)).all()


# Different collectives


def arguments(method: str, count: int) -> tuple[Any, ...]:
    """Return valid arguments of a method."""
    one, many = np.zeros(count, np.float32), np.zeros(count * SIZE, np.float32)
    match method:
        case "Barrier":
            return ()
        case "Bcast":
            return (one,)
        case "Reduce" | "Allreduce" | "Scan" | "Exscan":
            return (one, one.copy())
        case "Gather" | "Allgather":
            return (one, many)
        case "Scatter" | "Reduce_scatter_block":
            return (many, one)
        case "Reduce_scatter":
            return (many, one, None)
        case _:
            return (many, many.copy())


PAIRS = (
    ("Gather", "Bcast"),
    ("Reduce", "Allreduce"),
    ("Scatter", "Gather"),
    ("Allgather", "Alltoall"),
    ("Scan", "Exscan"),
    ("Allreduce", "Scan"),
    ("Reduce_scatter_block", "Scatter"),
    ("Reduce_scatter", "Allreduce"),
    ("Gather", "Allgather"),
    ("Bcast", "Reduce"),
)
BLOCKING_ONLY = (("Barrier", "Bcast"), ("Allreduce", "Barrier"), ("Barrier", "Gather"))


def start_name(method: str) -> str:
    return f"I{method.lower()}"


def method_pairs() -> list[tuple[str, str]]:
    """Return what rank 1 calls and what the others call."""
    started = [(start_name(odd), start_name(others)) for odd, others in PAIRS]
    mixed = [
        ("Bcast", "Ibcast"),
        ("Iallreduce", "Allreduce"),
        ("Gather", "Igather"),
        ("Ialltoall", "Alltoall"),
        ("Scan", "Iscan"),
    ]
    return [*PAIRS, *BLOCKING_ONLY, *started, *mixed]


def invoke(method: str, count: int, comm: Communicator) -> Any:
    """Call a method with valid arguments."""
    blocking = method if hasattr(MPI.Comm, method) and method[0] != "I" else method[1:].capitalize()
    return getattr(comm, method)(*arguments(blocking, count))


def collectives() -> dict[str, Call]:
    cases: dict[str, Call] = {}
    for odd, others in method_pairs():
        for count in COUNTS:
            cases[f"{odd} {others} {count}"] = partial(invoke, odd if ODD else others, count)
    return cases


# Different types


def reduce_guarded(method: str, count: int, comm: Communicator) -> Any:
    """Reduce into a guarded buffer; raise a RuntimeError if an error comes with a buffer that was written to."""
    dtype = "f8" if ODD else "f4"
    received = Guarded(count, dtype)
    try:
        result = getattr(comm, method)(np.ones(count, dtype), received.array)
        if isinstance(result, Request):
            result.Wait()
    except ValueError:
        if not received.is_untouched():
            raise RuntimeError("the receive buffer was written to") from None
        raise


def types() -> dict[str, Call]:
    cases: dict[str, Call] = {}
    for method in ("Iallreduce", "Iscan", "Iexscan", "Allreduce", "Scan", "Exscan", "Ireduce", "Reduce"):
        for count in COUNTS:
            cases[f"{method} {count}"] = partial(reduce_guarded, method, count)
    return cases


# Arguments that cannot be read


def read_cases(count: int) -> dict[str, tuple[Call, Call]]:
    """Return for each case the call of rank 1, whose arguments raise, and that of the others."""
    one, many = np.zeros(count, np.float32), np.zeros(count * SIZE, np.float32)
    unreadable = {name: Unreadable(name) for name in ("__array_interface__", "__dlpack__", "__cuda_array_interface__")}
    cases: dict[str, tuple[Call, Call]] = {
        "root=None": (lambda comm: comm.Bcast(one, root=None), lambda comm: comm.Bcast(one)),
        "root='0'": (lambda comm: comm.Bcast(one, root="0"), lambda comm: comm.Bcast(one)),
        "root=99": (lambda comm: comm.Bcast(one, root=99), lambda comm: comm.Bcast(one)),
        "root=-1": (lambda comm: comm.Gather(one, many, root=-1), lambda comm: comm.Gather(one, many)),
        "op='sum'": (lambda comm: comm.Allreduce(one, one + 0, "sum"), lambda comm: comm.Allreduce(one, one + 0)),
        "op=None": (lambda comm: comm.Iallreduce(one, one + 0, None), lambda comm: comm.Iallreduce(one, one + 0)),
        "None": (lambda comm: comm.Bcast(None), lambda comm: comm.Bcast(one)),
        "text": (lambda comm: comm.Bcast("text"), lambda comm: comm.Bcast(one)),
        "objects": (lambda comm: comm.Bcast(np.array([{}, None], dtype=object)), lambda comm: comm.Bcast(one)),
        "counts": (
            lambda comm: comm.Allgatherv(one, [many, "all", MPI.FLOAT]),
            lambda comm: comm.Allgatherv(one, many),
        ),
        "recvcounts": (
            lambda comm: comm.Reduce_scatter(many, one, "all"),
            lambda comm: comm.Reduce_scatter(many, one, [count] * SIZE),
        ),
        "shares": (
            lambda comm: comm.Reduce_scatter(many, Unreadable("__array_interface__")),
            lambda comm: comm.Reduce_scatter(many, one),
        ),
        "chunk": (lambda comm: comm.Bcast(one, chunk="big"), lambda comm: comm.Bcast(one)),
        "codec": (lambda comm: comm.Bcast(one, codec=3.0), lambda comm: comm.Bcast(one)),
        "role": (lambda comm: comm.Bcast(one, role="weights"), lambda comm: comm.Bcast(one)),
        "algorithm": (lambda comm: comm.Bcast(one, algorithm=7), lambda comm: comm.Bcast(one)),
        "priority": (lambda comm: comm.Ibcast(one, priority="high"), lambda comm: comm.Ibcast(one)),
        "name": (lambda comm: comm.Bcast(one, name=3), lambda comm: comm.Bcast(one)),
        "unknown option": (lambda comm: comm.Bcast(one, codex="split"), lambda comm: comm.Bcast(one)),
        "named": (
            lambda comm: comm.Iallreduce(one, one + 0, "sum", name="grad"),
            lambda comm: comm.Iallreduce(one, one + 0, name="grad"),
        ),
        "persistent": (lambda comm: comm.Bcast_init(one, root=None), lambda comm: run_persistent(comm, one)),
        "unregistered": (lambda comm: comm.run("grad", one, one + 0), lambda comm: run_registered(comm, one)),
        "calibrate": (lambda comm: comm.calibrate("Alltoal"), lambda comm: comm.calibrate("Alltoall")),
        "autotune": (lambda comm: comm.autotune("Bcst", one), lambda comm: comm.autotune("Bcast", one)),
    }
    for name, buffer in unreadable.items():
        cases[name] = (lambda comm, buffer=buffer: comm.Bcast(buffer), lambda comm: comm.Bcast(one))
        cases[f"{name}, started"] = (
            lambda comm, buffer=buffer: comm.Iallreduce(one, buffer),
            lambda comm: comm.Iallreduce(one, one + 0),
        )
    return cases


def run_persistent(comm: Communicator, values: np.ndarray) -> None:
    request = comm.Bcast_init(values)
    request.Start()
    request.Wait()


def run_registered(comm: Communicator, values: np.ndarray) -> Request:
    comm.register("grad", "allreduce")
    return comm.run("grad", values, values + 0)


def arguments_cases() -> dict[str, Call]:
    return {
        f"{name} {count}": odd if ODD else others
        for count in (*COUNTS, TUNED)
        for name, (odd, others) in read_cases(count).items()
    }


# Options that do not exist


def options() -> dict[str, Call]:
    """Return calls with misspelt options, the same on all ranks."""
    cases: dict[str, Call] = {}
    for count in COUNTS:
        one = np.zeros(count, np.float32)
        calls: dict[str, Call] = {
            "Bcast codex codec": lambda comm, one=one: comm.Bcast(one, codex="split"),
            "Ibcast codex codec": lambda comm, one=one: comm.Ibcast(one, codex="split"),
            "Allreduce algoritm algorithm": lambda comm, one=one: comm.Allreduce(one, one + 0, algoritm="ring"),
            "Iallgather chunks chunk": lambda comm, one=one: comm.Iallgather(one, np.tile(one, SIZE), chunks=1000),
            "Bcast_init rolle role": lambda comm, one=one: comm.Bcast_init(one, rolle="weights"),
            "register prority priority": lambda comm: comm.register("grad", "allreduce", prority=1),
            "Bcast zebra -": lambda comm, one=one: comm.Bcast(one, zebra=1),
        }
        cases |= {f"{name} {count}": call for name, call in calls.items()}
    return cases


# Counts of v-variants


def vector_call(method: str, count: int, root: int, more: int, comm: Communicator) -> Any:
    """Call a v-variant of which rank 1 counts `more` elements at one place than its peer."""
    counts, wrong, own = [count] * SIZE, [count] * SIZE, count
    if ODD and (root == RANK or method.lower() in ("alltoallv", "ialltoallv", "allgatherv", "iallgatherv")):
        wrong[2] += more
    elif ODD:
        own += more
    many, one = np.zeros(count * SIZE + GUARD, np.float32), np.zeros(own, np.float32)
    match method.lower().removeprefix("i"):
        case "gatherv":
            return getattr(comm, method)(one, [many, wrong] if root == RANK else None, root)
        case "scatterv":
            return getattr(comm, method)([many, wrong] if root == RANK else None, one, root)
        case "allgatherv":
            return getattr(comm, method)(one, [many, wrong])
        case _:
            return getattr(comm, method)([many, wrong], [many.copy(), counts])


def after_one_that_matches(method: str, count: int, root: int, more: int, comm: Communicator) -> Any:
    result = vector_call(method, count, root, 0, comm)
    if isinstance(result, Request):
        result.Wait()
    return vector_call(method, count, root, more, comm)


def counts() -> dict[str, Call]:
    cases: dict[str, Call] = {}
    for method in ("Gatherv", "Scatterv", "Alltoallv", "Allgatherv"):
        for name in (method, start_name(method)):
            for root, more in ((0, 1), (1, -1)) if method in ("Gatherv", "Scatterv") else ((0, 1),):
                for count in COUNTS:
                    title, arguments = f"{name} root {root}, {more:+} of {count}", (name, count, root, more)
                    cases[title] = partial(vector_call, *arguments)
                    cases[f"{title}, second call"] = partial(after_one_that_matches, *arguments)
    return cases


CASES = {"collectives": collectives, "types": types, "arguments": arguments_cases, "options": options, "counts": counts}


def main() -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    kind, *chosen = sys.argv[1:]
    codec = "split"
    if chosen and chosen[0].startswith("codec="):
        codec = chosen.pop(0).removeprefix("codec=")
    found: dict[str, tuple[str, bool]] = {}
    for name, call in CASES[kind]().items():
        if chosen and name not in chosen:
            continue
        with Communicator(WORLD, codec=codec, timeout=20.0) as comm:
            found[name] = report(comm, call), is_usable(comm)
    everyone = WORLD.gather(found)
    if RANK == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()
