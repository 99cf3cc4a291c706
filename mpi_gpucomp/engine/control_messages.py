"""Control messages between the engines of a communicator: typed, versioned and bounded in size.

A message is a header (magic, protocol version, kind, length of the body) and a body. Each kind is a NamedTuple whose
annotations declare its fields: int (64 bits), bool, str, bytes, `X | None`, `tuple[X, ...]` and `dict[K, V]`, where X,
K and V are int, str or a NamedTuple of such fields. The body of a record is a fixed part with one entry for each field,
the value of an int or bool and the length of anything else, followed by the contents of the latter.

Nothing in a message is trusted: whatever is not exactly a message of this version raises ControlMessageError, which
names the sender.
"""

from __future__ import annotations

import struct
from types import UnionType
from typing import Any, ClassVar, NamedTuple, Protocol, cast, get_args, get_origin, get_type_hints

from mpi_gpucomp.errors import ControlMessageError

__all__ = [
    "MAX_BYTES",
    "MAX_ITEMS",
    "MAX_TEXT_BYTES",
    "VERSION",
    "Abort",
    "ControlMessage",
    "DeadlockFound",
    "DeadlockQuery",
    "DeadlockReply",
    "EnvelopeMessage",
    "FailureReport",
    "Join",
    "ObserverMessage",
    "RankWait",
    "Wait",
    "clip",
    "decode",
    "encode",
]

VERSION = 2
MAGIC = b"GC"
_HEADER = struct.Struct("<2sBBI")
_NUMBER = struct.Struct("<q")
MAX_BYTES = 1 << 24
"""The longest body."""
MAX_TEXT_BYTES = 1 << 20
"""The longest str or bytes."""
MAX_ITEMS = 1 << 18
"""The longest tuple or dict."""
ERROR_CHARACTERS = 1 << 14
"""What is kept of the text of an error."""


class Join(NamedTuple):
    """A rank joins a call: run `run` of the collective `name`, or of those without a name."""

    name: str
    run: int
    signature: str
    """What ranks must agree on in the call."""
    tag: int
    """The first of the tags it receives on."""
    longest: int = 0
    """The length of the longest block that it knows of."""
    trace: int = 0
    """Rolling hash of the pass-through calls before this one: ranks that differ have diverged."""
    balance: int = 0
    """The balance of counts that only the ranks of each pair know: over all ranks the sum is 0, modulo 2**64."""


class FailureReport(NamedTuple):
    """A rank's view of a failed call."""

    name: str
    run: int
    answer: bool
    """Whether this is the answer of a rank that has completed the call, and that expects none in return."""
    signature: str | None
    """None if it has not joined the call."""
    error: str | None
    """The class of its error; None if it has none."""
    text: str
    sent: dict[int, int]
    """Messages it has sent to the receiver of this report, by channel."""
    trace: int | None
    """As in `Join`; None if unknown."""


class Abort(NamedTuple):
    """A rank leaves the communicator."""

    reason: str


class DeadlockQuery(NamedTuple):
    """A rank asks what the others are blocked in."""

    number: int


class Wait(NamedTuple):
    """A call that a rank is blocked in."""

    name: str
    run: int
    title: str


class DeadlockReply(NamedTuple):
    """The answer: what this rank is blocked in, and how often it has begun each name."""

    number: int
    waits: tuple[Wait, ...]
    runs: dict[str, int]


class RankWait(NamedTuple):
    """A call that a rank was blocked in when it was asked."""

    rank: int
    name: str
    run: int


class DeadlockFound(NamedTuple):
    """The ranks wait for each other: these calls fail."""

    text: str
    waits: tuple[RankWait, ...]


class ObserverMessage(NamedTuple):
    """A message between observers of the engines, such as the monitors."""

    kind: str
    number: int = 0
    text: str = ""


class EnvelopeMessage(NamedTuple):
    """The envelope of a point-to-point message, where rails carry it."""

    tag: int
    data: bytes


ControlMessage = (
    Join | FailureReport | Abort | DeadlockQuery | DeadlockReply | DeadlockFound | ObserverMessage | EnvelopeMessage
)


