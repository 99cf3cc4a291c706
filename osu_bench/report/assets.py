"""The look of the page: light and dark, narrow and wide, on screen and on paper."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { --ground: #fff; --raised: #f6f7f9; --text: #191c21; --faint: #5c6570; --line: #dfe3e8; --link: #0b57b8;
  --good: #0a6b4b; --bad: #b3261e; --bad-ground: #fdeceb; --best: #d9f2e6; --limit: #b3261e; --s0: #e08a4f;
  --s1: #f2b88d; --s2: #fae0cb; --s3: #eceef1; --s4: #d3e5f8; --s5: #9cc7ef; --s6: #5fa3df; --on-shade: #101317 }
@media screen and (prefers-color-scheme:dark) {
  :root { --ground: #14171c; --raised: #1d2127; --text: #e8eaed; --faint: #a3acb8; --line: #343a43;
    --link: #8ab8ff; --good: #5fd6a8; --bad: #ff8a80; --bad-ground: #45201d; --best: #114532; --limit: #ff8a80;
    --s0: #a8501b; --s1: #7d4420; --s2: #553524; --s3: #30353d; --s4: #234058; --s5: #1f5788; --s6: #1c6db8;
    --on-shade: #fff }
}
* { box-sizing: border-box }
html { scroll-padding-top: 6.5rem; scroll-behavior: smooth }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 20px }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 20px; padding-top: 12px;
  padding-bottom: 12px; background: var(--ground); border-bottom: 1px solid var(--line); position: sticky; top: 0;
  z-index: 5 }
h1 { font-size: 1.25rem; margin: 0; letter-spacing: -.01em }
h2 { font-size: 1.5rem; margin: 44px 0 14px; letter-spacing: -.02em }
h3 { font-size: 1rem; margin: 0; display: inline; overflow-wrap: anywhere }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .9rem }
a { color: var(--link); text-decoration: none }
a:hover { text-decoration: underline }
a:focus-visible, [tabindex]:focus-visible, summary:focus-visible { outline: 2px solid var(--link);
  outline-offset: 2px }
code { font: .92em ui-monospace,SFMono-Regular,Menlo,monospace; overflow-wrap: anywhere }
.hint { color: var(--faint); font-size: .875rem; margin: 8px 0 }
.none { padding: 14px 18px; background: var(--raised); border-radius: 8px }
form { display: flex; flex-wrap: wrap; gap: 8px 10px; align-items: center; font-size: .875rem }
form[hidden] { display: none }
.filters { margin-left: auto; font-size: .8rem; gap: 6px }
select { font: inherit; color: var(--text); background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 6px; max-width: 9.5rem }
output { color: var(--faint); min-width: 7em }
.cards { display: grid; grid-template-columns: repeat(auto-fit,minmax(250px,1fr)); gap: 14px }
.card { background: var(--raised); border-radius: 12px; padding: 16px 20px 18px; border-top: 4px solid var(--good) }
.card p { margin: 8px 0 0; font-size: .875rem; overflow-wrap: anywhere }
.card .large { font-size: 3rem; font-weight: 700; line-height: 1.1; margin: 0; letter-spacing: -.03em;
  color: var(--good) }
.card .label { font-size: 1rem; font-weight: 600; margin: 2px 0 0 }
.card.lost { border-top-color: var(--bad) }
.card.lost .large { color: var(--bad) }
.honest { font-size: 1.05rem; max-width: 62em; margin: 18px 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
caption { text-align: left; color: var(--faint); font-size: .875rem; padding: 4px 0 6px }
th { font-weight: 600; text-align: left }
.scroll { overflow-x: auto; max-width: 100% }
.summary { font-size: .875rem }
.summary td, .summary th { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line) }
.summary th { white-space: nowrap; max-width: 22em; overflow: hidden; text-overflow: ellipsis }
.summary thead tr+tr th, .summary .number { text-align: right }
.summary th[scope=colgroup] { text-align: center; border-left: 1px solid var(--line); padding-left: 14px }
.summary .last { color: var(--faint); border-right: 1px solid var(--line) }
.number.lost { color: var(--bad); font-weight: 600 }
.matrices { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 20px 32px; margin-top: 12px }
.matrix { font-size: .875rem }
.matrix caption { color: var(--text) }
.matrix caption span { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden;
  min-width: 14em; overflow-wrap: anywhere }
.matrix th { font-weight: 500; color: var(--faint); padding: 2px 8px 2px 0; white-space: nowrap; font-size: .8rem }
.matrix thead th { text-align: center; padding: 2px 4px }
.matrix td { border: 2px solid var(--ground); padding: 0 }
.matrix a { display: block; padding: 5px 10px; min-width: 74px; text-align: center; color: inherit;
  border-radius: 5px }
.matrix b { display: block; font-size: 1.05rem; line-height: 1.25 }
.matrix small { display: block; font-size: .78rem; line-height: 1.2 }
.shade { color: var(--on-shade); border-radius: 6px }
span.shade { padding: 1px 9px; margin-right: 4px; font-size: .8rem }
.s0 { background: var(--s0) }
.s1 { background: var(--s1) }
.s2 { background: var(--s2) }
.s3 { background: var(--s3) }
.s4 { background: var(--s4) }
.s5 { background: var(--s5) }
.s6 { background: var(--s6) }
td.shade:not([class*=" s"]) { background: var(--raised); color: var(--faint) }
details { border: 1px solid var(--line); border-radius: 10px; margin: 8px 0; padding: 0 16px }
details[hidden] { display: none }
details[open] { padding-bottom: 8px; margin: 14px 0 }
summary { cursor: pointer; padding: 9px 0; display: flex; flex-wrap: wrap; gap: 2px 16px; align-items: baseline }
summary::before { content: "\\25B8"; color: var(--faint); width: .8em }
details[open]>summary::before { content: "\\25BE" }
summary h3 { flex: 1 1 20em }
.gist { color: var(--faint); font-size: .875rem; font-variant-numeric: tabular-nums }
.drawn { display: grid; grid-template-columns: minmax(0,780px) minmax(230px,1fr); gap: 8px 28px; align-items: center }
.chart { width: 100%; height: auto; max-height: 520px; display: block; touch-action: pan-y }
.chart text { fill: var(--faint); font-size: 11.5px }
.tick.y { text-anchor: end }
.tick.x, .chart .name { text-anchor: middle }
.grid { stroke: var(--line) }
.axis { stroke: var(--faint); fill: none }
.rule { stroke: var(--faint); stroke-dasharray: 2 3 }
.line { stroke: var(--c); stroke-width: 2; fill: none; stroke-linejoin: round }
.dot { fill: var(--c); stroke: var(--ground); stroke-width: 1 }
.dot.wrong { fill: var(--bad-ground); stroke: var(--bad); stroke-width: 2.5 }
.limit { stroke: var(--limit); stroke-width: 1.6; stroke-dasharray: 7 4; fill: none }
.own-limit { stroke: var(--c); stroke-width: 1.4; stroke-dasharray: 2 4; fill: none; visibility: hidden }
.series:hover .own-limit, .series.lit .own-limit { visibility: visible }
.series:hover .line, .series.lit .line { stroke-width: 3.5 }
.has-lit .series:not(.lit) { opacity: .18 }
.swatch { width: 24px; height: 12px; flex: none; vertical-align: -1px; margin-right: 6px }
.legend { list-style: none; margin: 0; padding: 0; font-size: .875rem }
.legend li { display: flex; align-items: center; gap: 2px; padding: 2px 6px; border-radius: 6px;
  font-variant-numeric: tabular-nums }
.legend li.hint { justify-content: flex-end; font-size: .78rem; margin: 0 }
.legend span { flex: 1; overflow-wrap: anywhere }
.legend small { color: var(--faint); white-space: nowrap }
.legend li[role=button] { cursor: pointer }
.legend li[role=button]:hover, .legend li[aria-pressed=true] { background: var(--raised) }
.figures { font-size: .84rem; width: 100%; margin: 6px 0 }
.figures caption, #tip[hidden] { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%) }
.figures thead th { text-align: right; color: var(--faint); padding: 4px 8px; border-bottom: 1px solid var(--faint) }
.figures thead th:first-child { text-align: left }
.figures tbody th { white-space: nowrap; padding: 4px 10px 4px 0; position: sticky; left: 0;
  background: var(--ground) }
.candidate { display: inline-block; max-width: 14em; overflow: hidden; text-overflow: ellipsis;
  vertical-align: bottom }
.figures td { text-align: right; padding: 4px 8px; line-height: 1.3; white-space: nowrap }
.figures tbody tr { border-bottom: 1px solid var(--line) }
.figures b, .figures .gain, .figures small, .figures strong { display: block }
.figures small, .lossy { color: var(--faint); font-weight: 400 }
.figures .gain { color: var(--text) }
.lossy { font-size: .75rem }
.figures td.best { background: var(--best) }
.figures td.best-exact { box-shadow: inset 0 0 0 2px var(--good) }
.figures td.wrong, .figures td.wrong * { color: var(--bad) }
.figures td.wrong { background: var(--bad-ground) }
.figures td.missing { color: var(--faint); font-size: .75rem; white-space: normal }
.figures th[aria-sort] { color: var(--text) }
.figures th button { all: unset; cursor: pointer }
.figures th button:focus-visible { outline: 2px solid var(--link) }
.figures th[aria-sort=ascending] button::after { content: " \\2191" }
.figures th[aria-sort=descending] button::after { content: " \\2193" }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; font-size: .9rem }
dt { color: var(--faint) }
dd { margin: 0; overflow-wrap: anywhere }
#tip { position: absolute; z-index: 9; pointer-events: none; background: var(--raised);
  border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; font-size: .8rem;
  box-shadow: 0 4px 18px #0003; font-variant-numeric: tabular-nums; max-width: 340px }
#tip p { margin: 0 0 4px; font-weight: 600 }
#tip div { display: flex; align-items: center; gap: 2px }
#tip span { flex: 1; margin-right: 14px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
main { padding-bottom: 60px }
@media (max-width:820px) {
  .drawn { grid-template-columns: minmax(0,1fr) }
  .legend { columns: 2 }
  .legend li { break-inside: avoid }
}
@media (max-width:560px) {
  header { position: static }
  html { scroll-padding-top: 8px }
  header, main { padding-left: 14px; padding-right: 14px }
  .filters { margin-left: 0 }
  .chart text { font-size: 16px }
  .tick.x.odd { display: none }
  details { padding: 0 10px }
  .legend { columns: 1 }
  .card .large { font-size: 2.5rem }
  h2 { margin-top: 32px }
  .candidate { max-width: 8em }
  .matrix a { min-width: 62px; padding: 5px }
  dl { grid-template-columns: 1fr }
  dd { margin-bottom: 6px }
}
@media print {
  header { position: static }
  nav, form, .needs-script { display: none }
  body { font-size: 11px }
  details, .card { break-inside: avoid }
  details { border-color: #999 }
  .figures { font-size: 8px }
  .chart { max-height: 300px }
  .scroll { overflow: visible }
  .figures td, .shade, .card { print-color-adjust: exact; -webkit-print-color-adjust: exact }
}
"""


