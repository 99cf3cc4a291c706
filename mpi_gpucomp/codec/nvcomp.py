"""The GPU side of the general codecs: NVIDIA's nvCOMP, on the caller's CUDA stream and into the caller's memory.

Two kinds of bytes. The plain form is one stream of the format and nothing around it, as host libraries write it. nvCOMP
bounds its length (`Format.largest`), and one stream keeps few of a GPU's processors busy. The native form, for formats
that no host library knows, is nvCOMP's own: pieces of 64 KiB behind a header, worked on side by side.

Nothing here waits. nvCOMP's batch calls (a batch of one) read the size back only when it is asked for, and decoding is
configured from the plain length that the receiver knows, not from the bytes. The price: nvCOMP may decode broken bytes
to anything without saying so. A frame's checksum is compared before its bytes get here.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from mpi_gpucomp.codec.base import Pending
from mpi_gpucomp.codec.kernel_codec import needed
from mpi_gpucomp.errors import BufferSpecError, DeviceError, GpucompError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi_gpucomp.device.base import Memory, Stream
    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.cuda import CudaStream
    from mpi_gpucomp.errors import DecodeError

__all__ = ["PIECE", "Format", "Session", "native_bound", "session"]

PIECE = 1 << 16
"""Plain bytes in one piece of the native form."""

NATIVE_HEADER, NATIVE_FIELDS = 256, 64
"""Room for what the native form adds to all pieces and to each; nvCOMP 6 was seen to use 72 bytes and 32."""

CONFIGURATIONS_KEPT = 32
"""Buffer lengths that a session remembers the configuration of."""


@dataclass(frozen=True)
class Format:
    """A format as nvCOMP knows it: name, plain or native form, longest plain buffer, alignment of every buffer."""

    algorithm: str
    plain: bool
    largest: int
    alignment: int


def native_bound(nbytes: int, largest_piece: int) -> int:
    """Bytes that the native form of `nbytes` never exceeds, where a whole piece never exceeds `largest_piece`."""
    return NATIVE_HEADER + -(-nbytes // PIECE) * (largest_piece + NATIVE_FIELDS)


class Session:
    """nvCOMP's codec object for one stream and one setting, with what it has worked out for each length."""

    def __init__(self, form: Format, options: dict[str, Any], device: str, cuda_stream: int) -> None:
        """Open nvCOMP's codec on the CUDA stream at this address."""
        self._form = form
        self._element = options.get("data_type", "|u1")
        self._configurations: dict[int, tuple[Any, Any]] = {}
        self._library = library = _package(device)
        kind = library.BitstreamKind.RAW if form.plain else library.BitstreamKind.NVCOMP_NATIVE
        self._failed = partial(_failed, form, device)
        with _told_as(self._failed):
            self._codec = library.Codec(
                algorithm=form.algorithm,
                device_id=int(device.rpartition(":")[2]),
                cuda_stream=cuda_stream,
                uncomp_chunk_size=PIECE,
                bitstream_kind=kind,
                **options,
            )

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        """Queue the encoding; a buffer too long for the format travels raw."""
        if source.nbytes > self._form.largest:
            return Pending(lambda: True, lambda: None)
        self._check_alignment(to)
        staging = self._staging(source, stream)
        if staging is not None:
            stream.copy(staging.address, source.address, source.nbytes)
        address = source.address if staging is None else staging.address
        with _told_as(self._failed):
            encoded = _call(stream, partial(self._encode, address, source.nbytes, to))

        def answer(kept_while_the_gpu_works: object = (source, to)) -> int:
            with _told_as(self._failed):
                return int(encoded.buffer_sizes[0])

        return _pending(stream, answer, staging)

    def decode(
        self,
        source: Memory,
        nbytes: int,
        to: Buffer,
        stream: Stream,
        broken: Callable[[str], DecodeError],
        finish: Callable[[int, Stream], None] | None,
    ) -> Pending:
        """Queue the decoding into `to`, or into temporary memory from whose address `finish` goes on."""
        self._check_alignment(source)
        staging = stream.device.alloc(to.nbytes) if finish else self._staging(to, stream)
        address = to.address if staging is None else staging.address
        with _told_as(broken):
            decoded = _call(stream, partial(self._decode, source.address, nbytes, address, to.nbytes))
        if finish:
            finish(address, stream)
        elif staging is not None:
            stream.copy(to.address, address, to.nbytes)

        def answer(kept_while_the_gpu_works: object = (source, to)) -> int:
            with _told_as(broken):
                size = int(decoded.buffer_sizes[0])
            if size != to.nbytes:
                raise broken(f"one of {size}")
            return size

        return _pending(stream, answer, staging)

    def _encode(self, plain: int, nbytes: int, to: Memory) -> Any:
        source, target = self._batch(plain, nbytes, self._element), self._batch(to.address, to.nbytes)
        return self._codec.encode(source, out=target, compression_config=self._configuration(nbytes)[0])

    def _decode(self, encoded: int, encoded_bytes: int, plain: int, nbytes: int) -> Any:
        source, target = self._batch(encoded, encoded_bytes), self._batch(plain, nbytes, self._element)
        return self._codec.decode(source, out=target, decompression_config=self._configuration(nbytes)[1])

    def _configuration(self, nbytes: int) -> tuple[Any, Any]:
        known = self._configurations.get(nbytes)
        if known is None:
            if len(self._configurations) == CONFIGURATIONS_KEPT:
                self._configurations.clear()
            compression = self._codec.compression_config([nbytes])
            known = compression, self._codec.decompression_config(compression)
            self._configurations[nbytes] = known
        return known

    def _batch(self, address: int, nbytes: int, element: str = "|u1") -> Any:
        return self._library.as_arrays([_Span(address, nbytes, element)])

    def _staging(self, user: Buffer, stream: Stream) -> Memory | None:
        """Take aligned memory to stand in for a user's buffer that is not, else None."""
        return stream.device.alloc(user.nbytes) if user.address % self._form.alignment else None

    def _check_alignment(self, encoded: Memory) -> None:
        if encoded.address % self._form.alignment:
            raise BufferSpecError(
                f"nvCOMP's {self._form.algorithm} on {encoded.device.name}",
                expected=f"encoded bytes at a multiple of {self._form.alignment}",
                got=f"the address {encoded.address:#x}",
                remedy="Place them at the start of memory from the device's pool.",
            )


