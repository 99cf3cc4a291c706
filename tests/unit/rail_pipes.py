"""Two ranks whose links are joined by paths in memory, which a test moves bit by bit, breaks and makes anew."""

from __future__ import annotations

import time
from collections import deque
from contextlib import nullcontext

from mpi_gpucomp.transport.rails.frames import Header
from mpi_gpucomp.transport.rails.link import Link
from mpi_gpucomp.transport.rails.messages import Messages
from mpi_gpucomp.transport.rails.path import Path
from mpi_gpucomp.transport.rails.pointers import Key


class Pipe(Path):
    """One end of a path: what it sends waits for its other end to take it."""

    def __init__(self, end: End, key: Key) -> None:
        super().__init__(key)
        self.end, self.closed, self.mute = end, False, False
        self.wire: deque[tuple[bytes, bytes]] = deque()
        self.other: Pipe

    def wake(self) -> None:
        pass

    def heard(self, now: float) -> float:
        return now

    def fault(self) -> str | None:
        return None

    def close(self) -> None:
        self.closed = True

    def put(self) -> bool:
        """Put the next frame on the wire; its payload is read now, as a socket does."""
        if self.closed or (taken := self.end.link.next(self)) is None:
            return False
        self.wire.append((taken[0], bytes(taken[1])))
        return True

    def get(self, share: float = 1.0) -> bool:
        """Take the next frame from the wire, or only a first part of it, behind which the path breaks."""
        if self.closed or not self.other.wire:
            return False
        data, payload = self.other.wire.popleft()
        header = Header.read(data)
        room = self.end.link.accept(self, header)
        kept = int(len(payload) * share)
        if room is not None:
            room[:kept] = payload[:kept]
        if share < 1:
            self.end.link.down(self, "it broke")
        else:
            self.end.link.take(self, header, room)
            self.end.link.answer(self)
        return True


class End:
    """A rank with one peer."""

    def __init__(self, rank: int, tiers: list[list[int]]) -> None:
        post, wake = (lambda peer, item: self.link.post(item)), (lambda peer: self.link.wake())
        self.messages = Messages(rank, post, wake, nullcontext)
        self.link = Link(1 - rank, tiers, self.messages, 1.0)


class Pair:
    """Two ranks."""

    def __init__(self, tiers: list[list[int]]) -> None:
        self.rails = [rail for tier in tiers for rail in tier]
        self.ends = End(0, tiers), End(1, tiers)
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

    def settle(self, seconds: float = 20.0, *, anew: bool = True) -> None:
        """Let everything arrive, on new paths or on those that are left, which do not break any more."""
        deadline = time.monotonic() + seconds
        for rail in self.rails if anew else ():
            self.connect(rail)
        moved = True
        while moved:
            moved = False
            for side in (0, 1):
                for rail in self.rails:
                    pipe = self.path(side, rail)
                    moved |= pipe is not None and (pipe.put() | pipe.get())
            assert time.monotonic() < deadline, "it does not come to an end"
