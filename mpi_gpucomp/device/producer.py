"""Producers of buffers: the streams on which the caller works, as they are when the library is called.

A current stream belongs to a thread, and work that is queued on it later must not delay a call. So an event is recorded
by the caller's thread, at the call; whatever thread copies or encodes the elements lets its stream wait for the event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi_gpucomp.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.device.buffer import Buffer
    from mpi_gpucomp.device.cuda import CudaEvent

__all__ = ["mark_producer", "stream_handle"]

LEGACY_STREAM = 1
"""CUDA's explicit handle of the legacy default stream, which 0 also names."""
STREAM_ERRORS = (1, 201, 400, 709)
"""CUDA's codes for a wrong stream: invalid value, context or handle, and a context that was destroyed."""


def stream_handle(stream: Any) -> int | None:
    """Return the handle of a stream of any library, or None for an object that is not a stream."""
    if isinstance(stream, bool):
        return None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        stream = (protocol() if callable(protocol) else protocol)[1]
    for name in ("ptr", "cuda_stream"):
        stream = getattr(stream, name, stream)
    return (stream or LEGACY_STREAM) if isinstance(stream, int) and stream >= 0 else None


def mark_producer(buffer: Buffer, stream: int | None = None) -> Buffer:
    """Return a buffer with an event at the current end of its producer's stream, or of `stream` instead of that."""
    producer = buffer.producer_stream if stream is None else stream
    if producer is None or buffer.device == "host":
        return buffer
    return buffer.marked(_record(producer, int(buffer.device.removeprefix("cuda:"))))


def _record(producer: int | Callable[[int], object], ordinal: int) -> CudaEvent:
    """Record an event on a stream, or on a new one that a function orders after its producer's."""
    from mpi_gpucomp.device import get_device
    from mpi_gpucomp.device.cuda import CudaDevice, CudaEvent

    device = get_device(f"cuda:{ordinal}")
    assert isinstance(device, CudaDevice)
    cuda = device.cupy.cuda
    with device.current:
        try:
            if callable(producer):
                between = cuda.Stream(non_blocking=True)
                producer(between.ptr)
                producer = between.ptr
            else:
                _check_not_capturing(cuda.runtime, producer, ordinal)
            event = cuda.Event(block=True, disable_timing=True)  # block: a waiting thread sleeps
            cuda.runtime.eventRecord(event.ptr, producer)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status not in STREAM_ERRORS:
                raise DeviceError(
                    f"cuda:{ordinal}",
                    expected="a GPU that works",
                    got=f"'{error}'",
                    remedy="Earlier work on this GPU failed, or the GPU itself. Start the program again, with "
                    "CUDA_LAUNCH_BLOCKING=1 (or compute-sanitizer) to find a kernel that fails.",
                ) from error
            raise DeviceError(
                f"stream {producer:#x} of cuda:{ordinal}",
                expected="a stream of this GPU that exists",
                got=f"'{error}'",
                remedy="Pass stream= with a stream of the buffer's GPU, or make that stream current.",
            ) from error
    return CudaEvent(device, event, [])


def _check_not_capturing(runtime: Any, stream: int, ordinal: int) -> None:
    """Raise if a stream is capturing a graph, or if the legacy stream would break the capture of another one."""
    try:
        if not runtime.streamIsCapturing(stream):
            return
        got = "one that is capturing a graph"
    except runtime.CUDARuntimeError as error:
        if "capture" not in str(error).lower():
            raise
        got = f"'{error}'"
    raise DeviceError(
        f"stream {stream:#x} of cuda:{ordinal}",
        expected="a stream that is not capturing a graph",
        got=got,
        remedy="Call the library before the capture begins or after it has ended: a graph cannot contain messages. "
        "Or pass stream= with another stream.",
    )
