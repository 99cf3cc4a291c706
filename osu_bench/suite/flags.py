"""Flags and defaults of the benchmarks: those of the OSU micro-benchmarks, and our own."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from osu_bench.arguments import message_size, names, number, sizes
from osu_bench.suite import buffers, data

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COLUMNS", "Defaults", "Flags", "add_flags"]

LARGE = 8192
"""Above this many bytes, the defaults for large messages apply."""
COLUMNS = ("ratio", "wire", "algbw", "busbw", "wrong", "limit", "note")


class Defaults(NamedTuple):
    """Defaults of a family of benchmarks, as in the OSU micro-benchmarks."""

    largest: int
    iterations: tuple[int, int]
    """For small and for large messages."""
    warm_up: tuple[int, int]
    smallest: int = 1


def is_baseline(name: str) -> bool:
    """Return True if a candidate is not this library's."""
    return name in ("mpi", "mpi-tuned", "gloo") or name.startswith("p2p")


class Flags(argparse.Namespace):
    """The parsed flags."""

    benchmark: str
    defaults: Defaults
    message_size: tuple[int | None, int] | None
    step: int
    iterations: int | None
    seconds: float | None
    warmup: int | None
    mem_limit: int
    full: bool
    tail_lat: bool
    validation: bool
    type: str | None
    window_size: int
    pairs: int | None
    num_test_calls: int
    graph: list[str]
    buffer: str
    codec: str
    compare: list[str] | None
    algorithm: str | None
    chunk: int | None
    data: str
    columns: list[str]
    json: str | None
    csv: str | None
    plot: str | None

    @property
    def candidates(self) -> list[str]:
        """The names of the candidates."""
        names = self.compare or [self.codec]
        suffix = f"@{self.algorithm}" if self.algorithm else ""
        return [name if is_baseline(name) or "@" in name else f"{name}{suffix}" for name in names]

    def repeats(self, size: int) -> tuple[int, int]:
        """Return the numbers of warm-up and measured iterations."""
        large = size > LARGE
        warm_up = self.defaults.warm_up[large] if self.warmup is None else self.warmup
        return warm_up, self.defaults.iterations[large] if self.iterations is None else self.iterations

    def sizes(self, itemsize: int, buffers_each: int = 1) -> list[int]:
        """Return the sizes of at least one element whose buffers fit into the memory limit."""
        least, most = self.message_size or (None, self.defaults.largest)
        least = self.defaults.smallest if least is None else least
        return [
            size
            for size in sizes(max(least, itemsize), most, self.step)
            if size * buffers_each <= max(self.mem_limit, itemsize)
        ]


def columns(text: str) -> list[str]:
    """Parse a list of columns."""
    chosen = list(COLUMNS) if text == "all" else names(text)
    unknown = [name for name in chosen if name not in COLUMNS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(COLUMNS)} or all, got {unknown[0]!r}")
    return chosen


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return value

    read.__name__ = "number"  # argparse prints this name in its errors
    return read


def add_flags(parser: argparse.ArgumentParser, *, windows: bool, nonblocking: bool, pairs: bool) -> None:
    """Add the flags to a benchmark's parser."""
    osu = parser.add_argument_group("as in the OSU micro-benchmarks")
    add = osu.add_argument
    add("-m", "--message-size", type=message_size, metavar="[MIN:]MAX", help="bytes of the messages")
    add("-x", "--warmup", type=_at_least(0), metavar="N", help="iterations before the measured ones")
    add("-i", "--iterations", type=_at_least(1), metavar="N", help="measured iterations")
    add("-M", "--mem-limit", type=number, default=1 << 29, metavar="SIZE", help="bytes of buffers on a rank (512M)")
    add("-f", "--full", action="store_true", help="add minimum, maximum and number of iterations")
    add("-z", "--tail-lat", action="store_true", help="add P50, P90 and P99")
    add("-c", "--validation", action="store_true", help="add a column Pass or Fail; results are always verified")
    add("-T", "--type", choices=sorted(data.TYPES), help="element type, instead of the type of the data")
    add("-d", "--accelerator", choices=["cuda"], help="buffers in GPU memory: --buffer cupy")
    add("-G", "--graph", type=names, default=[], metavar="tty,png,pdf", help="plot the latencies, as osu_NAME.png")
    if windows:
        add("-W", "--window-size", type=_at_least(1), default=64, metavar="N", help="messages in flight (64)")
    if pairs:
        add("-p", "--pairs", type=_at_least(1), metavar="N", help="pairs of ranks (all)")
    if nonblocking:
        add("-t", "--num-test-calls", type=_at_least(0), default=0, metavar="N", help="calls of Test while computing")
    _add_own(parser)


def _add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("osu_bench").add_argument
    add("--buffer", choices=sorted(buffers.KINDS), default="numpy", help="library that allocates the buffers")
    add("--codec", default="auto", help="codec spec or other candidate (auto)")
    add("--compare", type=names, metavar="A,B,...", help="mpi, mpi-tuned, gloo, p2p:CODEC, p2p-chain:CODEC, codecs")
    add("--step", type=_at_least(2), default=2, metavar="N", help="factor between sizes (2)")
    add("--seconds", type=float, metavar="S", help="time limit per size; 3 iterations are always made")
    add("--algorithm", help="algorithm name (see `gpucomp algorithms`) or MSCCL XML file")
    add("--chunk", type=number, metavar="SIZE", help="chunk size (chosen by message size)")
    add("--data", default="weights", help=f"{', '.join(data.KINDS)} or a .npy file (weights)")
    add("--columns", type=columns, default=[], metavar="A,B,...", help=f"further columns: {', '.join(COLUMNS)}, all")
    add("--json", metavar="FILE", help="write the results, appending to an existing file")
    add("--csv", metavar="FILE", help="write the rows of the table")
    add("--plot", metavar="FILE", help="plot the results: .png, .svg or .pdf")