_sessions: WeakKeyDictionary[Stream, dict[Any, Session]] = WeakKeyDictionary()


def session(form: Format, options: dict[str, Any], stream: Stream) -> Session:
    """Return the stream's session for these settings; it lives no longer than the stream."""
    opened = _sessions.setdefault(stream, {})
    key = form, *sorted(options.items())
    if key not in opened:
        opened[key] = Session(form, options, stream.device.name, cast("CudaStream", stream).handle.ptr)
    return opened[key]


class _Span:
    """Device memory as nvCOMP takes it; what orders it is the codec's stream, so it names none to wait for."""

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
    """Let nvCOMP queue its work, with the stream's device the current one."""
    results: list[Any] = []
    stream.run(lambda: results.append(call()))
    return results[0]


@contextmanager
def _told_as(error: Callable[[str], GpucompError]) -> Iterator[None]:
    """Tell nvCOMP's errors as ours."""
    try:
        yield
    except GpucompError:
        raise
    except (RuntimeError, ValueError) as failure:
        raise error(str(failure).rstrip(".")) from failure


def _pending(stream: Stream, answer: Callable[[], int], staging: Memory | None) -> Pending:
    """Record this place; asked behind it, the temporary memory goes back to the pool before the answer."""
    event = stream.record()

    def wait() -> int:
        event.wait()
        if staging is not None:
            staging.release()
        return answer()

    return Pending(event.done, wait)


def _package(device: str) -> Any:
    remedy = "Install it with 'pip install mpi_gpucomp[cuda13]', or [cuda12] where the driver is older."
    return needed("nvidia.nvcomp", f"nvCOMP on {device}", remedy)


def _failed(form: Format, device: str, got: str) -> DeviceError:
    return DeviceError(
        f"nvCOMP's {form.algorithm} on {device}",
        expected="a GPU that runs it",
        got=got,
        remedy="Check the driver with nvidia-smi, or choose a codec of this package's own kernels, such as split.",
    )
