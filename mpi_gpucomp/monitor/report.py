"""The report: alarms, where time went, a heat map of links and a timeline, in one HTML file without dependencies."""

from __future__ import annotations

import json
import time
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.monitor.chrome_trace import spans
from mpi_gpucomp.monitor.diagnosis import united
from mpi_gpucomp.monitor.reader import aligned, is_alive
from mpi_gpucomp.monitor.report_assets import SCRIPT, STYLE
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, KINDS, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from mpi_gpucomp.monitor.trace_buffer import LinkState, TraceBuffer

__all__ = ["MAX_RECORDS_SHOWN", "TimeShares", "rate_text", "report", "size_text", "time_shares", "timeline"]

SECTIONS = {"alarms": "Alarms", "ranks": "Ranks", "links": "Links", "timeline-section": "Timeline", "about": "About"}
SHADES = 6
WORK = ("encode", "send", "receive", "decode")
MAX_RECORDS_SHOWN = 4000
"""The newest records of a rank, which the timeline shows."""
MIN_SHOWN_US = 1000.0
EMPTY_ELEMENTS = ("meta", "br")


def report(buffers: Sequence[TraceBuffer]) -> str:
    """Return the HTML of the report on the traces of all ranks."""
    data = json.dumps(timeline(buffers), separators=(",", ":")).replace("<", "\\u003c")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", "mpi_gpucomp: report"),
        element("style", Markup(STYLE)),
    )
    links = (element("a", name, href=f"#{place}") for place, name in SECTIONS.items())
    header = element("header", element("h1", "mpi_gpucomp"), element("nav", *links, aria_label="Sections"))
    main = element(
        "main", _cards(buffers), _alarms(buffers), _ranks(buffers), _links(buffers), _timeline(), _about(buffers)
    )
    scripts = element("script", Markup(data), type="application/json", id="spans"), element("script", Markup(SCRIPT))
    tip = Markup('<div id="tip" role="status" hidden></div>')
    return f"<!doctype html>\n{element('html', head, element('body', header, main, tip, *scripts), lang='en')}\n"


def _section(place: str, *inside: str) -> Markup:
    return element("section", element("h2", SECTIONS[place]), *inside, id=place)


def _cards(buffers: Sequence[TraceBuffer]) -> Markup:
    states = [buffer.state for buffer in buffers]
    raw, encoded = sum(state.raw_bytes for state in states), sum(state.encoded_bytes for state in states)
    found = sum(sum(state.alarms) for state in states)
    lost = buffers[0].header.size - len(buffers)
    silent = [buffer.header.rank for buffer in buffers if not buffer.state.closed and not is_alive(buffer)]
    cards = [
        (
            f"{len(buffers)} of {buffers[0].header.size}" if lost else str(len(buffers)),
            "ranks" if not lost else "ranks have a trace",
            lost,
        ),
        (str(max(state.ended for state in states)), "calls", 0),
        (size_text(sum(link.nbytes for buffer in buffers for link in buffer.links)), "sent by all ranks", 0),
        (f"{raw / encoded:.2f}" if encoded else "1", "bytes of elements for each encoded byte", 0),
        (str(found) if found else "none", "alarms", found),
    ]
    if silent:
        cards.append((", ".join(map(str, silent)), "killed or stopped (ranks)", 1))
    made = [
        element(
            "div",
            element("p", large, class_="large"),
            element("p", text, class_="text"),
            class_="card bad" if bad else "card",
        )
        for large, text, bad in cards
    ]
    return element("div", *made, class_="cards", style="margin-top:20px")


def _alarms(buffers: Sequence[TraceBuffer]) -> Markup:
    texts = sorted({text for buffer in buffers for text in buffer.alarms})
    if not texts:
        return _section("alarms", element("p", "No alarms.", class_="none"))
    items = []
    for text in texts:
        stamp, _, text = text.partition(" ")
        over = "over" if text.startswith("over after") else None
        items.append(element("li", element("time", stamp), text, class_=over))
    return _section("alarms", element("ul", *items, class_="alarms"))


def _legend(*extra: tuple[str, str]) -> Markup:
    named = (*((kind, kind) for kind in WORK), *extra)
    items = [element("li", element("i", class_=kind), text) for kind, text in named]
    return element("ul", *items, class_="legend")


