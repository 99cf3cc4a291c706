"""Speed-ups by network: a table of hosts and rates for each benchmark, data and MPI library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from osu_bench.report.compare import is_exact, is_ours, speed
from osu_bench.report.markup import Markup, tag
from osu_bench.report.units import TIMES, factor_text, rate_text, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from osu_bench.suite.results import Results, Run

__all__ = ["STEPS", "chosen_size", "matrices", "speeds"]

AGAINST = ("mpi", "mpi-tuned")
STEPS = (0.5, 0.8, 0.95, 1.05, 1.5, 3.0)
"""Boundaries of the shades; between the middle two the speed-up is within noise."""
PREFERRED_SIZE = 64 << 20


def chosen_size(results: Results) -> int | None:
    """Return the size shown first: PREFERRED_SIZE, or else the largest of those in most runs."""
    counts: dict[int, int] = {}
    for run in results.runs:
        for size in run.sizes():
            counts[size] = counts.get(size, 0) + 1
    if PREFERRED_SIZE in counts:
        return PREFERRED_SIZE
    return max(counts, key=lambda size: (counts[size], size), default=None)


def speeds(run: Run) -> dict[str, dict[int, dict[str, float]]]:
    """Return the speed-ups by baseline, size and candidate, without wrong results."""
    table: dict[str, dict[int, dict[str, float]]] = {base: {} for base in AGAINST}
    for row in run.rows:
        for base in AGAINST if is_ours(row.candidate) and not row.wrong else ():
            gain = speed(run, row, run.row(base, row.size))
            if gain is not None:
                table[base].setdefault(row.size, {})[row.candidate] = float(f"{gain:.4g}")
    return table


def choices(results: Results) -> list[str]:
    """Return this library's candidates of all runs."""
    return list(dict.fromkeys(name for run in results.runs for name in run.candidates() if is_ours(name)))


def for_script(results: Results) -> dict[str, Any]:
    """Return the data with which the page's script shows other sizes and candidates."""
    exact = [name for name in choices(results) if is_exact(name)]
    return {"runs": [speeds(run) for run in results.runs], "exact": exact, "steps": STEPS, "times": TIMES}


def matrices(results: Results) -> Markup:
    """Return the tables, with this library's fastest candidate at the chosen size."""
    size = chosen_size(results)
    groups: dict[tuple[str, ...], dict[tuple[str, str], int]] = {}
    for number, run in enumerate(results.runs):
        if run.rows:
            groups.setdefault(_group(run), {})[_hosts(run), _rate(run)] = number
    rates = _in_order(results.runs)
    return tag("div", *(_matrix(results, key, cells, rates, size) for key, cells in groups.items()), class_="matrices")


def _group(run: Run) -> tuple[str, ...]:
    rails = f"{run.network.rails} rails" if run.network and run.network.rails > 1 else ""
    buffer = run.buffer if run.buffer != "numpy" else ""
    return (run.benchmark, run.data, run.mpi, run.dtype if run.dtype != "float32" else "", buffer, rails)


def _hosts(run: Run) -> str:
    return f"{run.network.hosts} hosts" if run.network else f"{run.ranks} ranks"


def _rate(run: Run) -> str:
    return rate_text(run.network.rate) if run.network else "unknown"


def _in_order(runs: Sequence[Run]) -> list[str]:
    known = sorted({run.network.rate or math.inf for run in runs if run.network})
    unknown = ["unknown"] if any(run.network is None for run in runs) else []
    return [rate_text(None if math.isinf(rate) else rate) for rate in known] + unknown


def _matrix(
    results: Results, key: tuple[str, ...], cells: dict[tuple[str, str], int], rates: list[str], size: int | None
) -> Markup:
    columns = [rate for rate in rates if any(rate == of_cell for _, of_cell in cells)]
    head = tag("tr", tag("td", ""), *(tag("th", rate, scope="col") for rate in columns))
    rows = [
        tag("tr", tag("th", hosts, scope="row"), *(_cell(results, cells.get((hosts, rate)), size) for rate in columns))
        for hosts in dict.fromkeys(hosts for hosts, _ in cells)
    ]
    conditions = " \N{MIDDLE DOT} ".join(part for part in key[1:] if part)
    title = tag("caption", tag("b", key[0]), tag("span", conditions, title=conditions))
    filters = {"data_benchmark": key[0], "data_data": key[1], "data_mpi": key[2]}
    return tag("table", title, tag("thead", head), tag("tbody", *rows), class_="matrix", **filters)


def _cell(results: Results, number: int | None, size: int | None) -> Markup:
    if number is None or size is None:
        return tag("td", "")
    found = speeds(results.runs[number])
    first, second = (max(found[base].get(size, {}).values(), default=None) for base in AGAINST)
    hardest = first if second is None else second
    shown = [tag("b", _shown(first)), tag("small", _shown(second))]
    link = tag("a", *shown, href=f"#run-{number}", title=f"{size_text(size)}: against mpi, below it against mpi-tuned")
    return tag("td", link, class_=shade(hardest), data_run=number)


def _shown(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else factor_text(value)


def shade(value: float | None) -> str:
    """Return the class that colours a speed-up."""
    return "shade" if value is None else f"shade s{sum(value >= step for step in STEPS)}"
