"""Comparison of candidates: the figures compared, the baselines, and the limit of the link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mpi_gpucomp.codec.registry import get_codec
from mpi_gpucomp.errors import GpucompError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from osu_bench.suite.results import Results, Row, Run

__all__ = ["BASELINES", "Point", "best", "figure", "is_bandwidth", "is_exact", "is_ours", "limit", "raw_limit"]
__all__ += ["points", "speed", "wire_share"]

BANDWIDTH = ("bw", "bibw", "mbw_mr")
BASELINES = ("mpi", "mpi-tuned", "p2p")
"""Baselines of the comparisons; p2p compresses each message separately, with the same codec."""
OTHERS = ("mpi", "mpi-tuned", "gloo", "p2p")
EXACT_BASELINES = ("mpi", "mpi-tuned", "gloo")


@dataclass(frozen=True)
class Point:
    """A candidate of this library at one size of a run, and the baseline's row."""

    number: int
    """The index of the run in the report."""
    run: Run
    row: Row
    base: Row
    speed: float
    """The speed-up over the baseline."""


def is_bandwidth(run: Run) -> bool:
    """Return True if the run measures bandwidth, not time."""
    return run.benchmark in BANDWIDTH


def is_ours(candidate: str) -> bool:
    """Return True if a candidate is this library's, not a baseline."""
    return candidate.partition(":")[0] not in OTHERS


@lru_cache(maxsize=256)
def is_exact(candidate: str) -> bool:
    """Return True if a candidate is known to be lossless."""
    if candidate in EXACT_BASELINES:
        return True
    try:
        return get_codec(candidate.removeprefix("p2p:")).lossless
    except GpucompError:
        return False


def figure(run: Run, row: Row | None) -> float | None:
    """Return the figure compared: median microseconds, or GB/s."""
    if row is None or (is_bandwidth(run) and row.algbw is None) or not row.times_us:
        return None
    value = row.algbw if is_bandwidth(run) else row.median_us
    return value or None


def speed(run: Run, row: Row | None, base: Row | None) -> float | None:
    """Return the speed-up of a row over another, or None if one was not measured."""
    own, other = figure(run, row), figure(run, base)
    if own is None or other is None:
        return None
    return own / other if is_bandwidth(run) else other / own


def base_row(run: Run, candidate: str, size: int, base: str) -> Row | None:
    """Return the baseline's row for a candidate and size."""
    return run.row(f"p2p:{candidate}" if base == "p2p" else base, size)


def points(results: Results, base: str) -> list[Point]:
    """Compare every correct result of this library with a baseline's correct result."""
    return [point for number, run in enumerate(results.runs) for point in _of_run(number, run, base)]


def _of_run(number: int, run: Run, base: str) -> Iterator[Point]:
    for row in run.rows:
        other = base_row(run, row.candidate, row.size, base)
        gain = speed(run, row, other)
        if other is not None and gain is not None and is_ours(row.candidate) and not row.wrong and not other.wrong:
            yield Point(number, run, row, other, gain)


def best(run: Run, size: int, exact: bool = False) -> Row | None:
    """Return the fastest correct row of a size, among all or only lossless candidates."""
    rows = [row for row in run.rows if row.size == size and not row.wrong and figure(run, row) is not None]
    return _fastest(run, [row for row in rows if not exact or is_exact(row.candidate)])


def _fastest(run: Run, rows: Sequence[Row]) -> Row | None:
    if is_bandwidth(run):
        return max(rows, key=lambda row: row.algbw or 0, default=None)
    return min(rows, key=lambda row: row.median_us, default=None)


def wire_share(row: Row, run: Run) -> float | None:
    """Return the time of a row's bytes on the link as a share of the row's time."""
    raw = raw_limit(run, row.size) if row.limit_us is None and row.candidate in EXACT_BASELINES else None
    if raw is not None:
        own = figure(run, row)
        return None if own is None else own / raw if is_bandwidth(run) else raw / own
    if row.limit_us is None or not row.times_us or not row.median_us:
        return None
    return row.limit_us / row.median_us


def limit(run: Run, row: Row) -> float | None:
    """Return the best figure that the link allows for the bytes of a row."""
    own, share = figure(run, row), wire_share(row, run)
    if own is None or not share:
        return None
    return own / share if is_bandwidth(run) else own * share


def raw_limit(run: Run, size: int) -> float | None:
    """Return the best figure that the link allows without compression."""
    if run.network is None or run.network.rate is None or run.benchmark == "barrier":
        return None
    bytes_a_us = run.network.rate * run.network.rails / 8e6
    if is_bandwidth(run):
        together = {"bibw": 2, "mbw_mr": max(1, run.ranks // 2)}.get(run.benchmark, 1)
        return together * bytes_a_us / 1e3
    return size * _passes(run) / bytes_a_us


def _passes(run: Run) -> float:
    """Return the traffic of the busiest link, as a multiple of the OSU message size."""
    others = run.ranks - 1
    if run.benchmark.removeprefix("i") == "allreduce":
        return 2 * others / run.ranks
    if run.benchmark.removeprefix("i") == "reduce_scatter":
        return others / run.ranks
    return others if run.benchmark.removeprefix("i") in ("allgather", "alltoall", "gather", "scatter") else 1
