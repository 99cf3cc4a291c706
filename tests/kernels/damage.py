"""Damages encoded streams: blindly, or with consistent sizes, to reach the code behind the size checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpi_gpucomp.codec.kernel_codec import TiledCodec

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device.base import DType

__all__ = ["damaged"]

Random = np.random.Generator


def cut(data: bytes, random: Random) -> bytes:
    """Truncate the stream, by a little or anywhere."""
    return data[: random.choice([len(data) - 4, len(data) - 1, 4, int(random.integers(len(data)))])]


def extended(data: bytes, random: Random) -> bytes:
    """Append bytes."""
    return data + random.bytes(int(random.choice([1, 4, 8, 32, 128])))


def flipped(data: bytes, random: Random) -> bytes:
    """Flip a few bits."""
    bits = np.frombuffer(data, np.uint8).copy()
    where = random.integers(bits.size, size=random.integers(1, 9))
    bits[where] ^= np.uint8(1) << random.integers(8, size=where.size).astype(np.uint8)
    return bits.tobytes()


def noise(data: bytes, random: Random) -> bytes:
    """Replace everything by noise."""
    return random.bytes(len(data))


class Tiles:
    """A parsed stream of tiles: the header, and the bytes of each tile."""

    def __init__(self, codec: TiledCodec, data: bytes, count: int, dtype: DType) -> None:
        tiling = codec.tiling(dtype)
        self._tiles_start = tiling.tiles_start(count)
        self.header = data[: tiling.header]
        sizes = np.frombuffer(data, np.uint32, tiling.entries(count), tiling.header)
        ends = self._tiles_start + np.cumsum(sizes)
        self.tiles = [data[int(end - size) : int(end)] for end, size in zip(ends, sizes, strict=True)]

    def joined(self) -> bytes:
        """Return the stream with correct sizes."""
        sizes = np.array([len(tile) for tile in self.tiles], np.uint32).tobytes()
        return (self.header + sizes).ljust(self._tiles_start, b"\0") + b"".join(self.tiles)


def resized(stream: Tiles, random: Random) -> bytes:
    """Shorten or lengthen one tile and its size; often the last one, which has no successor."""
    t = int(random.choice([0, len(stream.tiles) - 1, random.integers(len(stream.tiles))]))
    tile = stream.tiles[t]
    size = int(random.choice([4, 8, 32, 36, len(tile) - 4, len(tile) + 4, 4 * random.integers(1, len(tile) // 4 + 2)]))
    stream.tiles[t] = tile[:size].ljust(size, random.bytes(1))
    return stream.joined()


def refilled(stream: Tiles, random: Random) -> bytes:
    """Fill one tile with other bytes: noise, zeros or ones."""
    t = int(random.choice([0, random.integers(len(stream.tiles))]))
    size = len(stream.tiles[t])
    stream.tiles[t] = [random.bytes(size), bytes(size), b"\xff" * size][random.integers(3)]
    return stream.joined()


def damaged_headers(stream: Tiles, random: Random) -> bytes:
    """Flip bits at the start of a tile or the stream, where lengths, bitmaps and tables are."""
    t = int(random.integers(len(stream.tiles)))
    stream.tiles[t] = flipped(stream.tiles[t][:48], random) + stream.tiles[t][48:]
    if stream.header:
        stream.header = flipped(stream.header, random)
    return stream.joined()


def swapped(stream: Tiles, random: Random) -> bytes:
    """Permute the tiles."""
    stream.tiles = [stream.tiles[int(t)] for t in random.permutation(len(stream.tiles))]
    return stream.joined()


def wrong_size(stream: Tiles, random: Random) -> bytes:
    """Write a wrong size."""
    data = bytearray(stream.joined())
    at = len(stream.header) + 4 * int(random.integers(len(stream.tiles)))
    data[at : at + 4] = int(random.choice([0, 3, 4, 2**31, 2**32 - 4, random.integers(2**20)])).to_bytes(4, "little")
    return bytes(data)


BLIND: list[Callable[[bytes, Random], bytes]] = [cut, extended, flipped, noise]
STRUCTURED: list[Callable[[Tiles, Random], bytes]] = [resized, refilled, damaged_headers, swapped, wrong_size]


def damaged(codec: Codec, data: bytes, count: int, dtype: DType, random: Random) -> tuple[str, bytes]:
    """Return the kind of damage and the damaged stream."""
    if isinstance(codec, TiledCodec) and random.random() < 0.7:
        structured = STRUCTURED[random.integers(len(STRUCTURED))]
        return structured.__name__, structured(Tiles(codec, data, count, dtype), random)
    blind = BLIND[random.integers(len(BLIND))]
    return blind.__name__, blind(data, random)
