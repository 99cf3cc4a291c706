"""The messages of one task: what arrives and leaves in each lane, and how it all comes to an end after a failure."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from mpi_gpucomp.engine.staging import Frame, Staging
    from mpi_gpucomp.schedule.ir import Lane, Place
    from mpi_gpucomp.transport.base import Transfer, Transport

    Ready = Callable[[], bool]
    Moves = Generator[Ready, None, None]

__all__ = ["AHEAD", "LaneState", "Wire"]

AHEAD = 2
"""Messages that a lane has room for before it needs them; more would make MPI interleave them."""


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

    def has_message(self) -> bool:
        """Say whether the next message is there."""
        return bool(self.arriving) and self.arriving[0][0].done()

    def next_landing(self) -> tuple[int, Place | None]:
        """Return the loop of the next message that there is no room for yet, and where it goes."""
        loop, number = divmod(self._messages - self.expected, len(self.landings))
        return loop, self.landings[number]


class Wire:
    """The lanes of one task, and the tags of its messages."""

    def __init__(self, transport: Transport, tag: int) -> None:
        """Listen on tags from this one on, one for each channel."""
        self._transport, self._tag = transport, tag
        self.lanes: list[LaneState] = []
        self.peer_tags: dict[int, int] = {}
        """The first tag that each peer listens on; one that is not here listens on ours."""
        self.sent: Counter[tuple[int, int]] = Counter()
        """How many messages have left, by peer and channel."""
        self._taken: Counter[tuple[int, int]] = Counter()
        self._discarding: list[Transfer] = []

    def listen(self, state: LaneState, room: Callable[[LaneState], Frame | None]) -> None:
        """Have room ready for the next messages of a lane."""
        peer = state.lane.receive
        while peer is not None and state.expected and len(state.arriving) < AHEAD:
            frame = room(state)
            if frame is None:
                return
            tag = self._tag + state.lane.channel
            transfer = self._transport.receive(peer, tag, frame.memory.address, frame.memory.nbytes)
            state.arriving.append((transfer, frame))
            state.expected -= 1

    def take(self, state: LaneState) -> Frame:
        """Return the next message of a lane, which is there."""
        transfer, frame = state.arriving.popleft()
        self._taken[state.lane.receive or 0, state.lane.channel] += 1
        frame.nbytes = transfer.nbytes
        return frame

    def post(self, state: LaneState, frame: Frame) -> None:
        """Send a frame, which lets go of it once it has left."""
        peer, channel = state.lane.send, state.lane.channel
        assert peer is not None
        tag = self.peer_tags.get(peer, self._tag) + channel
        self.sent[peer, channel] += 1
        state.leaving.append((self._transport.send(peer, tag, frame.memory.address, frame.nbytes), frame))

    @staticmethod
    def settle(state: LaneState) -> bool:
        """Let go of frames that have been sent; say whether there were any."""
        moved = False
        while state.leaving and state.leaving[0][0].done():
            state.leaving.popleft()[1].release()
            moved = True
        return moved

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