class _MalformedError(Exception):
    """What was expected of the bytes, and what they are."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected, self.got = expected, got


class _Tail(Protocol):
    """A field of variable length: a count in the fixed part, and bytes behind it."""

    def pack(self, value: Any) -> tuple[int, bytes]:
        """Return count and bytes."""
        ...

    def unpack(self, count: int, data: bytes, at: int) -> tuple[Any, int]:
        """Return the value that starts at an offset, and the offset behind it."""
        ...


class _Bytes:
    def pack(self, value: bytes) -> tuple[int, bytes]:
        if len(value) > MAX_TEXT_BYTES:
            raise _MalformedError(f"at most {MAX_TEXT_BYTES} bytes", f"{len(value)}")
        return len(value), value

    def unpack(self, count: int, data: bytes, at: int) -> tuple[bytes, int]:
        if count > MAX_TEXT_BYTES:
            raise _MalformedError(f"a field of at most {MAX_TEXT_BYTES} bytes", f"{count}")
        end = at + count
        if end > len(data):
            raise _MalformedError(f"a field of {count} bytes", f"{len(data) - at}")
        return data[at:end], end


class _Text(_Bytes):
    def pack(self, value: str) -> tuple[int, bytes]:  # type: ignore[override]
        return super().pack(value.encode("utf-8", "surrogatepass"))

    def unpack(self, count: int, data: bytes, at: int) -> tuple[str, int]:  # type: ignore[override]
        end = at + count
        if count > MAX_TEXT_BYTES or end > len(data):
            super().unpack(count, data, at)
        try:
            return data[at:end].decode("utf-8", "surrogatepass"), end
        except UnicodeDecodeError as error:
            raise _MalformedError("text in UTF-8", f"byte {data[at + error.start]:#04x}") from error


class _Sequence:
    """Items behind each other."""

    def __init__(self, item: type, limit: int = MAX_ITEMS) -> None:
        self._item, self._limit = _item_codec(item), limit

    def pack(self, value: Any) -> tuple[int, bytes]:
        if len(value) > self._limit:
            raise _MalformedError(f"at most {self._limit} items", f"{len(value)}")
        return len(value), b"".join(map(self._item.pack, value))

    def unpack(self, count: int, data: bytes, at: int) -> tuple[Any, int]:
        if count > self._limit:
            raise _MalformedError(f"at most {self._limit} items", f"{count}")
        items = []
        for _ in range(count):
            item, at = self._item.unpack(data, at)
            items.append(item)
        return tuple(items), at


class _Optional(_Sequence):
    def __init__(self, item: type) -> None:
        super().__init__(item, limit=1)

    def pack(self, value: Any) -> tuple[int, bytes]:
        return super().pack(() if value is None else (value,))

    def unpack(self, count: int, data: bytes, at: int) -> tuple[Any, int]:
        items, at = super().unpack(count, data, at)
        return (items[0] if items else None), at


class _Dict(_Sequence):
    def __init__(self, key: type, value: type) -> None:
        super().__init__(_tuple_type(key=key, value=value))

    def pack(self, value: Any) -> tuple[int, bytes]:
        return super().pack(value.items())

    def unpack(self, count: int, data: bytes, at: int) -> tuple[dict[Any, Any], int]:
        items, at = super().unpack(count, data, at)
        found = dict(items)
        if len(found) < count:
            raise _MalformedError(f"{count} different keys", f"{len(found)}")
        return found, at


class _Record:
    """The fields of a NamedTuple."""

    def __init__(self, made: type[Any]) -> None:
        self._make = made._make
        hints = get_type_hints(made).values()
        self._tails: list[tuple[int, _Tail]] = []
        codes = ""
        for index, hint in enumerate(hints):
            codes += {int: "q", bool: "B"}.get(hint, "I")
            if hint is bool:
                self._tails.append((index, _BOOL))
            elif hint is not int:
                self._tails.append((index, _tail_of(hint)))
        self._fixed = struct.Struct(f"<{codes}")

    def pack(self, record: Any) -> bytes:
        """Return the bytes of a record."""
        fixed, tails = list(record), []
        for index, tail in self._tails:
            fixed[index], data = tail.pack(fixed[index])
            tails.append(data)
        try:
            return b"".join((self._fixed.pack(*fixed), *tails))
        except struct.error as error:
            raise _MalformedError("integers of 64 bits", f"{record}") from error

    def unpack(self, data: bytes, at: int) -> tuple[Any, int]:
        """Return the record at an offset, and the offset behind it."""
        end = at + self._fixed.size
        if end > len(data):
            raise _MalformedError(f"{self._fixed.size} bytes of fields", f"{len(data) - at}")
        values = list(self._fixed.unpack_from(data, at))
        for index, tail in self._tails:
            values[index], end = tail.unpack(values[index], data, end)
        return self._make(values), end


class _Bool:
    def pack(self, value: bool) -> tuple[int, bytes]:
        return int(value), b""

    def unpack(self, count: int, data: bytes, at: int) -> tuple[bool, int]:
        if count > 1:
            raise _MalformedError("0 or 1", f"{count}")
        return count == 1, at


_BOOL = _Bool()


class _Scalar:
    """An int or str as an item."""

    def __init__(self, hint: type) -> None:
        self._record = _Record(_tuple_type(value=hint))

    def pack(self, value: int | str) -> bytes:
        return self._record.pack((value,))

    def unpack(self, data: bytes, at: int) -> tuple[Any, int]:
        record, at = self._record.unpack(data, at)
        return record[0], at


def _tuple_type(**fields: type) -> type[Any]:
    made: Any = NamedTuple("Item", list(fields.items()))  # type: ignore[misc]
    return cast("type[Any]", made)


def _item_codec(hint: type) -> _Record | _Scalar:
    return _Record(hint) if hasattr(hint, "_fields") else _Scalar(hint)


def _tail_of(hint: Any) -> _Tail:
    if hint is str:
        return _Text()
    if hint is bytes:
        return _Bytes()
    if isinstance(hint, UnionType):
        return _Optional(get_args(hint)[0])
    if get_origin(hint) is dict:
        return _Dict(*get_args(hint))
    assert get_origin(hint) is tuple, hint
    return _Sequence(get_args(hint)[0])


class _Kinds:
    """The kinds of messages by number, which never changes, with their codecs."""

    types: ClassVar[dict[int, type[Any]]] = dict(enumerate(get_args(ControlMessage), 1))
    numbers: ClassVar[dict[type[Any], int]] = {made: number for number, made in types.items()}
    codecs: ClassVar[dict[int, _Record]] = {}


_Kinds.codecs.update({number: _Record(made) for number, made in _Kinds.types.items()})


def encode(message: ControlMessage) -> bytes:
    """Return the bytes of a message."""
    kind = _Kinds.numbers[type(message)]
    try:
        body = _Kinds.codecs[kind].pack(message)
        if len(body) > MAX_BYTES:
            raise _MalformedError(f"at most {MAX_BYTES} bytes", f"{len(body)}")
    except _MalformedError as error:
        raise ControlMessageError(
            f"control message {type(message).__name__}",
            expected=error.expected,
            got=error.got,
            remedy="Use shorter names, or fewer of them.",
        ) from None
    return _HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


def decode(data: bytes, peer: int, rank: int) -> ControlMessage:
    """Read a message from a peer, received by this rank; raise ControlMessageError if it is malformed."""
    topic = f"control message from rank {peer}"
    try:
        if len(data) < _HEADER.size:
            raise _MalformedError(f"a header of {_HEADER.size} bytes", f"{len(data)}")
        magic, version, kind, length = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise _MalformedError(f"the magic bytes {MAGIC!r}", f"{magic!r}")
        if version != VERSION:
            raise _MalformedError(f"protocol version {VERSION}", f"{version}")
        if kind not in _Kinds.codecs:
            raise _MalformedError(f"a kind from 1 to {len(_Kinds.codecs)}", f"{kind}")
        topic = f"control message {_Kinds.types[kind].__name__} from rank {peer}"
        if length > MAX_BYTES:
            raise _MalformedError(f"at most {MAX_BYTES} bytes", f"{length}")
        if len(data) != _HEADER.size + length:
            raise _MalformedError(f"a body of {length} bytes", f"{len(data) - _HEADER.size}")
        message, end = _Kinds.codecs[kind].unpack(data, _HEADER.size)
        if end != len(data):
            raise _MalformedError(f"{end - _HEADER.size} bytes of fields", f"{length}")
    except _MalformedError as error:
        raise ControlMessageError(
            topic,
            expected=error.expected,
            got=error.got,
            remedy="Install the same version of mpi_gpucomp on every rank.",
            rank=rank,
        ) from None
    result: ControlMessage = message
    return result


def clip(text: str) -> str:
    """Return the text of an error, shortened so that it fits into a message."""
    return text if len(text) <= ERROR_CHARACTERS else f"{text[:ERROR_CHARACTERS]} ..."
