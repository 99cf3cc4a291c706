"""Run every algorithm by name and from an MSCCL XML file, and files that do not fit the call."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from calls import METHODS, RANK, ROOTED, SIZE, WORLD, Case
from comparison import Comparison, Ledger

from mpi_gpucomp import Communicator, GpucompError
from mpi_gpucomp.schedule import msccl_xml as xml
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.ir import COLLECTIVES

SCHEDULED = {
    method: {"Bcast": "broadcast", "Reduce_scatter_block": "reduce_scatter"}.get(
        method, method.lower().removesuffix("v")
    )
    for method in METHODS
    if not method.endswith("can")
}
"""The collective behind each method that has schedules."""
COUNTS = (0, 3, 4000)


def cases(method: str) -> Iterator[Case]:
    root = SIZE - 1 if method in ROOTED else 0
    for in_place, count in product((False, True) if method != "Bcast" else (False,), COUNTS):
        yield Case(method, count, "float32", root, in_place=in_place)


def buildable(collective: str, name: str) -> bool:
    """Return True if the algorithm supports this number of ranks; some need a power of two."""
    try:
        build(collective, name, SIZE)
    except GpucompError:
        return False
    return True


def every_algorithm(ledger: Ledger, comms: dict[str, Communicator]) -> None:
    """Compare each algorithm that supports this number of ranks with native MPI."""
    comparison = Comparison(ledger, comms, seed=2)
    for method, collective in SCHEDULED.items():
        for row in algorithms(collective):
            if buildable(collective, row.name):
                for case in cases(method):
                    comparison.run(case, [{"algorithm": row.name, "codec": codec, "chunk": 3000} for codec in CODECS])
    comparison.wait_all()


CODECS = ("none", "split", "mpc")


def write(folder: Path, collective: str, name: str, *, ranks: int = SIZE, root: int = 0, in_place: bool = False) -> str:
    """Write a file on rank 0 unless it exists, and return its path on all ranks."""
    path = folder / f"{collective}-{name}-{ranks}-{root}-{in_place}.xml"
    if RANK == 0 and not path.exists():
        path.write_text(xml.write(build(collective, name, ranks, root, in_place=in_place)))
    WORLD.Barrier()
    return str(path)


def every_file(ledger: Ledger, comms: dict[str, Communicator]) -> None:
    """Compare the last algorithm of each collective, loaded from a file, with native MPI."""
    comparison = Comparison(ledger, comms, seed=3)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(WORLD.bcast(own))
        for method, collective in SCHEDULED.items():
            name = [row.name for row in algorithms(collective) if buildable(collective, row.name)][-1]
            for case in cases(method):
                in_place = case.in_place and collective != "reduce_scatter"
                path = write(folder, collective, name, root=case.root, in_place=in_place)
                comparison.run(case, [{"algorithm": path, "chunk": 3000}])
        comparison.wait_all()
        wrong_files(ledger, comms["split"], folder)
        WORLD.Barrier()


def wrong_files(ledger: Ledger, comm: Communicator, folder: Path) -> None:
    """Expect an error on every rank that names the call that the file is for."""
    values, total = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    made_for = {
        write(folder, "allreduce", "ring", ranks=SIZE + 1): f"allreduce on {SIZE + 1} ranks, in place: False, root 0",
        write(folder, "broadcast", "chain"): f"broadcast on {SIZE} ranks, in place: True, root 0",
        write(folder, "allreduce", "ring", in_place=True): f"allreduce on {SIZE} ranks, in place: True, root 0",
    }
    for path, what in made_for.items():
        error = error_of(lambda path=path: comm.Allreduce(values, total, algorithm=path))
        name = "chain" if "broadcast" in path else "ring"
        wanted = (
            f"ScheduleError: rank {RANK}: algorithm {name}: expected allreduce on {SIZE} ranks, in place: False, "
            f"root 0, got {what}. Load a schedule that was made for this call."
        )
        ledger.same(f"a file for {what}", error, wanted)
    error = error_of(lambda: comm.Allreduce(values, total, algorithm=f"{folder}/none.xml"))
    wanted = f"ScheduleError: MSCCL XML {folder}/none.xml: expected a readable file, got No such file or directory. "
    ledger.same("no file", error, f"{wanted}Name another file.")
    comm.Allreduce(values, total, algorithm="ring")
    ledger.check(bool((total == SIZE).all()), "after wrong files", total[:5])


def error_of(call: object) -> str:
    try:
        call()
    except GpucompError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def unsupported_ranks(ledger: Ledger, comm: Communicator) -> None:
    """Expect an error on every rank from an algorithm that does not support this number of ranks."""
    values, room = np.ones(1000, np.float32), np.zeros(1000 * SIZE, np.float32)
    if not buildable("allgather", "recursive_doubling"):
        error = error_of(lambda: comm.Allgather(values, room, algorithm="recursive_doubling"))
        ledger.check(error.startswith("ScheduleError: ") and "power of two" in error, "recursive doubling", error)
    assert set(SCHEDULED.values()) == set(COLLECTIVES)
