"""The report: what the page says is what was measured, whatever the names and however much is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from report_pages import MB, SIZES, Page, a_run, cells, page_of, row

from mpi_gpucomp.errors import GpucompError
from osu_bench import report
from osu_bench.report.command import main
from osu_bench.report.units import time_text
from osu_bench.suite.results import Network, Results, Run


def test_every_figure_of_the_data_is_in_the_table_of_its_run() -> None:
    run = a_run()
    page = page_of(run)
    found = cells(page, 0)
    assert set(found) == {(each.candidate, each.size) for each in run.rows}
    for each in run.rows:
        cell = found[each.candidate, each.size]
        assert page.find("b", cell)[0].text == time_text(each.median_us)
        assert float(cell.attributes["data-value"] or "") == pytest.approx(each.median_us, rel=1e-5)
    assert [page.find("span", found[name, MB])[0].text for name in run.candidates()] == [
        "1.00x",
        "2.00x",
        "4.00x",
        "0.50x",
    ]
    assert page.find("small", found["zfp:rate=8", MB])[0].text == "4:1 · 80 %"
    assert page.find("small", found["mpi", MB])[0].text == "80 %"
    assert "pipeline" in (found["mpi-tuned", MB].attributes["title"] or "")


def test_the_fastest_is_marked_and_so_is_the_fastest_without_loss() -> None:
    page = page_of(a_run())
    kinds = {name: cell.attributes.get("class") for (name, size), cell in cells(page, 0).items() if size == MB}
    assert kinds == {"mpi": None, "mpi-tuned": "best-exact", "zfp:rate=8": "best", "split": None}


def test_the_headline_says_the_best_and_the_worst() -> None:
    page = page_of(a_run())
    cards = page.find("div", class_="card")
    assert [page.find("p", card, class_="large")[0].text for card in cards] == ["4.00x", "2.00x", "0.25x"]
    assert [(card.attributes["class"] or "").endswith("lost") for card in cards] == [False, False, True]
    assert cards[0].text == (
        "4.00xas fast as native MPI (mpi)zfp:rate=8 (lossy): 2.62 ms against 10.5 ms, 75 % less time. "
        "bcast of 1 MB, weights, 4 hosts, 1 Gbit/s, Open MPI 5."
        "Without loss 0.50x: split: 21.0 ms against 10.5 ms, 100 % more time. "
        "bcast of 1 MB, weights, 4 hosts, 1 Gbit/s, Open MPI 5."
    )
    assert cards[2].text.startswith("0.25xat worst as fast as the fastest native algorithm (mpi-tuned)split: 21.0 ms")
    assert page.find("p", class_="honest")[0].text.replace("\N{NO-BREAK SPACE}", " ") == (
        "Over all 3 sizes and conditions, our fastest candidate is more than 5 % faster than mpi-tuned at 3,"
        " more than 5 % slower at 0, and about equal at 0."
    )


def test_auto_is_held_to_its_promise() -> None:
    run = a_run()
    run.rows += [row(MB, "auto", 10_000), row(4 * MB, "auto", 20_000)]
    shown = page_of(run).find("p", class_="honest")[0].text.replace("\N{NO-BREAK SPACE}", " ")
    assert "The codec auto is more than 5 % slower than mpi-tuned at 1 of 2; its worst is 0.52x" in shown


def test_the_same_codec_message_by_message_is_a_base_of_its_own() -> None:
    run = a_run()
    run.rows.append(row(MB, "p2p:zfp:rate=8", MB / 100 * 0.75))
    cards = page_of(run).find("div", class_="card")
    assert cards[2].text.startswith("3.00xas fast as the same codec per message (p2p)zfp:rate=8")


def test_the_summary_counts_over_all_runs() -> None:
    page = page_of(a_run(), a_run("reduce"))
    lines = page.find("tr", page.find("tbody", page.find("table", class_="summary")[0])[0])
    texts = [[cell.text for kind in ("th", "td") for cell in page.find(kind, line)] for line in lines]
    zfp = ["4.00x", "4.00x", "4.00x", "0 of 3", "2.00x", "2.00x", "2.00x", "0 of 3"]
    split = ["0.50x", "0.50x", "0.50x", "3 of 3", "0.25x", "0.25x", "0.25x", "3 of 3"]
    named = [(name, benchmark) for benchmark in ("bcast", "reduce") for name in ("zfp:rate=8", "split")]
    assert texts == [[*key, *(zfp if key[0] == "zfp:rate=8" else split)] for key in named]


def test_a_wrong_result_is_red_and_never_the_best() -> None:
    run = a_run()
    run.rows = [replace(each, wrong=7 if each.candidate == "zfp:rate=8" else 0) for each in run.rows]
    page = page_of(run)
    found = cells(page, 0)
    assert found["zfp:rate=8", MB].attributes["class"] == "wrong"
    assert found["zfp:rate=8", MB].text.endswith("7 wrong")
    assert found["mpi-tuned", MB].attributes["class"] == "best best-exact"
    assert len(page.find("path", page.run(0), class_="wrong")) == len(SIZES)
    assert page.find("p", class_="large")[0].text == "0.50x"
    assert page.find("td", class_="shade")[0].text == "0.50x0.25x"


def test_a_candidate_that_is_missing_at_some_sizes_leaves_a_gap() -> None:
    run = a_run()
    sizes = [MB << power for power in range(5)]
    run.rows = [row(size, name, size / 100) for name in ("mpi", "none") for size in sizes]
    run.rows = [each for each in run.rows if (each.candidate, each.size) != ("none", 4 * MB)]
    page = page_of(run)
    assert cells(page, 0)["none", 4 * MB].text == "not measured"
    drawn = {each.attributes["data-name"]: each for each in page.find("g", class_="series")}
    assert [len(page.find("path", drawn[name], class_="line")) for name in ("mpi", "none")] == [1, 2]
    assert [len(page.find("path", drawn[name], class_="dot")) for name in ("mpi", "none")] == [5, 4]


def test_the_lines_of_a_chart_lie_as_the_values_do() -> None:
    page = page_of(a_run())
    lines = {
        each.attributes["data-name"]: page.find("path", each, class_="line")[0]
        for each in page.find("g", class_="series")
    }
    places = {name: re.findall(r"([\d.]+) ([\d.]+)", line.attributes["d"] or "") for name, line in lines.items()}
    heights = {name: float(found[0][1]) for name, found in places.items()}
    assert sorted(heights, key=heights.__getitem__) == ["split", "mpi", "mpi-tuned", "zfp:rate=8"]
    steps = [heights["split"] - heights["mpi"], heights["mpi"] - heights["mpi-tuned"]]
    assert steps[0] == pytest.approx(steps[1], abs=0.2)
    assert all(float(before[0]) < float(after[0]) for before, after in pairwise(places["mpi"]))
    label = page.find("svg", class_="chart")[0].attributes["aria-label"]
    assert label == (
        "Median time against size of bcast, weights, 4 hosts, 1 Gbit/s, Open MPI 5, both axes logarithmic."
        " Best at 64 MB: zfp:rate=8 with 168 ms."
    )


def test_names_are_text_and_never_markup() -> None:
    name = "<script>alert(1)</script>\"'&\N{SNOWMAN}" + "x" * 300
    run = a_run(data=name, mpi="<b>MPI</b>", options={"<i>": "</i>"})
    run.rows += [row(MB, f"<img src=x onerror=alert(2)>{name}", 5.0)]
    text = report.page(Results([run], {"</title>": name}))
    page = Page(text)
    assert "<img" not in text and "<script>alert" not in text and "<i>" not in text
    assert len(page.find("script")) == 2
    assert page.run(0).attributes["data-data"] == name
    assert (f"<img src=x onerror=alert(2)>{name}", MB) in cells(page, 0)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = report.page(Results([a_run()], {}))
    assert not re.search(r"https?:|src=|@import|url\(|<link|<iframe", text)


def test_anchors_lead_somewhere_and_ids_are_unique() -> None:
    page = page_of(*(a_run(data=f"data {number}") for number in range(5)))
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    targets = {(link.attributes["href"] or "")[1:] for link in page.find("a")}
    assert targets <= set(ids)
    assert all(head.attributes.get("scope") for head in page.find("th"))


def test_a_hundred_runs_are_all_there_and_one_is_open() -> None:
    runs = [
        a_run(benchmark, data=data, network=Network(hosts, rate))
        for benchmark in ("bcast", "allreduce")
        for data in ("weights", "gradients", "smooth", "bf16", "zeros")
        for hosts in (4, 8)
        for rate in (5e8, 1e9, 5e9, None, 1e10)
    ]
    page = page_of(*reversed(runs))
    details = page.find("details")
    assert len(details) == len(page.find("svg", class_="chart")) == 100
    assert sum("open" in each.attributes for each in details) == 1
    assert len(page.find("table", class_="matrix")) == 10
    heads = [head.text for head in page.find("th", page.find("table", class_="matrix")[0], scope="col")]
    assert heads == ["0.5 Gbit/s", "1 Gbit/s", "5 Gbit/s", "10 Gbit/s", "unshaped"]
    options = [option.text for option in page.find("option", page.find("form", class_="filters")[0])]
    assert options[:3] == ["any benchmark", "allreduce", "bcast"]
    assert len(options) == 3 + 6 + 11


def test_the_matrix_shows_the_speed_on_each_network_in_its_colour() -> None:
    page = page_of(a_run(), a_run(network=Network(8, None)), a_run(network=None))
    found = page.find("td", class_="shade")
    assert [cell.text for cell in found] == ["4.00x2.00x"] * 3
    assert {cell.attributes["class"] for cell in found} == {"shade s5"}
    assert [head.text for head in page.find("th", page.find("table", class_="matrix")[0])] == [
        *("1 Gbit/s", "unshaped", "unknown"),
        *("4 hosts", "8 hosts", "4 ranks"),
    ]


@pytest.mark.parametrize(
    "runs, shown",
    [
        ([], "These results hold no runs."),
        ([Run("bcast", 4, "MPI")], "These results hold runs without measurements."),
    ],
)
def test_nothing_measured_is_stated(runs: list[Run], shown: str) -> None:
    page = page_of(*runs)
    assert page.find("p", class_="none")[0].text == shown
    assert not page.find("svg")


def test_odd_runs_make_a_page_too() -> None:
    barrier = Run("barrier", 4, "MPI", rows=[row(0, "mpi", 90.0), row(0, "none", 80.0)])
    one_size = Run("bcast", 4, "MPI", network=None, rows=[row(MB, "zfp:rate=8", 90.0)])
    page = page_of(barrier, one_size, Run("reduce", 2, "MPI"))
    assert [each.text for each in page.find("p", class_="none")] == [
        "No chart: no size above 0 was measured.",
        "Nothing was measured.",
    ]
    assert cells(page, 0)["none", 0].attributes["class"] == "best best-exact"
    assert "network unknown" in page.run(1).text
    alone = page_of(one_size).find("p", class_="none")
    assert [each.text for each in alone] == ["No comparison: mpi was not measured together with other candidates."]


def test_of_bandwidth_more_is_better() -> None:
    rows = [row(size, name, 100.0, algbw=gain) for size in SIZES for name, gain in (("mpi", 0.1), ("zfp:rate=8", 0.4))]
    page = page_of(Run("bw", 2, "MPI", network=Network(2, 1e9), rows=rows))
    best = cells(page, 0)["zfp:rate=8", MB]
    assert (best.text, best.attributes["class"]) == ("400 MB/s4.00x", "best")
    assert cells(page, 0)["mpi", MB].text == "100 MB/s1.00x80 %"
    assert page.find("p", class_="large")[0].text == "4.00x"


def command(*words: str) -> int:
    return main(words)


def test_the_command_merges_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, out = (str(tmp_path / name) for name in ("one.json", "other.json", "page.html"))
    Results([a_run()], {"processor": "first"}).save(one)
    Results([a_run("reduce")], {"processor": "second"}).save(other)
    assert command(one, other, "-o", out) == 0
    assert capsys.readouterr().out == f"{out}: 2 runs\n"
    page = Page(Path(out).read_text(encoding="utf-8"))
    assert [head.text for head in page.find("h3")] == [
        *("bcast, weights, 4 hosts, 1 Gbit/s, Open MPI 5", "reduce, weights, 4 hosts, 1 Gbit/s, Open MPI 5")
    ]
    assert "first" in page.find("dl")[0].text


def test_errors_name_the_file(tmp_path: Path) -> None:
    missing, garbage, good = (tmp_path / name for name in ("none.json", "bad.json", "good.json"))
    garbage.write_text("{}")
    Results([a_run()], {}).save(good)
    remedy = "Create one with `osu_bench NAME --json FILE`."
    cases: list[tuple[list[Path | str], str]] = [
        ([missing], f"file {missing}: expected results of osu_bench, got No such file or directory. {remedy}"),
        (
            [good, garbage],
            f"file {garbage}: expected results of osu_bench, got JSON without format 'osu_bench results'. {remedy}",
        ),
        (
            [good, "-o", tmp_path / "no" / "x.html"],
            f"file {tmp_path}/no/x.html: expected a file to write, got No such file or directory."
            " Choose another file with -o.",
        ),
    ]
    for words, shown in cases:
        with pytest.raises(GpucompError) as caught:
            command(*map(str, words))
        assert str(caught.value) == shown
