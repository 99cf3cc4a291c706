"""The page in a browser: no errors, and the timeline can be zoomed, moved and pointed at."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import needs_browser, probe
from traces import chain

from mpi_gpucomp.monitor.report import report
from mpi_gpucomp.monitor.trace_buffer import newest

PROBE = """
var shown = function () { return document.getElementById('shown').textContent; };
var canvas = document.getElementById('timeline'), box = canvas.getBoundingClientRect();
var point = function (kind, x, y) {
  canvas.dispatchEvent(new PointerEvent(kind, { clientX: box.left + x, clientY: box.top + y }));
};
document.getElementById('show-all').click();
var all = shown();
say('all', all.split(' of ')[0] === all.split(' of ')[1]);
document.getElementById('zoom-in').click();
say('closer', shown() !== all);
canvas.dispatchEvent(new KeyboardEvent('keydown', { key: '-' }));
say('back', shown() === all);
point('pointermove', box.width / 2, 24 + 7);
var tip = document.getElementById('tip');
say('tip', tip.hidden + ' ' + tip.textContent.split('\\n').slice(0, 2).join(', '));
var drawn = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, colours = {};
for (var at = 0; at < drawn.length; at += 4) { colours[drawn.slice(at, at + 3).join()] = 1; }
say('colours', Object.keys(colours).length >= 6);
say('wide', document.documentElement.scrollWidth <= window.innerWidth);
say('errors', errors.join());
"""


@needs_browser
@pytest.mark.parametrize("width", [500, 1280])
def test_it_works_in_a_browser(tmp_path: Path, width: int) -> None:
    chain(tmp_path)
    assert probe(report(newest(tmp_path)), PROBE, tmp_path, width) == {
        "all": "true",
        "closer": "true",
        "back": "true",
        "tip": "false rank 0 (h0): call, broadcast (call 1)",
        "colours": "true",
        "wide": "true",
        "errors": "",
    }
