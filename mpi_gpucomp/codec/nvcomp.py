"""The general codecs on a GPU: NVIDIA's nvCOMP, on the caller's CUDA stream and into the caller's memory.

There are two bitstreams. The standard one is a single stream of the format, as host libraries write it; nvCOMP limits
its length (`Format.max_bytes`), and a single stream uses few of a GPU's multiprocessors. The native one, for formats
without a host library, is nvCOMP's: a header and chunks of 64 KiB, processed in parallel.

Nothing here blocks. nvCOMP's batch calls (with a batch of one) read the size back only on request, and decoding is
configured from the decoded length, which the receiver knows, and not from the bytes. In return nvCOMP may decode
damaged bytes to arbitrary values without an error: a frame's checksum is verified before its bytes get here.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from mpi_gpucomp.codec.base import Pending, require_package
from mpi_gpucomp.errors import BufferSpecError, DeviceError, GpucompError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.cuda import CudaStream
    from mpi_gpucomp.errors import DecodeError

__all__ = ["NVCOMP_CHUNK", "Format", "Session", "native_bound", "session"]

NVCOMP_CHUNK = 1 << 16
"""Decoded bytes in one of nvCOMP's chunks of the native bitstream."""

NATIVE_HEADER, NATIVE_FIELDS = 256, 64
"""Bytes reserved for the native bitstream's header and for its fields per chunk; nvCOMP 6 uses 72 and 32."""

MAX_CONFIGURATIONS = 32
"""Maximum number of buffer lengths whose configuration a session caches."""


@dataclass(frozen=True)
class Format:
    """A format of nvCOMP: name, standard or native bitstream, maximum decoded bytes, alignment of every buffer."""

    algorithm: str
    standard: bool
    max_bytes: int
    alignment: int


