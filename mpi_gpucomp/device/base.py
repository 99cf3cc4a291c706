"""The device contract: element types, memory, streams, events and kernels, asynchronous on every device.

A stream is an in-order work queue that runs concurrently with the caller. An event marks a position in a stream;
another stream or the caller can wait for it. Kernels (see `kernels/simt.h`) take a range of tiles, then only pointers,
64-bit integers and doubles, so that one calling convention serves both host and GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["DTYPES", "DType", "Device", "Event", "Memory", "Stream", "dtype_of_code", "dtype_of_name"]


@dataclass(frozen=True)
class DType:
    """An element type: numpy-style name, wire code, size in bytes, kind (f, i, u, b or c) and kernel suffix."""

    name: str
    code: int
    itemsize: int
    kind: str
    suffix: str

    def __str__(self) -> str:
        """Return the name."""
        return self.name


DTYPES = (
    DType("uint8", 1, 1, "u", "u8"),
    DType("int8", 2, 1, "i", "i8"),
    DType("uint16", 3, 2, "u", "u16"),
    DType("int16", 4, 2, "i", "i16"),
    DType("uint32", 5, 4, "u", "u32"),
    DType("int32", 6, 4, "i", "i32"),
    DType("uint64", 7, 8, "u", "u64"),
    DType("int64", 8, 8, "i", "i64"),
    DType("float16", 9, 2, "f", "f16"),
    DType("bfloat16", 10, 2, "f", "bf16"),
    DType("float32", 11, 4, "f", "f32"),
    DType("float64", 12, 8, "f", "f64"),
    DType("bool", 13, 1, "b", "u8"),
    DType("complex64", 14, 8, "c", "c64"),
    DType("complex128", 15, 16, "c", "c128"),
)
"""The supported element types."""

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}


def dtype_of_name(name: str) -> DType | None:
    """Return the type with this numpy-style name, or None."""
    return _BY_NAME.get(name)


def dtype_of_code(code: int) -> DType | None:
    """Return the type with this wire code, or None."""
    return _BY_CODE.get(code)


class Memory:
    """A block of bytes from a device's pool; `release` (or the end of a `with`) returns it to the pool."""

    __slots__ = ("_give_back", "address", "device", "nbytes", "owner")

    def __init__(
        self,
        address: int,
        nbytes: int,
        device: Device,
        owner: object,
        give_back: Callable[[Memory], None] | None = None,
    ) -> None:
        """Describe `nbytes` at `address`, kept alive by `owner`."""
        self.address, self.nbytes, self.device, self.owner = address, nbytes, device, owner
        self._give_back = give_back

    def release(self) -> None:
        """Return the block to the pool; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self)

    def part(self, start: int, nbytes: int) -> Memory:
        """Return a view of part of the block; releasing the view does nothing."""
        return Memory(self.address + start, nbytes, self.device, self)

    def __enter__(self) -> Memory:
        """Hold the block for the duration of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Return the block to the pool."""
        self.release()


class Event(ABC):
    """A position in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the stream has passed this position; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the stream has passed this position; raise if earlier work failed."""


class Stream(ABC):
    """An in-order work queue that runs concurrently with the caller."""

    device: Device

    @abstractmethod
    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Queue a kernel over the tiles 0 .. tiles-1.

        On the host `grain` is the number of tiles that justifies another core; `split=False` runs all of them on one
        core, in order.
        """

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between two addresses, host or device."""

    @abstractmethod
    def fill(self, to: int, byte: int, nbytes: int) -> None:
        """Queue a memset."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Queue `work` itself (host), or call it now to queue its own device work on this stream (CUDA)."""

    @abstractmethod
    def release(self, memory: Memory) -> None:
        """Return memory to its pool once the work queued so far has completed; does not block."""

    @abstractmethod
    def record(self) -> Event:
        """Record an event at the current end of the stream."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for `event`; does not block the caller."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work queued so far has completed; raise if any of it failed."""

    @abstractmethod
    def close(self) -> None:
        """Complete the queued work and end the stream."""


class Device(ABC):
    """A processor with its memory: the host or one GPU."""

    name: str
    """`host` or `cuda:N`."""

    appends_in_place: bool
    """True if encoded tiles of one worker are written back to back (host), False if each has its own slot (GPU)."""

    @abstractmethod
    def alloc(self, nbytes: int) -> Memory:
        """Allocate device memory from the pool, aligned for any kernel."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Memory:
        """Allocate memory that host and device access at the same address."""

    @abstractmethod
    def stream(self) -> Stream:
        """Create a stream."""
