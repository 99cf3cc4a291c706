"""Formatting of sizes, times, rates and factors with three significant digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from osu_bench.suite.results import Network, Run

__all__ = [
    "TIMES",
    "bandwidth_text",
    "digits",
    "factor_text",
    "network_text",
    "rate_text",
    "run_title",
    "short",
    "size_text",
    "tick_text",
    "time_text",
]

TIMES = "\N{MULTIPLICATION SIGN}"
SIZES = (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10))
PERIODS = (("us", 1.0), ("ms", 1e3), ("s", 1e6))
RATES = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("Kbit/s", 1e3))
BANDWIDTHS = (("GB/s", 1.0), ("MB/s", 1e-3), ("KB/s", 1e-6))
ROUNDS_UP = 999.5
"""From this value on, rounding would give 1000."""


def digits(value: float) -> str:
    """Format a number with three significant digits, or all digits before the point."""
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{places}f}"


def short(value: float) -> str:
    """Format a number with at most three significant digits, without trailing zeros."""
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def size_text(size: int) -> str:
    """Format bytes, with 1 KB = 1024 bytes as in the OSU benchmarks."""
    unit, scale = next((item for item in SIZES if size >= item[1]), ("B", 1))
    return f"{short(size / scale)} {unit}"


def time_text(microseconds: float) -> str:
    """Format a time."""
    unit, scale = _period(microseconds)
    return f"{digits(microseconds / scale)} {unit}"


def tick_text(microseconds: float) -> str:
    """Format a tick of a time axis."""
    unit, scale = _period(microseconds)
    return f"{microseconds / scale:.3g} {unit}"


def _period(microseconds: float) -> tuple[str, float]:
    return next((item for item in PERIODS if microseconds < ROUNDS_UP * item[1]), PERIODS[-1])


def bandwidth_text(gigabytes: float) -> str:
    """Format a bandwidth given in GB/s."""
    unit, scale = next((item for item in BANDWIDTHS if gigabytes >= item[1]), BANDWIDTHS[-1])
    return f"{short(gigabytes / scale)} {unit}"


def factor_text(factor: float) -> str:
    """Format a speed-up."""
    return f"{digits(factor)}{TIMES}"


def rate_text(rate: float | None) -> str:
    """Format the rate of a link."""
    if rate is None:
        return "unshaped"
    unit, scale = next((item for item in RATES if rate >= item[1] / 2), ("bit/s", 1.0))
    return f"{rate / scale:.4g} {unit}"


def network_text(network: Network | None) -> str:
    """Describe a network."""
    if network is None:
        return "network unknown"
    rails = f"{network.rails} {TIMES} " if network.rails > 1 else ""
    return f"{network.hosts} hosts, {rails}{rate_text(network.rate)}"


def run_title(run: Run) -> str:
    """Return the title of a run: its conditions."""
    usual = [
        run.data,
        run.dtype if run.dtype not in ("float32", "") else "",
        run.buffer if run.buffer != "numpy" else "",
    ]
    ranks = "" if run.network and run.network.hosts == run.ranks else f"{run.ranks} ranks"
    parts = [run.benchmark, *usual, network_text(run.network), ranks, run.mpi]
    return ", ".join(part for part in parts if part)
