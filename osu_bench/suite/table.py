"""Printed tables: the format of the OSU micro-benchmarks, and a table for comparisons."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from osu_bench.suite.flags import Flags
    from osu_bench.suite.results import Row

__all__ = ["Comparison", "Table", "bars", "osu_version"]

osu_version = "v7.4"
"""The version of the OSU micro-benchmarks whose format is printed."""

Cell = tuple[str, "Callable[[Row], str]"]


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


EXTRA: dict[str, Cell] = {
    "ratio": ("Ratio", lambda row: _number(row.ratio)),
    "wire": ("Wire(bytes)", lambda row: _number(row.wire_bytes, "d")),
    "algbw": ("algbw(GB/s)", lambda row: _number(row.algbw)),
    "busbw": ("busbw(GB/s)", lambda row: _number(row.busbw)),
    "wrong": ("#wrong", lambda row: str(row.wrong)),
    "limit": ("Wire limit(us)", lambda row: _number(row.limit_us)),
    "note": ("Note", lambda row: f"  {row.note or '-'}"),
}


def _latency(flags: Flags) -> list[Cell]:
    cells: list[Cell] = [("Avg Latency(us)", lambda row: f"{row.average_us:.2f}")]
    if flags.full:
        cells += [
            ("Min Latency(us)", lambda row: f"{row.fastest_us:.2f}"),
            ("Max Latency(us)", lambda row: f"{row.slowest_us:.2f}"),
            ("Iterations", lambda row: str(len(row.times_us))),
        ]
    return cells


def _overlap(flags: Flags) -> list[Cell]:
    named = {"Overall(us)": "overall_us", "Compute(us)": "compute_us", "Pure Comm.(us)": "pure_us"}
    cells = [(name, _extra(key)) for name, key in named.items()]
    if flags.full:
        cells += [
            ("Min Comm.(us)", lambda row: f"{row.fastest_us:.2f}"),
            ("Max Comm.(us)", lambda row: f"{row.slowest_us:.2f}"),
        ]
    cells.append(("Overlap(%)", _extra("overlap")))
    return cells


def _extra(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row.extra[key]:.2f}"


def _tail(percent: int) -> Callable[[Row], str]:
    return lambda row: f"{row.percentile(percent):.2f}"


def _bandwidth(flags: Flags) -> list[Cell]:
    return [("Bandwidth (MB/s)", _extra("bandwidth"))]


def _message_rate(flags: Flags) -> list[Cell]:
    return [
        ("MB/s", _extra("bandwidth")),
        ("Messages/s", _extra("message_rate")),
    ]


STYLES: dict[str, Callable[[Flags], list[Cell]]] = {
    "latency": _latency,
    "overlap": _overlap,
    "bandwidth": _bandwidth,
    "message rate": _message_rate,
}


BAR = 60


def bars(rows: Sequence[Row]) -> str:
    """Draw the medians as bars on a logarithmic scale."""
    times = [row.median_us for row in rows]
    least, most = math.log(min(times)), math.log(max(times))
    width = max(len(row.candidate) for row in rows)
    lengths = [1 + round((BAR - 1) * (math.log(time) - least) / ((most - least) or 1)) for time in times]
    lines = (
        f"{row.size:<10d}{row.candidate:<{width}s}  {'#' * length:<{BAR}s} {row.median_us:.2f}"
        for row, length in zip(rows, lengths, strict=True)
    )
    return "\n".join(["", "# Median latency (us), logarithmic", *lines])


class Table:
    """The table of one candidate: the columns of the OSU micro-benchmarks, then those of --columns."""

    def __init__(self, title: str, type_name: str, style: str, flags: Flags, *, sized: bool = True) -> None:
        """Choose the columns; `sized` is False for a barrier, which has no size."""
        self._title, self._type, self._sized = title, type_name, sized
        self._cells = STYLES[style](flags)
        if flags.tail_lat and style == "latency":
            tails = (50, 90, 99)
            self._cells += [(f"P{percent} Tail Lat(us)", _tail(percent)) for percent in tails]
        if flags.validation:
            self._cells.append(("Validation", lambda row: "Fail" if row.wrong else "Pass"))
        self._cells += [EXTRA[name] for name in flags.columns]

    def header(self) -> str:
        """Return the lines above the rows."""
        kind = [f"# Datatype: {self._type}."] if self._sized else []
        columns = "".join(f"{name:>20s}" for name, _ in self._cells)
        first = f"{'# Size':<10s}{columns}" if self._sized else f"# {columns.strip()}"
        return "\n".join(["", f"# OSU {self._title} Test {osu_version}", *kind, first])

    def line(self, rows: Sequence[Row]) -> str:
        """Return the line of a size."""
        (row,) = rows
        cells = "".join(f"{cell(row):>20s}" for _, cell in self._cells)
        return f"{row.size:<10d}{cells}" if self._sized else f"{cells}"


class Comparison:
    """The table of a comparison: each candidate's median, its ratio to the first one's, and further columns."""

    def __init__(self, title: str, names: Sequence[str], columns: Sequence[str]) -> None:
        """Fit the first column to the longest name."""
        self._title, self._lead = title, names[0]
        self._width = max(len("Candidate"), *map(len, names)) + 2
        self._extra = [EXTRA[name] for name in columns]

    def header(self) -> str:
        """Return the lines above the rows."""
        labels = [f"/ {self._lead}", *(label for label, _ in self._extra)]
        cells = "".join(f"{label:>16s}" for label in ("Median(us)", *labels))
        return f"\n# {self._title}\n{'# Size':<12s}{'Candidate':<{self._width}s}{cells}"

    def line(self, rows: Sequence[Row]) -> str:
        """Return the lines of a size."""
        lead = rows[0].median_us
        return "\n".join(self._one(row, row.median_us / lead) for row in rows)

    def _one(self, row: Row, versus: float) -> str:
        cells = [f"{row.median_us:.2f}", f"{versus:.3f}", *(cell(row) for _, cell in self._extra)]
        return f"{row.size:<12d}{row.candidate:<{self._width}s}" + "".join(f"{cell:>16s}" for cell in cells)
