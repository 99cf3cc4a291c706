"""Messages over MPI that are sent in segments below the MPI library's rendezvous threshold.

Over TCP an MPI library sends short messages eagerly and starts a rendezvous for long ones. In a chain this handshake is
paid per hop and per chunk by ranks that poll rarely, and the link idles meanwhile. So a long message leaves as short
ones. Only the last segment is sent in synchronous mode: the message completes when the receiver has matched it, which
bounds the unexpected messages at the receiver by what a sender has in flight.

Segments can be relayed while the message still arrives. A chain of ranks then ends one segment after its first hop, for
any chunk size.

The length of the first segment encodes the number of segments that follow, so no header is added: a first segment of at
most `Segmentation.max_whole` bytes stands alone, and one of `max_whole + n` bytes is followed by n others. All of them
are full but the last, which takes the remainder. A first message longer than a segment is the whole message: the sender
decides, and segments only on slow links. On fast links the copies of MPI's eager protocol cost more than the rendezvous
they avoid.
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
    "MAX_SEGMENTS",
    "SEGMENT_BYTES",
    "LinkRate",
    "PendingSegments",
    "SegmentChannel",
    "Segmentation",
    "SegmentedDiscard",
    "SegmentedRecv",
    "SegmentedSend",
]

SEGMENT_BYTES = (1 << 16) - 256
"""Default bytes of a segment: with its header, the largest message that Open MPI sends eagerly over TCP."""
MAX_SEGMENTS = 1 << 12
"""The largest number of segments that follow the first one."""
WINDOW = 8
"""Messages in the estimate of a link's rate."""
SLOW = 160e6
"""Bytes per second up to which a link is slow, such as one of 1 Gbit/s."""


