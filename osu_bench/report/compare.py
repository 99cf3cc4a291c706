"""Candidates against each other: what is compared, against whom, and what the wire alone would take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mpi_gpucomp.codec.registry import get_codec
from mpi_gpucomp.errors import GpucompError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from osu_bench.suite.results import Results, Row, Run

__all__ = ["BASES", "Point", "best", "figure", "is_bandwidth", "is_exact", "is_ours", "limit", "plain_limit"]
__all__ += ["points", "speed", "wire_share"]

BANDWIDTH = ("bw", "bibw", "mbw_mr")
BASES = ("mpi", "mpi-tuned", "p2p")
"""Whom the candidates are held against; p2p is compression message by message, with the same codec."""
RIVALS = ("mpi", "mpi-tuned", "gloo", "p2p")
EXACT_RIVALS = ("mpi", "mpi-tuned", "gloo")


@dataclass(frozen=True)
class Point:
    """One of our own candidates at one size of a run, beside the candidate that it is held against."""

    number: int
    """The place of the run in the report."""
    run: Run
    row: Row
    base: Row
    speed: float
    """How many times as fast as the base it is."""


def is_bandwidth(run: Run) -> bool:
    """Tell whether the run measures GB/s, of which more is better, and not time."""
    return run.benchmark in BANDWIDTH


def is_ours(candidate: str) -> bool:
    """Tell whether a candidate is this library's own way, not one that it is held against."""
    return candidate.partition(":")[0] not in RIVALS


@lru_cache(maxsize=256)
def is_exact(candidate: str) -> bool:
    """Tell whether a candidate is known to give back every bit."""
    if candidate in EXACT_RIVALS:
        return True
    try:
        return get_codec(candidate.removeprefix("p2p:")).lossless
    except GpucompError:
        return False


def figure(run: Run, row: Row | None) -> float | None:
    """Return what is compared: the median microseconds, or GB/s where bandwidth is measured."""
    if row is None or (is_bandwidth(run) and row.algbw is None) or not row.times_us:
        return None
    value = row.algbw if is_bandwidth(run) else row.median_us
    return value or None


def speed(run: Run, row: Row | None, base: Row | None) -> float | None:
    """Return how many times as fast a row is as another, if both were measured."""
    own, other = figure(run, row), figure(run, base)
    if own is None or other is None:
        return None
    return own / other if is_bandwidth(run) else other / own


def base_row(run: Run, candidate: str, size: int, base: str) -> Row | None:
    """Return the row that a candidate is held against at a size."""
    return run.row(f"p2p:{candidate}" if base == "p2p" else base, size)


def points(results: Results, base: str) -> list[Point]:
    """Hold every right result of our own candidates against a base, where that was measured and right too."""
    return [point for number, run in enumerate(results.runs) for point in _of_run(number, run, base)]


def _of_run(number: int, run: Run, base: str) -> Iterator[Point]:
    for row in run.rows:
        other = base_row(run, row.candidate, row.size, base)
        gain = speed(run, row, other)
        if other is not None and gain is not None and is_ours(row.candidate) and not row.wrong and not other.wrong:
            yield Point(number, run, row, other, gain)


def best(run: Run, size: int, exact: bool = False) -> Row | None:
    """Return the fastest right row of a size, among all or among those that lose nothing."""
    rows = [row for row in run.rows if row.size == size and not row.wrong and figure(run, row) is not None]
    return _fastest(run, [row for row in rows if not exact or is_exact(row.candidate)])


def _fastest(run: Run, rows: Sequence[Row]) -> Row | None:
    if is_bandwidth(run):
        return max(rows, key=lambda row: row.algbw or 0, default=None)
    return min(rows, key=lambda row: row.median_us, default=None)


def wire_share(row: Row, run: Run) -> float | None:
    """Return the share of its time that a row's bytes need on the wire."""
    plain = plain_limit(run, row.size) if row.limit_us is None and row.candidate in EXACT_RIVALS else None
    if plain is not None:
        own = figure(run, row)
        return None if own is None else own / plain if is_bandwidth(run) else plain / own
    if row.limit_us is None or not row.times_us or not row.median_us:
        return None
    return row.limit_us / row.median_us


def limit(run: Run, row: Row) -> float | None:
    """Return the best figure that the wire would allow with the bytes of a row."""
    own, share = figure(run, row), wire_share(row, run)
    if own is None or not share:
        return None
    return own / share if is_bandwidth(run) else own * share


def plain_limit(run: Run, size: int) -> float | None:
    """Return the best figure that the wire would allow without compression."""
    if run.network is None or run.network.rate is None or run.benchmark == "barrier":
        return None
    bytes_a_us = run.network.rate * run.network.rails / 8e6
    if is_bandwidth(run):
        together = {"bibw": 2, "mbw_mr": max(1, run.ranks // 2)}.get(run.benchmark, 1)
        return together * bytes_a_us / 1e3
    return size * _passes(run) / bytes_a_us


def _passes(run: Run) -> float:
    """Return how often the bytes of a message, as the OSU benchmarks count them, go over the busiest link."""
    others = run.ranks - 1
    if run.benchmark.removeprefix("i") == "allreduce":
        return 2 * others / run.ranks
    if run.benchmark.removeprefix("i") == "reduce_scatter":
        return others / run.ranks
    return others if run.benchmark.removeprefix("i") in ("allgather", "alltoall", "gather", "scatter") else 1
