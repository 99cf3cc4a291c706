"""Two ranks whose links are joined by paths in memory, which a test moves bit by bit, breaks and makes anew.

Slow ones are not quiet as soon as they are closed: until then they write rubbish where they were about to receive, and
what they were given to send must stay as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

from mpi_gpucomp.transport.rails.frames import Header
from mpi_gpucomp.transport.rails.link import Path, RailLink
from mpi_gpucomp.transport.rails.messages import Messages
from mpi_gpucomp.transport.rails.sequence import Key


class Pipe(Path):
    """One end of a path: what it sends waits for its other end to take it."""

    def __init__(self, end: End, key: Key) -> None:
        super().__init__(key)
        self.end, self.closed, self.mute = end, False, False
        self.wire: deque[tuple[bytes, bytes]] = deque()
        self.other: Pipe
        self._room: memoryview | None = None
        self._given: list[tuple[memoryview, bytes]] = []
        """What it has sent and the peer has not taken: the memory, and what was in it."""

    def wake(self) -> None:
        pass

    def heard(self, now: float) -> float:
        return now

    def fault(self) -> str | None:
        return None

    def close(self, quiet: Callable[[], None]) -> None:
        assert not self.closed, "it is closed once"
        self.closed, self._quiet = True, quiet
        self.end.fading.append(self)
        if not self.end.slow:
            self.calm()

    def calm(self) -> None:
        """Be quiet from now on."""
        if self.end.slow and self._room is not None:
            self._room[:] = b"\xee" * len(self._room)
        assert all(memory == data for memory, data in self._given), "what it may still read was used for something else"
        self.end.fading.remove(self)
        self._quiet()

    def put(self) -> bool:
        """Put the next frame on the wire; its payload is read now, as a socket does."""
        if self.closed or (taken := self.end.link.next(self)) is None:
            return False
        self.wire.append((taken[0], bytes(taken[1])))
        if self.end.slow:
            self._given.append((memoryview(taken[1]), bytes(taken[1])))
        return True

    def get(self, share: float = 1.0) -> bool:
        """Take the next frame from the wire, or only a first part of it, behind which the path breaks."""
        if self.closed or not self.other.wire:
            return False
        data, payload = self.other.wire.popleft()
        header = Header.read(data)
        room = self._room = self.end.link.accept(self, header)
        kept = int(len(payload) * share)
        if room is not None:
            room[:kept] = payload[:kept]
        if share < 1:
            self.end.link.down(self, "it broke")
        else:
            self._room = None
            if self.other._given:
                self.other._given.pop(0)  # it has left
            self.end.link.take(self, header, room)
            self.end.link.answer(self)
        return True


class End:
    """A rank with one peer."""

    def __init__(self, rank: int, tiers: list[list[int]], *, slow: bool) -> None:
        self.slow, self.fading = slow, list[Pipe]()
        post, wake = (lambda peer, item: self.link.post(item)), (lambda peer: self.link.wake())
        self.messages = Messages(rank, post, wake, nullcontext)
        self.link = RailLink(1 - rank, tiers, self.messages, 1.0)


class Pair:
    """Two ranks."""

    def __init__(self, tiers: list[list[int]], *, slow: bool = False) -> None:
        self.rails = [rail for tier in tiers for rail in tier]
        self.ends = End(0, tiers, slow=slow), End(1, tiers, slow=slow)
        self.generations = dict.fromkeys(self.rails, 0)
        for rail in self.rails:
            self.connect(rail)

    def connect(self, rail: int) -> None:
        """Make a new path; what was there on the rail is given up."""
        self.generations[rail] += 1
        pipes = [Pipe(end, Key(rail, self.generations[rail])) for end in self.ends]
        pipes[0].other, pipes[1].other = pipes[1], pipes[0]
        for end, pipe in zip(self.ends, pipes, strict=True):
            end.link.up(pipe)

    def path(self, side: int, rail: int) -> Pipe | None:
        found = self.ends[side].link.paths.get(rail)
        assert found is None or isinstance(found, Pipe)
        return found

    def joined(self) -> bool:
        """Say whether there is a path that is whole at both ends."""
        ends = [[self.path(side, rail) for side in (0, 1)] for rail in self.rails]
        return any(one is not None and one.other is two for one, two in ends)

    def run(self, rail: int, steps: int) -> None:
        """Let some frames pass both ways on one rail."""
        for step in range(steps):
            pipe = self.path(step % 2, rail)
            _ = pipe is not None and (pipe.put(), pipe.get())

    def settle(self, seconds: float = 20.0, *, anew: bool = True) -> None:
        """Let everything arrive, on new paths or on those that are left, which do not break any more."""
        deadline = time.monotonic() + seconds
        for rail in self.rails if anew else ():
            self.connect(rail)
        moved = True
        while moved:
            moved = False
            for pipe in [pipe for end in self.ends for pipe in end.fading]:
                pipe.calm()
                moved = True
            for side in (0, 1):
                for rail in self.rails:
                    pipe = self.path(side, rail)
                    moved |= pipe is not None and (pipe.put() | pipe.get())
            assert time.monotonic() < deadline, "it does not come to an end"
