"""Codec throughput on one host thread, relative to well-known libraries.

Each figure compares two candidates that alternate call by call, and is the ratio of their medians. The data is drawn
from normal(0, 0.02); each result is verified before it is timed. Memory is allocated beforehand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import zfpy
import zstandard
from numpy.typing import NDArray

from mpi_gpucomp.codec.base import Codec
from mpi_gpucomp.codec.registry import get_codec
from mpi_gpucomp.device import Buffer, as_buffer, dtype_of_name
from mpi_gpucomp.device.host import HostDevice
from osu_bench.arguments import CommandParser

__all__ = ["Figure", "figures", "main"]

Array = NDArray[Any]
Call = Callable[[int], object]
"""A candidate's call, given the index of a chunk."""

DEVIATION = 0.02
RATE = 8
BOUND = DEVIATION / 100
CHUNKS = 4


@dataclass(frozen=True)
class Figure:
    """A measured ratio, its target, and the throughput of both sides in MB/s of raw data."""

    name: str
    measured: float
    target: float
    ours: float | None = None
    theirs: float | None = None

    @property
    def met(self) -> bool:
        """True if the target is reached."""
        return self.measured >= self.target


class Comparison:
    """Times two candidates alternately on chunks of `nbytes` bytes."""

    def __init__(self, nbytes: int, rounds: int) -> None:
        """Set the chunk size and the number of rounds."""
        self._nbytes, self._rounds = nbytes, rounds

    def run(self, name: str, target: float, ours: Call, theirs: Call) -> Figure:
        """Time both and compare them."""
        times: tuple[list[float], list[float]] = ([], [])
        for chunk in islice(cycle(range(CHUNKS)), self._rounds):
            for call, taken in zip((ours, theirs), times, strict=True):
                start = perf_counter()
                call(chunk)
                taken.append(perf_counter() - start)
        fast, slow = map(median, times)
        return Figure(name, slow / fast, target, self._nbytes / fast / 1e6, self._nbytes / slow / 1e6)


class Ours:
    """A codec on one thread, with buffers for all encoded chunks and one decoded chunk."""

    def __init__(self, spec: str, chunks: list[Array], dtype: str) -> None:
        """Allocate the buffers and encode every chunk once."""
        kind = dtype_of_name(dtype)
        assert kind is not None
        device = HostDevice()
        self._codec: Codec = get_codec(spec)
        self._stream = device.stream(inline=True)
        self._sources = [Buffer(as_buffer(c).address, kind, c.shape, owner=c) for c in chunks]
        self._rooms = [device.alloc(self._codec.max_encoded(chunks[0].size, kind)) for _ in chunks]
        self.decoded = np.empty_like(chunks[0])
        self._to = Buffer(as_buffer(self.decoded).address, kind, self.decoded.shape, owner=self.decoded)
        self.sizes = [self.encode(number) for number in range(len(chunks))]

    def encode(self, number: int) -> int:
        """Encode a chunk."""
        size = self._codec.encode(self._sources[number], self._rooms[number], self._stream).result()
        assert size is not None, f"{self._codec.spec} cannot hold the chunk"
        return size

    def decode(self, number: int, op: str = "replace") -> Array:
        """Decode a chunk onto `decoded`."""
        self._codec.decode_reduce(self._rooms[number], self.sizes[number], self._to, op, self._stream).result()
        return self.decoded


def weights(count: int) -> list[Array]:
    """Draw the chunks, of `count` values each."""
    return [np.random.default_rng(seed).normal(0, DEVIATION, count).astype(np.float32) for seed in range(CHUNKS)]


def as_bfloat16(values: Array) -> Array:
    """Round float32 to bfloat16, as bits."""
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def verify(right: bool, what: str) -> None:
    """Exit if a result is wrong."""
    if not right:
        sys.exit(f"{what}: wrong result, not timed")


def zfp_figures(comparison: Comparison, chunks: list[Array]) -> list[Figure]:
    """Compare zfp with zfpy, in both directions."""
    ours = Ours(f"zfp:rate={RATE}", chunks, "float32")
    encoded = [zfpy.compress_numpy(chunk, rate=RATE, write_header=False) for chunk in chunks]
    to = np.empty_like(chunks[0])

    def encode(number: int) -> object:
        return zfpy.compress_numpy(chunks[number], rate=RATE, write_header=False)

    def decode(number: int) -> Any:
        return zfpy._decompress(encoded[number], zfpy.type_float, to.shape, out=to, rate=RATE)

    verify(np.array_equal(ours.decode(0), decode(0)), "zfp")
    return [
        comparison.run(f"zfp:rate={RATE} encode / zfpy", 6, ours.encode, encode),
        comparison.run(f"zfp:rate={RATE} decode / zfpy", 5, ours.decode, decode),
    ]


