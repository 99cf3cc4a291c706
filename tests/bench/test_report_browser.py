"""The report in a browser: no errors, and everything that can be pointed at or chosen does what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import needs_browser, probe
from report_pages import a_run

from osu_bench import report
from osu_bench.suite.results import Results

PROBE = """
var change = function (element, value) { element.value = value; element.dispatchEvent(new Event('change')); };
var all = function (query) { return Array.from(document.querySelectorAll(query)); };
var shown = function (query) { return all(query).filter(function (element) { return !element.hidden; }); };
say('errors', errors.join());
say('forms', shown('form').length);
change(document.querySelector('[data-filter=benchmark]'), 'reduce');
say('filtered', shown('details').length + ' ' + document.getElementById('count').textContent);
change(document.getElementById('candidate'), '=split');
say('matrix', document.querySelector('.matrix td[data-run]').textContent);
say('shade', document.querySelector('.matrix td[data-run]').className);
document.querySelector('#run-0 .figures th button').click();
say('sorted', shown('#run-0 .candidate').map(function (e) { return e.textContent; }).join());
change(document.querySelector('[data-filter=benchmark]'), '');
var chart = document.querySelector('#run-0 .chart'), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 30, clientY: box.top + 50 }));
say('tip', document.getElementById('tip').hidden + ' ' + document.getElementById('tip').textContent);
document.querySelector('#run-0 .legend li[data-name=mpi]').click();
say('lit', shown('.series.lit').map(function (e) { return e.dataset.name; }).join());
say('wide', document.documentElement.scrollWidth <= window.innerWidth);
say('errors after', errors.join());
"""


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_it_works_in_a_browser(tmp_path: Path, width: int) -> None:
    page = report.page(Results([a_run(), a_run("reduce")], {}))
    assert probe(page, PROBE, tmp_path, width) == {
        "errors": "",
        "forms": "2",
        "filtered": "1 1 of 2 runs",
        "matrix": "0.50\u00d70.25\u00d7",
        "shade": "shade s0",
        "sorted": "zfp:rate=8,mpi-tuned,mpi,split",
        "tip": "false 64 MBsplit1.34 smpi671 msmpi-tuned336 mszfp:rate=8168 ms",
        "lit": "mpi",
        "wide": "true",
        "errors after": "",
    }