class Segmentation(NamedTuple):
    """How messages are segmented; the same on all ranks."""

    segment_bytes: int
    """Bytes of a segment, more than MAX_SEGMENTS."""

    @property
    def max_whole(self) -> int:
        """Return the largest message that is not segmented."""
        return self.segment_bytes - MAX_SEGMENTS

    def first(self, nbytes: int) -> int:
        """Return the bytes of the first segment of a message."""
        beyond = nbytes - self.max_whole
        if beyond <= 0:
            return nbytes
        return self.max_whole + min(MAX_SEGMENTS, -(-beyond // (self.segment_bytes + 1)))

    def following(self, first: int) -> int:
        """Return the number of segments that follow a first one of `first` bytes."""
        return max(0, first - self.max_whole) if first <= self.segment_bytes else 0

    def rest(self, first: int, capacity: int) -> Iterator[tuple[int, int]]:
        """Return start and end of the segments behind the first one, in a buffer of `capacity` bytes."""
        following = self.following(first)
        for number in range(following):
            start = first + number * self.segment_bytes
            yield start, capacity if number == following - 1 else start + self.segment_bytes


class LinkRate:
    """The recent rate of messages to one peer."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._last = 0.0

    def begin(self, nbytes: int) -> Callable[[], None]:
        """Start to time a message; return the function that stops the timer, to be called once.

        The message counts as in flight from now on, or from the completion of the previous one.
        """
        posted = perf_counter()

        def end() -> None:
            now = perf_counter()
            self._recent.append(nbytes / (now - max(posted, self._last)))
            self._last = now

        return end

    def slow(self) -> bool:
        """Return True if segmented messages are faster on this link, or if its rate is not known yet.

        The median message decides, not the mean: some wait for a receiver that has no CPU.
        """
        return len(self._recent) < WINDOW or sorted(self._recent)[WINDOW // 2] <= SLOW


class SegmentChannel(NamedTuple):
    """The messages of one tag to or from a peer."""

    transport: MpiTransport
    peer: int
    tag: int

    @property
    def first_comm(self) -> MPI.Intracomm:
        """The communicator of whole messages and first segments."""
        return self.transport.messages

    @property
    def rest_comm(self) -> MPI.Intracomm:
        """The communicator of the segments that follow the first."""
        return self.transport.segments

    def checked(self, call: Callable[[], bool]) -> bool:
        """Call MPI, and convert its errors."""
        try:
            return call()
        except MPI.Exception as error:
            self.transport.fail(error)

    def enqueue(self, message: PendingSegments) -> PendingSegments | None:
        """Append a message to the channel; return its predecessor if that has not arrived yet."""
        before = self.transport.latest.get(self[1:])
        self.transport.latest[self[1:]] = message
        return before

    def remove(self, message: PendingSegments, before: PendingSegments | None = None) -> None:
        """Remove a message; later ones wait for its predecessor `before` instead."""
        if self.transport.latest.get(self[1:]) is message:
            del self.transport.latest[self[1:]]
            if before is not None:
                self.transport.latest[self[1:]] = before


class SegmentedSend(Transfer):
    """A message whose segments are sent as they become available."""

    def __init__(
        self, channel: SegmentChannel, address: int, first: int, on_done: Callable[[], None] | None = None
    ) -> None:
        """Send the first segment, of `first` bytes; `on_done` is called when the message has completed."""
        self._channel, self._address, self.nbytes, self._on_done = channel, address, first, on_done
        self._full = [channel.first_comm.Isend(_bytes(address, first), channel.peer, channel.tag)]
        self._last: MPI.Request | None = None

    @classmethod
    def of(
        cls,
        channel: SegmentChannel,
        segmentation: Segmentation,
        address: int,
        nbytes: int,
        on_done: Callable[[], None],
    ) -> SegmentedSend:
        """Send a message that is complete in memory."""
        sent = cls(channel, address, segmentation.first(nbytes), on_done)
        *full, last = segmentation.rest(sent.nbytes, nbytes)
        for segment in full:
            sent.push(*segment)
        sent.push(*last, last=True)
        return sent

    def push(self, start: int, end: int, *, last: bool = False) -> None:
        """Send the next segment.

        The last one is synchronous, which bounds the unexpected messages in the receiver's memory.
        """
        send = self._channel.rest_comm.Issend if last else self._channel.rest_comm.Isend
        request = send(_bytes(self._address + start, end - start), self._channel.peer, self._channel.tag)
        self.nbytes = end
        if last:
            self._last, self.posted = request, perf_counter_ns()
            self._channel.transport.bytes_sent += end
        else:
            self._full.append(request)

    def done(self) -> bool:
        """Test the last segment first, which is cheaper than testing all."""
        last = self._last
        if last is None or not self._channel.checked(lambda: last.Test() and MPI.Request.Testall(self._full)):
            return False
        if self._on_done:
            self._on_done()
            self._on_done = None
        return True

    def cancel(self) -> bool:
        """Refuse: MPI does not cancel sends."""
        return False


class PendingSegments(Transfer):
    """A segmented message that arrives: the first segment is posted, then those that it announces.

    Messages of one channel post the latter in order: otherwise a segment could match another message's receive.
    """

    def __init__(self, channel: SegmentChannel, segmentation: Segmentation, first: MPI.Request) -> None:
        """Wait for the first segment, behind the earlier messages of this channel."""
        self._channel, self._segmentation, self._first = channel, segmentation, first
        self._before = channel.enqueue(self)
        self._status = MPI.Status()
        self._arrived = self._done = self._opened = False
        self.nbytes = 0

    def done(self) -> bool:
        """Test all segments, posting the others as soon as the first one has arrived."""
        if not self._done and self._channel.checked(lambda: self.opened() and self._complete()):
            self._done = True
            self._channel.transport.bytes_received += self.nbytes
            self._channel.remove(self)
        return self._done

    def opened(self) -> bool:
        """Return True if the first segment has arrived and the others are posted."""
        if not self._opened and (self._before is None or self._before.opened()):
            self._before = None
            self._arrived = self._arrived or self._first.Test(self._status)
            if self._arrived:
                self.nbytes = self._status.Get_count(MPI.BYTE)
                self._open()
                self._opened = True
        return self._opened

    def cancel(self) -> bool:
        """Cancel the first receive and wait for the outcome, which does not depend on the peer."""
        if self._arrived:
            return False
        self._channel.checked(self._cancel)
        self._arrived = not self._status.Is_cancelled()
        self._opened = not self._arrived
        if self._opened:
            self._channel.remove(self, self._before)
        return self._opened

    def _cancel(self) -> bool:
        self._first.Cancel()
        return self._first.Wait(self._status)

    def _open(self) -> None:
        """Post the segments that follow a first one of `nbytes`."""
        raise NotImplementedError

    def _complete(self) -> bool:
        """Return True if these have arrived too, and count their bytes."""
        raise NotImplementedError


class SegmentedRecv(PendingSegments):
    """A message that is received into the caller's memory."""

    def __init__(self, channel: SegmentChannel, segmentation: Segmentation, address: int, capacity: int) -> None:
        """Receive at most `capacity` bytes at an address."""
        self._address, self._capacity = address, capacity
        self._left: deque[tuple[MPI.Request, int]] = deque()
        """The segments that have not arrived yet, and their offsets."""
        self._relay: SegmentedSend | None = None
        first = channel.first_comm.Irecv(_bytes(address, capacity), channel.peer, channel.tag)
        super().__init__(channel, segmentation, first)

    def begun(self) -> bool:
        """Return True if the first segment has arrived."""
        return self._channel.checked(self.opened)

    def relay(self, channel: SegmentChannel) -> Transfer | None:
        """Forward the first segment and those that follow; None if none follow, or some have arrived."""
        if not self._left or self.nbytes != self._left[0][1]:
            return None
        self._relay = SegmentedSend(channel, self._address, self.nbytes)
        return self._relay

    def _open(self) -> None:
        channel = self._channel
        for start, end in self._segmentation.rest(self.nbytes, self._capacity):
            request = channel.rest_comm.Irecv(_bytes(self._address + start, end - start), channel.peer, channel.tag)
            self._left.append((request, start))

    def _complete(self) -> bool:
        while self._left and self._left[0][0].Test(self._status):
            _, start = self._left.popleft()
            self.nbytes = start + self._status.Get_count(MPI.BYTE)
            if self._relay is not None:
                self._relay.push(start, self.nbytes, last=not self._left)
        return not self._left


class SegmentedDiscard(PendingSegments):
    """A message that is dropped: each segment is received into temporary memory."""

    def __init__(self, channel: SegmentChannel, segmentation: Segmentation, message: MPI.Message, nbytes: int) -> None:
        """Receive a probed first segment of `nbytes`."""
        self._memory, self._left = [bytearray(nbytes)], 0
        self._requests: list[MPI.Request] = []
        super().__init__(channel, segmentation, message.Irecv([self._memory[0], MPI.BYTE]))

    def opened(self) -> bool:
        """Return True if all segments are matched, so that those behind them belong to another message."""
        if not super().opened():
            return False
        channel = self._channel
        while self._left and (message := channel.rest_comm.Improbe(channel.peer, channel.tag, self._status)):
            self._left -= 1
            self._memory.append(bytearray(self._status.Get_count(MPI.BYTE)))
            self._requests.append(message.Irecv([self._memory[-1], MPI.BYTE]))
        return not self._left

    def _open(self) -> None:
        self._left = self._segmentation.following(self.nbytes)

    def _complete(self) -> bool:
        if not MPI.Request.Testall(self._requests):
            return False
        self.nbytes = sum(map(len, self._memory))
        return True


def _bytes(address: int, nbytes: int) -> list[Any]:
    """Return a buffer specification as mpi4py takes it."""
    return [MPI.memory.fromaddress(address, nbytes), MPI.BYTE]
