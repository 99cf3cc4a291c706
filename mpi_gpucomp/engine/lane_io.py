"""The messages of one task: what arrives and leaves in each lane, and how it all comes to an end after a failure."""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING

from mpi_gpucomp.trace import NO_CALL_TRACE, RECV, SEND, CallTrace, InFlight

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from mpi_gpucomp.engine.staging import Frame, Staging
    from mpi_gpucomp.schedule.ir import Lane, Place
    from mpi_gpucomp.transport.base import Transfer, Transport

    Ready = Callable[[], bool]
    Moves = Generator[Ready, None, None]

__all__ = ["AHEAD", "LaneIO", "LaneState"]

AHEAD = 2
"""Messages that a lane has room for before it needs them."""
DEPTH = 8
"""Messages that a lane has on their way at most: to announce hundreds at once would keep MPI from sending the first."""
QUICK = 1e-3
"""Seconds between messages below which none is worth waiting for: memory that ranks share, or a fast wire."""


class LaneState:
    """What one lane has on the wire, and what it waits for."""

    def __init__(self, lane: Lane, staging: Staging, loops: int, landings: list[Place | None]) -> None:
        """Expect as many messages in each loop as there are `landings`: where each goes, or None for a frame."""
        self.lane, self.staging, self.landings = lane, staging, landings
        self.expected = self._messages = loops * len(landings)
        self.arriving: deque[tuple[Transfer, Frame]] = deque()
        self.leaving: deque[tuple[Transfer, Frame]] = deque()
        self.moves: Moves
        self.ready: Ready | None = _always
        self.chunk = 0
        """The chunk that it is at, for errors."""
        self.number = self.left = self.taken = 0
        """Which lane it is, and how many messages have left and were taken, for records."""
        self._taken_at, self._interval = -inf, inf

    def wants_room(self) -> bool:
        """Say whether it is time to have room for another message.

        While one is under way, the next one is asked for when about half of it should be there. Without that the wire
        would stand still for as long as it takes to agree on the next message. With both from the start MPI would send
        them side by side, and the first would be there no sooner than the second.
        """
        if not self.arriving:
            return True
        if len(self.arriving) >= AHEAD:
            return False
        return self._interval < QUICK or perf_counter() - self._taken_at > self._interval / 2

    def take(self) -> tuple[Transfer, Frame]:
        """Return the next message, which is there, and note how long messages take."""
        now = perf_counter()
        self._interval, self._taken_at = max(0.0, now - self._taken_at), now
        return self.arriving.popleft()

    def has_message(self) -> bool:
        """Say whether the next message is there."""
        return bool(self.arriving) and self.arriving[0][0].done()

    def has_begun(self) -> bool:
        """Say whether a part of the next message is there."""
        return bool(self.arriving) and self.arriving[0][0].begun()

    def may_send(self) -> bool:
        """Say whether there is room on the way for another message."""
        return len(self.leaving) < DEPTH

    def wait_from_now(self) -> None:
        """Note, for the monitor, since when the lane cannot go on without the next message."""
        if self.arriving and not self.arriving[0][0].waited:
            self.arriving[0][0].waited = perf_counter_ns()

    def next_landing(self) -> tuple[int, Place | None]:
        """Return the loop of the next message that there is no room for yet, and where it goes."""
        loop, number = divmod(self._messages - self.expected, len(self.landings))
        return loop, self.landings[number]