def _ranks(buffers: Sequence[TraceBuffer]) -> Markup:
    numbers = (
        "calls",
        "ratio",
        "join wait",
        "in calls",
        "encodes",
        "sends",
        "waits for messages",
        "decodes",
    )
    head = [element("th", name) for name in ("rank", "host")]
    head += [element("th", name, class_="number") for name in numbers]
    body = element("tbody", *(_rank(buffer) for buffer in buffers))
    table = element("table", element("thead", element("tr", *head, element("th", ""))), body, class_="figures")
    hint = "Shares of the time that the records cover. They overlap: while a chunk is on the wire the next is encoded."
    return _section("ranks", element("p", hint, class_="hint"), _legend(), element("div", table, class_="scroll"))


def _rank(buffer: TraceBuffer) -> Markup:
    state, share = buffer.state, time_shares(buffer.records())
    work = share.encode, share.send, share.receive, share.decode
    bars = [
        element("span", class_=kind, style=f"width:{value * 100:.1f}%") for kind, value in zip(WORK, work, strict=True)
    ]
    cells = [
        *(str(state.ended), f"{state.raw_bytes / state.encoded_bytes:.2f}" if state.encoded_bytes else "-"),
        *(f"{state.join_wait / 1e9:.2f} s", f"{1 - share.outside:.0%}", *(f"{value:.0%}" for value in work)),
    ]
    names = element("th", str(buffer.header.rank), scope="row"), element("th", buffer.header.host)
    bar = element("td", element("div", *bars, class_="bars"), class_="wide")
    return element("tr", *names, *(element("td", cell) for cell in cells), bar)


def _links(buffers: Sequence[TraceBuffer]) -> Markup:
    links: dict[tuple[int, int], list[LinkState]] = {}
    for buffer in buffers:
        for link in buffer.links:
            links.setdefault((buffer.header.rank, link.peer), []).append(link)
    ranks = range(buffers[0].header.size)
    fastest = max((_mean(some) for some in links.values()), default=1.0)
    head = element("tr", element("th", "from \\ to"), *(element("th", str(rank), scope="col") for rank in ranks))
    rows = [
        element(
            "tr",
            element("th", f"rank {sender}", scope="row"),
            *(_cell(links.get((sender, to)), fastest) for to in ranks),
        )
        for sender in ranks
    ]
    table = element("table", element("thead", head), element("tbody", *rows), class_="heat", aria_label="Links")
    hint = "Mean bandwidth while a link was busy, and all that it has carried. The darker the faster; orange is slow."
    return _section("links", element("p", hint, class_="hint"), element("div", table, class_="scroll"))


def _mean(links: Sequence[LinkState]) -> float:
    return sum(link.mean for link in links)


def _cell(links: Sequence[LinkState] | None, fastest: float) -> Markup:
    if not links:
        return element("td", Markup("&nbsp;"), class_="empty")
    mean, nbytes = _mean(links), sum(link.nbytes for link in links)
    shade = min(SHADES - 1, int(SHADES * mean / max(1.0, fastest)))
    kind = "slow" if any(link.slow for link in links) else f"s{shade}"
    return element(
        "td", element("b", rate_text(mean) if mean else "-"), element("small", size_text(nbytes)), class_=kind
    )


def _timeline() -> Markup:
    buttons = {"zoom-in": "closer", "zoom-out": "further", "show-last": "last calls", "show-all": "all"}
    tools = [element("button", text, type="button", id=name) for name, text in buttons.items()]
    hint = "Drag to move, double-click or Ctrl and wheel to zoom, + - and arrows on the keyboard; point at a span."
    canvas = element("canvas", id="timeline", tabindex="0", role="img", aria_label="Timeline of all ranks")
    nothing = Markup(
        "<noscript><p class=none>The timeline needs JavaScript; the rest of the page does not.</p></noscript>"
    )
    legend = _legend(("call", "call, from its start to its end"))
    parts = element("p", hint, class_="hint"), element("div", *tools, element("output", id="shown"), class_="tools")
    return _section("timeline-section", legend, *parts, canvas, nothing)


