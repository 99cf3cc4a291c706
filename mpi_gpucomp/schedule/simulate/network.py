"""Messages on links and ports that several of them share: each gets its fair part of what is there.

The shares are max-min fair, as long streams of TCP or of a lossless fabric come to have them: what one message cannot
use, because it is held up elsewhere, the others get. A share changes when a message joins or leaves, and only for
those that are joined to it by ports in common.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi_gpucomp.schedule.simulate.clock import Clock

__all__ = ["Flow", "Network"]


class Flow:
    """A message that moves: what is left of it, and how fast."""

    __slots__ = ("arrived", "left", "limit", "rate", "since", "through", "turn")

    def __init__(self, nbytes: float, limit: float, through: Sequence[int], arrived: Callable[[], None]) -> None:
        """Move so many bytes at `limit` bytes a second at most, through these shared things."""
        self.left, self.limit, self.through, self.arrived = nbytes, limit, through, arrived
        self.rate, self.since, self.turn = 0.0, 0.0, 0


class Network:
    """What messages share: each thing has a rate in bytes a second."""

    def __init__(self, clock: Clock, rates: Sequence[float]) -> None:
        """Begin with nothing on its way."""
        self._clock, self._rates = clock, rates
        # Not sets: the order must be the same in every run.
        self._using: list[dict[Flow, None]] = [{} for _ in rates]

    def join(self, flow: Flow) -> None:
        """Let a message set out."""
        flow.since = self._clock.now
        for number in flow.through:
            self._using[number][flow] = None
        self._share(self._joined([flow]))

    def _leave(self, flow: Flow, turn: int) -> None:
        if turn != flow.turn:
            return  # its share has changed since, and so has the time of its arrival
        for number in flow.through:
            del self._using[number][flow]
        touched = dict.fromkeys(other for number in flow.through for other in self._using[number])
        self._share(self._joined(list(touched)))
        flow.arrived()

    def _joined(self, flows: list[Flow]) -> list[Flow]:
        """Return all that share something with these, or with one that does, and so on."""
        seen, seen_ports = dict.fromkeys(flows), set[int]()
        todo = list(flows)
        while todo:
            for number in todo.pop().through:
                if number not in seen_ports:
                    seen_ports.add(number)
                    fresh = [other for other in self._using[number] if other not in seen]
                    seen.update(dict.fromkeys(fresh))
                    todo += fresh
        return list(seen)

    def _share(self, flows: list[Flow]) -> None:
        """Share out what there is among flows that nobody else shares anything with."""
        open_flows = dict.fromkeys(flows)
        left = {number: self._rates[number] for flow in flows for number in flow.through}
        count = dict.fromkeys(left, 0)
        for flow in flows:
            for number in flow.through:
                count[number] += 1
        while open_flows:
            level = min(left[number] / count[number] for number in left if count[number])
            level = min(level, min(flow.limit for flow in open_flows))
            full = {number for number in left if count[number] and left[number] / count[number] <= level * (1 + 1e-12)}
            settled = [flow for flow in open_flows if flow.limit <= level or not full.isdisjoint(flow.through)]
            for flow in settled:
                del open_flows[flow]
                self._set_rate(flow, level)
                for number in flow.through:
                    left[number] = max(0.0, left[number] - level)
                    count[number] -= 1

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        now = self._clock.now
        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
        flow.rate, flow.since, flow.turn = rate, now, flow.turn + 1
        self._clock.at(now + flow.left / rate, partial(self._leave, flow, flow.turn))