class LaneIO:
    """The lanes of one task, and the tags of its messages."""

    def __init__(self, transport: Transport, tag: int) -> None:
        """Listen on tags from this one on, one for each channel."""
        self._transport, self._tag = transport, tag
        self.lanes: list[LaneState] = []
        self.peer_tags: dict[int, int] = {}
        """The first tag that each peer listens on; one that is not here listens on ours."""
        self.sent: Counter[tuple[int, int]] = Counter()
        """How many messages have left, by peer and channel."""
        self.call_trace: CallTrace = NO_CALL_TRACE
        self._taken: Counter[tuple[int, int]] = Counter()
        self._discarding: list[Transfer] = []

    def listen(self, state: LaneState, room: Callable[[LaneState], Frame | None]) -> None:
        """Have room ready for the next messages of a lane."""
        peer = state.lane.receive
        while peer is not None and state.expected and state.wants_room():
            frame = room(state)
            if frame is None:
                return
            tag = self._tag + state.lane.channel
            transfer = self._transport.receive(peer, tag, frame.memory.address, frame.memory.nbytes)
            transfer.posted = perf_counter_ns()
            state.arriving.append((transfer, frame))
            state.expected -= 1

    def take(self, state: LaneState) -> Frame:
        """Return the next message of a lane, which is there."""
        transfer, frame = state.take()
        self._taken[state.lane.receive or 0, state.lane.channel] += 1
        frame.nbytes = transfer.nbytes
        state.taken += 1
        peer, nbytes = state.lane.receive or 0, transfer.nbytes
        self.call_trace.received(
            peer, transfer.posted, transfer.waited, nbytes, state.number, state.taken, transfer.rail
        )
        return frame

    def post(self, state: LaneState, frame: Frame) -> None:
        """Send a frame, which lets go of it once it has left."""
        peer, tag = self._next(state)
        transfer = self._transport.send(peer, tag, frame.memory.address, frame.nbytes)
        transfer.posted = perf_counter_ns()
        self._leave(state, transfer, frame)

    def relay(self, state: LaneState) -> bool:
        """Send on the message that has begun to arrive, as it does; say whether that can be."""
        received, frame = state.arriving[0]
        transfer = self._transport.relay(received, *self._next(state))
        if transfer is not None:
            self._leave(state, transfer, frame.hold())
        return transfer is not None

    def _next(self, state: LaneState) -> tuple[int, int]:
        """Return who a lane sends to, and by which tag."""
        peer = state.lane.send
        assert peer is not None
        return peer, self.peer_tags.get(peer, self._tag) + state.lane.channel

    def _leave(self, state: LaneState, transfer: Transfer, frame: Frame) -> None:
        self.sent[state.lane.send or 0, state.lane.channel] += 1
        state.leaving.append((transfer, frame))

    def settle(self, state: LaneState) -> bool:
        """Let go of frames that have been sent; say whether there were any."""
        moved = False
        while state.leaving and state.leaving[0][0].done():
            transfer, frame = state.leaving.popleft()
            state.left += 1
            self.call_trace.sent(
                state.lane.send or 0, transfer.posted, frame.nbytes, state.number, state.left, transfer.rail
            )
            frame.release()
            moved = True
        return moved

    def in_flight(self) -> Iterator[InFlight]:
        """Return the transfers that have not completed."""
        for state in self.lanes:
            to, source = state.lane.send or 0, state.lane.receive or 0
            # What is sent on while it arrives is not the next link's to answer for until all of it is here.
            for transfer, frame in ((one, frame) for one, frame in list(state.leaving) if one.posted):
                yield InFlight(SEND, to, transfer.rail, transfer.posted, 0, frame.nbytes)
            for transfer, _ in list(state.arriving):
                yield InFlight(RECV, source, transfer.rail, transfer.posted, transfer.waited, 0)

    def suspend(self) -> None:
        """Give back the memory that only waits for messages; what has arrived or is leaving stays."""
        for state in self.lanes:
            while state.arriving and state.arriving[-1][0].cancel():
                state.arriving.pop()[1].release()
                state.expected += 1

    def wind_down(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Throw away what peers have sent (`owed`, by peer and channel); say whether nothing is on its way any more."""
        for state in self.lanes:
            self._taken[state.lane.receive or 0, state.lane.channel] += len(state.arriving)
            self._discarding += [transfer for transfer, _ in state.arriving]
            state.arriving.clear()
        self._discarding += self._discarded(owed)  # before anything leaves: the peers may wait for just that
        self._discarding = [transfer for transfer in self._discarding if not transfer.done()]
        leaving = [transfer for state in self.lanes for transfer, _ in state.leaving if not transfer.done()]
        return not self._discarding and not leaving and all(owed[key] <= self._taken[key] for key in owed)

    def _discarded(self, owed: Mapping[tuple[int, int], int]) -> Iterator[Transfer]:
        """Start to receive, for nobody, what has been sent and not taken."""
        for (peer, channel), count in owed.items():
            while self._taken[peer, channel] < count:
                transfer = self._transport.discard(peer, self._tag + channel)
                if transfer is None:
                    break
                self._taken[peer, channel] += 1
                yield transfer

    def reclaim(self) -> None:
        """Take all memory back, now that nothing is on its way."""
        for state in self.lanes:
            state.leaving.clear()
            state.moves.close()
            state.staging.reclaim()


def _always() -> bool:
    return True
