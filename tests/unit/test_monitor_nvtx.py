"""Ranges around what is queued on a GPU, with CuPy's own NVTX where it is installed."""

from __future__ import annotations

import pytest

from mpi_gpucomp.monitor.recorder import gpu_range


def test_work_on_a_gpu_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = pytest.importorskip("cupy.cuda.nvtx")
    nvtx.RangePush("the real one takes it")
    nvtx.RangePop()
    calls: list[str] = []
    monkeypatch.setattr(nvtx, "RangePush", calls.append)
    monkeypatch.setattr(nvtx, "RangePop", lambda: calls.append("pop"))
    named = gpu_range("encode split", "cuda:0")
    for _ in range(2):
        with named:
            calls.append("work")
    assert calls == ["gpucomp encode split", "work", "pop"] * 2
    with gpu_range("encode split", "host"):
        assert len(calls) == 6