def bound_figures(comparison: Comparison, chunks: list[Array]) -> list[Figure]:
    """Compare the bound codec at 1 % of the standard deviation with our own zfp."""
    ours, zfp = Ours(f"bound:abs={BOUND}", chunks, "float32"), Ours(f"zfp:rate={RATE}", chunks, "float32")
    error = abs(ours.decode(0).astype(np.float64) - chunks[0])
    verify(error.max() <= BOUND, "bound")
    return [comparison.run(f"bound:abs={BOUND} encode / our zfp:rate={RATE}", 3, ours.encode, zfp.encode)]


def split_figures(comparison: Comparison, chunks: list[Array]) -> list[Figure]:
    """Compare split with zstd level 1 on bfloat16, and return its ratio."""
    halves = [as_bfloat16(chunk) for chunk in weights(2 * chunks[0].size)]
    raw = [half.tobytes() for half in halves]
    ours = Ours("split", halves, "bfloat16")
    encoder, decoder = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    encoded = [encoder.compress(data) for data in raw]
    verify(np.array_equal(ours.decode(0), halves[0]), "split")
    verify(decoder.decompress(encoded[0]) == raw[0], "zstd")
    return [
        Figure("split on bfloat16, raw / encoded bytes", sum(map(len, raw)) / sum(ours.sizes), 1.45),
        comparison.run("split on bfloat16 encode / zstd level 1", 1, ours.encode, lambda n: encoder.compress(raw[n])),
        comparison.run(
            "split on bfloat16 decode / zstd level 1", 1, ours.decode, lambda n: decoder.decompress(encoded[n])
        ),
    ]


def reduce_figures(comparison: Comparison, chunks: list[Array]) -> list[Figure]:
    """Compare the float32 sum with numpy's."""
    ours, to = Ours("none", chunks, "float32"), np.zeros_like(chunks[0])
    ours.decoded[:] = 0
    for number in (0, 1):
        ours.decode(number, "sum")
        to += chunks[number]
    verify(np.array_equal(ours.decoded, to), "reduce")
    add: Call = lambda number: np.add(to, chunks[number], out=to)  # noqa: E731
    return [comparison.run("reduce sum / numpy's in-place add", 0.7, lambda number: ours.decode(number, "sum"), add)]


def figures(chunk_bytes: int, rounds: int) -> list[Figure]:
    """Measure all figures."""
    comparison, chunks = Comparison(chunk_bytes, rounds), weights(chunk_bytes // 4)
    kinds = (zfp_figures, bound_figures, split_figures, reduce_figures)
    return [figure for kind in kinds for figure in kind(comparison, chunks)]


def print_table(found: list[Figure]) -> None:
    """Print one line for each figure."""
    print(f"# {'figure':<42}{'measured':>9}{'target':>8}  {'met':<5}{'MB/s':>8}{'other MB/s':>12}")
    for figure in found:
        speeds = "".join(
            "-".rjust(n) if x is None else f"{x:{n}.0f}" for x, n in ((figure.ours, 8), (figure.theirs, 12))
        )
        met = "yes" if figure.met else "no"
        print(f"{figure.name:<44}{figure.measured:9.2f}{figure.target:8.2f}  {met:<5}{speeds}")


EXAMPLE = "osu_bench codec_speed --rounds 51"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = CommandParser("osu_bench codec_speed", (__doc__ or "").splitlines()[0], EXAMPLE)
    parser.add_argument("--chunk", type=int, default=1 << 20, metavar="BYTES", help="size of a chunk (default 1 MB)")
    parser.add_argument("--rounds", type=int, default=101, help="calls of each candidate (default 101)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = figures(args.chunk, args.rounds)
    if args.json:
        print(json.dumps([{**asdict(figure), "met": figure.met} for figure in found], indent=2))
    else:
        print_table(found)


if __name__ == "__main__":
    main()
