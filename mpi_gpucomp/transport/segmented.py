"""Messages over MPI that are cut into pieces, so that each is sent at once.

Over TCP an MPI library sends short messages at once, and asks the receiver before it sends a long one. In a chain that
is asked at every hop and for every chunk, by ranks that look only now and then, and the wire stands still meanwhile.
So here a long message leaves as short ones. Only the last is one for which MPI waits until the receiver has asked for
it: a message is done when somebody has, and what lies unasked at the receiver stays bounded by what a sender has under
way.

What comes in pieces can be sent on in pieces, while it comes. A chain of ranks then is through when the last piece is,
however long its chunks are.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from mpi_gpucomp.transport.base import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi_gpucomp.transport.mpi import MpiTransport

__all__ = [
    "MOST",
    "SEGMENT_BYTES",
    "Channel",
    "DiscardedPieces",
    "Incoming",
    "LinkRate",
    "ReceivedPieces",
    "Segmentation",
    "SentPieces",
]


class Channel(NamedTuple):
    """The messages of one tag to a peer or from it."""

    transport: MpiTransport
    peer: int
    tag: int

    @property
    def firsts(self) -> MPI.Intracomm:
        """Where messages begin."""
        return self.transport.messages

    @property
    def others(self) -> MPI.Intracomm:
        """Where pieces go that follow the first."""
        return self.transport.pieces

    def asked(self, question: Callable[[], bool]) -> bool:
        """Ask MPI something."""
        try:
            return question()
        except MPI.Exception as error:
            self.transport.fail(error)

    def follow(self, message: Incoming) -> Incoming | None:
        """Take notice of the message that comes next, and return the one that it comes behind, if that is not here."""
        before = self.transport.latest.get(self[1:])
        self.transport.latest[self[1:]] = message
        return before

    def forget(self, message: Incoming, before: Incoming | None = None) -> None:
        """Let those that come later wait for what came `before` a message instead."""
        if self.transport.latest.get(self[1:]) is message:
            del self.transport.latest[self[1:]]
            if before is not None:
                self.transport.latest[self[1:]] = before


class SentPieces(Transfer):
    """A message that leaves in pieces, as they are there to be sent."""

    def __init__(self, on: Channel, address: int, first: int, timer: Callable[[], None] | None = None) -> None:
        """Send the first piece, of so many bytes; `timer` is called when all is done."""
        self._on, self._address, self.nbytes, self._timer = on, address, first, timer
        self._full = [on.firsts.Isend(_bytes(address, first), on.peer, on.tag)]
        self._last: MPI.Request | None = None

    @classmethod
    def of(cls, on: Channel, cut: Segmentation, address: int, nbytes: int, timer: Callable[[], None]) -> SentPieces:
        """Send a message that is all there."""
        sent = cls(on, address, cut.first(nbytes), timer)
        *full, last = cut.rest(sent.nbytes, nbytes)
        for piece in full:
            sent.push(*piece)
        sent.push(*last, last=True)
        return sent

    def push(self, start: int, end: int, *, last: bool = False) -> None:
        """Send the next piece.

        The last is not done before the receiver has asked for it: what nobody has asked for would fill its memory.
        """
        send = self._on.others.Issend if last else self._on.others.Isend
        request = send(_bytes(self._address + start, end - start), self._on.peer, self._on.tag)
        self.nbytes = end
        if last:
            self._last, self.posted = request, perf_counter_ns()
            self._on.transport.bytes_sent += end
        else:
            self._full.append(request)

    def done(self) -> bool:
        """Ask MPI, for the last piece first: to ask for all takes longer."""
        last = self._last
        if last is None or not self._on.asked(lambda: last.Test() and MPI.Request.Testall(self._full)):
            return False
        if self._timer:
            self._timer()
            self._timer = None
        return True

    def cancel(self) -> bool:
        """Refuse: MPI does not take sends back."""
        return False


class Incoming(Transfer):
    """A message that arrives in pieces: the first is asked for, then those of which it tells.

    Messages of one channel ask for the latter in turn: else pieces of one would take the place of another's.
    """

    def __init__(self, on: Channel, cut: Segmentation, first: MPI.Request) -> None:
        """Wait for the first piece, behind what was asked for before it on this channel."""
        self._on, self._cut, self._first, self._before = on, cut, first, on.follow(self)
        self._status = MPI.Status()
        self._arrived = self._done = self._opened = False
        self.nbytes = 0

    def done(self) -> bool:
        """Ask MPI, for the pieces that follow too as soon as the first one is there."""
        if not self._done and self._on.asked(lambda: self.opened() and self._complete()):
            self._done = True
            self._on.transport.bytes_received += self.nbytes
            self._on.forget(self)
        return self._done

    def opened(self) -> bool:
        """Say whether the first piece is there and the others were asked for."""
        if not self._opened and (self._before is None or self._before.opened()):
            self._before = None
            self._arrived = self._arrived or self._first.Test(self._status)
            if self._arrived:
                self.nbytes = self._status.Get_count(MPI.BYTE)
                self._open()
                self._opened = True
        return self._opened

    def cancel(self) -> bool:
        """Ask MPI to take the first piece back, and wait for its answer, which does not depend on the peer."""
        if self._arrived:
            return False
        self._on.asked(self._cancel)
        self._arrived = not self._status.Is_cancelled()
        self._opened = not self._arrived
        if self._opened:
            self._on.forget(self, self._before)
        return self._opened

    def _cancel(self) -> bool:
        self._first.Cancel()
        return self._first.Wait(self._status)

    def _open(self) -> None:
        """Ask for the pieces that follow a first one of `nbytes`."""
        raise NotImplementedError

    def _complete(self) -> bool:
        """Say whether these are there too, and count their bytes."""
        raise NotImplementedError


class ReceivedPieces(Incoming):
    """A message that somebody wants."""

    def __init__(self, on: Channel, cut: Segmentation, address: int, room: int) -> None:
        """Receive it at an address, where there is room for so many bytes."""
        self._address, self._room = address, room
        self._left: deque[tuple[MPI.Request, int]] = deque()
        """The pieces that are not there yet, and where they begin."""
        self._relay: SentPieces | None = None
        super().__init__(on, cut, on.firsts.Irecv(_bytes(address, room), on.peer, on.tag))

    def begun(self) -> bool:
        """Ask MPI."""
        return self._on.asked(self.opened)

    def relay(self, on: Channel) -> Transfer | None:
        """Start to send on the first piece and what follows it; None if nothing does, or some of it is there."""
        if not self._left or self.nbytes != self._left[0][1]:
            return None
        self._relay = SentPieces(on, self._address, self.nbytes)
        return self._relay

    def _open(self) -> None:
        on, pieces = self._on, self._cut.rest(self.nbytes, self._room)
        for start, end in pieces:
            request = on.others.Irecv(_bytes(self._address + start, end - start), on.peer, on.tag)
            self._left.append((request, start))

    def _complete(self) -> bool:
        while self._left and self._left[0][0].Test(self._status):
            _, start = self._left.popleft()
            self.nbytes = start + self._status.Get_count(MPI.BYTE)
            if self._relay is not None:
                self._relay.push(start, self.nbytes, last=not self._left)
        return not self._left


class DiscardedPieces(Incoming):
    """A message that nobody wants: each piece goes into memory of its own, which is forgotten."""

    def __init__(self, on: Channel, cut: Segmentation, message: MPI.Message, nbytes: int) -> None:
        """Take what was found, a first piece of so many bytes."""
        self._room, self._left = [bytearray(nbytes)], 0
        self._requests: list[MPI.Request] = []
        super().__init__(on, cut, message.Irecv([self._room[0], MPI.BYTE]))

    def opened(self) -> bool:
        """Say whether all pieces were taken from the wire, so that what comes behind them is another message's."""
        if not super().opened():
            return False
        while self._left and (message := self._on.others.Improbe(self._on.peer, self._on.tag, self._status)):
            self._left -= 1
            self._room.append(bytearray(self._status.Get_count(MPI.BYTE)))
            self._requests.append(message.Irecv([self._room[-1], MPI.BYTE]))
        return not self._left

    def _open(self) -> None:
        self._left = self._cut.following(self.nbytes)

    def _complete(self) -> bool:
        if not MPI.Request.Testall(self._requests):
            return False
        self.nbytes = sum(map(len, self._room))
        return True


