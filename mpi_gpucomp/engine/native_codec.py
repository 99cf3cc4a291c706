"""Codecs of this project's kernels as the core runs them: recordings for every length of chunk that occurs.

On the host and on each GPU they are different ones.
"""

from __future__ import annotations

from ctypes import c_double, c_int64
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from mpi_gpucomp.codec import OPS, recording
from mpi_gpucomp.codec.raw import REDUCE_TILE
from mpi_gpucomp.core.library import core
from mpi_gpucomp.device import library

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import DType
    from mpi_gpucomp.engine.gpu import CoreGpu

__all__ = ["NativeCodec", "native_codec"]

ENCODE, DECODE = 0, 1
MAX_RECORDED = 1024
"""Recordings, of 2 to 7 kB each, after which a codec starts again: programs may use any number of lengths."""


class NativeCodec:
    """A codec for one element type on one device."""

    def __init__(self, codec: Codec, dtype: DType, gpu: CoreGpu | None) -> None:
        """Start without recordings."""
        self._codec_ref, self._dtype, self._gpu = ref(codec), dtype, gpu  # a strong one would keep both alive for good
        self.is_native = recording.is_recordable(codec, on_gpu=gpu is not None) and dtype.name in codec.dtypes
        """Whether the core can run it; otherwise Python is called for every chunk."""
        self._recorded: set[tuple[str, int]] = set()
        self._lock = Lock()
        kernel = library.kernel_address if gpu is None else gpu.kernel
        reduce = None if dtype.kind == "b" else kernel(f"reduce_{dtype.suffix}")
        chooses = self.is_native and codec.name == "auto"
        self.handle = core().gc_codec_new(codec.wire_id, dtype.code, dtype.itemsize, reduce, REDUCE_TILE, chooses)
        for wire_id in recording.accepted_ids(codec) if self.is_native else ():
            core().gc_codec_accept(self.handle, wire_id)

    @property
    def is_full(self) -> bool:
        """Return True if it has so many recordings that the next task should start with none."""
        return len(self._recorded) >= MAX_RECORDED

    @property
    def _codec(self) -> Codec:
        codec = self._codec_ref()
        assert codec is not None, "its user has it"
        return codec

    def record(self, counts: Iterable[int], op: str) -> None:
        """Record the encoding and decoding of chunks of these lengths; chunks of other lengths are left to Python."""
        if not self.is_native or self._codec.name == "none":
            return
        with self._lock:
            for count in counts:
                for reduction in {"replace", op}:
                    if count and (reduction, count) not in self._recorded:
                        self._recorded.add((reduction, count))
                        self._record(count, reduction, encode=reduction == "replace")

    def _record(self, count: int, op: str, *, encode: bool) -> None:
        for codec in recording.recorded_codecs(self._codec, self._dtype):
            decoding = recording.record_decoding(codec, count, self._dtype, op, self._gpu)
            self._add(DECODE, codec.wire_id, OPS[op], count, decoding)
            if encode:
                encoding = recording.record_encoding(codec, count, self._dtype, self._gpu)
                self._add(ENCODE, codec.wire_id, 0, count, encoding)
        if encode:
            self._add_rule(count)

    def _add(self, direction: int, wire_id: int, op: int, count: int, numbers: array[int] | None) -> None:
        if numbers is not None:
            values = (c_int64 * len(numbers)).from_buffer(numbers)
            assert core().gc_codec_add(self.handle, direction, wire_id, op, count, values, len(numbers))

    def _add_rule(self, count: int) -> None:
        rule = recording.sampling_rule(self._codec, count, self._dtype)
        if rule is None:
            return
        for codec in rule.candidates:
            numbers = recording.record_encoding(codec, rule.sample_count, self._dtype)
            self._add(ENCODE, codec.wire_id, 0, rule.sample_count, numbers)
        number = len(rule.candidates)
        costs = [cost for speed in rule.speeds for cost in speed]
        core().gc_codec_add_chooser(
            *(self.handle, count, rule.block, rule.blocks, rule.wire, rule.raw, rule.margin),
            *(rule.chunks_per_sample, number),
            (c_int64 * number)(*(codec.wire_id for codec in rule.candidates)),
            (c_int64 * number)(*(rule.sample_count,) * number),
            (c_double * (2 * number))(*costs),
        )

    def __del__(self) -> None:
        """Free the recordings."""
        if getattr(self, "handle", None):
            core().gc_codec_free(self.handle)


_codecs: WeakKeyDictionary[Codec, dict[tuple[str, str], NativeCodec]] = WeakKeyDictionary()


def native_codec(codec: Codec, dtype: DType, gpu: CoreGpu | None = None) -> NativeCodec:
    """Return the core's codec for one of Python and an element type, on the host or a GPU."""
    known, key = _codecs.setdefault(codec, {}), (dtype.name, "host" if gpu is None else gpu.device.name)
    if key not in known or known[key].is_full:  # tasks in progress keep theirs
        known[key] = NativeCodec(codec, dtype, gpu)
    return known[key]
