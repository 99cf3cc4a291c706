"""The transfers of one task: sends and receives of each lane, and how they are drained after a failure."""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING

from mpi_gpucomp.trace import NO_CALL_TRACE, RECV, SEND, CallTrace, InFlight

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from mpi_gpucomp.engine.staging import Slot, Staging
    from mpi_gpucomp.schedule.ir import Lane, Place
    from mpi_gpucomp.transport.base import Transfer, Transport

    Ready = Callable[[], bool]
    Moves = Generator[Ready, None, None]

__all__ = ["AHEAD", "LaneIO", "LaneState"]

AHEAD = 2
"""Receives that a lane posts ahead."""
DEPTH = 8
"""Sends of a lane in flight: hundreds of announced messages would delay the first in MPI."""
QUICK = 1e-3
"""Seconds between messages below which a second receive is posted at once: shared memory, or a fast link."""


class LaneState:
    """The transfers of one lane, and what it waits for."""

    def __init__(self, lane: Lane, staging: Staging, loops: int, targets: list[Place | None]) -> None:
        """Expect one message in each loop for every target: its place in the output, or None for a staging slot."""
        self.lane, self.staging, self.targets = lane, staging, targets
        self.expected = self._messages = loops * len(targets)
        self.arriving: deque[tuple[Transfer, Slot]] = deque()
        self.leaving: deque[tuple[Transfer, Slot]] = deque()
        self.moves: Moves
        self.ready: Ready | None = _always
        self.chunk = 0
        """The current chunk, for errors."""
        self.number = self.left = self.taken = 0
        """The lane's number, and its completed sends and receives, for the trace."""
        self._taken_at, self._interval = -inf, inf

    def wants_receive(self) -> bool:
        """Return True if it is time to post another receive.

        While one is in flight, the next is posted when about half of it should have arrived. Without it the link would
        idle during the rendezvous of the next message. With both from the start MPI would interleave them, and the
        first would arrive no sooner than the second.
        """
        if not self.arriving:
            return True
        if len(self.arriving) >= AHEAD:
            return False
        return self._interval < QUICK or perf_counter() - self._taken_at > self._interval / 2

    def take(self) -> tuple[Transfer, Slot]:
        """Return the next message, which has arrived, and measure the interval of messages."""
        now = perf_counter()
        self._interval, self._taken_at = max(0.0, now - self._taken_at), now
        return self.arriving.popleft()

    def has_message(self) -> bool:
        """Return True if the next message has arrived."""
        return bool(self.arriving) and self.arriving[0][0].done()

    def has_begun(self) -> bool:
        """Return True if a part of the next message has arrived."""
        return bool(self.arriving) and self.arriving[0][0].begun()

    def may_send(self) -> bool:
        """Return True if another send may be posted."""
        return len(self.leaving) < DEPTH

    def wait_from_now(self) -> None:
        """Record, for the trace, that the lane is blocked on the next message."""
        if self.arriving and not self.arriving[0][0].waited:
            self.arriving[0][0].waited = perf_counter_ns()

    def next_target(self) -> tuple[int, Place | None]:
        """Return loop and target of the next message without a posted receive."""
        loop, number = divmod(self._messages - self.expected, len(self.targets))
        return loop, self.targets[number]