def _about(buffers: Sequence[TraceBuffer]) -> Markup:
    headers = [buffer.header for buffer in buffers]
    uncertainty = max(header.uncertainty for header in headers)
    measured = all(header.uncertainty >= 0 for header in headers)
    facts = {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(headers[0].started / 1e9)),
        "hosts": ", ".join(dict.fromkeys(header.host for header in headers)),
        "processes": ", ".join(str(header.pid) for header in headers),
        "clocks": f"measured against rank 0, within {uncertainty / 1e3:.0f} µs"
        if measured
        else "wall clocks of the hosts",
        "records kept": ", ".join(f"{len(buffer.records())} of {buffer.capacity}" for buffer in buffers),
    }
    pairs = [Markup(element("dt", name) + element("dd", value)) for name, value in facts.items()]
    return _section("about", element("dl", *pairs))


def size_text(nbytes: float) -> str:
    """Format a number of bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def rate_text(rate: float) -> str:
    """Format bytes per second."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


class TimeShares(NamedTuple):
    """Where a rank's time went, as shares of the time that its records cover; they overlap, as the work does."""

    seconds: float
    encode: float
    send: float
    receive: float
    decode: float
    outside: float
    """Outside of calls."""


def time_shares(records: npt.NDArray[Any]) -> TimeShares:
    """Return for how long a rank encoded, sent, waited for messages, and decoded."""
    done = records[records["complete"] > 0]
    if not len(done):
        return TimeShares(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    begin, end = int(done["post"].min()), int(done["complete"].max())
    whole = max(1, end - begin)

    def share(kind: int, since: str = "post") -> float:
        some = done[(done["kind"] == kind) & (done[since] > 0)]
        return united(np.stack((some[since], some["complete"]), axis=1), begin, end) / whole

    return TimeShares(
        whole / 1e9, share(ENCODE), share(SEND), share(RECV, "transmit"), share(DECODE), max(0.0, 1 - share(CALL))
    )


def timeline(buffers: Sequence[TraceBuffer]) -> dict[str, Any]:
    """Return the newest spans of all ranks for the timeline, in microseconds from the first of them."""
    records = [some[some["complete"] > 0][-MAX_RECORDS_SHOWN:] for some in aligned(buffers)]
    filled = [some for some in records if len(some)]
    if not filled:
        return {"ranks": [], "calls": [], "end": 1.0, "shown": 1.0}
    first = max(int(some["post"].min()) for some in filled)  # from here on all ranks have records
    end = max(int(some["complete"].max()) for some in filled)
    first = first if first < end else min(int(some["post"].min()) for some in filled)
    titles: dict[str, int] = {}
    ranks = [
        {
            "name": f"rank {buffer.header.rank} ({buffer.header.host})",
            "rows": _rows(buffer, some[some["complete"] >= first], first, titles),
        }
        for buffer, some in zip(buffers, records, strict=True)
    ]
    lengths = [int(one) for some in filled for one in (some["complete"] - some["post"])[some["kind"] == CALL]]
    shown = max(MIN_SHOWN_US, 3 * float(np.median(lengths)) / 1e3 if lengths else 0.0)
    whole = max(1.0, (end - first) / 1e3)
    return {"ranks": ranks, "calls": list(titles), "end": whole, "shown": min(shown, whole)}


def _rows(buffer: TraceBuffer, records: npt.NDArray[Any], first: int, titles: dict[str, int]) -> list[dict[str, Any]]:
    names, rows = buffer.names, []
    for kind in (CALL, ENCODE, SEND, RECV, DECODE):
        some = records[records["kind"] == kind]
        if len(some) or kind == CALL:
            found = []
            for lane in sorted(set(some["lane"].tolist())):
                for begin, end, one in spans(some[some["lane"] == lane]):
                    title = titles.setdefault(f"{names[one['name']]} (call {one['call']})", len(titles))
                    begin = max(one["post"] if kind == CALL else begin, first)
                    nbytes = one["raw_bytes"] if kind in (ENCODE, DECODE) else one["nbytes"]
                    found.append(
                        [round((begin - first) / 1e3, 1), round((end - begin) / 1e3, 1), one["peer"], nbytes, title]
                    )
            rows.append({"kind": KINDS[kind], "spans": sorted(found)})
    return rows


class Markup(str):
    """Text that is markup, and not escaped."""

    __slots__ = ()


def element(name: str, /, *inside: str, **attributes: str | float | None) -> Markup:
    """Return an HTML element; `class_` is class, `data_x` is data-x, and None omits an attribute."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY_ELEMENTS:
        return Markup(f"<{name}{text}>")
    return Markup(
        f"<{name}{text}>{''.join(one if isinstance(one, Markup) else escape(one) for one in inside)}</{name}>"
    )
