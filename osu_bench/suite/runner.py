"""The runner of all benchmarks: it lets candidates alternate, times and verifies them, and prints the results."""

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

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.cli.command import Progress, allgather_json
from osu_bench.suite.buffers import memory
from osu_bench.suite.candidates import make_candidate
from osu_bench.suite.data import Values
from osu_bench.suite.results import Network, Results, Row, Run, load, machine, row_of
from osu_bench.suite.table import bars

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from osu_bench.suite.candidates import Candidate
    from osu_bench.suite.flags import Flags
    from osu_bench.suite.table import Comparison, Table

__all__ = ["NETWORK", "Bench", "run_sizes"]

NETWORK = "OSU_BENCH_NETWORK"
"""Environment variable that describes the network between the ranks, as JSON."""
PROGRESS = "OSU_BENCH_PROGRESS"
"""Environment variable that makes rank 0 report progress on standard error, one line per step."""
LEAST_ITERATIONS = 3
"""Iterations that are made even when the time limit has passed, so that a median exists."""


class Bench:
    """One benchmark on all ranks."""

    def __init__(self, flags: Flags) -> None:
        """Create memory, data and candidates; collective."""
        self.flags, self.comm = flags, MPI.COMM_WORLD.Dup()
        self.rank, self.ranks = self.comm.rank, self.comm.size
        self.memory = memory("cupy" if flags.accelerator else flags.buffer, self.comm)
        self.values = Values(flags.data, flags.type)
        self.candidates = [make_candidate(name, self.comm, flags.chunk) for name in flags.candidates]
        self.run = self._describe()
        self._size, self._times = 0, dict[str, list[float]]()

    def _describe(self) -> Run:
        flags, network = self.flags, os.environ.get(NETWORK)
        return Run(
            flags.benchmark,
            self.ranks,
            mpi=" ".join(MPI.Get_library_version().partition(",")[0].split()[:4]),
            data=Path(flags.data).name,
            dtype=str(self.values.dtype),
            buffer=self.memory.name,
            network=Network(**json.loads(network)) if network else None,
            options={"chunk": flags.chunk, "algorithm": flags.algorithm},
        )

    @property
    def device(self) -> str:
        """The prefix of titles, as in the OSU benchmarks."""
        return "MPI-CUDA" if self.memory.on_gpu else "MPI"

    def timed(self, call: Callable[[], object]) -> float:
        """Run a call on all ranks, after a barrier; return this rank's seconds."""
        self.memory.synchronise()
        self.comm.Barrier()
        start = perf_counter()
        call()
        self.memory.synchronise()
        return perf_counter() - start

    def measure(self, size: int, iterate: Callable[[Candidate], tuple[float, int]]) -> list[Row]:
        """Let the candidates alternate; `iterate` returns this rank's seconds and wrong elements of one call."""
        warm_up, iterations = self.flags.repeats(size)
        self._size, self._times = size, {one.name: [] for one in self.candidates}
        wrong = dict.fromkeys(self._times, 0)
        wires = dict.fromkeys(self._times, 0)
        start = perf_counter()
        for number in range(warm_up + iterations):
            if number >= warm_up + LEAST_ITERATIONS and self._late(start):
                break
            # The order changes with each round, equally on all ranks, because a candidate may leave full socket buffers
            # or a busy thread to the next one.
            for one in Random(number).sample(self.candidates, len(self.candidates)):
                self.report(f"{one.name}, round {max(0, number - warm_up) + 1}" if number >= warm_up else "warm-up")
                before = one.traffic()
                seconds, errors = iterate(one)
                wrong[one.name] += errors
                wires[one.name] = _busiest(before, one.traffic())
                if number >= warm_up:
                    self._times[one.name].append(seconds * 1e6)
        return [self._row(size, one, wrong[one.name], wires[one.name]) for one in self.candidates]

    def report(self, step: str) -> None:
        """Report progress to the parent process, if it asked for it."""
        if self.rank == 0 and os.environ.get(PROGRESS):
            print(f"@progress {json.dumps(step)}", file=sys.stderr, flush=True)

    def _late(self, start: float) -> bool:
        """Return True if the time limit of a size has passed on rank 0."""
        limit = self.flags.seconds
        if limit is None:
            return False
        late = np.array([perf_counter() - start > limit])
        self.comm.Bcast(late)
        return bool(late[0])

    def _row(self, size: int, one: Candidate, wrong: int, wire: int) -> Row:
        times, errors, bytes_sent = zip(*allgather_json(self.comm, (self._times[one.name], wrong, wire)), strict=True)
        return row_of(
            size,
            one.name,
            list(zip(*times, strict=True)),
            wrong=sum(errors),
            wire_bytes=max(bytes_sent) or None,
            note=one.note,
        )

    def set_bandwidth(self, row: Row, total: int, factor: float) -> None:
        """Set the bandwidths, as nccl-tests define them, and the time at the network's rate."""
        row.algbw = total / row.average_us / 1e3
        row.busbw = row.algbw * factor
        raw = factor * total
        if row.wire_bytes:
            row.ratio = raw / row.wire_bytes
        if self.run.network is not None and self.run.network.rate:
            row.limit_us = (row.wire_bytes or raw) * 8e6 / self.run.network.rate

    def so_far(self) -> str:
        """Summarise what has been measured of the current size, by this rank's times."""
        some = (f"{name} {median(times):.2f} us ({len(times)})" for name, times in self._times.items() if times)
        return f"{self._size} bytes, medians and iterations: {', '.join(some) or 'nothing yet'}"

    def close(self) -> None:
        """Free the candidates and the communicator; collective."""
        for one in self.candidates:
            one.close()
        self.comm.Free()


