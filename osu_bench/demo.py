"""The command `demo`: native MPI against this library's codecs, on four hosts made of this machine.

The hosts are network namespaces joined by shaped links, in a user namespace where this process is not root. Where the
kernel forbids that, the ranks share memory instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import BufferSpecError
from osu_bench.arguments import CommandParser, names, number
from osu_bench.cluster import Cluster, ClusterError, rootless
from osu_bench.cluster.network import parse_rate
from osu_bench.launcher import find
from osu_bench.report.compare import is_exact
from osu_bench.report.page import page
from osu_bench.report.units import factor_text, rate_text, short, size_text, time_text
from osu_bench.suite.results import Results, Row, Run, load

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import IO

__all__ = ["chart", "conditions", "main", "table"]

ABOUT = "Compare native MPI with this library's codecs: a broadcast on four hosts made of this machine."
EXAMPLE = """\
osu_bench demo
osu_bench demo --quick
osu_bench demo --rate 500mbit --codecs split,zfp:rate=16"""
BASELINES = ("mpi", "mpi-tuned")
CODECS = ["none", "split", "auto", "zfp:rate=8", "bound:rel=1e-3"]
QUICK_CODECS = ["none", "split", "zfp:rate=8", "bound:rel=1e-3"]
DESCRIPTIONS = {
    "mpi": "native MPI, default algorithm",
    "mpi-tuned": "native MPI, fastest algorithm",
    "none": "this library, no codec",
    "auto": "this library, autotuned",
}
CLUSTER = "demo"
DEVIATION = 0.02
"""Of the values in the message."""
BLOCKS = " ▏▎▍▌▋▊▉█"
GREY, GREEN, BLUE, RESET = "\033[90m", "\033[32m", "\033[34m", "\033[0m"
LEAST_WIDTH, BAR_WIDTH = 60, 40


class Scale(NamedTuple):
    """How long the demo measures."""

    size: int
    seconds: float
    """Time for the rounds, unless three take longer."""
    iterations: int


USUAL, QUICK = Scale(32 << 20, 40.0, 15), Scale(16 << 20, 8.0, 7)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table, the chart and the path of the HTML page."""
    words = list(sys.argv[2:] if argv is None else argv)
    args = _parser().parse_args(words)
    parse_rate(args.rate)
    scale = QUICK if args.quick else USUAL
    args.size = scale.size if args.size is None else args.size
    args.codecs = args.codecs or (QUICK_CODECS if args.quick else CODECS)
    args.compare = [*(BASELINES[:1] if args.quick else BASELINES), *args.codecs]
    find()
    obstacle = rootless.obstacle()
    if obstacle is None:
        rootless.enter("demo", *words)
    return _run(args, scale, obstacle)


def _parser() -> CommandParser:
    parser = CommandParser("osu_bench demo", ABOUT, EXAMPLE)
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller message, fewer rounds, no tuning: about 20 seconds")
    add("--size", type=number, metavar="BYTES", help="of the message (32M; with --quick 16M)")
    add("--rate", default="1gbit", help="of each link: 1gbit (default), 500mbit, unlimited")
    add("--hosts", type=int, default=4, metavar="N", help="number of hosts (4)")
    add("--codecs", type=names, metavar="A,B,...", help=f"codecs to compare ({','.join(CODECS)})")
    add("--json", metavar="FILE", help="write the results")
    add("--html", metavar="FILE", default="osu_bench_demo.html", help="the page (osu_bench_demo.html)")
    return parser


def _run(args: argparse.Namespace, scale: Scale, obstacle: str | None) -> int:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path, display = folder / "results.json", _Display(stack)
        program = _benchmark(args, scale, path)
        cluster = None
        if obstacle is None:
            display.show(f"making {args.hosts} hosts with {args.rate} links")
            try:
                cluster = stack.enter_context(Cluster.up(args.hosts, args.rate, name=CLUSTER))
            except ClusterError as error:
                obstacle = str(error)
        if obstacle is not None:
            display.print(f"No hosts with shaped links on this machine: {obstacle}")
            display.print("The ranks share memory instead: this shows overhead, not the gain on a network.\n")
        code = _measure(args, cluster, program, display)
        display.clear()
        if code:
            return code
        results = load(path)
    return _present(args, results)


def _benchmark(args: argparse.Namespace, scale: Scale, path: Path) -> list[str]:
    flags = {
        "--message-size": f"{args.size}:{args.size}",
        "--mem-limit": "4G",
        "--warmup": "1",
        "--iterations": str(scale.iterations),
        "--seconds": str(scale.seconds),
        "--compare": ",".join(args.compare),
        "--json": str(path),
    }
    return [sys.executable, "-m", "osu_bench", "bcast", *(word for flag in flags.items() for word in flag)]


