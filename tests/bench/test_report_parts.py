"""What the report is made of: figures in words, limits of the wire, axes, and colours that can be told and read."""

from __future__ import annotations

import re

import pytest
from report_pages import MB, a_run, row

from osu_bench import report
from osu_bench.report.assets import STYLE
from osu_bench.report.compare import raw_limit, wire_share
from osu_bench.report.drawing import FIXED, axis, look, round_values, thinned
from osu_bench.report.units import TIMES, bandwidth_text, factor_text, network_text, rate_text, size_text, time_text
from osu_bench.suite.results import Network, Results, Run


@pytest.mark.parametrize(
    "benchmark, microseconds",
    [
        ("bcast", 8e3),
        ("iallreduce", 12e3),
        ("allgather", 24e3),
        ("reduce_scatter", 6e3),
        ("ialltoall", 24e3),
        ("barrier", None),
    ],
)
def test_the_wire_alone_takes(benchmark: str, microseconds: float | None) -> None:
    assert raw_limit(Run(benchmark, 4, "MPI", network=Network(4, 1e9)), 1_000_000) == microseconds


@pytest.mark.parametrize("name, share", [("mpi", 0.8), ("mpi-tuned", 0.8), ("gloo", 0.8), ("zfp:rate=8", None)])
def test_who_does_not_compress_is_held_to_the_raw_limit(name: str, share: float | None) -> None:
    run = Run("bcast", 4, "MPI", network=Network(4, 1e9))
    assert wire_share(row(1_000_000, name, 10_000.0), run) == share


def test_without_a_rate_there_is_no_limit() -> None:
    assert raw_limit(Run("bcast", 4, "MPI", network=Network(4, None)), MB) is None
    assert raw_limit(Run("bcast", 4, "MPI"), MB) is None
    assert wire_share(row(MB, "none", 5.0), Run("bcast", 4, "MPI")) is None
    assert raw_limit(Run("bibw", 2, "MPI", network=Network(2, 1e9, 2)), MB) == 0.5


@pytest.mark.parametrize(
    "size, text", [(1, "1 B"), (1024, "1 KB"), (65536, "64 KB"), (3 << 19, "1.5 MB"), (1 << 31, "2 GB")]
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    "us, text",
    [
        (0.5, "0.50 us"),
        (99.96, "100 us"),
        (999.4, "999 us"),
        (999.6, "1.00 ms"),
        (58_123, "58.1 ms"),
        (1.688e6, "1.69 s"),
    ],
)
def test_times(us: float, text: str) -> None:
    assert time_text(us) == text


def test_other_figures() -> None:
    assert [rate_text(rate) for rate in (5e8, 1e9, 2.5e9, 1e8, None)] == [
        *("0.5 Gbit/s", "1 Gbit/s", "2.5 Gbit/s", "100 Mbit/s", "unshaped")
    ]
    assert [bandwidth_text(value) for value in (12.34, 0.118, 2e-5)] == ["12.3 GB/s", "118 MB/s", "20 KB/s"]
    assert [factor_text(value) for value in (0.4, 9.996, 123.4)] == [
        f"{digits}{TIMES}" for digits in ("0.40", "10.0", "123")
    ]
    assert network_text(Network(4, 1e9, 2)) == f"4 hosts, 2 {TIMES} 1 Gbit/s"


def test_axes() -> None:
    assert round_values(2.5, 60) == [5, 10, 20, 50]
    assert round_values(0.9, 1.1e5) == [1, 10, 100, 1000, 1e4, 1e5]
    assert thinned(range(10), 4) == [0, 3, 6, 9] and thinned([1, 2, 3], 9) == [1, 2, 3]
    assert axis([10, 1000], 0, 100, 1.0)(100) == pytest.approx(50)


def test_a_candidate_always_looks_the_same() -> None:
    assert look("zfp:rate=8") == ("#0057c2", "#5a9bff", "circle")
    assert look("lz4:level=3") == ("#3b515b", "#b1c5ce", "diamond")
    assert len({each.light for each in FIXED.values()}) == len({each.dark for each in FIXED.values()}) == len(FIXED)
    text = report.page(Results([a_run()], {}))
    assert ".c2{--c:#0057c2}" in text and ".c2{--c:#5a9bff}" in text


@pytest.mark.parametrize("name", [*FIXED, "p2p", "zfp:rate=12", "bound:rel=1e-3", "cast", "mpc", "lz4", "mine:x=1"])
def test_lines_stand_out_from_the_ground(name: str) -> None:
    light, dark = re.findall(r"--ground: (#\w+)", STYLE)[:2]
    assert contrast(look(name).light, "#ffffff" if light == "#fff" else light) >= 3
    assert contrast(look(name).dark, dark) >= 3


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(
    "ink, ground",
    [
        *(("text", "ground"), ("faint", "ground"), ("faint", "raised"), ("link", "raised"), ("bad", "bad-ground")),
        *(("faint", "best"), ("text", "best"), ("good", "raised")),
        *(("on-shade", f"s{step}") for step in range(7)),
    ],
)
def test_text_can_be_read(ink: str, ground: str, mode: int) -> None:
    one, other = (re.findall(rf"--{name}: (#\w+)", STYLE)[mode] for name in (ink, ground))
    assert contrast(one, other) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG defines it."""
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = [int(digits[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