class LaneIO:
    """The lanes of one task, and the tags of their messages."""

    def __init__(self, transport: Transport, tag: int) -> None:
        """Receive on tags from this one on, one for each channel."""
        self._transport, self._tag = transport, tag
        self.lanes: list[LaneState] = []
        self.peer_tags: dict[int, int] = {}
        """The first tag that each peer receives on; others use ours."""
        self.sent: Counter[tuple[int, int]] = Counter()
        """Messages sent, by peer and channel."""
        self.call_trace: CallTrace = NO_CALL_TRACE
        self._taken: Counter[tuple[int, int]] = Counter()
        self._discarding: list[Transfer] = []

    def post_receives(self, state: LaneState, make_slot: Callable[[LaneState], Slot | None]) -> None:
        """Post receives for the next messages of a lane."""
        peer = state.lane.receive
        while peer is not None and state.expected and state.wants_receive():
            slot = make_slot(state)
            if slot is None:
                return
            tag = self._tag + state.lane.channel
            transfer = self._transport.receive(peer, tag, slot.memory.address, slot.memory.nbytes)
            transfer.posted = perf_counter_ns()
            state.arriving.append((transfer, slot))
            state.expected -= 1

    def take(self, state: LaneState) -> Slot:
        """Return the next message of a lane, which has arrived."""
        transfer, slot = state.take()
        self._taken[state.lane.receive or 0, state.lane.channel] += 1
        slot.nbytes = transfer.nbytes
        state.taken += 1
        peer, nbytes = state.lane.receive or 0, transfer.nbytes
        self.call_trace.received(
            peer, transfer.posted, transfer.waited, nbytes, state.number, state.taken, transfer.rail
        )
        return slot

    def post(self, state: LaneState, slot: Slot) -> None:
        """Send a frame; the slot is released when the send has completed."""
        peer, tag = self._next(state)
        transfer = self._transport.send(peer, tag, slot.memory.address, slot.nbytes)
        transfer.posted = perf_counter_ns()
        self._leave(state, transfer, slot)

    def relay(self, state: LaneState) -> bool:
        """Relay the message that has begun to arrive; return False where the transport cannot."""
        received, slot = state.arriving[0]
        transfer = self._transport.relay(received, *self._next(state))
        if transfer is not None:
            self._leave(state, transfer, slot.hold())
        return transfer is not None

    def _next(self, state: LaneState) -> tuple[int, int]:
        """Return the peer and tag of a lane's sends."""
        peer = state.lane.send
        assert peer is not None
        return peer, self.peer_tags.get(peer, self._tag) + state.lane.channel

    def _leave(self, state: LaneState, transfer: Transfer, slot: Slot) -> None:
        self.sent[state.lane.send or 0, state.lane.channel] += 1
        state.leaving.append((transfer, slot))

    def release_sent(self, state: LaneState) -> bool:
        """Release the slots of completed sends; return True if there were any."""
        moved = False
        while state.leaving and state.leaving[0][0].done():
            transfer, slot = state.leaving.popleft()
            state.left += 1
            self.call_trace.sent(
                state.lane.send or 0, transfer.posted, slot.nbytes, state.number, state.left, transfer.rail
            )
            slot.release()
            moved = True
        return moved

    def in_flight(self) -> Iterator[InFlight]:
        """Return the transfers that have not completed."""
        for state in self.lanes:
            to, source = state.lane.send or 0, state.lane.receive or 0
            # A relayed message does not count for the next link until all of it has arrived here.
            for transfer, slot in ((one, slot) for one, slot in list(state.leaving) if one.posted):
                yield InFlight(SEND, to, transfer.rail, transfer.posted, 0, slot.nbytes)
            for transfer, _ in list(state.arriving):
                yield InFlight(RECV, source, transfer.rail, transfer.posted, transfer.waited, 0)

    def suspend(self) -> None:
        """Cancel unmatched receives and release their slots; other transfers continue."""
        for state in self.lanes:
            while state.arriving and state.arriving[-1][0].cancel():
                state.arriving.pop()[1].release()
                state.expected += 1

    def drain(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Drop what peers have sent (`owed`, by peer and channel); return True if nothing is in flight any more."""
        for state in self.lanes:
            self._taken[state.lane.receive or 0, state.lane.channel] += len(state.arriving)
            self._discarding += [transfer for transfer, _ in state.arriving]
            state.arriving.clear()
        self._discarding += self._discarded(owed)  # before testing sends: the peers may wait for just that
        self._discarding = [transfer for transfer in self._discarding if not transfer.done()]
        leaving = [transfer for state in self.lanes for transfer, _ in state.leaving if not transfer.done()]
        return not self._discarding and not leaving and all(owed[key] <= self._taken[key] for key in owed)

    def _discarded(self, owed: Mapping[tuple[int, int], int]) -> Iterator[Transfer]:
        """Receive and drop messages that were sent and not taken."""
        for (peer, channel), count in owed.items():
            while self._taken[peer, channel] < count:
                transfer = self._transport.discard(peer, self._tag + channel)
                if transfer is None:
                    break
                self._taken[peer, channel] += 1
                yield transfer

    def free(self) -> None:
        """Release all memory, now that nothing is in flight."""
        for state in self.lanes:
            state.leaving.clear()
            state.moves.close()
            state.staging.free()


def _always() -> bool:
    return True