def native_bound(nbytes: int, chunk_bound: int) -> int:
    """Return an upper bound for the native bitstream of `nbytes`, given the bound for one of nvCOMP's chunks."""
    return NATIVE_HEADER + -(-nbytes // NVCOMP_CHUNK) * (chunk_bound + NATIVE_FIELDS)


class Session:
    """nvCOMP's codec object for one stream and one set of options, with a configuration per buffer length."""

    def __init__(self, format: Format, options: dict[str, Any], device: str, cuda_stream: int) -> None:
        """Open nvCOMP's codec on the CUDA stream with this handle."""
        self._format = format
        self._element = options.get("data_type", "|u1")
        self._configurations: dict[int, tuple[Any, Any]] = {}
        self._library = library = _require_nvcomp(device)
        bitstream = library.BitstreamKind.RAW if format.standard else library.BitstreamKind.NVCOMP_NATIVE
        self._error = partial(_device_error, format, device)
        with _raise_as(self._error):
            self._codec = library.Codec(
                algorithm=format.algorithm,
                device_id=int(device.rpartition(":")[2]),
                cuda_stream=cuda_stream,
                uncomp_chunk_size=NVCOMP_CHUNK,
                bitstream_kind=bitstream,
                **options,
            )

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; a buffer too long for the format is sent raw."""
        if source.nbytes > self._format.max_bytes:
            return Pending(lambda: True, lambda: None)
        self._check_alignment(to)
        staging = self._staging(source, stream)
        if staging is not None:
            stream.copy(staging.address, source.address, source.nbytes)
        address = source.address if staging is None else staging.address
        with _raise_as(self._error):
            encoded = _call(stream, partial(self._encode, address, source.nbytes, to))

        def size(keep_alive: object = (source, to)) -> int:
            with _raise_as(self._error):
                return int(encoded.buffer_sizes[0])

        return _pending(stream, size, staging)

    def decode(
        self,
        source: Memory,
        nbytes: int,
        to: Buffer,
        stream: Stream,
        error: Callable[[str], DecodeError],
        reduce: Callable[[int, Stream], None] | None,
    ) -> Pending:
        """Queue the decoding into `to`, or into temporary memory that `reduce` then reads."""
        self._check_alignment(source)
        staging = stream.device.alloc(to.nbytes) if reduce else self._staging(to, stream)
        address = to.address if staging is None else staging.address
        with _raise_as(error):
            decoded = _call(stream, partial(self._decode, source.address, nbytes, address, to.nbytes))
        if reduce:
            reduce(address, stream)
        elif staging is not None:
            stream.copy(to.address, address, to.nbytes)

        def size(keep_alive: object = (source, to)) -> int:
            with _raise_as(error):
                nbytes = int(decoded.buffer_sizes[0])
            if nbytes != to.nbytes:
                raise error(f"one of {nbytes}")
            return nbytes

        return _pending(stream, size, staging)

    def _encode(self, decoded: int, nbytes: int, to: Memory) -> Any:
        source, target = self._batch(decoded, nbytes, self._element), self._batch(to.address, to.nbytes)
        return self._codec.encode(source, out=target, compression_config=self._configuration(nbytes)[0])

    def _decode(self, encoded: int, encoded_bytes: int, decoded: int, nbytes: int) -> Any:
        source, target = self._batch(encoded, encoded_bytes), self._batch(decoded, nbytes, self._element)
        return self._codec.decode(source, out=target, decompression_config=self._configuration(nbytes)[1])

    def _configuration(self, nbytes: int) -> tuple[Any, Any]:
        known = self._configurations.get(nbytes)
        if known is None:
            if len(self._configurations) == MAX_CONFIGURATIONS:
                self._configurations.clear()
            compression = self._codec.compression_config([nbytes])
            known = compression, self._codec.decompression_config(compression)
            self._configurations[nbytes] = known
        return known

    def _batch(self, address: int, nbytes: int, element: str = "|u1") -> Any:
        return self._library.as_arrays([_Span(address, nbytes, element)])

    def _staging(self, user: Buffer, stream: Stream) -> Memory | None:
        """Allocate aligned memory to replace a buffer that is not aligned, else return None."""
        return stream.device.alloc(user.nbytes) if user.address % self._format.alignment else None

    def _check_alignment(self, encoded: Memory) -> None:
        if encoded.address % self._format.alignment:
            raise BufferSpecError(
                f"nvCOMP's {self._format.algorithm} on {encoded.device.name}",
                expected=f"encoded bytes aligned to {self._format.alignment} bytes",
                got=f"address {encoded.address:#x}",
                remedy="Place them at the start of a block from the device's pool.",
            )


_sessions: WeakKeyDictionary[Stream, dict[Any, Session]] = WeakKeyDictionary()


def session(format: Format, options: dict[str, Any], stream: Stream) -> Session:
    """Return the stream's session for a format and options; it is dropped with the stream."""
    opened = _sessions.setdefault(stream, {})
    key = format, *sorted(options.items())
    if key not in opened:
        opened[key] = Session(format, options, stream.device.name, cast("CudaStream", stream).handle.ptr)
    return opened[key]


class _Span:
    """Device memory with a CUDA array interface; without a stream, as nvCOMP's codec runs on ours."""

    def __init__(self, address: int, nbytes: int, element: str) -> None:
        shape = (nbytes // int(element[2:]),)
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": element,
            "shape": shape,
            "strides": None,
            "data": (address, False),
            "stream": None,
        }


def _call(stream: Stream, call: Callable[[], Any]) -> Any:
    """Call nvCOMP, which queues its work, with the stream's device current."""
    results: list[Any] = []
    stream.run(lambda: results.append(call()))
    return results[0]


@contextmanager
def _raise_as(error: Callable[[str], GpucompError]) -> Iterator[None]:
    """Convert nvCOMP's exceptions."""
    try:
        yield
    except GpucompError:
        raise
    except (RuntimeError, ValueError) as failure:
        raise error(str(failure).rstrip(".")) from failure


def _pending(stream: Stream, size: Callable[[], int], staging: Memory | None) -> Pending:
    """Return a Pending for the work queued so far, which releases the temporary memory before reading the size."""
    event = stream.record()

    def wait() -> int:
        event.wait()
        if staging is not None:
            staging.release()
        return size()

    return Pending(event.done, wait)


def _require_nvcomp(device: str) -> Any:
    remedy = "Install it with 'pip install mpi_gpucomp[cuda13]', or [cuda12] for an older driver."
    return require_package("nvidia.nvcomp", f"nvCOMP on {device}", remedy)


def _device_error(format: Format, device: str, got: str) -> DeviceError:
    return DeviceError(
        f"nvCOMP's {format.algorithm} on {device}",
        expected="a working GPU",
        got=got,
        remedy="Check the driver with nvidia-smi, or choose a codec of this package's kernels, such as split.",
    )
