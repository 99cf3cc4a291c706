"""What a device is: memory, streams, events and kernels, asynchronous on every kind.

A stream is a queue of work that runs in order, beside the caller. An event marks a place in a stream; another stream
or the caller can wait for it. Kernels (see `kernels/simt.h`) take a range of tiles first, then pointers, 64-bit
integers and doubles, nothing else, so that one call form serves both machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["DTYPES", "DType", "Device", "Event", "Memory", "Stream", "dtype_of_code", "dtype_of_name"]


class Memory:
    """A span of bytes from a device's pool; `release` (or the end of a `with`) gives it back."""

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
        """Give the bytes back to the pool; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self)

    def part(self, start: int, nbytes: int) -> Memory:
        """Describe a part of the bytes; the whole is what must be released."""
        return Memory(self.address + start, nbytes, self.device, self)

    def __enter__(self) -> Memory:
        """Use the memory for the length of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the bytes back."""
        self.release()


class Event(ABC):
    """A place in a stream that has been passed or has not."""

    @abstractmethod
    def done(self) -> bool:
        """Say whether the stream has passed this place; never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the stream has passed this place; raise what went wrong before it."""


class Stream(ABC):
    """A queue of work that runs in order, beside the caller."""

    device: Device

    @abstractmethod
    def launch(self, kernel: str, tiles: int, *args: int | float, split: bool = True, grain: int = 64) -> None:
        """Queue a kernel over the tiles 0 .. tiles-1.

        On the host every `grain` tiles are worth waking another core for; `split=False` keeps them on one, in order.
        """

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queue a copy of bytes between two addresses, host or device."""

    @abstractmethod
    def fill(self, to: int, byte: int, nbytes: int) -> None:
        """Queue the setting of bytes to one value."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Queue `work` itself (host), or call it to queue its own device work on this stream (CUDA)."""

    @abstractmethod
    def release(self, memory: Memory) -> None:
        """Give memory back to its pool once what is queued so far is done with it; the caller does not wait."""

    @abstractmethod
    def record(self) -> Event:
        """Mark this place in the stream."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Hold later work of this stream until `event` is done; the caller does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything queued so far; raise what went wrong."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued and end the stream."""


class Device(ABC):
    """A place where buffers live and kernels run."""

    name: str
    """`host` or `cuda:N`."""

    appends_in_place: bool
    """Whether the tiles of one worker's range are written one behind the other (host) or each into a slot (GPU)."""

    @abstractmethod
    def alloc(self, nbytes: int) -> Memory:
        """Take memory of this device from the pool, aligned for any kernel."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Memory:
        """Take memory that both the processor and this device reach at the same address."""

    @abstractmethod
    def stream(self) -> Stream:
        """Make a new stream."""


# The element types that buffers carry, with the number that stands for each on the wire.


@dataclass(frozen=True)
class DType:
    """An element type: its numpy-style name, wire number, size in bytes, kind (f, i, u, b or c) and kernel suffix."""

    name: str
    code: int
    itemsize: int
    kind: str
    suffix: str

    def __str__(self) -> str:
        """Print as the name alone."""
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

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}


def dtype_of_name(name: str) -> DType | None:
    """Return the type with this numpy-style name, or None."""
    return _BY_NAME.get(name)


def dtype_of_code(code: int) -> DType | None:
    """Return the type with this wire number, or None."""
    return _BY_CODE.get(code)
