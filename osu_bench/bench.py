"""What all benchmarks share: the ranks, their memory, and contenders that take turns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from mpi4py import MPI

from osu_bench.buffers import memory
from osu_bench.contenders import contender
from osu_bench.data import Values
from osu_bench.results import Network, Row, Run, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from osu_bench.contenders import Contender
    from osu_bench.flags import Flags

__all__ = ["Bench"]

NETWORK = "OSU_BENCH_NETWORK"
"""The environment variable by which whoever has made the network says what it is."""


FEWEST = 3
"""Iterations that are made however long they take: a single one may have met something else."""


class Bench:
    """One benchmark on all ranks."""

    def __init__(self, flags: Flags) -> None:
        """Make memory, data and contenders; all ranks do."""
        self.flags, self.comm = flags, MPI.COMM_WORLD.Dup()
        self.rank, self.ranks = self.comm.rank, self.comm.size
        self.memory = memory("cupy" if flags.accelerator else flags.buffer, self.comm)
        self.values = Values(flags.data, flags.type)
        self.contenders = [contender(name, self.comm, flags.chunk) for name in flags.contenders]
        self.run = self._describe()
        self._size, self._times = 0, dict[str, list[float]]()

    def _describe(self) -> Run:
        flags, said = self.flags, os.environ.get(NETWORK)
        return Run(
            flags.benchmark,
            self.ranks,
            mpi=" ".join(MPI.Get_library_version().partition(",")[0].split()[:4]),
            data=Path(flags.data).name,
            dtype=str(self.values.dtype),
            buffer=self.memory.name,
            network=Network(**json.loads(said)) if said else None,
            options={"chunk": flags.chunk, "algorithm": flags.algorithm},
        )

    @property
    def device(self) -> str:
        """What the OSU benchmarks put behind MPI in their titles."""
        return "MPI-CUDA" if self.memory.on_gpu else "MPI"

    def timed(self, call: Callable[[], object]) -> float:
        """Run something on all ranks at once; return the seconds that it took here."""
        self.memory.synchronise()
        self.comm.Barrier()
        start = perf_counter()
        call()
        self.memory.synchronise()
        return perf_counter() - start

    def measure(self, size: int, turn: Callable[[Contender], tuple[float, int]]) -> list[Row]:
        """Let the contenders take turns; `turn` returns the seconds and the wrong elements of one, on this rank."""
        warm_up, iterations = self.flags.repeats(size)
        self._size, self._times = size, {one.name: [] for one in self.contenders}
        wrong = dict.fromkeys(self._times, 0)
        wires = dict.fromkeys(self._times, 0)
        start = perf_counter()
        for number in range(warm_up + iterations):
            if number >= warm_up + FEWEST and self._late(start):
                break
            # In another order each time, the same on all ranks: nobody always comes behind the same one, which may have
            # left the wire's buffers full or a thread at work.
            for one in Random(number).sample(self.contenders, len(self.contenders)):
                before = one.traffic()
                seconds, errors = turn(one)
                wrong[one.name] += errors
                wires[one.name] = _busiest(before, one.traffic())
                if number >= warm_up:
                    self._times[one.name].append(seconds * 1e6)
        return [self._row(size, one, wrong[one.name], wires[one.name]) for one in self.contenders]

    def _late(self, start: float) -> bool:
        """Say whether the time for a size is over, as rank 0 sees it."""
        limit = self.flags.seconds
        return limit is not None and bool(self.comm.bcast(perf_counter() - start > limit))

    def _row(self, size: int, one: Contender, wrong: int, wire: int) -> Row:
        everyone = self.comm.allgather(self._times[one.name])
        return row_of(
            size,
            one.name,
            list(zip(*everyone, strict=True)),
            wrong=self.comm.allreduce(wrong),
            wire_bytes=self.comm.allreduce(wire, MPI.MAX) or None,
            note=one.note,
        )

    def set_bandwidth(self, row: Row, total: int, factor: float) -> None:
        """Add bandwidths as nccl-tests count them, and what the wire alone would take."""
        row.algbw = total / row.average_us / 1e3
        row.busbw = row.algbw * factor
        plain = factor * total
        if row.wire_bytes:
            row.ratio = plain / row.wire_bytes
        if self.run.network is not None and self.run.network.rate:
            row.limit_us = (row.wire_bytes or plain) * 8e6 / self.run.network.rate

    def so_far(self) -> str:
        """Say what has been measured of the size at hand, by this rank's own times."""
        some = (f"{name} {median(times):.2f} us ({len(times)})" for name, times in self._times.items() if times)
        return f"{self._size} bytes, medians and iterations: {', '.join(some) or 'nothing yet'}"

    def close(self) -> None:
        """Free what was made; all ranks do."""
        for one in self.contenders:
            one.close()
        self.comm.Free()


def _busiest(before: tuple[int, int] | None, after: tuple[int, int] | None) -> int:
    """Return what was sent or what was received, whichever is more."""
    if before is None or after is None:
        return 0
    return max(now - then for now, then in zip(after, before, strict=True))
