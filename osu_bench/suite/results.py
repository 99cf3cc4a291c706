"""Results: rows (one per candidate and size), runs, the machine, and their JSON and CSV files.

A file holds any number of runs, so that one report can compare several networks and MPI libraries.
"""

from __future__ import annotations

import csv
import json
import os
import platform
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np

import mpi_gpucomp
from mpi_gpucomp.errors import BufferSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Network", "Results", "Row", "Run", "load", "machine", "merge", "row_of"]

FORMAT = "osu_bench results"
VERSION, READABLE = 2, (1, 2)
"""Version 1 calls a candidate `contender`."""


@dataclass(frozen=True)
class Network:
    """The links between the ranks."""

    hosts: int
    rate: float | None
    """Bits per second of each host's link, per direction; None if unshaped."""
    rails: int = 1


@dataclass
class Row:
    """The measurements of one candidate at one size."""

    size: int
    """Bytes of the message, as the OSU benchmarks define it."""
    candidate: str
    times_us: list[float]
    """Microseconds of the slowest rank, for each iteration."""
    average_us: float
    """Mean over iterations and ranks: the latency of the OSU benchmarks."""
    fastest_us: float
    slowest_us: float
    """Means of the fastest and of the slowest rank."""
    wrong: int = 0
    """Wrong elements on all ranks in all iterations."""
    ratio: float | None = None
    """Raw bytes over bytes on the wire; None for native MPI, whose traffic is not counted."""
    wire_bytes: int | None = None
    """Bytes sent or received by the busiest rank."""
    limit_us: float | None = None
    """Microseconds that these bytes take at the rate of the link."""
    algbw: float | None = None
    busbw: float | None = None
    """GB/s, as nccl-tests define them."""
    note: str = ""
    """The plan or algorithm that was chosen."""
    extra: dict[str, float] = field(default_factory=dict)
    """Figures of some benchmarks only: overlap, message rate, max_error."""

    @property
    def median_us(self) -> float:
        """The median, by which candidates are compared."""
        return median(self.times_us)

    def percentile(self, percent: int) -> float:
        """Return a percentile of the iterations."""
        if len(self.times_us) == 1:
            return self.times_us[0]
        return quantiles(self.times_us, n=100, method="inclusive")[percent - 1]


@dataclass
class Run:
    """One benchmark under one set of conditions."""

    benchmark: str
    ranks: int
    mpi: str
    data: str = "weights"
    dtype: str = "float32"
    buffer: str = "numpy"
    network: Network | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def sizes(self) -> list[int]:
        """Return the sizes, in order."""
        return sorted({row.size for row in self.rows})

    def candidates(self) -> list[str]:
        """Return the candidates in the order given."""
        return list(dict.fromkeys(row.candidate for row in self.rows))

    def row(self, candidate: str, size: int) -> Row | None:
        """Return the row of a candidate and size, or None."""
        return next((row for row in self.rows if row.candidate == candidate and row.size == size), None)


@dataclass
class Results:
    """The content of a file."""

    runs: list[Run] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path | str) -> None:
        """Write JSON atomically: an interrupt leaves the old file or the new one."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)
        partial = Path(f"{path}.partial")
        partial.write_text(text + "\n")
        partial.replace(path)

    def save_csv(self, path: Path | str) -> None:
        """Write CSV: one line per row, which begins with the conditions of its run."""
        lines = [_flat(run, row) for run in self.runs for row in run.rows]
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for line in lines for name in line)), restval="")
            writer.writeheader()
            writer.writerows(lines)


def _flat(run: Run, row: Row) -> dict[str, Any]:
    network = run.network or Network(0, None, 0)
    conditions = {
        **{name: getattr(run, name) for name in ("benchmark", "ranks", "mpi", "data", "dtype", "buffer")},
        "hosts": network.hosts or "",
        "rate_bits": network.rate or "",
    }
    skipped = ("times_us", "extra")
    measured = {item.name: getattr(row, item.name) for item in fields(row) if item.name not in skipped}
    return {**conditions, **measured, "median_us": row.median_us, "iterations": len(row.times_us), **row.extra}


def load(path: Path | str) -> Results:
    """Read and validate a file that `save` has written."""
    try:
        content = json.loads(Path(path).read_text())
        return _results(content)
    except (OSError, ValueError, RecursionError) as error:  # the last from JSON that is nested too deeply
        got = getattr(error, "strerror", None) or str(error)
        remedy = "Create one with `osu_bench NAME --json FILE`."
        raise BufferSpecError(f"file {path}", expected="results of osu_bench", got=got, remedy=remedy) from error


def _results(content: Any) -> Results:
    """Validate the content of a file; a ValueError names the first entry that is wrong."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"JSON without format {FORMAT!r}")
    if content.get("version") not in READABLE:
        raise ValueError(f"version {content.get('version')!r} instead of {VERSION}")
    machine = _entry(content, "machine", dict, "file")
    runs = _entry(content, "runs", list, "file")
    return Results([_run(run, f"run {number}") for number, run in enumerate(runs)], machine)


def _entry(content: Any, name: str, kind: type, where: str) -> Any:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{where} without {name} ({kind.__name__})")
    return value


def _run(content: Any, where: str) -> Run:
    rows = [_row(row, f"{where}, row {number}") for number, row in enumerate(_entry(content, "rows", list, where))]
    network = content.get("network")
    known = {name: value for name, value in content.items() if name not in ("network", "rows")}
    found: Run = _made(Run, known, where)
    found.network = _made(Network, network, f"{where}, network") if network else None
    found.rows = rows
    return found


def _row(content: Any, where: str) -> Row:
    if isinstance(content, dict) and "contender" in content:
        content = {("candidate" if name == "contender" else name): value for name, value in content.items()}
    row: Row = _made(Row, content, where)
    times = row.times_us
    if not isinstance(times, list) or not times or not all(isinstance(time, (int, float)) for time in times):
        raise ValueError(f"{where} without times_us (a list of numbers)")
    if not isinstance(row.size, int) or not isinstance(row.candidate, str):
        raise ValueError(f"{where} without size (int) and candidate (str)")
    return row


def _made(kind: type[Any], content: Any, where: str) -> Any:
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('() ')[2] or error}") from None


def merge(several: Sequence[Results]) -> Results:
    """Concatenate the runs of several files; the machine is that of the first."""
    return Results([run for results in several for run in results.runs], several[0].machine if several else {})


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi_gpucomp": mpi_gpucomp.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def row_of(size: int, candidate: str, by_iteration: Sequence[Sequence[float]], **measured: Any) -> Row:
    """Return a row, given the microseconds of each iteration on each rank."""
    of_ranks = [mean(times) for times in zip(*by_iteration, strict=True)]
    slowest = [max(times) for times in by_iteration]
    return Row(size, candidate, slowest, mean(of_ranks), min(of_ranks), max(of_ranks), **measured)
