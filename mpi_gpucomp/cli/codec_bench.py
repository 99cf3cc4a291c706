"""Measures codecs: how small, how fast, how exact."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpi_gpucomp.cli.capabilities import why_not
from mpi_gpucomp.cli.sample_data import largest_error
from mpi_gpucomp.device import Buffer
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.errors import BufferSpecError, DecodeError, DeviceError

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

    from mpi_gpucomp.cli.sample_data import Values
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device import Device, Memory, Stream

__all__ = ["Bench", "Measurement"]

POISON = 0xA5
"""What the place of decoded bytes is filled with, so that a decoder that writes nothing is found out."""


@dataclass
class Measurement:
    """What was found about one codec; None where there is nothing to say."""

    codec: str
    lossless: bool
    chunks: int
    raw_chunks: int = 0
    """Chunks that do not shrink, or that the codec cannot hold: they travel as they are."""
    ratio: float | None = None
    """Plain bytes for each that travels."""
    encode_speed: float | None = None
    """Plain bytes per second."""
    decode_speed: float | None = None
    largest_error: float | None = None
    largest_relative_error: float | None = None
    """The error as a share of its chunk's range."""
    wrong: str = ""
    """Why the codec is broken."""
    unavailable: str = ""
    """Why it could not be measured."""


class _Turn(NamedTuple):
    """One chunk there and back: the encoded size, None where it must travel raw, and the seconds of each way."""

    size: int | None
    encode: float
    decode: float


class Bench:
    """Values on a device, cut into chunks that go through codecs one after the other."""

    def __init__(self, values: Values, device: Device, chunk_bytes: int, *, threads: bool = False) -> None:
        """Bring the values to the device; on the host `threads` shares the work among cores."""
        self._values, self._device = values, device
        self._stream = _stream(device, threads)
        self._plain = device.alloc(values.array.nbytes)
        self._stream.copy(self._plain.address, values.array.ctypes.data, values.array.nbytes)
        self._chunks = self._cut(max(1, chunk_bytes // values.dtype.itemsize))
        self._decoded = device.alloc(self._chunks[0].nbytes)

    def _cut(self, count: int) -> list[Buffer]:
        total = self._values.array.size
        whole = Buffer(self._plain.address, self._values.dtype, (total,), device=self._device.name, owner=self._plain)
        return [whole.slice(start, min(count, total - start)) for start in range(0, total, count)]

    @property
    def chunks(self) -> int:
        """How many chunks the values make."""
        return len(self._chunks)

    def __enter__(self) -> Self:
        """Use it for the length of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the stream and give the memory back."""
        self._stream.close()
        self._plain.release()
        self._decoded.release()

    def measure(self, codec: Codec, seconds: float) -> Measurement:
        """Check the codec with every chunk, then time it for about so many seconds, and at least once."""
        found = Measurement(codec.spec, codec.lossless, self.chunks)
        try:
            codec.check_dtype(self._values.dtype)
            with self._device.alloc(codec.max_encoded(self._chunks[0].count, self._values.dtype)) as room:
                self._check(codec, room, found)
                self._time(codec, room, found, seconds)
        except (BufferSpecError, DeviceError) as error:
            found.unavailable = ". ".join(filter(None, why_not(error)))
        except DecodeError as error:
            found.wrong = f"does not decode its own bytes: {error.got}"
        return found

    def _check(self, codec: Codec, room: Memory, found: Measurement) -> None:
        errors = [(0.0, 0.0)]
        travelling = 0
        for chunk in self._chunks:
            self._stream.fill(self._decoded.address, POISON, chunk.nbytes)
            size = self._turn(codec, room, chunk).size
            raw = size is None or size >= chunk.nbytes
            found.raw_chunks += raw
            travelling += chunk.nbytes if size is None or raw else size
            if size is not None:
                plain, decoded = self._before_and_after(chunk)
                errors.append(largest_error(plain, decoded, chunk.dtype))
                if codec.lossless and plain.tobytes() != decoded.tobytes():
                    found.wrong = "does not give back every bit"
        found.ratio = self._plain.nbytes / travelling
        found.largest_error, found.largest_relative_error = map(max, zip(*errors, strict=True))

    def _before_and_after(self, chunk: Buffer) -> tuple[NDArray[Any], NDArray[Any]]:
        start = (chunk.address - self._plain.address) // chunk.dtype.itemsize
        plain = self._values.array[start : start + chunk.count]
        decoded = np.empty_like(plain)
        self._stream.copy(decoded.ctypes.data, self._decoded.address, decoded.nbytes)
        self._stream.synchronize()
        return plain, decoded

    def _time(self, codec: Codec, room: Memory, found: Measurement, seconds: float) -> None:
        passes: list[tuple[float, float]] = []
        decoded = 0
        end = perf_counter() + seconds
        while not passes or perf_counter() < end:
            turns = [self._turn(codec, room, chunk) for chunk in self._chunks]
            passes.append((sum(turn.encode for turn in turns), sum(turn.decode for turn in turns)))
            kept = zip(turns, self._chunks, strict=True)
            decoded = sum(chunk.nbytes for turn, chunk in kept if turn.size is not None)
        encoding, decoding = map(median, zip(*passes, strict=True))
        found.encode_speed = self._plain.nbytes / encoding
        found.decode_speed = decoded / decoding if decoded else None

    def _turn(self, codec: Codec, room: Memory, chunk: Buffer) -> _Turn:
        to = Buffer(self._decoded.address, chunk.dtype, chunk.shape, device=chunk.device, owner=self._decoded)
        start = perf_counter()
        size = codec.encode(chunk, room, self._stream).result()
        middle = perf_counter()
        if size is not None:
            codec.decode(room, size, to, self._stream).result()
        return _Turn(size, middle - start, perf_counter() - middle)


def _stream(device: Device, threads: bool) -> Stream:
    return device.stream(inline=not threads) if isinstance(device, HostDevice) else device.stream()
