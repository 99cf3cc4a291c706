"""Plots as png, svg or pdf, with matplotlib: `plot` draws a run, `plot_grid` a benchmark on several networks."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.errors import BufferSpecError, DeviceError, SpecError
from osu_bench.report.compare import figure, is_bandwidth, is_ours, limit, raw_limit
from osu_bench.report.drawing import MARKERS, axis, look, round_values, thinned
from osu_bench.report.units import bandwidth_text, rate_text, run_title, size_text, tick_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from osu_bench.suite.results import Results, Run

__all__ = ["FAINT", "GRID", "INK", "new_figure", "plot", "plot_grid", "save_figure"]

SUFFIXES = (".png", ".svg", ".pdf")
GROUND, INK, FAINT, GRID, WIRE = "#ffffff", "#191c21", "#5c6570", "#dfe3e8", "#b3261e"
WIRE_NAME = "link limit, uncompressed"
DOTS_AN_INCH = 160
MOST_SIZES, MOST_SIZES_OF_PANEL = 9, 5
FEW = 5
"""Up to this many candidates also show the link limit of their compressed bytes."""


def plot(run: Run, path: Path | str) -> None:
    """Plot time (or bandwidth) against size for each candidate, and the link limit."""
    drawing = new_figure(path, 8.5, 5.2)
    candidates = run.candidates()
    if not _values(run, candidates):
        raise _empty(run_title(run))
    axes = drawing.add_subplot()
    _lines(axes, run, candidates)
    _scales(axes, [run], candidates, MOST_SIZES)
    axes.set_title(_text(run_title(run)), loc="left", fontsize=11, color=INK, wrap=True)
    axes.set_ylabel("bandwidth" if is_bandwidth(run) else "median time", color=FAINT)
    axes.set_xlabel("message size", color=FAINT)
    handles, names = _by_last_value([axes])
    axes.legend(handles, names, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelcolor=INK)
    save_figure(drawing, path)


def plot_grid(
    results: Results,
    path: Path | str,
    candidates: Sequence[str],
    *,
    benchmark: str = "bcast",
    data: str = "weights",
    mpi: str | None = None,
) -> None:
    """Plot a grid of panels, rates by numbers of hosts.

    `mpi` is a prefix of the MPI library's name; by default the first one measured is shown.
    """
    runs = _by_network(results, benchmark, data, mpi)
    hosts, rates = sorted({host for host, _ in runs}), sorted({rate for _, rate in runs})
    shown = [run for run in runs.values() if _values(run, candidates)]
    if not shown:
        raise _empty(f"{benchmark}, {data} on known networks")
    drawing = new_figure(path, 1.0 + 2.5 * len(rates), 1.3 + 2.1 * len(hosts))
    panels = drawing.subplots(len(hosts), len(rates), sharex=True, sharey=True, squeeze=False)
    places = [
        ((host, rate), panels[down][across]) for down, host in enumerate(hosts) for across, rate in enumerate(rates)
    ]
    for (host, rate), axes in places:
        axes.set_title(f"{host} hosts, {rate_text(None if math.isinf(rate) else rate)}", fontsize=10, color=INK)
        if (host, rate) in runs:
            _lines(axes, runs[host, rate], candidates)
            _scales(axes, shown, candidates, MOST_SIZES_OF_PANEL)
        else:
            axes.set_axis_off()  # not measured
    handles, names = _by_last_value([axes for _, axes in places])
    columns = min(len(names), 1 + len(rates))  # a name is about as wide as a panel
    drawing.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, labelcolor=INK)
    what = "bandwidth" if is_bandwidth(shown[0]) else "median time"
    drawing.suptitle(_text(f"{benchmark}, {data}, {shown[0].mpi}: {what} against size"), fontsize=12, color=INK)
    save_figure(drawing, path)


def _by_network(results: Results, benchmark: str, data: str, mpi: str | None) -> dict[tuple[int, float], Run]:
    """Return the last run of each network; an unshaped rate is infinite."""
    runs = [run for run in results.runs if (run.benchmark, run.data) == (benchmark, data)]
    wanted = next((run.mpi for run in runs if run.network and run.mpi.startswith(mpi or "")), None)
    same_mpi = [run for run in runs if run.mpi == wanted]
    return {(run.network.hosts, run.network.rate or math.inf): run for run in same_mpi if run.network}


def _lines(axes: Any, run: Run, candidates: Sequence[str]) -> None:
    wire = [(size, value) for size in _sizes(run) if (value := raw_limit(run, size))]
    if wire:
        axes.plot(*zip(*wire, strict=True), color=WIRE, linestyle=(0, (5, 3)), linewidth=1.3, label=WIRE_NAME, zorder=4)
    for name in candidates:
        drawn = look(name)
        rows = [run.row(name, size) for size in _sizes(run)]
        values = [figure(run, row) or math.nan for row in rows]
        if all(map(math.isnan, values)):
            continue
        style = {"color": drawn.light, "marker": MARKERS[drawn.marker], "markersize": 5, "linewidth": 1.7}
        axes.plot(_sizes(run), values, label=_text(name), markeredgecolor=GROUND, markeredgewidth=0.6, **style)
        own = [(row.size, value) for row in rows if row and row.ratio not in (None, 1) and (value := limit(run, row))]
        if own and is_ours(name) and len(candidates) <= FEW:
            dots = {"color": drawn.light, "linestyle": ":", "linewidth": 1.1}
            axes.plot(*zip(*own, strict=True), label=_text(f"link limit, {name}"), **dots)


def _scales(axes: Any, runs: Sequence[Run], candidates: Sequence[str], most: int) -> None:
    sizes = thinned(sorted({size for run in runs for size in _sizes(run)}), most)
    values = [value for run in runs for value in _values(run, candidates)]
    limits = [value for run in runs for size in _sizes(run) if (value := raw_limit(run, size))]
    span = axis([*values, *limits], 0, 1, 1.25)
    ticks = round_values(span.low, span.high)
    text = bandwidth_text if is_bandwidth(runs[0]) else tick_text
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.set_yticks(ticks, [text(value) for value in ticks])
    axes.minorticks_off()
    axes.set_ylim(span.low, span.high)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=3)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _sizes(run: Run) -> list[int]:
    return [size for size in run.sizes() if size > 0]


def _values(run: Run, candidates: Sequence[str]) -> list[float]:
    rows = (run.row(name, size) for name in candidates for size in _sizes(run))
    return [value for row in rows if (value := figure(run, row))]


def _by_last_value(several: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return the legend's handles and names, sorted by the last values of the lines."""
    ends: dict[str, tuple[float, Any]] = {}
    for axes in several:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            last = [value for value in handle.get_ydata() if not math.isnan(value)][-1]
            ends.setdefault(name, (last, handle))
    names = sorted(ends, key=lambda name: -ends[name][0])
    return [ends[name][1] for name in names], names


