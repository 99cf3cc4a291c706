"""Figures as people read them: sizes, times, rates and factors, with three digits that matter."""

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
"""From here on three digits would show as 1000."""


def digits(value: float) -> str:
    """Write a number with three digits, more only in front of the point."""
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{places}f}"


def short(value: float) -> str:
    """Write a number with three digits at most, and no zeros at its end."""
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def size_text(size: int) -> str:
    """Write bytes as the OSU benchmarks count them, 1024 to the KB."""
    unit, scale = next((item for item in SIZES if size >= item[1]), ("B", 1))
    return f"{short(size / scale)} {unit}"


def time_text(microseconds: float) -> str:
    """Write a time in the unit that suits it."""
    unit, scale = _period(microseconds)
    return f"{digits(microseconds / scale)} {unit}"


def tick_text(microseconds: float) -> str:
    """Write a round time, as axes have them."""
    unit, scale = _period(microseconds)
    return f"{microseconds / scale:.3g} {unit}"


def _period(microseconds: float) -> tuple[str, float]:
    return next((item for item in PERIODS if microseconds < ROUNDS_UP * item[1]), PERIODS[-1])


def bandwidth_text(gigabytes: float) -> str:
    """Write GB/s, or a smaller unit where they are few."""
    unit, scale = next((item for item in BANDWIDTHS if gigabytes >= item[1]), BANDWIDTHS[-1])
    return f"{short(gigabytes / scale)} {unit}"


def factor_text(factor: float) -> str:
    """Write how many times as fast something is."""
    return f"{digits(factor)}{TIMES}"


def rate_text(rate: float | None) -> str:
    """Write the rate of a link; one that nothing limits is unshaped."""
    if rate is None:
        return "unshaped"
    unit, scale = next((item for item in RATES if rate >= item[1] / 2), ("bit/s", 1.0))
    return f"{rate / scale:.4g} {unit}"


def network_text(network: Network | None) -> str:
    """Say what joins the hosts."""
    if network is None:
        return "network unknown"
    rails = f"{network.rails} {TIMES} " if network.rails > 1 else ""
    return f"{network.hosts} hosts, {rails}{rate_text(network.rate)}"


def run_title(run: Run) -> str:
    """Name a run by its conditions."""
    usual = [
        run.data,
        run.dtype if run.dtype not in ("float32", "") else "",
        run.buffer if run.buffer != "numpy" else "",
    ]
    ranks = "" if run.network and run.network.hosts == run.ranks else f"{run.ranks} ranks"
    parts = [run.benchmark, *usual, network_text(run.network), ranks, run.mpi]
    return ", ".join(part for part in parts if part)
