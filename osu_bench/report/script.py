"""What moves on the page: filters, the choice of size, sorting, and the figures beneath the pointer.

Everything that is shown is in the page without it. Names from the results only ever become text, never markup.
"""

from __future__ import annotations

__all__ = ["SCRIPT"]

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

  // Across networks: another size or contender.
  var size = byId('size'), contender = byId('contender');
  var fastest = function (table) {
    var names = Object.keys(table || {}).filter(function (name) {
      if (contender.value === 'exact') { return speeds.exact.indexOf(name) >= 0; }
      return !contender.value || '=' + name === contender.value;
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
    var said = contender.value[0] === '=' ? contender.value.slice(1) : 'the ' + contender.selectedOptions[0].text;
    byId('shown').textContent = said + ' at ' + size.selectedOptions[0].text;
    all('.matrix td[data-run]').forEach(recolour);
  };
  [size, contender].forEach(function (select) { select.addEventListener('change', choose); });

  // Tables: a click on a size sorts the contenders by it, a second click the other way round.
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
    name.textContent = row.querySelector('.contender').textContent;
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

  // Legends: pointing lights one contender up, a click keeps it lit.
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
