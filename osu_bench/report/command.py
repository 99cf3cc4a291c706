"""The command `report`: write an HTML page of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import BufferSpecError
from osu_bench.arguments import CommandParser
from osu_bench.report.page import page
from osu_bench.suite.results import load, merge

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["main", "write"]


EXAMPLE = """\
osu_bench report results.json -o report.html"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write an HTML page of results."""
    parser = CommandParser(
        "osu_bench report",
        "Make one self-contained HTML page of results that benchmarks have written with --json.",
        EXAMPLE,
    )
    parser.add_argument("files", nargs="+", metavar="RESULTS.json", help="files written with --json")
    parser.add_argument("-o", "--output", default="report.html", metavar="PAGE", help="the page (default report.html)")
    return _run(parser.parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    return write(args.files, args.output)


def write(files: Sequence[Path | str], output: Path | str) -> int:
    """Write the page, print a summary, and return the exit code."""
    results = merge([load(path) for path in files])
    try:
        Path(output).write_text(page(results), encoding="utf-8")
    except OSError as error:
        remedy = "Choose another file with -o."
        got = error.strerror or str(error)
        raise BufferSpecError(f"file {output}", expected="a file to write", got=got, remedy=remedy) from error
    print(f"{output}: {len(results.runs)} run{'' if len(results.runs) == 1 else 's'}")
    return 0
