"""Run under mpirun: compare every collective of a Communicator with native MPI, bit for bit.

compare_native.py [STEP]    run every case, or every STEP-th one; rank 0 prints the differences on all ranks
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, product
from typing import Any

from arithmetic import arithmetic
from buffers import cupy
from by_algorithm import SCHEDULED, every_algorithm, every_file, unsupported_ranks
from calls import METHODS, OPERATIONS, REDUCING, ROOTED, SIZE, WORLD, Case
from comparison import Comparison, Ledger
from lifecycle import check_lifecycle, check_no_leaks
from mpi4py import MPI
from passthrough import check_passthrough

from mpi_gpucomp import Communicator
from mpi_gpucomp.schedule.algorithms import algorithms

HANG_SECONDS = 170
"""After this time a rank that hangs prints its stack and exits."""
COUNTS = (0, 1, 3, 3000, 30_000)
DTYPES = ("float32", "float64", "int32")
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int64", "uint64")
COMPLEX = ("complex64", "complex128")
GENERAL = "none" if cupy else "lz4"
"""A codec for any type: nvCOMP does not run on a simulated GPU."""


def cases() -> Iterator[Case]:
    for count, method, dtype in product(COUNTS, METHODS, DTYPES):
        yield from of_one_type(method, count, dtype)
    for method, dtype in product(METHODS, (*INTEGERS, *COMPLEX, "bool")):
        if dtype != "bool" or method not in REDUCING:
            ops = ("sum", "prod") if dtype in COMPLEX else tuple(OPERATIONS)
            yield from of_one_type(method, 700, dtype, ops)


def of_one_type(method: str, count: int, dtype: str, ops: tuple[str, ...] = tuple(OPERATIONS)) -> Iterator[Case]:
    roots = sorted({0, SIZE - 1}) if method in ROOTED else [0]
    for root, in_place in product(roots, (False, True) if method != "Bcast" else (False,)):
        for op in ops if method in REDUCING else ("sum",):
            yield Case(method, count, dtype, root, op, in_place)


def options(case: Case) -> list[dict[str, Any]]:
    """Return options to run a case with: none, and combinations of codec, role, name, algorithm and chunk."""
    if case.method not in SCHEDULED:
        return [{}, {"chunk": 5000}]
    algorithm = algorithms(SCHEDULED[case.method])[0].name
    codecs = ("none", "split", "mpc") if case.dtype in ("float32", "float64") else ("none", GENERAL)
    chosen = [{"codec": codec, "chunk": 5000} for codec in codecs]
    chosen += [{"codec": codec, "name": f"{case.method}.{codec}"} for codec in codecs]
    chosen += [{"codec": codec, "algorithm": algorithm} for codec in codecs]
    return [*chosen, {}, {}, {"role": "fields"}, {"role": "fields", "algorithm": algorithm, "chunk": 5000}]


def communicators(stack: ExitStack) -> dict[str, Communicator]:
    """Create one that runs everything in the engine, one that passes most calls through, and one with codec="auto"."""
    made = {
        "split": Communicator(WORLD, "split", passthrough_bytes=0, chunk=20_000, roles={"fields": "mpc"}),
        "none": Communicator(WORLD, "none", roles={"fields": "split"}),
        "auto": Communicator(WORLD, chunk=20_000, passthrough_bytes=1000, roles={"fields": "bound:abs=1e-9"}),
    }
    return {name: stack.enter_context(comm) for name, comm in made.items()}


def main(step: int) -> None:
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    ledger = Ledger()
    with ExitStack() as stack:
        comms = communicators(stack)
        comparison = Comparison(ledger, comms, seed=1)
        for case in list(cases())[::step]:
            comparison.run(case, options(case))
        comparison.wait_all()
        every_algorithm(ledger, comms)
        every_file(ledger, comms)
        unsupported_ranks(ledger, comms["split"])
        arithmetic(ledger, comms)
        check_passthrough(ledger, comms)
        check_lifecycle(ledger, comms)
    check_no_leaks(ledger, cycles=1500 if SIZE == 1 else 15)
    wrong = WORLD.gather(ledger.wrong)
    if wrong is not None:
        found = {"mpi": MPI.Get_library_version(), "compared": ledger.compared, "wrong": [*chain.from_iterable(wrong)]}
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1)
