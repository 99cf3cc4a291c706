"""What all benchmarks share: the ranks, their memory, and contenders that take turns."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

from mpi4py import MPI

from mpi_gpucomp.cli.output import Progress
from osu_bench.suite.buffers import memory
from osu_bench.suite.candidates import contender
from osu_bench.suite.data import Values
from osu_bench.suite.results import Network, Results, Row, Run, load, machine, row_of
from osu_bench.suite.table import bars

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from osu_bench.suite.candidates import Contender
    from osu_bench.suite.flags import Flags
    from osu_bench.suite.table import Comparison, Table

__all__ = ["Bench", "carry_out"]

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


# Where measurements go: a line for each size as it comes, files, and what there is when somebody interrupts.

INTERRUPTED = 130
GRACE = 1.0
"""Seconds that the other ranks leave the first one to tell how far it came."""


def carry_out(
    bench: Bench, table: Table | Comparison, sizes: Sequence[int], measure: Callable[[int], list[Row]]
) -> int:
    """Measure every size; print and keep each as it comes. Return the exit code: 1 once a result is wrong."""
    output = _Output(bench, table)
    with _Interrupts(output.tell_rest if bench.rank == 0 else None), _bar(bench.rank, len(sizes)) as bar:
        for size in sizes:
            bar.start(f"{size} bytes")
            rows = measure(size)
            bar.clear()
            output.add(rows)
            if any(row.wrong for row in rows):
                return 1
    output.draw()
    return 0


class _Output:
    """What rank 0 prints and writes; the other ranks' do nothing."""

    def __init__(self, bench: Bench, table: Table | Comparison) -> None:
        self._bench, self._table, self._flags = bench, table, bench.flags
        self._silent = bench.rank != 0
        path = self._flags.json
        self._earlier = load(path).runs if path and not self._silent and Path(path).exists() else []
        if not self._silent:
            print(table.header(), flush=True)

    def add(self, rows: list[Row]) -> None:
        """Print a line, and bring the files up to date."""
        self._bench.run.rows += rows
        if self._silent:
            return
        print(self._table.line(rows), flush=True)
        for row in rows:
            if row.wrong:
                print(f"{row.contender}: {row.wrong} elements of {row.size} bytes are wrong", file=sys.stderr)
        if self._flags.json:
            Results([*self._earlier, self._bench.run], machine()).save(self._flags.json)
        if self._flags.csv:
            Results([self._bench.run]).save_csv(self._flags.csv)

    def draw(self) -> None:
        """Plot what was measured, where that was asked for."""
        if self._silent:
            return
        name = f"osu_{self._bench.run.benchmark}"
        paths = [f"{name}.{kind}" for kind in self._flags.graph if kind != "tty"]
        if self._flags.plot:
            paths.append(self._flags.plot)
        if paths:
            from osu_bench.report.plot import plot

            for path in paths:
                plot(self._bench.run, path)
        if "tty" in self._flags.graph:
            print(bars(self._bench.run.rows), flush=True)

    def tell_rest(self) -> None:
        """Say how far it came."""
        print(
            f"\n# interrupted: {len(self._bench.run.sizes())} sizes measured; then {self._bench.so_far()}", flush=True
        )


class _Interrupts:
    """Ends this rank on SIGINT and SIGTERM, whatever it is doing, after telling how far it came.

    Python runs signal handlers between its own instructions, and a rank inside MPI may never come back to those once
    its peers are gone; so a thread waits for the signals.
    """

    def __init__(self, tell: Callable[[], None] | None) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        threading.Thread(target=self._wait, daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._writer.close()

    def _wait(self) -> None:
        with self._reader:
            if not self._reader.recv(1):
                return
        if self._tell is not None:
            self._tell()
        else:
            time.sleep(GRACE)  # a launcher ends the others as soon as one is gone, also the one that still has to tell
        os._exit(INTERRUPTED)


def _bar(rank: int, steps: int) -> Progress:
    return Progress(steps, _terminal() if rank == 0 else open(os.devnull, "w"))


def _terminal() -> TextIO:
    """Return where a person watches: standard error, or the terminal that mpirun was started from."""
    if not sys.stderr.isatty():
        with suppress(OSError):
            terminal = open("/dev/tty", "w")  # noqa: SIM115
            if os.tcgetpgrp(terminal.fileno()) == os.getpgid(os.getppid()):  # and nobody put it into the background
                return terminal
    return sys.stderr
