"""The timeline of the page: drawn on a canvas, zoomed, moved and pointed at."""

from __future__ import annotations

__all__ = ["SCRIPT"]

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
