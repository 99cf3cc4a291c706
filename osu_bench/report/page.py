"""The HTML page: overview, networks, runs and conditions in one self-contained file."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from osu_bench.report.assets import SCRIPT, STYLE
from osu_bench.report.chart import chart, figure_text, limit_swatch, swatch
from osu_bench.report.compare import best, figure, points, raw_limit
from osu_bench.report.drawing import look
from osu_bench.report.figures import EXPLAINED, figures
from osu_bench.report.markup import Markup, join, tag
from osu_bench.report.matrix import choices, chosen_size, for_script, matrices
from osu_bench.report.overview import headline, summary
from osu_bench.report.units import factor_text, network_text, run_title, size_text
from osu_bench.suite.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from osu_bench.suite.results import Run

__all__ = ["page"]

FEW = 4
"""Up to this many runs are shown open; of more, only the one with the best speed-up."""
FILTERS = {"benchmark": "benchmark", "data": "data", "network": "network", "mpi": "MPI"}


def page(results: Results) -> str:
    """Return the HTML page of results."""
    results = Results(_in_order(results.runs), results.machine)
    body = _body(results) if any(run.rows for run in results.runs) else [_nothing(results)]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", "osu_bench: report"),
        tag("style", Markup(STYLE + _colours(_candidates(results)))),
    ]
    whole = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _in_order(runs: Iterable[Run]) -> list[Run]:
    """Sort runs by benchmark (in file order), hosts, rate, data (in file order) and MPI library."""
    runs = list(runs)
    benchmarks, kinds = (list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("benchmark", "data"))

    def key(run: Run) -> tuple[Any, ...]:
        hosts, rate = (run.network.hosts, run.network.rate or math.inf) if run.network else (math.inf, math.inf)
        return benchmarks.index(run.benchmark), hosts, rate, kinds.index(run.data), run.mpi

    return sorted(runs, key=key)


def _body(results: Results) -> list[Markup]:
    sections = [
        _header(results),
        tag("section", tag("h2", "At a glance"), headline(results), summary(results), id="glance"),
        tag("section", tag("h2", "Across networks"), _networks(results), id="networks"),
        tag("section", tag("h2", "Runs"), tag("p", EXPLAINED, class_="hint"), *_runs(results), id="runs"),
        tag("section", tag("h2", "Machine and conditions"), _conditions(results), id="conditions"),
    ]
    data = json.dumps(for_script(results), separators=(",", ":")).replace("<", "\\u003c")
    scripts = tag("script", Markup(data), type="application/json", id="speeds"), tag("script", Markup(SCRIPT))
    return [*sections[:1], tag("main", *sections[1:]), tag("div", id="tip", role="status", hidden=True), *scripts]


def _nothing(results: Results) -> Markup:
    found = "runs without measurements" if results.runs else "no runs"
    remedy = tag("p", "Create results with ", tag("code", "osu_bench NAME --json FILE"), ".")
    return tag("main", tag("h1", "osu_bench"), tag("p", f"These results hold {found}.", class_="none"), remedy)


def _header(results: Results) -> Markup:
    links = {"glance": "At a glance", "networks": "Across networks", "runs": "Runs", "conditions": "Conditions"}
    menu = tag("nav", *(tag("a", name, href=f"#{place}") for place, name in links.items()), aria_label="Sections")
    return tag("header", tag("h1", "osu_bench"), menu, _filters(results))


def _filters(results: Results) -> Markup:
    """Return a filter for each condition in which the runs differ; hidden unless the script runs."""
    chosen = []
    for name, label in FILTERS.items():
        values = list(dict.fromkeys(_condition(run, name) for run in results.runs))
        if len(values) > 1:
            options = [
                tag("option", f"any {label}", value=""),
                *(tag("option", value, value=value) for value in values),
            ]
            chosen.append(tag("select", *options, data_filter=name, aria_label=f"Show only this {label}"))
    count = tag("output", f"{len(results.runs)} runs", id="count")
    return tag("form", *chosen, count, class_="filters needs-script", hidden=True) if chosen else Markup()


def _condition(run: Run, name: str) -> str:
    return network_text(run.network) if name == "network" else str(getattr(run, name))


def _networks(results: Results) -> Markup:
    size = chosen_size(results)
    sizes = sorted({size for run in results.runs for size in run.sizes()})
    by_size = [tag("option", size_text(each), value=each, selected=each == size) for each in sizes]
    named = {"": "best of this library", "exact": "best lossless", **{f"={name}": name for name in choices(results)}}
    by_name = [tag("option", label, value=value) for value, label in named.items()]
    form = tag(
        "form",
        tag("label", "size ", tag("select", *by_size, id="size")),
        tag("label", "candidate ", tag("select", *by_name, id="candidate")),
        class_="needs-script",
        hidden=True,
    )
    shown = tag("span", f"this library's best candidate at {size_text(size or 0)}", id="shown")
    label = (
        "Speed-up over mpi of ",
        shown,
        "; the small figure and the colour show the speed-up over mpi-tuned, where measured. ",
    )
    legend = [tag("span", text, class_=f"shade s{step}") for step, text in ((0, "slower"), (3, "equal"), (6, "faster"))]
    return join((tag("p", *label, *legend, class_="hint"), form, matrices(results)))


def _runs(results: Results) -> list[Markup]:
    found = points(results, "mpi")
    spoken_of = max(found, key=lambda point: point.speed).number if found else 0
    some = len(results.runs) <= FEW
    kind = _classes(_candidates(results))
    return [_run(number, run, kind, some or number == spoken_of) for number, run in enumerate(results.runs)]


def _run(number: int, run: Run, kind: Callable[[str], str], is_open: bool) -> Markup:
    title = tag("summary", tag("h3", run_title(run)), tag("span", _gist(run), class_="gist"))
    filters = {f"data_{name}": _condition(run, name) for name in FILTERS}
    inside = [tag("p", "Nothing was measured.", class_="none")]
    if run.rows:
        inside = [tag("div", chart(run, kind), _legend(run, kind), class_="drawn"), figures(run, kind)]
    options = ", ".join(f"{name} {value}" for name, value in run.options.items())
    label = f"{run.ranks} ranks, {run.dtype} in {run.buffer}, {run.mpi}" + (f"; {options}" if options else "")
    return tag("details", title, *inside, tag("p", label, class_="hint"), id=f"run-{number}", open=is_open, **filters)


def _gist(run: Run) -> str:
    """Summarise a run in one line: the fastest candidate at the largest size."""
    size = max(run.sizes(), default=0)
    winner = best(run, size)
    value = figure(run, winner)
    if winner is None or value is None:
        return "no correct result" if run.rows else "nothing was measured"
    base = figure(run, run.row("mpi", size))
    gain = "" if base is None or winner.candidate == "mpi" else f", {factor_text(max(value / base, base / value))} mpi"
    return f"{size_text(size)}: {winner.candidate} {figure_text(run, value)}{gain}"


def _legend(run: Run, kind: Callable[[str], str]) -> Markup:
    """List the candidates by their figure at the largest size, the highest first."""
    size = max(run.sizes())
    values = {name: figure(run, run.row(name, size)) for name in run.candidates()}
    names = sorted(values, key=lambda name: -(values[name] or 0))
    items = [
        tag("li", swatch(name, kind(name)), tag("span", name), _value(run, values[name]), data_name=name)
        for name in names
    ]
    wire = raw_limit(run, size)
    if wire:
        items.append(
            tag("li", limit_swatch(), tag("span", "link limit, uncompressed"), _value(run, wire), class_="wire")
        )
    return tag("ul", tag("li", f"at {size_text(size)}", class_="hint"), *items, class_="legend")


def _value(run: Run, value: float | None) -> Markup:
    return tag("small", "" if value is None else figure_text(run, value))


def _conditions(results: Results) -> Markup:
    facts = dict(results.machine)
    if isinstance(facts.get("memory_bytes"), int):
        facts["memory"] = size_text(facts.pop("memory_bytes"))
    known = {
        "benchmarks": [run.benchmark for run in results.runs],
        "data": [run.data for run in results.runs],
        "networks": [network_text(run.network) for run in results.runs],
        "MPI": [run.mpi for run in results.runs],
        "iterations": [str(len(row.times_us)) for run in results.runs for row in run.rows],
    }
    facts |= {name: "; ".join(dict.fromkeys(values)) for name, values in known.items()}
    pairs = [join((tag("dt", name.replace("_", " ")), tag("dd", str(value)))) for name, value in facts.items()]
    note = "1 KB is 1024 bytes, 1 GB/s is 10^9 bytes per second. Times are those of the slowest rank."
    return join((tag("dl", *pairs), tag("p", note, class_="hint")))


def _candidates(results: Results) -> list[str]:
    return list(dict.fromkeys(name for run in results.runs for name in run.candidates()))


def _classes(candidates: list[str]) -> Callable[[str], str]:
    return {name: f"c{number}" for number, name in enumerate(candidates)}.__getitem__


def _colours(candidates: list[str]) -> str:
    """Return CSS rules for the colours of the candidates, light and dark."""
    looks = [look(name) for name in candidates]
    light = "".join(f".c{number}{{--c:{each.light}}}" for number, each in enumerate(looks))
    dark = "".join(f".c{number}{{--c:{each.dark}}}" for number, each in enumerate(looks))
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"