def _busiest(before: tuple[int, int] | None, after: tuple[int, int] | None) -> int:
    """Return the larger of the bytes sent and the bytes received."""
    if before is None or after is None:
        return 0
    return max(now - then for now, then in zip(after, before, strict=True))


INTERRUPTED = 130
GRACE = 1.0
"""Seconds that other ranks leave rank 0 to print a summary after an interrupt."""


def run_sizes(
    bench: Bench, table: Table | Comparison, sizes: Sequence[int], measure: Callable[[int], list[Row]]
) -> int:
    """Measure every size, printing and saving each at once; return the exit code, 1 as soon as a result is wrong."""
    output = _Output(bench, table)
    with _Interrupts(output.summarise if bench.rank == 0 else None), _bar(bench.rank, len(sizes)) as bar:
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
    """Prints and writes results on rank 0; does nothing on other ranks."""

    def __init__(self, bench: Bench, table: Table | Comparison) -> None:
        self._bench, self._table, self._flags = bench, table, bench.flags
        self._silent = bench.rank != 0
        path = self._flags.json
        self._earlier = load(path).runs if path and not self._silent and Path(path).exists() else []
        if not self._silent:
            print(table.header(), flush=True)

    def add(self, rows: list[Row]) -> None:
        """Print the rows of a size and update the files."""
        self._bench.run.rows += rows
        if self._silent:
            return
        print(self._table.line(rows), flush=True)
        for row in rows:
            if row.wrong:
                print(f"{row.candidate}: {row.wrong} wrong elements in messages of {row.size} bytes", file=sys.stderr)
        if self._flags.json:
            Results([*self._earlier, self._bench.run], machine()).save(self._flags.json)
        if self._flags.csv:
            Results([self._bench.run]).save_csv(self._flags.csv)

    def draw(self) -> None:
        """Draw the plots that were requested."""
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

    def summarise(self) -> None:
        """Print what was measured before an interrupt."""
        print(
            f"\n# interrupted: {len(self._bench.run.sizes())} sizes measured; then {self._bench.so_far()}", flush=True
        )


class _Interrupts:
    """Ends this rank on SIGINT and SIGTERM, after rank 0 has printed a summary.

    A thread waits for the signals: Python runs handlers between its own instructions, and a rank inside MPI may never
    return to those once its peers are gone.
    """

    def __init__(self, summarise: Callable[[], None] | None) -> None:
        self._summarise = summarise

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
        if self._summarise is not None:
            self._summarise()
        else:
            time.sleep(GRACE)  # the launcher ends all ranks once one has exited
        os._exit(INTERRUPTED)


def _bar(rank: int, steps: int) -> Progress:
    return Progress(steps, _terminal() if rank == 0 else open(os.devnull, "w"))


def _terminal() -> TextIO:
    """Return standard error, or the terminal that mpirun was started from if it is in the foreground."""
    if not sys.stderr.isatty():
        with suppress(OSError):
            terminal = open("/dev/tty", "w")  # noqa: SIM115
            if os.tcgetpgrp(terminal.fileno()) == os.getpgid(os.getppid()):
                return terminal
    return sys.stderr
