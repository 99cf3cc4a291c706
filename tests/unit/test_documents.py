"""The Python examples in the documents run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from osu_bench.launcher import find

ROOT = Path(__file__).parents[2]
EXECUTED = ("README.md", "CONTRIBUTING.md", "docs/CODECS.md", "docs/TORCH.md", "docs/TRAINING.md")
WRAPPED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
BLOCKS = [
    pytest.param(block, id=f"{document}-{number}")
    for document in EXECUTED
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL))
]
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))

ROUND_TRIP = """
import numpy as np
from mpi_gpucomp.device import as_buffer, get_device
x, back = np.arange(1000.0), np.zeros(1000)
device = get_device("host")
with device.alloc(codec.max_encoded(1000, as_buffer(x).dtype)) as room:
    stream = device.stream()
    nbytes = codec.encode(as_buffer(x), room, stream).result()
    codec.decode(room, nbytes, as_buffer(back, writable=True), stream).result()
assert (back == x).all() and nbytes < x.nbytes
"""


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run(block):
    program = block + (ROUND_TRIP if "register(" in block else "")
    command, environment = [sys.executable, "-c", program], dict(os.environ)
    if "init_process_group" in block or "COMM_WORLD" in block:  # needs mpirun
        launcher = find()
        command, environment = launcher.command(2, command), environment | launcher.environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_examples():
    assert len(BLOCKS) >= 3


def test_the_readme_is_read_in_ninety_seconds():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("document", [*WRAPPED, *PAGES])
def test_lines_of_prose_have_at_most_100_characters(document):
    prose = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|")] == []