def _measure(args: argparse.Namespace, cluster: Cluster | None, program: list[str], display: _Display) -> int:
    """Run the benchmark and show its progress; return its exit code, after its error output if it failed."""
    environment = {"OSU_BENCH_PROGRESS": "1"}
    with ExitStack() as stack:
        if cluster is not None:
            running = stack.enter_context(cluster.start(program, environment=environment, capture=True))
            process = running.process
        else:
            launcher = find()
            process = subprocess.Popen(
                launcher.command(args.hosts, program),
                env={**os.environ, **launcher.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        output: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        stdout = threading.Thread(target=output.extend, args=(process.stdout,), daemon=True)
        stdout.start()
        errors = _follow(process.stderr, display)
        code = process.wait()
        stdout.join(5)
    if code:
        display.clear()
        print("".join([*output, *errors]), file=sys.stderr)
        print(f"osu_bench demo: the benchmark failed with exit code {code}", file=sys.stderr)
    return 1 if code else 0


def _follow(stream: IO[str], display: _Display) -> list[str]:
    """Show the progress lines of a stream, and return its other lines."""
    rest = []
    for line in stream:
        marker, _, text = line.partition("@progress ")
        if marker or not text:
            rest.append(line)
            continue
        display.show(str(json.loads(text)))
    return rest


class _Display:
    """One line of progress on standard error, with the seconds since the start; without a terminal, sparse lines."""

    def __init__(self, stack: ExitStack) -> None:
        self._start, self._last, self._shown = monotonic(), -10.0, ""
        self._terminal = sys.stderr.isatty()
        stack.callback(self.clear)

    def show(self, text: str) -> None:
        """Replace the line."""
        seconds = monotonic() - self._start
        self._shown = f"{seconds:4.0f} s  {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{self._shown[:width]}", end="", file=sys.stderr, flush=True)
        elif seconds - self._last >= 5:
            self._last = seconds
            print(self._shown, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._terminal and self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._shown = ""

    def print(self, text: str) -> None:
        """Print something else."""
        self.clear()
        print(text, flush=True)


def _present(args: argparse.Namespace, results: Results) -> int:
    run = results.runs[-1]
    print(f"{table(run)}\n\n{chart(run, colour=sys.stdout.isatty())}\n\n{conditions(run)}")
    if args.json:
        _write(args.json, results.save)
    written = _write(args.html, lambda path: path.write_text(page(results), encoding="utf-8"))
    print(f"Page with all figures: {written}")
    return 0


def _write(path: str, write: Callable[[Path], object]) -> Path:
    """Write a file and return its path; the page goes to /tmp if its default place is not writable."""
    target = Path(path).absolute()
    try:
        write(target)
    except OSError as error:
        if path != _parser().get_default("html"):
            got = error.strerror or str(error)
            remedy = "Choose another file."
            raise BufferSpecError(f"file {path}", expected="a writable file", got=got, remedy=remedy) from error
        handle, name = tempfile.mkstemp(prefix="osu_bench_demo_", suffix=".html", dir="/tmp")
        os.close(handle)
        target = Path(name)
        write(target)
    return target


def table(run: Run) -> str:
    """Return the table: a row for each candidate, at most 80 columns wide."""
    base = run.rows[0].median_us
    width = max(len(row.candidate) for row in run.rows)
    labels = (f"{'median':>8}", f"{'speed-up':>8}", "ratio", "max error", "rounds", "verified")
    head = "  ".join([f"{'candidate':<{width}}", *labels])
    return "\n".join([head, "-" * len(head), *(_line(row, base, width) for row in run.rows)])


def _line(row: Row, base: float, width: int) -> str:
    error = row.extra.get("max_error", 0.0)
    cells = (
        f"{time_text(row.median_us):>8}",
        f"{factor_text(base / row.median_us):>8}",
        f"{short(row.ratio) if row.ratio else '-':>5}",
        f"{f'{error:.1e}' if error else '0':>9}",
        f"{len(row.times_us):>6}",
        "no" if row.wrong else "yes",
    )
    return f"{row.candidate:<{width}}  {'  '.join(cells)}"


def chart(run: Run, *, colour: bool, columns: int | None = None) -> str:
    """Return the bar chart of the medians, drawn with Unicode blocks."""
    columns = columns or shutil.get_terminal_size().columns
    width = max(len(row.candidate) for row in run.rows)
    room = min(BAR_WIDTH if columns < LEAST_WIDTH else columns - width - 12, 60)
    slowest = max(row.median_us for row in run.rows)
    lines = [f"Time of a broadcast of {size_text(run.rows[0].size)} (shorter is better)", ""]
    for row in run.rows:
        bar = _bar(row.median_us / slowest, room)
        painted = f"{_paint(row.candidate)}{bar}{RESET}" if colour else bar
        lines.append(f"{row.candidate:<{width}} {painted} {time_text(row.median_us)}")
    return "\n".join(lines)


def _bar(share: float, room: int) -> str:
    eighths = max(1, round(share * room * 8))
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()


def _paint(candidate: str) -> str:
    if candidate in BASELINES:
        return GREY
    return GREEN if is_exact(candidate) else BLUE


def conditions(run: Run) -> str:
    """Return what the figures hold for, in a few lines."""
    row = run.rows[0]
    where = (
        f"{run.network.hosts} hosts on this machine (network namespaces), {rate_text(run.network.rate)} links"
        if run.network
        else f"{run.ranks} ranks on this machine, shared memory"
    )
    measured = [candidate for candidate in run.candidates() if not is_exact(candidate) and candidate != "auto"]
    lines = [
        f"Conditions: {where}, {run.mpi}.",
        f"Broadcast of {size_text(row.size)} of {run.dtype} weights, drawn from normal(0, {DEVIATION}).",
        "Candidates alternate in one run. Every result is verified. Times are medians of the slowest rank.",
        *(f"{name}: {text}." for name, text in DESCRIPTIONS.items() if name in run.candidates()),
    ]
    for name in measured:
        found = run.row(name, row.size)
        if found is not None:
            error = found.extra.get("max_error", 0.0)
            lines.append(f"{name} is lossy: largest error {error:.1e}, where the standard deviation is {DEVIATION}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
