"""Views of traces: Chrome trace, CSV rows, Prometheus, report and terminal."""

from __future__ import annotations

import csv
import itertools
import json
import re
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from traces import chain

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.cli.monitor import Terminal, screen
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor import exporters as prometheus
from mpi_gpucomp.monitor.exporters import CSV_HEADER, CsvFile, chrome_trace, rows
from mpi_gpucomp.monitor.report import report
from mpi_gpucomp.monitor.trace_buffer import newest, shift


def test_clocks_of_all_ranks_are_aligned(tmp_path: Path) -> None:
    chain(tmp_path)
    buffers = newest(tmp_path)
    assert [buffer.header.rank for buffer in buffers] == [0, 1, 2]
    first, *others = shift(buffers)
    assert [other - first for other in others] == [5_000_000, 10_000_000]


def test_chrome_trace_has_a_row_per_lane_and_kind_of_work(tmp_path: Path) -> None:
    chain(tmp_path)
    found = chrome_trace(newest(tmp_path))
    assert json.loads(json.dumps(found)) == found
    events = found["traceEvents"]
    rows = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert rows == {
        (0, 1): "lane 0: encode",
        (0, 2): "lane 0: send",
        (1, 2): "lane 0: send",
        (1, 3): "lane 0: receive",
        (1, 4): "lane 0: decode",
        (2, 3): "lane 0: receive",
        (2, 4): "lane 0: decode",
    }
    assert {one["args"]["name"] for one in events if one["name"] == "process_name"} == {
        "rank 0 (h0)",
        "rank 1 (h1)",
        "rank 2 (h2)",
    }
    work = [one for one in events if one["ph"] == "X"]
    assert len(work) == 40 * 7 and all(one["dur"] >= 0 and one["ts"] >= 0 for one in work)
    by_row: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in work:
        by_row.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for spans in by_row.values():  # or a viewer would take one for a part of the other
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(spans))
    assert [one["ph"] for one in events if one.get("cat") == "call"] == ["b", "e"] * 3


def test_csv_rows_per_link_and_file_rotation(tmp_path: Path) -> None:
    monitors = chain(tmp_path)
    found = rows(monitors[1].buffer, 0)
    assert [row[1:7] for row in found] == [[0, 1, 2, 0, "broadcast", 40]]
    file = CsvFile(tmp_path / "a.csv", max_bytes=200, files=3)
    for _ in range(30):
        file.add(found)
    assert sorted(path.name for path in tmp_path.glob("a.csv*")) == ["a.csv", "a.csv.1", "a.csv.2"]
    with (tmp_path / "a.csv").open() as text:
        read = list(csv.DictReader(text))
    assert tuple(read[0]) == CSV_HEADER and read[0]["from"] == "1" and read[0]["to"] == "2"


def test_prometheus_text_format(tmp_path: Path) -> None:
    chain(tmp_path)
    text = prometheus.exposition(newest(tmp_path))
    sample = re.compile(r'[a-z_]+\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\} [-+0-9.e]+')
    lines = text.splitlines()
    assert all(
        line.startswith(("# HELP mpi_gpucomp_", "# TYPE mpi_gpucomp_")) or sample.fullmatch(line) for line in lines
    )
    assert 'mpi_gpucomp_sent_bytes_total{rank="1",host="h1",to="2",rail="0"} 40000000' in lines
    assert 'mpi_gpucomp_alarms_total{rank="0",host="h0",kind="slow link"} 1' in lines
    assert text.endswith("\n") and len({line for line in lines if "TYPE" in line}) == 14


def test_prometheus_endpoint_on_loopback(tmp_path: Path) -> None:
    chain(tmp_path)
    server = prometheus.serve("0", lambda: newest(tmp_path))
    try:
        address, port = server.server_address[:2]
        assert address == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"] == prometheus.CONTENT_TYPE
            assert b"mpi_gpucomp_calls_ended_total" in answer.read()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/x", timeout=10)
        assert refused.value.code == 404
        refused.value.close()
        with pytest.raises(SpecError, match="expected a free port"):
            prometheus.serve(str(port), lambda: [])
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(SpecError, match="expected \\[address:\\]port, got 'x:y'"):
        prometheus.serve("x:y", lambda: [])


class Page(HTMLParser):
    """The external resources and the texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [value for name, value in attrs if name in ("src", "href") and value and value[0] != "#"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_report_has_no_external_resources_and_escapes_text(tmp_path: Path) -> None:
    chain(tmp_path)
    text = report(newest(tmp_path))
    found = Page(text)
    assert not found.outside and "http" not in re.sub(r"<!doctype html>", "", text)
    assert "slow link: from rank 1 <b> to rank 2" in found.words and "<b> to" not in text
    assert text.count('<td class="s') + text.count('<td class="slow') == 2


def test_terminal_shows_ranks_links_and_alarms(tmp_path: Path) -> None:
    chain(tmp_path)
    lines = screen(newest(tmp_path), Terminal(colours=False, unicode=False)).splitlines()
    assert lines[0].endswith("3 of 3 ranks alive")
    assert lines[2].split()[:4] == ["rank", "host", "state", "calls"]
    assert lines[4].split()[:4] == ["1", "h1", "idle", "1/1"]
    assert lines[8].startswith("0 -> 1     0") and lines[8].rstrip().endswith("40.0 MB")
    assert lines[-1].endswith("slow link: from rank 1 <b> to rank 2")
    assert not any("\x1b" in line for line in lines)


def test_output_fits_a_small_terminal(tmp_path: Path) -> None:
    chain(tmp_path, ranks=30)
    shown = screen(newest(tmp_path), Terminal(colours=True, unicode=True), width=40, height=20).splitlines()
    assert len(shown) <= 20 and any("more lines" in line for line in shown)
    assert all(len(re.sub(r"\x1b\[[0-9]*m", "", line)) <= 40 for line in shown)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    assert (
        main(["monitor", str(tmp_path), "--csv", str(out / "a.csv"), "--prometheus", str(out / "a.prom"), "--once"])
        == 0
    )
    assert "ranks alive" in capsys.readouterr().out
    assert len((out / "a.csv").read_text().splitlines()) == 3 and (out / "a.prom").exists()
    assert main(["trace", str(tmp_path), "-o", str(out / "t.json")]) == 0
    assert capsys.readouterr().out == f"{out / 't.json'}: 306 events, clocks measured, within 1 us\n"
    assert main(["report", str(tmp_path), "-o", str(out / "r.html")]) == 0
    assert capsys.readouterr().out.startswith(f"{out / 'r.html'}: 3 ranks, ")
    assert main(["monitor", str(out)]) == 2
    assert "expected traces of ranks (*.trace), got none" in capsys.readouterr().err
