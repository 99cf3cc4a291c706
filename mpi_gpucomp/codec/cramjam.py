"""The host side of the general codecs: the package cramjam, which releases the GIL and writes into the caller's memory.

Every decoder bounds what it writes by the buffer, so that no bytes, however made, reach beyond it. Broken bytes are the
error of their own `Pending` alone: the stream goes on with what is queued behind them.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mpi_gpucomp.codec.base import Pending
from mpi_gpucomp.codec.optional import needed
from mpi_gpucomp.device.host import InlineStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.host import HostDevice
    from mpi_gpucomp.errors import StreamError

__all__ = ["LARGEST", "decode", "encode", "package"]

LARGEST = {"lz4": 0x7E000000, "snappy": (1 << 31) - 1, "zstd": (1 << 31) - 1, "deflate": 1 << 31}
"""The longest plain buffer of each format: what the host's encoder takes and nvCOMP's decoder gives back."""

_READ, _WRITE = 0x100, 0x200
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object


def package(name: str) -> Any:
    """Return cramjam, or say that the codec `name` needs it."""
    return needed("cramjam", f"codec {name} on the host", "Install it with 'pip install mpi_gpucomp[codecs]'.")


def encode(name: str, level: int, source: Buffer, to: Memory, stream: Stream) -> Pending:
    """Queue the encoding; a buffer too long for the format travels raw."""
    library = package(name)
    if source.nbytes > LARGEST[name]:
        return Pending(lambda: True, lambda: None)

    def work() -> int:
        plain, encoded = _view(source.address, source.nbytes, _READ), _view(to.address, to.nbytes, _WRITE)
        return _compress(library, name, level, plain, encoded)

    return _queue(work, stream)


def decode(
    name: str,
    source: Memory,
    nbytes: int,
    to: Buffer,
    stream: Stream,
    broken: Callable[[str], StreamError],
    finish: Callable[[int, Stream], None] | None,
) -> Pending:
    """Queue the decoding into `to`, or into temporary memory from whose address `finish` goes on if all went well."""
    library = package(name)

    def decode_to(address: int) -> int:
        if to.nbytes > LARGEST[name]:
            raise broken("a length that the format does not have")
        encoded, plain = _view(source.address, nbytes, _READ), _view(address, to.nbytes, _WRITE)
        try:
            size = _decompress(library, name, encoded, plain)
        except library.DecompressionError as error:
            raise broken(str(error)) from None
        if size != to.nbytes:
            raise broken(f"one of {size}")
        return size

    def decode_and(go_on: Callable[[int, Stream], None]) -> int:
        inline = InlineStream(cast("HostDevice", stream.device))
        with stream.device.alloc(to.nbytes) as temporary:
            size = decode_to(temporary.address)
            go_on(temporary.address, inline)
            inline.synchronize()
        return size

    return _queue(partial(decode_and, finish) if finish else partial(decode_to, to.address), stream)


def _compress(library: Any, name: str, level: int, plain: memoryview, encoded: memoryview) -> int:
    if name == "lz4":
        return int(library.lz4.compress_block_into(plain, encoded, store_size=False))
    if name == "snappy":
        return int(library.snappy.compress_raw_into(plain, encoded))
    return int(getattr(library, name).compress_into(plain, encoded, level=level))


def _decompress(library: Any, name: str, encoded: memoryview, plain: memoryview) -> int:
    if name == "lz4":
        return int(library.lz4.decompress_block_into(encoded, plain, output_len=len(plain)))
    if name == "snappy":
        return int(library.snappy.decompress_raw_into(encoded, plain))
    return int(getattr(library, name).decompress_into(encoded, plain))


def _queue(work: Callable[[], int], stream: Stream) -> Pending:
    """Queue work whose error is its own answer, not the stream's."""
    outcome: list[int | Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    stream.run(run)
    event = stream.record()

    def answer() -> int:
        event.wait()
        (found,) = outcome
        if isinstance(found, Exception):
            raise found
        return found

    return Pending(event.done, answer)