def _text(name: str) -> str:
    """Escape a name, in which matplotlib would find formulas."""
    return name.replace("$", r"\$")


def new_figure(path: Path | str, width: float, height: float) -> Any:
    """Return an empty figure of this size in inches, after checking the file name."""
    if Path(path).suffix.lower() not in SUFFIXES:
        expected = f"a name that ends with one of {', '.join(SUFFIXES)}"
        raise SpecError(f"plot {path}", expected=expected, got=f"'{Path(path).suffix}'", remedy="Rename it.")
    try:
        made = import_module("matplotlib.figure")
    except ImportError as error:
        remedy = "Install it with `pip install mpi_gpucomp[plot]`."
        raise DeviceError("plot", expected="the package matplotlib", got=str(error), remedy=remedy) from error
    return made.Figure(figsize=(width, height), facecolor=GROUND, layout="constrained")


def save_figure(drawing: Any, path: Path | str) -> None:
    """Save a figure."""
    try:
        drawing.savefig(path, dpi=DOTS_AN_INCH)
    except OSError as error:
        got = error.strerror or str(error)
        remedy = "Choose another file."
        raise BufferSpecError(f"file {path}", expected="a file to write", got=got, remedy=remedy) from error


def _empty(what: str) -> BufferSpecError:
    remedy = "Measure a size above 0, and name measured candidates."
    return BufferSpecError("plot", expected="figures to plot", got=f"no figures of {what}", remedy=remedy)
