"""The command `profile`, under mpirun: measures links and codecs, and writes them as a topology."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.topology import Processor
from mpi_gpucomp.schedule.topology_file import write_topology
from mpi_gpucomp.tools.coding import LEAST_CORES, codings, quiet_barrier
from mpi_gpucomp.tools.fitting import Fit, fitted, topology_of
from mpi_gpucomp.tools.handling import handling
from mpi_gpucomp.tools.islands import island_port, islands, trials
from mpi_gpucomp.tools.progress import Progress
from mpi_gpucomp.tools.table import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi4py import MPI

    from mpi_gpucomp.schedule.topology import Port, Topology
    from mpi_gpucomp.tools.islands import Trial

__all__ = ["add"]

SIZES = (1, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the messages: one for the latency, longer ones for the rate."""
SLOW = 0.15
"""Seconds after which no longer message is tried."""
TOGETHER = 0.1
"""Seconds that each of several messages at once should take alone."""
ROUNDS = 3
SHORT_ROUNDS = 20
MOST_MEASURED = 12
"""With more ranks only the first two of every node are measured."""
CODECS = ("none", "split", "zfp:rate=8", "bound:rel=1e-3")


def add(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "profile",
        help="measure links and codecs, under mpirun",
        description="Measure links and codecs: mpirun -n 8 python -m mpi_gpucomp profile -o topo.json.",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the topology's file")
    parser.add_argument("--name", default="profiled", help="of the topology")
    parser.add_argument("--codec", nargs="+", default=CODECS, metavar="SPEC", help=f"default {' '.join(CODECS)}")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if comm.size < 2:
        remedy = "Start it under mpirun: mpirun -n 4 python -m mpi_gpucomp profile -o topo.json."
        raise SpecError("profile", expected="two ranks at least", got="one", remedy=remedy)
    nodes = _nodes(comm, MPI.Get_processor_name())
    fits = _links(comm, nodes)
    shared = _islands(comm, nodes, fits)
    codecs, cores = codings(comm, args.codec)
    source = f"measured on {comm.size} ranks, {MPI.Get_library_version().partition(',')[0]}"
    found, looking = handling(comm, min(fit.latency for fit in fits.values()), cores)
    topology = replace(topology_of(args.name, nodes, fits, source, shared), codecs=codecs, handling=found)
    if cores < comm.size:
        left = round(max(LEAST_CORES, cores - looking), 2)
        topology = replace(topology, processors=(Processor(frozenset(range(comm.size)), left),))
    if comm.rank == 0:
        _write(topology, fits, args.output)
    comm.Free()
    return 0


def _nodes(comm: MPI.Intracomm, name: str) -> tuple[tuple[int, ...], ...]:
    names = comm.allgather(name)
    return tuple(tuple(rank for rank, other in enumerate(names) if other == one) for one in dict.fromkeys(names))


def _pairs(nodes: Sequence[Sequence[int]], ranks: int) -> list[tuple[int, int]]:
    measured = range(ranks) if ranks <= MOST_MEASURED else sorted(rank for node in nodes for rank in node[:2])
    return [(a, b) for a in measured for b in measured if a != b]


def _links(comm: MPI.Intracomm, nodes: Sequence[Sequence[int]]) -> dict[tuple[int, int], Fit]:
    """Measure one pair after the other, so that none disturbs another; all ranks get all results."""
    pairs = _pairs(nodes, comm.size)
    fits: dict[tuple[int, int], Fit] = {}
    with Progress(len(pairs) if comm.rank == 0 else 0) as progress:
        for pair in pairs:
            if comm.rank == 0:
                progress.start(f"rank {pair[0]} to rank {pair[1]}")
            own = list(_times(comm, *pair)) if comm.rank in pair else []
            # Those who wait must not take the core of those who measure.
            quiet_barrier(comm)
            fits[pair] = fitted(comm.bcast(own, pair[0]))
    return fits


def _islands(comm: MPI.Intracomm, nodes: Sequence[Sequence[int]], fits: dict[tuple[int, int], Fit]) -> list[Port]:
    """Find what islands of nodes share: all ranks measure what was slow alone, several pairs at once."""
    ports = []
    for trial in trials(nodes, islands(nodes, fits)):
        slowest = max(fits[pair].per_byte for pair in trial.pairs)
        nbytes = int(min(SIZES[-1], max(SIZES[1], TOGETHER / slowest if slowest else SIZES[-1])))
        ports.append(island_port(trial, fits, nbytes, _together(comm, trial, nbytes)))
    return [port for port in ports if port is not None]


def _together(comm: MPI.Intracomm, trial: Trial, nbytes: int) -> float:
    """Return the seconds until the last of several messages has come, all sent at once: the median of a few."""
    data, answer = np.ones(nbytes, np.uint8), np.ones(1, np.uint8)
    times: list[float] = []
    for _ in range(ROUNDS):
        comm.Barrier()
        start = perf_counter()
        for sender, receiver in trial.pairs:
            if comm.rank == sender:
                comm.Send(data, receiver)
                comm.Recv(answer, receiver)
            elif comm.rank == receiver:
                comm.Recv(data, sender)
                comm.Send(answer, sender)
        own = perf_counter() - start
        quiet_barrier(comm)
        times.append(max(comm.allgather(own)))
    return sorted(times)[ROUNDS // 2]


def _times(comm: MPI.Intracomm, sender: int, receiver: int) -> Iterator[tuple[int, float]]:
    """Yield bytes and seconds of messages from one rank to another, each answered by a byte."""
    data, answer = np.ones(SIZES[-1], np.uint8), np.ones(1, np.uint8)
    there = comm.rank == sender
    half = 0.0
    for nbytes in SIZES:
        best = float("inf")
        for _ in range(SHORT_ROUNDS if nbytes == 1 else ROUNDS):
            start = perf_counter()
            if there:
                comm.Send(data[:nbytes], receiver)
                comm.Recv(answer, receiver)
            else:
                comm.Recv(data[:nbytes], sender)
                comm.Send(answer, sender)
            best = min(best, perf_counter() - start)
        # Both must come to the same decision about longer ones.
        best = _agreed(comm, best, sender, receiver)
        half = best / 2 if nbytes == 1 else half
        yield nbytes, best - half
        if best > SLOW:
            return


def _agreed(comm: MPI.Intracomm, seconds: float, sender: int, receiver: int) -> float:
    """Take the sender's time on both sides."""
    if comm.rank == sender:
        comm.send(seconds, receiver)
        return seconds
    return float(comm.recv(source=sender))


def _write(topology: Topology, fits: dict[tuple[int, int], Fit], path: Path) -> None:
    residual = max(fit.residual for fit in fits.values())
    lines = {
        f"{a} -> {b}": [round(fit.latency * 1e6, 2), round(fit.per_byte * 1e12, 1), round(fit.residual, 4)]
        for (a, b), fit in fits.items()
    }
    write_topology(topology, path, {"alpha_us, beta_us_per_MB, residual": lines})
    rows = [
        (name, f"{link.latency * 1e6:.1f}", f"{link.per_byte * 1e12:.0f}", f"{8e-9 / link.per_byte:.3g}")
        for name, link in topology.classes.items()
        if link.per_byte
    ]
    rows += [(port.name, "", f"{port.per_byte * 1e12:.0f}", f"{8e-9 / port.per_byte:.3g}") for port in topology.ports]
    right = ("alpha us", "beta us/MB", "Gbit/s")
    print(table(("links and ports", *right), rows, right))
    print(
        f"\n{topology.ranks} ranks on {len(topology.nodes)} nodes; no time is further than {residual:.1%} from its line"
    )
    message, per_byte, wait, frame = topology.handling
    cores = topology.processors[0].cores if topology.processors else topology.ranks
    print(f"a message takes a processor {message * 1e6:.0f} us and {per_byte * 1e12:.0f} us/MB at each end, ", end="")
    print(
        f"{frame * 1e6:.0f} us more for a frame, and is noticed after {wait * 1e6:.0f} us; ranks have {cores:.3g} cores"
    )
    print(f"written to {path}")
