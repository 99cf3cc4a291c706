"""The table of a run: candidates by sizes, with all figures in each cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from osu_bench.report.chart import figure_text, swatch
from osu_bench.report.compare import best, figure, is_bandwidth, is_exact, speed, wire_share
from osu_bench.report.markup import Markup, tag
from osu_bench.report.units import digits, factor_text, run_title, short, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from osu_bench.suite.results import Row, Run

__all__ = ["EXPLAINED", "figures"]

EXPLAINED = (
    "Each cell: the median time (or bandwidth); the speed-up over mpi; the compression ratio; the time on the link as a"
    " share of the whole. Filled: fastest at this size. Framed: fastest lossless candidate."
)


def figures(run: Run, kind: Callable[[str], str]) -> Markup:
    """Return the table of a run."""
    sizes = run.sizes()
    head = [tag("th", size_text(size), scope="col", data_size=size) for size in sizes]
    marked = {size: (best(run, size), best(run, size, exact=True)) for size in sizes}
    lines = [_line(run, candidate, marked, kind(candidate)) for candidate in run.candidates()]
    table = tag(
        "table",
        tag("caption", f"Figures of {run_title(run)}"),
        tag("thead", tag("tr", tag("th", "candidate", scope="col"), *head)),
        tag("tbody", *lines),
        class_="figures",
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table of {run_title(run)}")


def _line(run: Run, candidate: str, marked: dict[int, tuple[Row | None, Row | None]], kind: str) -> Markup:
    loss = Markup() if is_exact(candidate) else tag("span", " lossy", class_="lossy")
    name = tag("th", swatch(candidate, kind), tag("span", candidate, class_="candidate"), loss, scope="row")
    return tag("tr", name, *(_cell(run, run.row(candidate, size), marked[size]) for size in marked))


def _cell(run: Run, row: Row | None, marked: tuple[Row | None, Row | None]) -> Markup:
    value = figure(run, row)
    if row is None or value is None:
        return tag("td", "not measured", class_="missing")
    lines = [tag("b", figure_text(run, value)), *_beside(run, row)]
    kinds = [name for name, is_so in _marks(row, marked) if is_so]
    return tag("td", *lines, class_=" ".join(kinds) or None, title=_details(run, row), data_value=f"{value:.6g}")


def _marks(row: Row, marked: tuple[Row | None, Row | None]) -> list[tuple[str, bool]]:
    fastest, fastest_exact = marked
    return [("wrong", row.wrong > 0), ("best", row is fastest), ("best-exact", row is fastest_exact)]


def _beside(run: Run, row: Row) -> list[Markup]:
    """Return the lower lines of a cell."""
    gain, share = speed(run, row, run.row("mpi", row.size)), wire_share(row, run)
    ratio = "" if row.ratio is None else f"{short(row.ratio)}:1"
    parts = [ratio, "" if share is None else f"{100 * share:.0f} %"]
    below = " \N{MIDDLE DOT} ".join(part for part in parts if part)
    lines = [tag("span", "" if gain is None else factor_text(gain), class_="gain"), tag("small", below)]
    return [*lines, tag("strong", f"{row.wrong} wrong")] if row.wrong else lines


def _details(run: Run, row: Row) -> str:
    """Return further figures, as the cell's tooltip."""
    parts = [
        f"{row.candidate}, {size_text(row.size)}",
        f"median {time_text(row.median_us)} of {len(row.times_us)}",
        f"average {time_text(row.average_us)}",
        f"90 % below {time_text(row.percentile(90))}",
        "" if row.wire_bytes is None else f"{row.wire_bytes} bytes on the wire",
        "" if row.algbw is None or is_bandwidth(run) else f"algbw {digits(row.algbw)} GB/s",
        "" if row.busbw is None else f"busbw {digits(row.busbw)} GB/s",
        *(f"{name} {short(value)}" for name, value in row.extra.items()),
        row.note,
    ]
    return "; ".join(part for part in parts if part)
