"""The report: alarms, where time went, a heat map of links and a timeline, in one HTML file without dependencies.

Its style sheet and the script of the timeline are at the end.
"""

from __future__ import annotations

import json
import time
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.monitor.diagnosis import united
from mpi_gpucomp.monitor.exporters import spans
from mpi_gpucomp.monitor.trace_buffer import aligned, is_alive
from mpi_gpucomp.trace import CALL, DECODE, ENCODE, KINDS, RECV, SEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from mpi_gpucomp.monitor.trace_buffer import LinkState, TraceBuffer

__all__ = [
    "MAX_RECORDS_SHOWN",
    "SCRIPT",
    "STYLE",
    "TimeShares",
    "rate_text",
    "report",
    "size_text",
    "time_shares",
    "timeline",
]

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


STYLE = """
:root { --ground: #fff; --raised: #f6f7f9; --text: #191c21; --faint: #5c6570; --line: #dfe3e8; --link: #0b57b8;
  --good: #0a6b4b; --bad: #b3261e; --bad-ground: #fdeceb; --on-shade: #101317; --s0: #eceef1; --s1: #dbe9f8;
  --s2: #c3dcf5; --s3: #9cc7ef; --s4: #7bb4e8; --s5: #5fa3df; --slow: #f2b88d;
  --call: #c9ced6; --encode: #b07400; --send: #0057c2; --receive: #00809c; --decode: #00805c; --outside: #dfe3e8 }
@media screen and (prefers-color-scheme:dark) {
  :root { --ground: #14171c; --raised: #1d2127; --text: #e8eaed; --faint: #a3acb8; --line: #343a43; --link: #8ab8ff;
    --good: #5fd6a8; --bad: #ff8a80; --bad-ground: #45201d; --on-shade: #fff; --s0: #30353d; --s1: #2a3c4e;
    --s2: #234058; --s3: #214c70; --s4: #1f5788; --s5: #1c6db8; --slow: #a8501b;
    --call: #4b535f; --encode: #f0b429; --send: #5a9bff; --receive: #4cc9e0; --decode: #2fc79a; --outside: #343a43 }
}
* { box-sizing: border-box }
html { scroll-padding-top: 5rem; scroll-behavior: smooth }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 20px }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 20px; padding-top: 12px; padding-bottom: 12px;
  background: var(--ground); border-bottom: 1px solid var(--line); position: sticky; top: 0; z-index: 5 }
main { padding-bottom: 60px }
h1 { font-size: 1.25rem; margin: 0; letter-spacing: -.01em }
h2 { font-size: 1.5rem; margin: 44px 0 14px; letter-spacing: -.02em }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .9rem }
a { color: var(--link); text-decoration: none }
a:hover { text-decoration: underline }
a:focus-visible, [tabindex]:focus-visible, button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.hint { color: var(--faint); font-size: .875rem; margin: 8px 0; max-width: 70em }
.cards { display: grid; grid-template-columns: repeat(auto-fit,minmax(180px,1fr)); gap: 14px }
.card { background: var(--raised); border-radius: 12px; padding: 14px 18px 16px; border-top: 4px solid var(--good) }
.card .large { font-size: 2.1rem; font-weight: 700; line-height: 1.15; margin: 0; letter-spacing: -.03em }
.card .text { margin: 2px 0 0; font-size: .875rem; color: var(--faint) }
.card.bad { border-top-color: var(--bad) }
.card.bad .large { color: var(--bad) }
.alarms { list-style: none; margin: 0; padding: 0; font-size: .95rem }
.alarms li { padding: 8px 14px; border-left: 4px solid var(--bad); background: var(--bad-ground); margin: 6px 0;
  border-radius: 0 8px 8px 0; overflow-wrap: anywhere }
.alarms li.over { border-left-color: var(--line); background: var(--raised); color: var(--faint) }
.alarms time { font-variant-numeric: tabular-nums; margin-right: 10px; color: var(--faint) }
.none { padding: 12px 18px; background: var(--raised); border-radius: 8px; border-left: 4px solid var(--good) }
.scroll { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .875rem }
caption { text-align: left; color: var(--faint); padding: 4px 0 6px }
th { font-weight: 600; text-align: left }
.figures td, .figures th { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap }
.figures td { text-align: right }
.figures td.wide { width: 30%; min-width: 180px; padding-right: 0 }
.figures th.number { text-align: right }
.bars span { display: block; height: 4px; border-radius: 2px; margin: 2px 0 }
.heat td, .heat thead th { text-align: center; min-width: 66px; padding: 0 }
.heat th { color: var(--faint); font-weight: 500; padding: 2px 10px 2px 0; white-space: nowrap }
.heat td { border: 2px solid var(--ground); border-radius: 6px; padding: 6px 8px; color: var(--on-shade) }
.heat td b { display: block; line-height: 1.25 }
.heat td small { display: block; font-size: .78rem; line-height: 1.2 }
.heat td.empty { background: var(--raised); color: var(--faint) }
.s0 { background: var(--s0) } .s1 { background: var(--s1) } .s2 { background: var(--s2) }
.s3 { background: var(--s3) } .s4 { background: var(--s4) } .s5 { background: var(--s5) }
.heat td.slow { background: var(--slow) }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; margin: 6px 0;
  font-size: .875rem }
.legend i { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 6px;
  vertical-align: -2px }
.encode { background: var(--encode) } .send { background: var(--send) } .receive { background: var(--receive) }
.decode { background: var(--decode) } .call { background: var(--call) } .outside { background: var(--outside) }
.tools { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 8px 0; font-size: .875rem }
.tools button { font: inherit; color: var(--text); background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 12px; cursor: pointer }
.tools button:hover { border-color: var(--faint) }
.tools output { color: var(--faint); font-variant-numeric: tabular-nums }
#timeline { width: 100%; display: block; cursor: grab; border: 1px solid var(--line); border-radius: 10px;
  touch-action: pan-y }
#timeline:active { cursor: grabbing }
#tip { position: absolute; z-index: 9; pointer-events: none; background: var(--raised); border: 1px solid var(--line);
  border-radius: 8px; padding: 8px 12px; font-size: .8rem; box-shadow: 0 4px 18px #0003; max-width: 340px;
  font-variant-numeric: tabular-nums; white-space: pre-line }
#tip[hidden] { display: none }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; font-size: .9rem }
dt { color: var(--faint) }
dd { margin: 0; overflow-wrap: anywhere }
@media (max-width:560px) {
  header { position: static }
  header, main { padding-left: 14px; padding-right: 14px }
  .card .large { font-size: 1.7rem }
  h2 { margin-top: 32px }
  dl { grid-template-columns: 1fr }
}
@media print {
  header { position: static }
  nav, .tools { display: none }
  body { font-size: 11px }
  .card, .bars span, .heat td, .alarms li { print-color-adjust: exact; -webkit-print-color-adjust: exact }
}
"""
SCRIPT = """
(function () {
'use strict';
var data = JSON.parse(document.getElementById('spans').textContent);
var canvas = document.getElementById('timeline'), tip = document.getElementById('tip');
var shown = document.getElementById('shown'), pen = canvas.getContext('2d');
var ROW = 15, GAP = 10, TOP = 24, LEFT = 150;
var kinds = ['call', 'encode', 'send', 'receive', 'decode'];
var rows = [], height = TOP;
data.ranks.forEach(function (rank) {
  rank.rows.forEach(function (row, number) {
    rows.push({ y: height, kind: row.kind, spans: row.spans, rank: rank.name, first: number === 0 });
    height += ROW;
  });
  height += GAP;
});
var view = { from: Math.max(0, data.end - data.shown), to: data.end };
var width = 800, scale = 1;

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim(); }
function x(time) { return LEFT + (time - view.from) / (view.to - view.from) * (width - LEFT - 8); }
function time(at) { return view.from + (at - LEFT) / (width - LEFT - 8) * (view.to - view.from); }
function duration(us) {
  if (us >= 1e6) { return (us / 1e6).toFixed(2) + ' s'; }
  return us >= 1e3 ? (us / 1e3).toFixed(2) + ' ms' : us.toFixed(0) + ' \\u00b5s';
}
function size(bytes) {
  return bytes >= 1e6 ? (bytes / 1e6).toFixed(2) + ' MB' : (bytes / 1e3).toFixed(1) + ' KB';
}

function ticks() {
  var step = Math.pow(10, Math.floor(Math.log10((view.to - view.from) / 4)));
  while ((view.to - view.from) / step > 9) { step *= (('' + step)[0] === '2' ? 2.5 : 2); }
  pen.textAlign = 'center';
  for (var at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    pen.fillStyle = colour('line');
    pen.fillRect(Math.round(x(at)), TOP - 6, 1, height - TOP);
    pen.fillStyle = colour('faint');
    pen.fillText(duration(at), x(at), 12);
  }
}

function draw() {
  scale = window.devicePixelRatio || 1;
  width = canvas.clientWidth;
  LEFT = width < 600 ? 86 : 150;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = height + 'px';
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.fillStyle = colour('ground');
  pen.fillRect(0, 0, width, height);
  pen.font = '11.5px system-ui, sans-serif';
  ticks();
  var colours = {};
  kinds.forEach(function (kind) { colours[kind] = colour(kind); });
  rows.forEach(function (row) {
    pen.textAlign = 'left';
    pen.fillStyle = row.first ? colour('text') : colour('faint');
    pen.fillText(row.first ? row.rank : row.kind, row.first ? 6 : 18, row.y + 11);
    pen.fillStyle = colours[row.kind];
    var last = -1;
    row.spans.forEach(function (span) {
      if (span[0] + span[1] < view.from || span[0] > view.to) { return; }
      var from = Math.max(LEFT, x(span[0])), to = Math.min(width, x(span[0] + span[1]));
      if (to <= last) { return; }
      // What would be narrower than a point is drawn as one; a thin line keeps neighbours apart where there is room.
      var wide = Math.max(1, to - from - (to - from > 3 ? 0.7 : 0));
      pen.fillRect(from, row.y + 1, wide, ROW - 3);
      last = from + 1;
    });
  });
  shown.textContent = duration(view.to - view.from) + ' of ' + duration(data.end);
}

function move(from, to) {
  var length = Math.max(1, Math.min(to - from, data.end));
  from = Math.max(0, Math.min(from, data.end - length));
  view = { from: from, to: from + length };
  tip.hidden = true;
  draw();
}
function zoom(factor, at) {
  at = at === undefined ? (view.from + view.to) / 2 : at;
  move(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

function find(event) {
  var box = canvas.getBoundingClientRect(), at = event.clientX - box.left, y = event.clientY - box.top;
  var row = rows.find(function (one) { return y >= one.y && y < one.y + ROW; });
  if (!row || at < LEFT) { return null; }
  var slack = (view.to - view.from) / (width - LEFT) * 2, now = time(at);
  var span = row.spans.find(function (one) { return one[0] - slack <= now && now <= one[0] + one[1] + slack; });
  return span && { row: row, span: span };
}
function say(event) {
  var found = find(event);
  tip.hidden = !found;
  if (!found) { return; }
  var span = found.span, lines = [found.row.rank + ': ' + found.row.kind, data.calls[span[4]]];
  if (span[2] >= 0) { lines.push((found.row.kind === 'send' ? 'to rank ' : 'rank ') + span[2]); }
  lines.push(duration(span[1]) + (span[3] ? ', ' + size(span[3]) : ''));
  if (span[3] && span[1]) { lines.push((span[3] / span[1]).toFixed(0) + ' MB/s'); }
  tip.textContent = lines.join('\\n');
  tip.style.left = Math.min(event.pageX + 14, window.innerWidth - 200) + 'px';
  tip.style.top = event.pageY + 14 + 'px';
}

var held = null;
canvas.addEventListener('pointerdown', function (event) { held = { x: event.clientX, view: view }; });
window.addEventListener('pointerup', function () { held = null; });
canvas.addEventListener('pointermove', function (event) {
  if (!held) { say(event); return; }
  var moved = (event.clientX - held.x) / (width - LEFT) * (held.view.to - held.view.from);
  move(held.view.from - moved, held.view.to - moved);
});
canvas.addEventListener('pointerleave', function () { tip.hidden = true; });
canvas.addEventListener('dblclick', function (event) {
  zoom(0.5, time(event.clientX - canvas.getBoundingClientRect().left));
});
canvas.addEventListener('wheel', function (event) {
  if (!event.ctrlKey && !event.metaKey) { return; }
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.25 : 0.8, time(event.clientX - canvas.getBoundingClientRect().left));
}, { passive: false });
canvas.addEventListener('keydown', function (event) {
  var step = (view.to - view.from) / 4;
  var keys = {
    '+': function () { zoom(0.5); }, '-': function () { zoom(2); },
    ArrowLeft: function () { move(view.from - step, view.to - step); },
    ArrowRight: function () { move(view.from + step, view.to + step); }
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
var actions = {
  'zoom-in': function () { zoom(0.5); }, 'zoom-out': function () { zoom(2); },
  'show-all': function () { move(0, data.end); }, 'show-last': function () { move(data.end - data.shown, data.end); }
};
Object.keys(actions).forEach(function (name) {
  document.getElementById(name).addEventListener('click', actions[name]);
});
window.addEventListener('resize', draw);
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
draw();
})();
"""
