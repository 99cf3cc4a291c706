"""How tests look at a page: in a headless browser, with a script of their own that says what it finds."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = "chromium"
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom")
EARLY = "<script>var errors = []; window.onerror = function (said) { errors.push(said); };</script>"
FRAME = """
<script>
var said = [];
var say = function (name, value) { said.push(name + '=' + value); };
%s
document.body.appendChild(document.createElement('pre')).textContent = said.join('\\n');
</script>
"""

needs_browser = pytest.mark.skipif(shutil.which(BROWSER) is None, reason=f"{BROWSER} is not installed")


def probe(page: str, script: str, folder: Path, width: int) -> dict[str, str]:
    """Show a page in a window of this width, run a script in it, and return what that says: say('name', value)."""
    path = folder / "page.html"
    probed = page.replace("<head>", f"<head>{EARLY}").replace("</body>", f"{FRAME % script}</body>")
    path.write_text(probed, encoding="utf-8")
    options = [*OPTIONS, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *options, path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    said = re.findall(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    assert said, "the script has not come to its end"
    return dict(line.split("=", 1) for line in html.unescape(said[-1]).splitlines())
