"""The command line of the benchmarks: the flags and defaults of the OSU micro-benchmarks, and ours behind them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from osu_bench.arguments import message_size, names, number, sizes
from osu_bench.suite import buffers, data

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COLUMNS", "Defaults", "Flags", "add_flags"]

LARGE = 8192
"""Messages of more bytes are repeated less often."""
COLUMNS = ("ratio", "wire", "algbw", "busbw", "wrong", "limit", "note")


class Defaults(NamedTuple):
    """What a family of benchmarks does unless told otherwise, as in the OSU micro-benchmarks."""

    largest: int
    iterations: tuple[int, int]
    """For small messages and for large ones."""
    warm_up: tuple[int, int]
    smallest: int = 1


class Flags(argparse.Namespace):
    """What was asked for."""

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
        """The names of those who take part."""
        names = self.compare or [self.codec]
        ours = ("mpi", "mpi-tuned", "gloo")
        suffix = f"@{self.algorithm}" if self.algorithm else ""
        return [name if name in ours or name.startswith("p2p") or "@" in name else f"{name}{suffix}" for name in names]

    def repeats(self, size: int) -> tuple[int, int]:
        """Return how often a message is sent to warm up, and how often to be measured."""
        large = size > LARGE
        warm_up = self.defaults.warm_up[large] if self.warmup is None else self.warmup
        return warm_up, self.defaults.iterations[large] if self.iterations is None else self.iterations

    def sizes(self, itemsize: int, buffers_each: int = 1) -> list[int]:
        """Return the sizes that fit: at least an element, and no more memory on a rank than the limit."""
        least, most = self.message_size or (None, self.defaults.largest)
        least = self.defaults.smallest if least is None else least
        return [
            size
            for size in sizes(max(least, itemsize), most, self.step)
            if size * buffers_each <= max(self.mem_limit, itemsize)
        ]


def columns(text: str) -> list[str]:
    """Read a list of columns."""
    asked = list(COLUMNS) if text == "all" else names(text)
    unknown = [name for name in asked if name not in COLUMNS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(COLUMNS)} or all, got {unknown[0]!r}")
    return asked


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return value

    read.__name__ = "number"  # argparse names it in its own errors
    return read


def add_flags(parser: argparse.ArgumentParser, *, windows: bool, nonblocking: bool, pairs: bool) -> None:
    """Add the flags to a benchmark's parser."""
    osu = parser.add_argument_group("as in the OSU micro-benchmarks")
    add = osu.add_argument
    add("-m", "--message-size", type=message_size, metavar="[MIN:]MAX", help="bytes of the messages")
    add("-x", "--warmup", type=_at_least(0), metavar="N", help="iterations before the measured ones")
    add("-i", "--iterations", type=_at_least(1), metavar="N")
    add("-M", "--mem-limit", type=number, default=1 << 29, metavar="SIZE", help="bytes of buffers on a rank (512M)")
    add("-f", "--full", action="store_true", help="add minimum, maximum and number of iterations")
    add("-z", "--tail-lat", action="store_true", help="add P50, P90 and P99")
    add("-c", "--validation", action="store_true", help="add whether the results were right; they are looked at anyway")
    add("-T", "--type", choices=sorted(data.TYPES), help="elements, instead of those that the data have")
    add("-d", "--accelerator", choices=["cuda"], help="messages in the memory of a GPU: --buffer cupy")
    add("-G", "--graph", type=names, default=[], metavar="tty,png,pdf", help="draw the latencies, as osu_NAME.png")
    if windows:
        add("-W", "--window-size", type=_at_least(1), default=64, metavar="N", help="messages before a pause (64)")
    if pairs:
        add("-p", "--pairs", type=_at_least(1), metavar="N", help="pairs of ranks (all)")
    if nonblocking:
        add("-t", "--num-test-calls", type=_at_least(0), default=0, metavar="N", help="calls of Test while computing")
    _add_own(parser)


def _add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("besides").add_argument
    add("--buffer", choices=sorted(buffers.KINDS), default="numpy", help="whose memory messages are in")
    add("--codec", default="auto", help="a codec's spec, or another candidate (auto)")
    add("--compare", type=names, metavar="A,B,...", help="mpi, mpi-tuned, gloo, p2p:CODEC, p2p-chain:CODEC, codecs")
    add("--step", type=_at_least(2), default=2, metavar="N", help="how many times larger the next size is (2)")
    add("--seconds", type=float, metavar="S", help="stop repeating a size after so long")
    add("--algorithm", help="one of `python -m mpi_gpucomp algorithms`, or an MSCCL XML file")
    add("--chunk", type=number, metavar="SIZE", help="bytes of a chunk (chosen by the message)")
    add("--data", default="weights", help=f"{', '.join(data.KINDS)} or a .npy file (weights)")
    add("--columns", type=columns, default=[], metavar="A,B,...", help=f"further columns: {', '.join(COLUMNS)}, all")
    add("--json", metavar="FILE", help="write the results; add to those that are there")
    add("--csv", metavar="FILE")
    add("--plot", metavar="FILE", help="draw the results: .png, .svg or .pdf")
