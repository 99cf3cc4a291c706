"""Two ranks whose links are joined by paths in memory, which a test progresses, breaks and replaces.

Slow paths do not close at once: until then they write garbage into the buffer they were receiving into, and the memory
they were given to send must not change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

from mpi_gpucomp.transport.rails.link import Path, RailLink
from mpi_gpucomp.transport.rails.messages import TagMatcher
from mpi_gpucomp.transport.rails.sequence import PacketHeader, PathId


class Pipe(Path):
    """One end of a path: packets it sends wait until the other end takes them."""

    def __init__(self, end: End, path_id: PathId) -> None:
        super().__init__(path_id)
        self.end, self.closed = end, False
        self.wire: deque[tuple[bytes, bytes]] = deque()
        self.other: Pipe
        self._buffer: memoryview | None = None
        self._given: list[tuple[memoryview, bytes]] = []
        """The memory of packets that the peer has not taken, and its contents."""

    def wake(self) -> None:
        pass

    def last_seen(self, now: float) -> float:
        return now

    def fault(self) -> str | None:
        return None

    def close(self, on_closed: Callable[[], None]) -> None:
        assert not self.closed, "closed twice"
        self.closed, self._on_closed = True, on_closed
        self.end.closing.append(self)
        if not self.end.slow:
            self.finish_close()

    def finish_close(self) -> None:
        """Complete the close."""
        if self.end.slow and self._buffer is not None:
            self._buffer[:] = b"\xee" * len(self._buffer)
        assert all(memory == data for memory, data in self._given), "memory it may still read was overwritten"
        self.end.closing.remove(self)
        self._on_closed()

    def put(self) -> bool:
        """Send the next packet; its payload is read now, as by a socket."""
        if self.closed or (taken := self.end.link.next_packet(self)) is None:
            return False
        self.wire.append((taken[0], bytes(taken[1])))
        if self.end.slow:
            self._given.append((memoryview(taken[1]), bytes(taken[1])))
        return True

    def get(self, share: float = 1.0) -> bool:
        """Receive the next packet, or only its first part, after which the path breaks."""
        if self.closed or not self.other.wire:
            return False
        data, payload = self.other.wire.popleft()
        header = PacketHeader.unpack(data)
        buffer = self._buffer = self.end.link.accept(self, header)
        kept = int(len(payload) * share)
        if buffer is not None:
            buffer[:kept] = payload[:kept]
        if share < 1:
            self.end.link.drop_path(self, "broken")
        else:
            self._buffer = None
            if self.other._given:
                self.other._given.pop(0)
            self.end.link.on_packet(self, header, buffer)
            self.end.link.send_ack(self)
        return True


class End:
    """A rank with one peer."""

    def __init__(self, rank: int, tiers: list[list[int]], *, slow: bool) -> None:
        self.slow, self.closing = slow, list[Pipe]()
        post, wake = (lambda peer, item: self.link.post(item)), (lambda peer: self.link.wake())
        self.matcher = TagMatcher(rank, post, wake, nullcontext)
        self.link = RailLink(1 - rank, tiers, self.matcher, 1.0)


class Pair:
    """Two ranks."""

    def __init__(self, tiers: list[list[int]], *, slow: bool = False) -> None:
        self.rails = [rail for tier in tiers for rail in tier]
        self.ends = End(0, tiers, slow=slow), End(1, tiers, slow=slow)
        self.generations = dict.fromkeys(self.rails, 0)
        for rail in self.rails:
            self.connect(rail)

    def connect(self, rail: int) -> None:
        """Make a new path, which replaces the one on its rail."""
        self.generations[rail] += 1
        pipes = [Pipe(end, PathId(rail, self.generations[rail])) for end in self.ends]
        pipes[0].other, pipes[1].other = pipes[1], pipes[0]
        for end, pipe in zip(self.ends, pipes, strict=True):
            end.link.add_path(pipe)

    def path(self, side: int, rail: int) -> Pipe | None:
        found = self.ends[side].link.paths.get(rail)
        assert found is None or isinstance(found, Pipe)
        return found

    def joined(self) -> bool:
        """Return True if a path is open at both ends."""
        ends = [[self.path(side, rail) for side in (0, 1)] for rail in self.rails]
        return any(one is not None and one.other is two for one, two in ends)

    def run(self, rail: int, steps: int) -> None:
        """Pass some packets both ways on one rail."""
        for step in range(steps):
            pipe = self.path(step % 2, rail)
            _ = pipe is not None and (pipe.put(), pipe.get())

    def drain(self, seconds: float = 20.0, *, reconnect: bool = True) -> None:
        """Deliver everything, on new paths or on the remaining ones, which do not break any more."""
        deadline = time.monotonic() + seconds
        for rail in self.rails if reconnect else ():
            self.connect(rail)
        moved = True
        while moved:
            moved = False
            for pipe in [pipe for end in self.ends for pipe in end.closing]:
                pipe.finish_close()
                moved = True
            for side in (0, 1):
                for rail in self.rails:
                    pipe = self.path(side, rail)
                    moved |= pipe is not None and (pipe.put() | pipe.get())
            assert time.monotonic() < deadline, "timed out"
