"""The SVG chart of a run: time or bandwidth against size on logarithmic axes, and the limit of the link."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from osu_bench.report.compare import best, figure, is_bandwidth, limit, raw_limit
from osu_bench.report.drawing import Axis, axis, look, round_values, thinned
from osu_bench.report.markup import Markup, tag
from osu_bench.report.units import bandwidth_text, run_title, size_text, tick_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from osu_bench.suite.results import Row, Run

__all__ = ["WIDTH", "chart", "figure_text", "limit_swatch", "swatch"]

WIDTH, HEIGHT = 600, 400
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 14, 48
MOST_SIZES = 9
SHAPES = {
    "square": "M-3.6-3.6h7.2v7.2h-7.2z",
    "diamond": "M0-5L5 0 0 5-5 0z",
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "up": "M0-5L4.8 3.8h-9.6z",
    "down": "M0 5L4.8-3.8h-9.6z",
    "cross": "M-4.4-2.4l2-2L0-2l2.4-2.4 2 2L2 0l2.4 2.4-2 2L0 2l-2.4 2.4-2-2L-2 0z",
    "pentagon": "M0-5L4.8-1.5 2.9 4h-5.8L-4.8-1.5z",
}


class Frame(NamedTuple):
    """A run and the axes of its chart."""

    run: Run
    x: Axis
    y: Axis


def figure_text(run: Run, value: float) -> str:
    """Format a figure in the unit of the run."""
    return bandwidth_text(value) if is_bandwidth(run) else time_text(value)


def swatch(candidate: str, kind: str) -> Markup:
    """Draw a candidate's line and marker for a legend."""
    parts = (tag("path", d="M0 6h24", class_="line"), _marker(look(candidate).marker, 12, 6, "dot"))
    return tag("svg", *parts, viewBox="0 0 24 12", class_=f"swatch {kind}", aria_hidden="true")


def limit_swatch() -> Markup:
    """Draw the line of the link's limit for a legend."""
    return tag(
        "svg", tag("path", d="M0 6h24", class_="limit"), viewBox="0 0 24 12", class_="swatch", aria_hidden="true"
    )


def chart(run: Run, kind: Callable[[str], str]) -> Markup:
    """Draw a run; `kind` returns the CSS class of a candidate's colour."""
    sizes = [size for size in run.sizes() if size > 0]
    values = [value for row in run.rows if row.size in sizes and (value := figure(run, row))]
    if not values:
        return tag("p", "No chart: no size above 0 was measured.", class_="none")
    limits = [value for size in sizes if (value := raw_limit(run, size))]
    x = axis(sizes, LEFT + 10, WIDTH - RIGHT - 10, 1.0 if len(sizes) > 1 else 2.0)
    frame = Frame(run, x, axis([*values, *limits], HEIGHT - BOTTOM, TOP, 1.12))
    series = [_series(frame, candidate, kind(candidate)) for candidate in run.candidates()]
    parts = (_grid(frame, sizes), _raw_limit(frame, sizes), *series, tag("path", d="", class_="rule"))
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="chart",
        role="img",
        aria_label=_description(run, sizes),
        data_x=" ".join(f"{x(size):.1f}" for size in sizes),
        data_sizes=" ".join(map(str, sizes)),
        data_top=TOP,
        data_bottom=HEIGHT - BOTTOM,
    )


def _description(run: Run, sizes: list[int]) -> str:
    what = "Bandwidth" if is_bandwidth(run) else "Median time"
    winner = best(run, sizes[-1])
    value = figure(run, winner)
    text = f"{what} against size of {run_title(run)}, both axes logarithmic."
    if winner is None or value is None:
        return text
    return f"{text} Best at {size_text(sizes[-1])}: {winner.candidate} with {figure_text(run, value)}."


def _grid(frame: Frame, sizes: list[int]) -> Markup:
    y_text = bandwidth_text if is_bandwidth(frame.run) else tick_text
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in round_values(frame.y.low, frame.y.high):
        place = frame.y(value)
        parts.append(tag("path", d=f"M{LEFT} {place:.1f}H{right}", class_="grid"))
        parts.append(tag("text", y_text(value), x=LEFT - 8, y=place + 4, class_="tick y"))
    for at, size in enumerate(thinned(sizes, MOST_SIZES)[::-1]):
        place = frame.x(size)
        parts.append(tag("path", d=f"M{place:.1f} {bottom}v5", class_="axis"))
        parts.append(tag("text", size_text(size), x=place, y=bottom + 19, class_="tick x odd" if at % 2 else "tick x"))
    parts.append(tag("path", d=f"M{LEFT} {bottom}H{right}", class_="axis"))
    what = "bandwidth, more is better" if is_bandwidth(frame.run) else "median time, less is better"
    parts.append(tag("text", f"message size; {what}", x=(LEFT + right) / 2, y=HEIGHT - 8, class_="name"))
    return tag("g", *parts)


def _raw_limit(frame: Frame, sizes: list[int]) -> Markup:
    found = [(frame.x(size), frame.y(value)) for size in sizes if (value := raw_limit(frame.run, size))]
    if not found:
        return Markup()
    title = tag("title", "Limit of the link without compression")
    return tag("g", title, tag("path", d=_through(found), class_="limit"))


def _series(frame: Frame, candidate: str, kind: str) -> Markup:
    rows = [frame.run.row(candidate, size) for size in frame.run.sizes() if size > 0]
    lines = [tag("path", d=_through(part), class_="line") for part in _unbroken(frame, rows) if len(part) > 1]
    dots = [_dot(frame, row) for row in rows if row is not None and figure(frame.run, row)]
    return tag("g", _own_limit(frame, rows), *lines, *dots, class_=f"series {kind}", data_name=candidate)


def _unbroken(frame: Frame, rows: list[Row | None]) -> list[list[tuple[float, float]]]:
    """Return the points of the rows; sizes that were not measured interrupt the line."""
    parts: list[list[tuple[float, float]]] = [[]]
    for row in rows:
        value = figure(frame.run, row)
        if row is None or value is None:
            parts.append([])
        else:
            parts[-1].append((frame.x(row.size), frame.y(value)))
    return parts


def _own_limit(frame: Frame, rows: list[Row | None]) -> Markup:
    """Draw the limit of the link for the compressed bytes, shown while the pointer is on the candidate."""
    kept = ((row, limit(frame.run, row)) for row in rows if row is not None and row.ratio is not None)
    found = [(frame.x(row.size), frame.y(value)) for row, value in kept if value and row.ratio != 1]
    inside = [place for place in found if TOP <= place[1] <= HEIGHT - BOTTOM]
    return tag("path", d=_through(inside), class_="own-limit") if len(inside) > 1 else Markup()


def _dot(frame: Frame, row: Row) -> Markup:
    value = figure(frame.run, row) or 0.0
    wrong = f", {row.wrong} wrong" if row.wrong else ""
    text = f"{row.candidate}, {size_text(row.size)}: {figure_text(frame.run, value)}{wrong}"
    place = frame.x(row.size), frame.y(value)
    return _marker(look(row.candidate).marker, *place, "dot wrong" if row.wrong else "dot", tag("title", text))


def _marker(shape: str, x: float, y: float, kind: str, *inside: Markup) -> Markup:
    return tag("path", *inside, d=SHAPES[shape], transform=f"translate({x:.1f} {y:.1f})", class_=kind)


def _through(places: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