# What moves on the page: filters, the choice of size, sorting, and the figures beneath the pointer.
#
# Everything that is shown is in the page without it. Names from the results only ever become text, never markup.

SCRIPT = r"""
(function () {
  'use strict';
  var all = function (query, inside) { return Array.from((inside || document).querySelectorAll(query)); };
  var byId = function (name) { return document.getElementById(name); };
  var speeds = JSON.parse(byId('speeds').textContent);
  all('.needs-script').forEach(function (form) { form.hidden = false; });

  // Filters: a run, a network's table or a line of the summary shows while it agrees with every choice made.
  var choices = all('select[data-filter]');
  var agrees = function (element) {
    return choices.every(function (choice) {
      var own = element.getAttribute('data-' + choice.dataset.filter);
      return !choice.value || own === null || own === choice.value;
    });
  };
  var filter = function () {
    all('details, .matrix, .summary tbody tr').forEach(function (element) { element.hidden = !agrees(element); });
    var runs = all('details'), shown = runs.filter(function (run) { return !run.hidden; }).length;
    byId('count').textContent = shown === runs.length ? runs.length + ' runs' : shown + ' of ' + runs.length + ' runs';
  };
  choices.forEach(function (choice) { choice.addEventListener('change', filter); });
  if (choices.length) { filter(); }

  // Across networks: another size or candidate.
  var size = byId('size'), candidate = byId('candidate');
  var fastest = function (table) {
    var names = Object.keys(table || {}).filter(function (name) {
      if (candidate.value === 'exact') { return speeds.exact.indexOf(name) >= 0; }
      return !candidate.value || '=' + name === candidate.value;
    });
    return names.length ? Math.max.apply(null, names.map(function (name) { return table[name]; })) : null;
  };
  var factor = function (value) {
    if (value === null) { return '\u2013'; }
    return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0) + speeds.times;
  };
  var recolour = function (cell) {
    var run = speeds.runs[cell.dataset.run];
    var first = fastest(run.mpi[size.value]), second = fastest(run['mpi-tuned'][size.value]);
    var hardest = second === null ? first : second;
    var step = speeds.steps.filter(function (from) { return hardest >= from; }).length;
    cell.className = hardest === null ? 'shade' : 'shade s' + step;
    cell.querySelector('b').textContent = factor(first);
    cell.querySelector('small').textContent = factor(second);
    cell.querySelector('a').title = size.selectedOptions[0].text + ': against mpi, below it against mpi-tuned';
  };
  var choose = function () {
    var label = candidate.value[0] === '=' ? candidate.value.slice(1) : 'the ' + candidate.selectedOptions[0].text;
    byId('shown').textContent = label + ' at ' + size.selectedOptions[0].text;
    all('.matrix td[data-run]').forEach(recolour);
  };
  [size, candidate].forEach(function (select) { select.addEventListener('change', choose); });

  // Tables: a click on a size sorts the candidates by it, a second click the other way round.
  var sortBy = function (head) {
    var body = head.closest('table').tBodies[0], at = head.cellIndex;
    var down = head.getAttribute('aria-sort') === 'ascending';
    var value = function (row) { return parseFloat(row.cells[at].dataset.value || 'Infinity'); };
    var rows = all('tr', body).sort(function (one, other) {
      var a = value(one), b = value(other);
      if (a === b) { return 0; }
      if (a === Infinity || b === Infinity) { return a === Infinity ? 1 : -1; }
      return down ? b - a : a - b;
    });
    all('th', head.parentNode).forEach(function (other) { other.removeAttribute('aria-sort'); });
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    rows.forEach(function (row) { body.appendChild(row); });
  };
  all('.figures th[data-size]').forEach(function (head) {
    var button = document.createElement('button');
    button.type = 'button';
    button.textContent = head.textContent;
    button.title = 'Sort by this size';
    head.textContent = '';
    head.appendChild(button);
    button.addEventListener('click', function () { sortBy(head); });
  });

  // Charts: the figures of the size nearest to the pointer, taken from the table below.
  var tip = byId('tip');
  var line = function (row, at) {
    var cell = row.cells[at], item = document.createElement('div'), name = document.createElement('span');
    if (!cell.dataset.value) { return null; }
    name.textContent = row.querySelector('.candidate').textContent;
    item.appendChild(row.querySelector('.swatch').cloneNode(true));
    item.appendChild(name);
    item.appendChild(document.createTextNode(cell.querySelector('b').textContent));
    item.value = parseFloat(cell.dataset.value);
    return item;
  };
  var show = function (chart, index) {
    var sizes = chart.dataset.sizes.split(' '), places = chart.dataset.x.split(' ').map(Number);
    var run = chart.closest('details'), head = run.querySelector('th[data-size="' + sizes[index] + '"]');
    var title = document.createElement('p');
    title.textContent = head.textContent;
    var lines = all('.figures tbody tr', run).map(function (row) { return line(row, head.cellIndex); });
    lines = lines.filter(Boolean).sort(function (one, other) { return other.value - one.value; });
    tip.replaceChildren.apply(tip, [title].concat(lines));
    tip.hidden = false;
    chart.at = index;
    var rule = 'M' + places[index] + ' ' + chart.dataset.top + 'V' + chart.dataset.bottom;
    chart.querySelector('.rule').setAttribute('d', rule);
    var box = chart.getBoundingClientRect(), scale = box.width / chart.viewBox.baseVal.width;
    var left = box.left + places[index] * scale + 14;
    if (left + tip.offsetWidth > document.documentElement.clientWidth - 4) { left -= tip.offsetWidth + 28; }
    tip.style.left = Math.max(4, left) + window.scrollX + 'px';
    tip.style.top = box.top + 16 + window.scrollY + 'px';
  };
  var hide = function (chart) { tip.hidden = true; chart.querySelector('.rule').setAttribute('d', ''); };
  all('.chart').forEach(function (chart) {
    var places = chart.dataset.x.split(' ').map(Number);
    all('title', chart).forEach(function (title) { title.remove(); });
    chart.setAttribute('tabindex', '0');
    chart.addEventListener('pointermove', function (event) {
      var box = chart.getBoundingClientRect();
      var x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
      var distances = places.map(function (place) { return Math.abs(place - x); });
      show(chart, distances.indexOf(Math.min.apply(null, distances)));
    });
    chart.addEventListener('pointerleave', function () { hide(chart); });
    chart.addEventListener('blur', function () { hide(chart); });
    chart.addEventListener('keydown', function (event) {
      var step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === 'Escape') { hide(chart); }
      if (!step) { return; }
      event.preventDefault();
      show(chart, Math.min(places.length - 1, Math.max(0, (chart.at === undefined ? -1 : chart.at) + step)));
    });
  });

  // Legends: pointing lights one candidate up, a click keeps it lit.
  all('.legend').forEach(function (legend) {
    var chart = legend.parentNode.querySelector('.chart');
    var items = all('li[data-name]', legend);
    if (!chart) { return; }
    var light = function (pointed) {
      var isLit = function (item) { return item === pointed || item.getAttribute('aria-pressed') === 'true'; };
      var names = items.filter(isLit).map(function (item) { return item.dataset.name; });
      chart.classList.toggle('has-lit', names.length > 0);
      all('.series', chart).forEach(function (series) {
        series.classList.toggle('lit', names.indexOf(series.dataset.name) >= 0);
      });
    };
    items.forEach(function (item) {
      var press = function () {
        item.setAttribute('aria-pressed', item.getAttribute('aria-pressed') === 'true' ? 'false' : 'true');
        light(item);
      };
      item.setAttribute('role', 'button');
      item.setAttribute('tabindex', '0');
      item.setAttribute('aria-pressed', 'false');
      item.addEventListener('pointerenter', function () { light(item); });
      item.addEventListener('pointerleave', function () { light(null); });
      item.addEventListener('click', press);
      item.addEventListener('keydown', function (event) {
        if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); press(); }
      });
    });
  });

  // A link to a run opens it; paper shows them all.
  var openNamed = function () {
    var run = location.hash && byId(location.hash.slice(1));
    if (run && run.tagName === 'DETAILS') { run.open = true; run.hidden = false; run.scrollIntoView(); }
  };
  window.addEventListener('hashchange', openNamed);
  window.addEventListener('beforeprint', function () { all('details').forEach(function (run) { run.open = true; }); });
  openNamed();
})();
"""
