"""Where measurements go: a line for each size as it comes, files, and what there is when somebody interrupts."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mpi_gpucomp.cli.output import Progress
from osu_bench.results import Results, Row, load, machine
from osu_bench.table import bars

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from osu_bench.bench import Bench
    from osu_bench.table import Comparison, Table

__all__ = ["carry_out"]

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
            from osu_bench.plot import plot

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
