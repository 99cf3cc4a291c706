"""One running collective: how it begins, goes on, is set aside, ends, or is given up after a failure.

What it does is in `Steps`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from mpi_gpucomp.engine.meeting import CHANNELS
from mpi_gpucomp.engine.staging import Staging
from mpi_gpucomp.engine.steps import Steps
from mpi_gpucomp.engine.wire import AHEAD, LaneState
from mpi_gpucomp.errors import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

    from mpi_gpucomp.device import DType, Event, Stream
    from mpi_gpucomp.engine.coder import Coder
    from mpi_gpucomp.engine.layout import Layout
    from mpi_gpucomp.engine.steps import How
    from mpi_gpucomp.monitor.digest import UnderWay
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.transport.base import Transport

    StreamWork = Callable[[Stream], None]

__all__ = ["Task"]


class Task(Steps):
    """A collective on its way."""

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        dtype: DType,
        coder: Coder,
        transport: Transport,
        tag: int,
        *,
        name: str,
        before: StreamWork | None = None,
        after: StreamWork | None = None,
        **how: Unpack[How],
    ) -> None:
        """Take part as `Steps` says; `before` and `after` queue work on the stream ahead of everything, and behind."""
        _check_channels(algorithm, transport.rank)
        super().__init__(algorithm, layout, dtype, coder, transport, tag, name=name, **how)
        self.name, self.tag = name, tag
        self.peer_tags, self.sent = self._wire.peer_tags, self._wire.sent
        self._end: Event | None = None
        self.done = False
        """Whether every lane has come to its end, all work is done, and the caller may use the buffers."""
        self._before, self._after = before, after

    @property
    def longest(self) -> int:
        """Return the length of the longest block that this rank knows of."""
        return self._layout.longest

    def prepare(self, longest: int) -> None:
        """Get ready to move, now that the length of the longest block of all ranks is known."""
        self._layout.stretch(longest)
        self._wire.log = self.log
        if self._before is not None:
            self._before(self._coder.stream)
            self._watch()
        self._wire.lanes[:] = [self._prepared(number) for number in range(len(self._program.lanes))]

    def _prepared(self, number: int) -> LaneState:
        lane = self._program.lanes[number]
        kept = self._versions.kept(number)
        room = self._coder.room(self._layout.piece, self._dtype)
        # Frames that wait for other lanes must not take the place of those that would let them go on.
        staging = Staging(self._coder.memory, room, 2 * AHEAD + kept)
        landings = [
            self._lands(number, index, chunk)
            for index, step in enumerate(lane.steps)
            if step.receives
            for chunk in range(step.count)
        ]
        state = LaneState(lane, staging, self._layout.loops, landings)
        state.moves, state.number = self._walk(number, state), number & 0xFF
        return state

    @property
    def neighbours(self) -> frozenset[int]:
        """Return the ranks that it sends to or receives from."""
        peers = {peer for lane in self._program.lanes for peer in (lane.send, lane.receive) if peer is not None}
        return frozenset(peers)

    @property
    def busy(self) -> bool:
        """Say whether it has work of its own under way, and so does not (only) wait for a peer."""
        return bool(self._working or self._encoding or self._end)

    def move(self) -> bool:
        """Go on as far as possible without waiting; say whether anything has moved."""
        moved = self._settle_work()
        for state in self._wire.lanes:
            moved |= self._wire.settle(state)
            self._wire.listen(state, self._room)
            while state.ready is not None and state.ready():
                state.ready = next(state.moves, None)
                moved = True
        return self._finish() or moved

    def _finish(self) -> bool:
        """Notice the end: nothing under way, and the stream through with what was queued, copies too."""
        if self.done or self._working or any(state.ready or state.leaving for state in self._wire.lanes):
            return False
        if self._end is None:
            if self._after is not None:
                self._after(self._coder.stream)
            self._end = self._coder.stream.record()
        if self._end.done():
            self._end.wait()
            self.done = True
        return self.done

    def under_way(self) -> list[UnderWay]:
        """Return the chunks that are on the wire or waited for."""
        return list(self._wire.under_way())

    def suspend(self) -> None:
        """Give back the memory that only waits for messages; what has arrived or is leaving stays."""
        self._wire.suspend()

    def abandon(self) -> None:
        """Give up after a failure: stop listening, encode and send nothing more."""
        self.suspend()
        self._end = self._coder.stream.record()

    def halt(self) -> None:
        """Wait for the work that is queued: from then on no stream touches the caller's buffers."""
        with suppress(Exception):  # what went wrong is known
            self._coder.stream.record().wait()

    def wind_down(self, owed: Mapping[tuple[int, int], int]) -> bool:
        """Let what is under way come to its end, and throw away what peers have sent (`owed`, by peer and channel).

        Say whether nothing is left. Only then is the memory given back: until then the wire or the stream may use it.
        """
        assert self._end is not None, "abandon first"
        if not self._wire.wind_down(owed) or not self._end.done():
            return False
        with suppress(Exception):
            self._end.wait()  # or what went wrong here and nobody has asked for would meet the next one on this stream
        self._wire.reclaim()
        self._scratch.reclaim()
        return True


def _check_channels(algorithm: Algorithm, rank: int) -> None:
    channels = 1 + max((lane.channel for lane in algorithm.programs[rank].lanes), default=0)
    if channels > CHANNELS:
        raise ScheduleError(
            f"algorithm {algorithm.name}",
            expected=f"at most {CHANNELS} channels",
            got=f"{channels}",
            remedy="Let lanes that go to different peers share a channel.",
            rank=rank,
        )
