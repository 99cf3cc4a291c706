"""The command `demo`: its table and chart, and the fallback where no cluster is possible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osu_bench import demo
from osu_bench.cluster import rootless
from osu_bench.report.units import TIMES
from osu_bench.suite.results import Network, Row, Run, load

ROOT = Path(__file__).parents[2]
SIZE = 1 << 25


def a_run() -> Run:
    rows = [
        Row(SIZE, "mpi", [800e3], 800e3, 800e3, 800e3),
        Row(SIZE, "split", [200e3], 200e3, 200e3, 200e3, ratio=1.2),
        Row(SIZE, "zfp:rate=8", [100e3], 100e3, 100e3, 100e3, ratio=4.0, extra={"max_error": 1e-3}),
    ]
    return Run("bcast", 4, "Open MPI v5", network=Network(4, 1e9), rows=rows)


def test_table_has_speed_up_and_error_in_80_columns() -> None:
    lines = demo.table(a_run()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[3].split() == ["split", "200", "ms", f"4.00{TIMES}", "1.2", "0", "1", "yes"]
    assert lines[4].split() == ["zfp:rate=8", "100", "ms", f"8.00{TIMES}", "4", "1.0e-03", "1", "yes"]


def test_bars_are_proportional_and_coloured_on_request_only() -> None:
    bars = demo.chart(a_run(), colour=False, columns=80).splitlines()[2:]
    full = [line.count("█") for line in bars]
    assert full[0] == 58 and full[1] == 14 and full[2] == 7 and all(len(line) <= 80 for line in bars)
    assert "\033[" not in "".join(bars) and "\033[32m" in demo.chart(a_run(), colour=True, columns=80)


def test_conditions_name_hosts_links_and_losses() -> None:
    text = demo.conditions(a_run())
    assert "4 hosts on this machine (network namespaces), 1 Gbit/s links, Open MPI v5." in text
    assert "zfp:rate=8 is lossy: largest error 1.0e-03, where the standard deviation is 0.02." in text


def test_demo_falls_back_to_shared_memory(tmp_path: Path) -> None:
    """Run with an `unshare` that fails as on kernels without user namespaces."""
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    files = ["--html", str(tmp_path / "demo.html"), "--json", str(tmp_path / "demo.json")]
    command = [sys.executable, "-m", "osu_bench", "demo", "--quick", "--size", "64K", "--hosts", "2", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first == "No hosts with shaped links on this machine: unshare failed: Operation not permitted"
    assert second.startswith("The ranks share memory instead")
    assert (tmp_path / "demo.html").read_text().startswith("<!DOCTYPE html>")
    assert load(tmp_path / "demo.json").runs[0].candidates() == ["mpi", *demo.QUICK_CODECS]


def test_a_forbidding_setting_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(rootless, "has_privileges", lambda: False)
    monkeypatch.setattr(rootless, "_setting", {"user/max_user_namespaces": "0"}.get)
    expected = "unshare failed: Operation not permitted (/proc/sys/user/max_user_namespaces is 0)"
    assert rootless.obstacle() == expected
