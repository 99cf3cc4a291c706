"""A run with known figures, and a page taken apart."""

from __future__ import annotations

from html.parser import HTMLParser

from osu_bench import report
from osu_bench.report.units import TIMES
from osu_bench.suite.results import Network, Results, Row, Run

MB = 1 << 20
SIZES = [MB, 4 * MB, 64 * MB]
VOID = ("meta", "br", "input")


class Page(HTMLParser):
    """A page taken apart: its elements in order, each with the text inside it; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.opened: list[Element] = []
        self.feed(text)
        self.close()
        assert not self.opened

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), [*self.opened])
        self.elements.append(element)
        if tag not in VOID:
            self.opened.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.opened:
            element.text += data.replace(TIMES, "x")

    def find(self, tag: str, inside: Element | None = None, **attributes: str) -> list[Element]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            element
            for element in self.elements
            if element.tag == tag
            and (inside is None or inside in element.above)
            and all(value in (element.attributes.get(name) or "").split() for name, value in wanted.items())
        ]

    def run(self, number: int) -> Element:
        return next(element for element in self.find("details") if element.attributes["id"] == f"run-{number}")


class Element:
    def __init__(self, tag: str, attributes: dict[str, str | None], above: list[Element]) -> None:
        self.tag, self.attributes, self.above, self.text = tag, attributes, above, ""


def row(size: int, candidate: str, us: float, **known: object) -> Row:
    return Row(size, candidate, [us, us * 0.9, us * 1.1], us, us, us, **known)  # type: ignore[arg-type]


def a_run(benchmark: str = "bcast", **known: object) -> Run:
    """Return a run in which zfp is 4 times as fast as mpi and twice as fast as mpi-tuned, and split loses to both."""
    rows = []
    for size in SIZES:
        us = size / 100
        rows += [row(size, "mpi", us), row(size, "mpi-tuned", us / 2, note="pipeline")]
        rows += [row(size, "zfp:rate=8", us / 4, ratio=4.0, wire_bytes=size // 4, limit_us=us / 5)]
        rows += [row(size, "split", us * 2, ratio=1.25, wire_bytes=size, limit_us=us)]
    conditions = {"mpi": "Open MPI 5", "network": Network(4, 1e9), "rows": rows, **known}
    return Run(benchmark, 4, **conditions)  # type: ignore[arg-type]


def page_of(*runs: Run) -> Page:
    return Page(report.page(Results(list(runs), {"processor": "a <fast> one", "memory_bytes": 1 << 34})))


def cells(page: Page, number: int) -> dict[tuple[str, int], Element]:
    """Return the cells of a run's table by candidate and size."""
    table = page.find("table", page.run(number), class_="figures")[0]
    sizes = [
        int(head.attributes["data-size"] or "") for head in page.find("th", table) if "data-size" in head.attributes
    ]
    found: dict[tuple[str, int], Element] = {}
    for line in page.find("tr", page.find("tbody", table)[0]):
        name = page.find("span", line, class_="candidate")[0].text
        found |= {(name, size): cell for size, cell in zip(sizes, page.find("td", line), strict=True)}
    return found
