"""The overview at the top of the page: best and worst speed-ups, and a summary table."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from osu_bench.report.chart import figure_text
from osu_bench.report.compare import BASELINES, Point, figure, is_bandwidth, is_exact, points
from osu_bench.report.markup import Markup, tag
from osu_bench.report.units import factor_text, network_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from osu_bench.suite.results import Results

__all__ = ["headline", "summary"]

NAMED = {
    "mpi": "native MPI (mpi)",
    "mpi-tuned": "the fastest native algorithm (mpi-tuned)",
    "p2p": "the same codec per message (p2p)",
}
SUMMED = ("median", "best", "worst", "over 5 % slower")
PERCENT = "\N{NO-BREAK SPACE}%"
SLOWER = 1 / 1.05
"""Below this speed-up a candidate counts as slower."""


def headline(results: Results) -> Markup:
    """Return the cards: the best speed-up over each baseline, and the worst."""
    against = {base: points(results, base) for base in BASELINES}
    cards = [_best(base, found) for base, found in against.items() if found]
    hardest = against["mpi-tuned"] or against["mpi"]
    if not hardest:
        return tag("p", "No comparison: mpi was not measured together with other candidates.", class_="none")
    return Markup(tag("div", *cards, _worst(hardest), class_="cards") + _counts(hardest))


def _best(base: str, found: Sequence[Point]) -> Markup:
    first = max(found, key=_speed)
    exact = max((point for point in found if is_exact(point.row.candidate)), key=_speed, default=None)
    lines = [tag("p", *_where(first))]
    if exact is not None and exact is not first:
        lines.append(tag("p", tag("b", f"Without loss {factor_text(exact.speed)}: "), *_where(exact)))
    text = "as fast as " if first.speed >= 1 else "at best as fast as "
    return _card(first.speed, text + NAMED[base], lines)


def _worst(found: Sequence[Point]) -> Markup:
    last = min(found, key=_speed)
    base = NAMED.get(last.base.candidate, last.base.candidate)
    return _card(last.speed, f"at worst as fast as {base}", [tag("p", *_where(last))])


def _card(speed: float, text: str, lines: Iterable[Markup]) -> Markup:
    kind = "card" if speed >= 1 else "card lost"
    return tag("div", tag("p", factor_text(speed), class_="large"), tag("p", text, class_="label"), *lines, class_=kind)


def _where(point: Point) -> tuple[str, ...]:
    """Return the candidate, its figures and its run."""
    return tag("code", point.row.candidate), *_figures(point)


def _figures(point: Point) -> tuple[str, ...]:
    run, row = point.run, point.row
    own, other = figure(run, row) or 0.0, figure(run, point.base) or 0.0
    place = f"{run.benchmark} of {size_text(row.size)}, {run.data}, {network_text(run.network)}, {run.mpi}"
    less = "" if is_bandwidth(run) else f", {100 * abs(1 - own / other):.0f} % {'less' if own < other else 'more'} time"
    loss = "" if is_exact(row.candidate) else " (lossy)"
    against = f"{figure_text(run, own)} against {figure_text(run, other)}{less}"
    return f"{loss}: {against}. ", tag("a", place, href=f"#run-{point.number}"), "."


def _counts(found: Sequence[Point]) -> Markup:
    """Count the sizes at which the library is faster and slower, and those at which `auto` is slower."""
    base = found[0].base.candidate
    fastest: dict[tuple[int, int], float] = {}
    for point in found:
        place = (point.number, point.row.size)
        fastest[place] = max(point.speed, fastest.get(place, 0.0))
    slower = sum(speed < SLOWER for speed in fastest.values())
    faster = sum(speed > 1 / SLOWER for speed in fastest.values())
    text = (
        f"Over all {len(fastest)} sizes and conditions, our fastest candidate is more than 5 % faster than {base}"
        f" at {faster}, more than 5 % slower at {slower}, and about equal at {len(fastest) - faster - slower}."
    )
    chosen = _chosen([point for point in found if point.row.candidate == "auto"], base)
    return tag("p", text.replace(" %", PERCENT), *chosen, class_="honest")


def _chosen(found: Sequence[Point], base: str) -> tuple[str, ...]:
    if not found:
        return ()
    slower, last = sum(point.speed < SLOWER for point in found), min(found, key=_speed)
    text = f" is more than 5 % slower than {base} at {slower} of {len(found)}; its worst is {factor_text(last.speed)}"
    return " The codec ", tag("code", "auto"), text.replace(" %", PERCENT), *_figures(last)


def summary(results: Results) -> Markup:
    """Return the table of median, best and worst speed-up per benchmark and candidate."""
    found = {base: _grouped(points(results, base)) for base in BASELINES[:2]}
    bases = [base for base, groups in found.items() if groups]
    order = list(dict.fromkeys((run.benchmark, name) for run in results.runs for name in run.candidates()))
    if not bases:
        return Markup()
    compared = [key for key in order if any(key in found[base] for base in bases)]
    lines = [_line(key, [found[base].get(key, []) for base in bases]) for key in compared]
    groups = [tag("th", f"against {base}", scope="colgroup", colspan=len(SUMMED)) for base in bases]
    top = tag("tr", *(tag("th", name, scope="col", rowspan=2) for name in ("benchmark", "candidate")), *groups)
    below = tag("tr", *(tag("th", name, scope="col") for _ in bases for name in SUMMED))
    caption = tag("caption", "Speed-ups of this library's candidates, over all sizes and conditions")
    table = tag("table", caption, tag("thead", top, below), tag("tbody", *lines), class_="summary")
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Summary")


def _grouped(found: Iterable[Point]) -> dict[tuple[str, str], list[Point]]:
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        groups.setdefault((point.run.benchmark, point.row.candidate), []).append(point)
    return groups


def _line(key: tuple[str, str], of_bases: Iterable[Sequence[Point]]) -> Markup:
    benchmark, candidate = key
    names = tag("td", benchmark), tag("th", candidate, scope="row")
    return tag("tr", *names, *(cell for found in of_bases for cell in _summed(found)), data_benchmark=benchmark)


def _summed(found: Sequence[Point]) -> list[Markup]:
    if not found:
        return [tag("td", "", colspan=len(SUMMED))]
    speeds = [point.speed for point in found]
    slower = sum(speed < SLOWER for speed in speeds)
    shown = [_factor(value) for value in (median(speeds), max(speeds), min(speeds))]
    return [*shown, tag("td", f"{slower} of {len(found)}", class_="number last")]


def _factor(value: float) -> Markup:
    return tag("td", factor_text(value), class_="number lost" if value < SLOWER else "number")


def _speed(point: Point) -> float:
    return point.speed
