"""Loads a page in a headless browser and runs a script in it that reports values."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = "chromium"
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom")
EARLY = "<script>var errors = []; window.onerror = function (text) { errors.push(text); };</script>"
FRAME = """
<script>
var reported = [];
var say = function (name, value) { reported.push(name + '=' + value); };
%s
document.body.appendChild(document.createElement('pre')).textContent = reported.join('\\n');
</script>
"""

needs_browser = pytest.mark.skipif(shutil.which(BROWSER) is None, reason=f"{BROWSER} is not installed")


def probe(page: str, script: str, folder: Path, width: int) -> dict[str, str]:
    """Load a page in a window of this width, run a script in it, and return the values that it reports."""
    path = folder / "page.html"
    probed = page.replace("<head>", f"<head>{EARLY}").replace("</body>", f"{FRAME % script}</body>")
    path.write_text(probed, encoding="utf-8")
    options = [*OPTIONS, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *options, path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.findall(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    assert found, "the script did not complete"
    return dict(line.split("=", 1) for line in html.unescape(found[-1]).splitlines())
