"""The page itself: one file that needs nothing from elsewhere."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from mpi_gpucomp.monitor.page.figures import for_script, shares, size_text, speed_text
from mpi_gpucomp.monitor.page.markup import Markup, element
from mpi_gpucomp.monitor.page.script import SCRIPT
from mpi_gpucomp.monitor.page.style import STYLE
from mpi_gpucomp.monitor.reader import is_alive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi_gpucomp.monitor.trace_buffer import LinkState, TraceBuffer

__all__ = ["page"]

SECTIONS = {"alarms": "Alarms", "ranks": "Ranks", "links": "Links", "timeline-section": "Timeline", "about": "About"}
SHADES = 6
KINDS = ("encode", "send", "receive", "decode")


def page(boxes: Sequence[TraceBuffer]) -> str:
    """Make the page of the boxes of all ranks."""
    data = json.dumps(for_script(boxes), separators=(",", ":")).replace("<", "\\u003c")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", "mpi_gpucomp: what the ranks did"),
        element("style", Markup(STYLE)),
    )
    links = (element("a", name, href=f"#{place}") for place, name in SECTIONS.items())
    header = element("header", element("h1", "mpi_gpucomp"), element("nav", *links, aria_label="Sections"))
    main = element("main", _cards(boxes), _alarms(boxes), _ranks(boxes), _links(boxes), _timeline(), _about(boxes))
    scripts = element("script", Markup(data), type="application/json", id="spans"), element("script", Markup(SCRIPT))
    tip = Markup('<div id="tip" role="status" hidden></div>')
    return f"<!doctype html>\n{element('html', head, element('body', header, main, tip, *scripts), lang='en')}\n"


def _section(place: str, *inside: str) -> Markup:
    return element("section", element("h2", SECTIONS[place]), *inside, id=place)


def _cards(boxes: Sequence[TraceBuffer]) -> Markup:
    states = [box.state for box in boxes]
    plain, encoded = sum(state.plain for state in states), sum(state.encoded for state in states)
    found = sum(sum(state.alarms) for state in states)
    lost = boxes[0].head.size - len(boxes)
    silent = [box.head.rank for box in boxes if not box.state.closed and not is_alive(box)]
    cards = [
        (
            f"{len(boxes)} of {boxes[0].head.size}" if lost else str(len(boxes)),
            "ranks" if not lost else "ranks have a box",
            lost,
        ),
        (str(max(state.ended for state in states)), "calls", 0),
        (size_text(sum(link.nbytes for box in boxes for link in box.links)), "sent by all ranks", 0),
        (f"{plain / encoded:.2f}" if encoded else "1", "bytes of elements for each encoded byte", 0),
        (str(found) if found else "none", "alarms", found),
    ]
    if silent:
        cards.append((", ".join(map(str, silent)), "ended without a word, or stopped (ranks)", 1))
    made = [
        element(
            "div",
            element("p", large, class_="large"),
            element("p", said, class_="said"),
            class_="card bad" if bad else "card",
        )
        for large, said, bad in cards
    ]
    return element("div", *made, class_="cards", style="margin-top:20px")


def _alarms(boxes: Sequence[TraceBuffer]) -> Markup:
    texts = sorted({text for box in boxes for text in box.alarms})
    if not texts:
        return _section("alarms", element("p", "None was raised.", class_="none"))
    items = []
    for text in texts:
        stamp, _, said = text.partition(" ")
        over = "over" if said.startswith("over after") else None
        items.append(element("li", element("time", stamp), said, class_=over))
    return _section("alarms", element("ul", *items, class_="alarms"))


def _legend(*extra: tuple[str, str]) -> Markup:
    named = (*((kind, kind) for kind in KINDS), *extra)
    items = [element("li", element("i", class_=kind), said) for kind, said in named]
    return element("ul", *items, class_="legend")


def _ranks(boxes: Sequence[TraceBuffer]) -> Markup:
    numbers = ("calls", "ratio", "waited for others", "in calls", "encodes", "sends", "waits for messages", "decodes")
    head = [element("th", name) for name in ("rank", "host")]
    head += [element("th", name, class_="number") for name in numbers]
    body = element("tbody", *(_rank(box) for box in boxes))
    table = element("table", element("thead", element("tr", *head, element("th", ""))), body, class_="figures")
    hint = "Shares of the time that the records cover. They overlap: while a chunk is on the wire the next is encoded."
    return _section("ranks", element("p", hint, class_="hint"), _legend(), element("div", table, class_="scroll"))


def _rank(box: TraceBuffer) -> Markup:
    state, share = box.state, shares(box.records())
    work = share.encode, share.send, share.receive, share.decode
    bars = [
        element("span", class_=kind, style=f"width:{value * 100:.1f}%") for kind, value in zip(KINDS, work, strict=True)
    ]
    cells = [
        *(str(state.ended), f"{state.plain / state.encoded:.2f}" if state.encoded else "-"),
        *(f"{state.waited / 1e9:.2f} s", f"{1 - share.outside:.0%}", *(f"{value:.0%}" for value in work)),
    ]
    names = element("th", str(box.head.rank), scope="row"), element("th", box.head.host)
    bar = element("td", element("div", *bars, class_="bars"), class_="wide")
    return element("tr", *names, *(element("td", cell) for cell in cells), bar)


def _links(boxes: Sequence[TraceBuffer]) -> Markup:
    links: dict[tuple[int, int], list[LinkState]] = {}
    for box in boxes:
        for link in box.links:
            links.setdefault((box.head.rank, link.peer), []).append(link)
    ranks = range(boxes[0].head.size)
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
        "td", element("b", speed_text(mean) if mean else "-"), element("small", size_text(nbytes)), class_=kind
    )


def _timeline() -> Markup:
    buttons = {"zoom-in": "closer", "zoom-out": "further", "show-last": "last calls", "show-all": "all"}
    tools = [element("button", said, type="button", id=name) for name, said in buttons.items()]
    hint = "Drag to move, double-click or Ctrl and wheel to zoom, + - and arrows on the keyboard; point at a span."
    canvas = element("canvas", id="timeline", tabindex="0", role="img", aria_label="Timeline of all ranks")
    nothing = Markup(
        "<noscript><p class=none>The timeline needs JavaScript; the rest of the page does not.</p></noscript>"
    )
    legend = _legend(("call", "call, from its start to its end"))
    parts = element("p", hint, class_="hint"), element("div", *tools, element("output", id="shown"), class_="tools")
    return _section("timeline-section", legend, *parts, canvas, nothing)


def _about(boxes: Sequence[TraceBuffer]) -> Markup:
    heads = [box.head for box in boxes]
    doubt = max(head.doubt for head in heads)
    measured = all(head.doubt >= 0 for head in heads)
    facts = {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(heads[0].started / 1e9)),
        "hosts": ", ".join(dict.fromkeys(head.host for head in heads)),
        "processes": ", ".join(str(head.pid) for head in heads),
        "clocks": f"measured against rank 0, within {doubt / 1e3:.0f} µs" if measured else "the hosts' own wall clocks",
        "records kept": ", ".join(f"{len(box.records())} of {box.capacity}" for box in boxes),
    }
    pairs = [Markup(element("dt", name) + element("dd", value)) for name, value in facts.items()]
    return _section("about", element("dl", *pairs))
