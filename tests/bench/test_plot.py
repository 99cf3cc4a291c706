"""Plots: real images of the kind that was asked for, with every line in them, or clear words why not."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mpi_gpucomp.errors import GpucompError
from osu_bench.report.drawing import look
from osu_bench.report.plot import plot, plot_grid
from osu_bench.suite.results import Network, Results, Row, Run

MB = 1 << 20
NAMES = ("mpi", "none", "zfp:rate=8")
with_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def a_run(benchmark: str = "bcast", hosts: int = 4, rate: float | None = 1e9, **known: object) -> Run:
    rows = []
    for number, name in enumerate(NAMES):
        for size in (MB, 4 * MB, 16 * MB):
            us = size / 100 / (number + 1)
            ratio = 4.0 if name == "zfp:rate=8" else None
            rows.append(Row(size, name, [us], us, us, us, algbw=size / us / 1e3, ratio=ratio, limit_us=us * 0.8))
    network = Network(hosts, rate)
    return Run(benchmark, hosts, "Open MPI 5", network=network, rows=rows, **known)  # type: ignore[arg-type]


def words_of(path: Path) -> list[str]:
    """Return the texts of a plot; matplotlib names each in a comment beside its outlines."""
    return [line.strip()[5:-4] for line in path.read_text().splitlines() if line.strip().startswith("<!-- ")]


@with_matplotlib
@pytest.mark.parametrize("suffix, begins", [(".png", b"\x89PNG\r\n\x1a\n"), (".pdf", b"%PDF-"), (".SVG", b"<?xml")])
def test_the_suffix_decides_the_kind(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"out{suffix}"
    plot(a_run(), path)
    assert path.read_bytes().startswith(begins)
    assert path.stat().st_size > 5000


@with_matplotlib
def test_every_candidate_and_the_limits_are_drawn_and_named(tmp_path: Path) -> None:
    plot(a_run(), tmp_path / "out.svg")
    words = words_of(tmp_path / "out.svg")
    assert "bcast, weights, 4 hosts, 1 Gbit/s, Open MPI 5" in words
    assert words[-5:] == ["mpi", "link limit, uncompressed", "none", "zfp:rate=8", "link limit, zfp:rate=8"]
    assert [word for word in words if word.endswith("MB")] == ["1 MB", "4 MB", "16 MB"]
    assert {"median time", "10 ms", "100 ms"} <= set(words)
    text = (tmp_path / "out.svg").read_text()
    assert all(look(name).light in text for name in NAMES)


@with_matplotlib
def test_bandwidth_is_drawn_as_bandwidth(tmp_path: Path) -> None:
    plot(a_run("bw", 2), tmp_path / "out.svg")
    words = words_of(tmp_path / "out.svg")
    assert "bandwidth" in words and "200 MB/s" in words
    assert words[-5:] == ["link limit, zfp:rate=8", "zfp:rate=8", "none", "link limit, uncompressed", "mpi"]


@with_matplotlib
def test_gaps_odd_names_and_an_unknown_network_do_no_harm(tmp_path: Path) -> None:
    run = a_run(data="$x^{_y$ & <b>")
    run.network = None
    run.rows = [row for row in run.rows if (row.candidate, row.size) != ("none", 4 * MB)]
    run.rows += [Row(0, "mpi", [5.0], 5.0, 5.0, 5.0), Row(MB, "_$odd", [5.0], 5.0, 5.0, 5.0)]
    plot(run, tmp_path / "out.svg")
    assert "link limit, uncompressed" not in words_of(tmp_path / "out.svg")


@with_matplotlib
def test_the_grid_has_a_panel_for_each_network(tmp_path: Path) -> None:
    runs = [a_run(hosts=hosts, rate=rate) for hosts in (8, 4) for rate in (None, 5e9, 5e8)]
    runs[0].rows.clear()
    plot_grid(Results([*runs, a_run("reduce", 16)], {}), tmp_path / "grid.svg", ["mpi", "zfp:rate=8"], mpi="Open")
    words = words_of(tmp_path / "grid.svg")
    panels = [f"{hosts} hosts, {rate}" for hosts in (4, 8) for rate in ("0.5 Gbit/s", "5 Gbit/s", "unshaped")]
    assert [word for word in words if "hosts" in word] == panels
    assert "none" not in words and "zfp:rate=8" in words
    assert "bcast, weights, Open MPI 5: median time against size" in words


@with_matplotlib
def test_the_ground_is_opaque(tmp_path: Path) -> None:
    plot_grid(Results([a_run()], {}), tmp_path / "grid.png", NAMES)
    pixels = import_module("matplotlib.image").imread(tmp_path / "grid.png")
    assert (pixels[..., 3] == 1).all()
    assert pixels.shape[1] >= 500


def failing(run: Run, path: Path | str) -> str:
    with pytest.raises(GpucompError) as caught:
        plot(run, path)
    return str(caught.value)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert failing(a_run(), tmp_path / "out.png") == (
        "plot: expected the package matplotlib, got import of matplotlib.figure halted; None in sys.modules."
        " Install it with `pip install mpi_gpucomp[plot]`."
    )


def test_other_suffixes_are_refused() -> None:
    shown = "plot out.gif: expected a name that ends with one of .png, .svg, .pdf, got '.gif'. Rename it."
    assert failing(a_run(), "out.gif") == shown


@with_matplotlib
def test_what_cannot_be_drawn_or_written_is_stated(tmp_path: Path) -> None:
    remedy = "Measure a size above 0, and name measured candidates."
    shown = f"plot: expected figures to plot, got no figures of bcast, weights, network unknown, 4 ranks, MPI. {remedy}"
    assert failing(Run("bcast", 4, "MPI"), tmp_path / "out.png") == shown
    with pytest.raises(GpucompError) as caught:
        plot_grid(Results([a_run()], {}), tmp_path / "out.png", ["mine"])
    expected = f"plot: expected figures to plot, got no figures of bcast, weights on known networks. {remedy}"
    assert str(caught.value) == expected
    path = tmp_path / "no" / "out.png"
    shown = f"file {path}: expected a file to write, got No such file or directory. Choose another file."
    assert failing(a_run(), path) == shown
