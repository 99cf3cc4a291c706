"""The TCP wire: programs in C++, with sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tcp_programs import HERE, SANITIZERS, TCP, compile_to


def run(program: Path, *arguments: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


def test_links_whose_paths_break_at_any_step(tmp_path: Path) -> None:
    run(compile_to(tmp_path / "program", [HERE / "test_tcp_link.cpp", *TCP[:3]], SANITIZERS), "0", "2000")


@pytest.mark.slow
def test_control_in_another_thread(tmp_path: Path) -> None:
    sources = [HERE / "test_tcp_wire.cpp", *TCP]
    run(compile_to(tmp_path / "program", sources, ["-fsanitize=thread"]), "threads")


@pytest.mark.slow
@pytest.mark.parametrize("cuts", ["40", "300"])
def test_wires_over_loopback_sockets_under_cuts(tmp_path: Path, cuts: str) -> None:
    run(compile_to(tmp_path / "program", [HERE / "test_tcp_wire.cpp", *TCP], SANITIZERS), "1", cuts)