def _bytes(address: int, nbytes: int) -> list[Any]:
    """Describe some memory as mpi4py takes it."""
    return [MPI.memory.fromaddress(address, nbytes), MPI.BYTE]


# How long messages are cut into pieces, and when.
#
# How many pieces follow is said by the length of the first one, so nothing is added to the bytes: up to `Cut.whole`
# bytes
# there is one alone, and `Cut.whole + n` bytes are followed by n others. All of these are full, but the last, which
# takes
# what is left. What is longer than a piece has come whole: the sender decides, and cuts where the wire is slow. On
# a fast
# one the copies that MPI makes of short messages cost more than its questions before long ones.

SEGMENT_BYTES = (1 << 16) - 256
"""Bytes of a piece: Open MPI sends so much at once over TCP, with its header."""

MOST = 1 << 12
"""Pieces that may follow the first one."""
WINDOW = 8
"""Messages that tell how fast a wire is."""
SLOW = 160e6
"""Bytes a second: up to here a wire counts as slow, such as one of 1 Gbit/s."""


class Segmentation(NamedTuple):
    """How messages are cut; the same on all ranks."""

    piece: int
    """Bytes of a piece, more than MOST."""

    @property
    def whole(self) -> int:
        """Bytes up to which a message stays whole."""
        return self.piece - MOST

    def first(self, nbytes: int) -> int:
        """Return the bytes of the first piece of a message."""
        beyond = nbytes - self.whole
        return self.whole + min(MOST, -(-beyond // (self.piece + 1))) if beyond > 0 else nbytes

    def following(self, first: int) -> int:
        """Return how many pieces follow what has begun with so many bytes."""
        return max(0, first - self.whole) if first <= self.piece else 0

    def rest(self, first: int, room: int) -> Iterator[tuple[int, int]]:
        """Return where the pieces behind a first one begin and end, of a message that has `room` bytes."""
        following = self.following(first)
        for number in range(following):
            start = first + number * self.piece
            yield start, room if number == following - 1 else start + self.piece


class LinkRate:
    """How fast messages to one peer have left lately."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._last = 0.0

    def begin(self, nbytes: int) -> Callable[[], None]:
        """Start to count a message; return what ends it, once.

        It is under way since now, or since the one before it was done.
        """
        posted = perf_counter()

        def end() -> None:
            now = perf_counter()
            self._recent.append(nbytes / (now - max(posted, self._last)))
            self._last = now

        return end

    def slow(self) -> bool:
        """Say whether the wire is so slow that messages are better cut; one that nobody knows yet may be.

        The usual message counts, and not all of them together: some wait for a receiver that has no processor.
        """
        return len(self._recent) < WINDOW or sorted(self._recent)[WINDOW // 2] <= SLOW
