"""Run under mpirun on 3 ranks: compare every algorithm of the MPI library with its default, and set MPI_T variables."""

from __future__ import annotations

import faulthandler
import json
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp._tuning import mpi_algorithms as algorithms
from mpi_gpucomp._tuning import mpi_t as control
from mpi_gpucomp._tuning.mpi_algorithms import AlgorithmSweep
from mpi_gpucomp.errors import SpecError

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
COUNTS = (6, 300_000)
"""Elements; divisible by the number of ranks."""
Array = np.ndarray[Any, Any]


def run(comm: MPI.Intracomm, collective: str, send: Array, recv: Array) -> None:
    """Call mpi4py; the root is the last rank."""
    part, root = send[: send.size // SIZE], SIZE - 1
    calls: dict[str, Callable[[], object]] = {
        "bcast": lambda: comm.Bcast(recv, root),
        "reduce": lambda: comm.Reduce(send, recv, root=root),
        "allreduce": lambda: comm.Allreduce(send, recv),
        "allgather": lambda: comm.Allgather(part, recv),
        "reduce_scatter": lambda: comm.Reduce_scatter(send, recv[: part.size]),
        "reduce_scatter_block": lambda: comm.Reduce_scatter_block(send, recv[: part.size]),
        "alltoall": lambda: comm.Alltoall(send, recv),
        "gather": lambda: comm.Gather(part, recv, root),
        "scatter": lambda: comm.Scatter(send, recv[: part.size], root),
    }
    calls[collective]()


def result(comm: MPI.Intracomm, collective: str, count: int) -> Array:
    send = np.random.default_rng(RANK).integers(-1000, 1000, count).astype(np.float64)
    recv = send.copy() if collective == "bcast" and RANK == SIZE - 1 else np.full(count, -7.0)
    run(comm, collective, send, recv)
    return recv


def in_place(comm: MPI.Intracomm, collective: str, count: int) -> Array | None:
    """Return the result in place, for collectives whose in-place form is the same on every rank."""
    send = np.random.default_rng(RANK).integers(-1000, 1000, count).astype(np.float64)
    if collective == "allreduce":
        comm.Allreduce(MPI.IN_PLACE, send)
        return send
    if collective == "allgather":
        part = count // SIZE
        recv = np.full(count, -7.0)
        recv[RANK * part :][:part] = send[:part]
        comm.Allgather(MPI.IN_PLACE, recv)
        return recv
    return None


def every_candidate() -> dict[str, Any]:
    """Sweep the algorithms of each collective and compare their results."""
    tried: dict[str, list[str]] = {}
    wrong: list[str] = []
    for collective in algorithms.OPEN_MPI.table:
        expected = {count: result(WORLD, collective, count) for count in COUNTS}
        tuned = AlgorithmSweep(WORLD, collective)

        def call(comm: MPI.Intracomm, collective: str = collective, expected: dict[int, Array] = expected) -> float:
            for count, values in expected.items():
                if not np.array_equal(result(comm, collective, count), values):
                    wrong.append(f"{collective}, {count} elements")
                found = in_place(comm, collective, count)
                if found is not None and not np.array_equal(found, values):
                    wrong.append(f"{collective} in place, {count} elements")
            return 0.0

        name = tuned.sweep(call, rounds=1)
        with tuned.best() as comm:
            call(comm)
        tried[collective] = list(tuned.times)
        if name != tried[collective][0]:
            wrong.append(f"{collective}: {name} is not the first of those that are equally fast")
        tuned.close()
    return {"tried": tried, "wrong": [*chain.from_iterable(WORLD.allgather(wrong))]}


def passes_through_rank_1(comm: MPI.Intracomm) -> bool:
    """Return True if a broadcast from rank 0 reaches rank 2 only after rank 1 has joined."""
    data, through = np.zeros(1 << 22, np.uint8), False
    WORLD.Barrier()
    if RANK == 1:
        through = not _arrives(WORLD, within=1.0)
    comm.Bcast(data)
    if RANK == 2:
        WORLD.send(None, 1, 7)
    if RANK == 1:
        WORLD.recv(None, 2, 7)
    return bool(WORLD.bcast(through, 1))


def _arrives(comm: MPI.Intracomm, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if comm.iprobe(2, 7):
            return True
    return False


def settings_take_effect() -> dict[str, Any]:
    """Let a sweep choose by the observed shape of a broadcast instead of a clock: chains count as fast."""
    tuned, shapes = AlgorithmSweep(WORLD, "bcast"), dict[str, bool]()

    def call(comm: MPI.Intracomm) -> float:
        name = algorithms.variants("bcast")[len(tuned.times)].name
        if not name.startswith(("default", "pipeline", "binomial")):
            return 0.9
        shapes[name] = passes_through_rank_1(comm)
        return (0.5 if shapes[name] else 0.9) + (RANK == 1) * 0.001

    name = tuned.sweep(call, rounds=1)
    with tuned.best() as comm:
        best = passes_through_rank_1(comm)
    around = passes_through_rank_1(WORLD)
    tuned.close()
    with tuned.best() as comm:
        closed = passes_through_rank_1(comm)
    return {"name": name, "best": best, "around": around, "closed": closed, "shapes": shapes}


def giving_up() -> dict[str, int]:
    """Count the runs of each algorithm when one is far too slow, on one rank only, and another nearly so."""
    tuned = AlgorithmSweep(WORLD, "allreduce")
    names = [candidate.name for candidate in algorithms.variants("allreduce")]
    seconds = [1.0, 3.1, 2.9, *[1.0] * (len(names) - 3)]
    tries: dict[str, int] = dict.fromkeys(names, 0)

    def call(comm: MPI.Intracomm) -> float:
        number = len(tuned.times)
        tries[names[number]] += 1
        return seconds[number] if RANK == 2 else 0.001

    tuned.sweep(call, rounds=3)
    tuned.close()
    return tries


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except SpecError as error:
        return str(error)
    return "no error"


def some_variables() -> tuple[str, dict[str, int | float | str]]:
    """Return an enumeration variable, and values for it and for variables of other types; the last is text."""
    if algorithms.family() is algorithms.OPEN_MPI:
        stem, rules = "coll_tuned_bcast_algorithm", "coll_tuned_dynamic_rules_filename"
        return stem, {stem: "chain", f"{stem}_segmentsize": 123, "coll_tuned_use_dynamic_rules": "true", rules: "a/b"}
    stem, tree = "MPIR_CVAR_BCAST_INTRA_ALGORITHM", "MPIR_CVAR_ALLREDUCE_TREE"
    return stem, {stem: "pipelined_tree", f"{tree}_KVAL": 3, "MPIR_CVAR_COLL_ALIAS_CHECK": 0, f"{tree}_TYPE": "kary"}


def variables() -> dict[str, Any]:
    """Set variables, and check that they are restored, also after errors in the block and in the settings."""
    stem, values = some_variables()
    before = {name: control.get(name) for name in values}
    with control.settings(values):
        during = {name: control.get(name) for name in values}
    restored = before == {name: control.get(name) for name in values}
    with suppress(KeyError), control.settings({stem: 3}):
        third = control.get(stem)
        raise KeyError
    errors = {
        "unknown": error_of(lambda: control.get("no_such")),
        "name": error_of(lambda: control.settings({**values, stem: "no_such"}).__enter__()),
        "text": error_of(lambda: control.settings({**values, next(reversed(values)): "x" * 4000}).__enter__()),
        "read-only": error_of(lambda: control.settings({**values, "mpi_param_check": 0}).__enter__()),
    }
    return {
        "set": values == during,
        "changed": sum(before[name] != during[name] for name in values),
        "restored": restored,
        "third": third,
        "errors": errors,
        "restored after errors": before == {name: control.get(name) for name in values},
    }


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    parts = (every_candidate, settings_take_effect, giving_up, variables)
    threads = MPI.Query_thread()
    found = {part.__name__: part() for part in parts}
    found["threads"] = [threads, MPI.Query_thread()]
    family, version = algorithms.family(), " ".join(MPI.Get_library_version().partition(",")[0].split("\n")[0].split())
    named = {"family": family.name if family else None, "version": version, "stem": some_variables()[0]}
    if RANK == 0:
        print(json.dumps({**named, **found}))


if __name__ == "__main__":
    main()
