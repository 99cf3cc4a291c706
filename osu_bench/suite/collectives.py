"""The collectives that are measured: their buffers, what must be in them, and how much has to cross the wire.

Sizes are counted as the OSU benchmarks do: the message of a broadcast or a sum, and one rank's part of an exchange.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from osu_bench.suite.buffers import Memory
from osu_bench.suite.flags import Defaults
from osu_bench.suite.runner import Bench, carry_out
from osu_bench.suite.table import Comparison, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from osu_bench.suite.candidates import Contender
    from osu_bench.suite.data import Values
    from osu_bench.suite.flags import Flags
    from osu_bench.suite.results import Row

__all__ = ["COLLECTIVES", "DEFAULTS", "Collective", "Message", "barrier", "collective", "overlap", "sizes_of", "table"]

ROOT = 0
NONE, ONE, ALL, SHARE = "none", "one", "all", "share"
"""How long a buffer is: not there, the message, one message for each rank, this rank's share of a message."""


@dataclass(frozen=True)
class Collective:
    """One benchmark."""

    name: str
    title: str
    """What the OSU benchmarks call it."""
    method: str
    send: str
    receive: str
    factor: Callable[[int], float]
    """The bytes that have to leave or reach the busiest rank, of the largest buffer's, among n ranks."""
    sums: bool = False
    root_sends: bool = False
    """Only the root has something to send."""
    root_receives: bool = False

    def total(self, size: int, ranks: int) -> int:
        """Return the bytes of the largest buffer, from which bandwidth is computed."""
        return size * ranks if ALL in (self.send, self.receive) else size

    def wire_bytes(self, size: int, ranks: int) -> float:
        """Return the fewest bytes that the busiest rank sends or receives without compression."""
        return self.factor(ranks) * self.total(size, ranks)


def _once(ranks: int) -> float:
    return 1.0 if ranks > 1 else 0.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


COLLECTIVES = {
    item.name: item
    for item in (
        Collective("bcast", "Broadcast", "Bcast", NONE, ONE, _once, root_sends=True),
        Collective("reduce", "Reduce", "Reduce", ONE, ONE, _once, sums=True, root_receives=True),
        Collective("allreduce", "Allreduce", "Allreduce", ONE, ONE, _twice, sums=True),
        Collective("allgather", "Allgather", "Allgather", ONE, ALL, _others),
        Collective("reduce_scatter", "Reduce_scatter", "Reduce_scatter", ONE, SHARE, _others, sums=True),
        Collective("alltoall", "All-to-All Personalized Exchange", "Alltoall", ALL, ALL, _others),
        Collective("gather", "Gather", "Gather", ONE, ALL, _others, root_receives=True),
        Collective("scatter", "Scatter", "Scatter", ALL, ONE, _others, root_sends=True),
    )
}


class Message:
    """The buffers of one collective with one size on one rank."""

    def __init__(
        self, collective: Collective, size: int, rank: int, ranks: int, memory: Memory, values: Values
    ) -> None:
        """Make the buffers; a size that is no multiple of an element is cut."""
        self.collective, self.rank, self.ranks = collective, rank, ranks
        self.dtype, self.on_gpu = values.dtype, memory.on_gpu
        self._memory, self._values = memory, values
        self.count = max(1, size // values.dtype.itemsize)
        self._in_place = collective.send == NONE
        self.sends = None if self._in_place or not self._has(collective.root_sends) else self._buffer(collective.send)
        self.receives = self._buffer(collective.receive) if self._has(collective.root_receives) else None
        self._fill()

    def _has(self, root_only: bool) -> bool:
        return self.rank == ROOT or not root_only or self._in_place

    def _buffer(self, length: str) -> Any:
        count = {ONE: self.count, ALL: self.count * self.ranks, SHARE: self.shares()[self.rank]}[length]
        return self._memory.empty(count, self._values.dtype)

    def shares(self) -> list[int]:
        """Return how many elements of a message each rank gets."""
        each, more = divmod(self.count, self.ranks)
        return [each + (rank < more) for rank in range(self.ranks)]

    @property
    def buffers(self) -> tuple[Any, ...]:
        """The arguments of the method that are buffers."""
        if self._in_place:
            return (self.receives,)
        return (self.sends, self.receives)

    def as_bytes(self, buffer: Any) -> Any:
        """Return a buffer as bytes, for those who do not know its type."""
        return self._memory.as_bytes(buffer)

    def host_buffers(self) -> tuple[Any, ...]:
        """Return the buffers as numpy's arrays: themselves, if they are in host memory."""
        return tuple(None if buffer is None else self._memory.host(buffer) for buffer in self.buffers)

    @contextmanager
    def staged(self) -> Iterator[Message]:
        """Copy to the host for the length of the block, and back."""
        copies = copy(self)
        copies._memory = Memory()
        copies.sends, copies.receives = (
            None if buffer is None else self._memory.host(buffer) for buffer in (self.sends, self.receives)
        )
        yield copies
        if copies.receives is not None:
            self._memory.write(self.receives, copies.receives)

    def _seed(self, sender: int, block: int = 0) -> int:
        return sender + self.ranks * block

    def _fill(self) -> None:
        if self.sends is None:
            return
        host = np.empty(len(self.sends), self._values.dtype)
        for block in range(len(host) // self.count):
            self._values.write(host[block * self.count : (block + 1) * self.count], self._seed(self.rank, block))
        self._memory.write(self.sends, host)

    def poison(self) -> None:
        """Make sure that what is found afterwards was received just now."""
        if self._in_place and self.rank == ROOT:
            host = np.empty(self.count, self._values.dtype)
            self._values.write(host, self._seed(ROOT))
            self._memory.write(self.receives, host)
        elif self.receives is not None:
            self._memory.write(self.receives, np.full(len(self.receives), 77, self._values.dtype))

    def wrong(self, tolerance: float) -> int:
        """Count the elements that are not what they should be."""
        if self.receives is None:
            return 0
        got = self._memory.host(self.receives)
        if self.collective.sums:
            first = sum(self.shares()[: self.rank]) if self.collective.receive == SHARE else 0
            return self._values.wrong_sum(got, range(self.ranks), first, tolerance)
        wrong = self._values.wrong
        if self.collective.receive == ONE:
            return wrong(got, self._seed(ROOT, 0 if self._in_place else self.rank), tolerance)
        blocks = range(self.ranks)
        mine = self.rank if self.collective.send == ALL else 0
        return sum(wrong(got[b * self.count : (b + 1) * self.count], self._seed(b, mine), tolerance) for b in blocks)


# Collectives that return when they are done: latency, after each of which there is a barrier outside the timer.

DEFAULTS = Defaults(largest=1 << 20, iterations=(1000, 100), warm_up=(100, 10))


def collective(flags: Flags) -> int:
    """Measure a collective."""
    kind, bench = COLLECTIVES[flags.benchmark], Bench(flags)
    title = f"{bench.device} {kind.title} Latency"
    try:
        return carry_out(bench, table(bench, title), sizes_of(bench, kind), lambda size: _measure(bench, kind, size))
    finally:
        bench.close()


def table(bench: Bench, title: str, style: str = "latency") -> Table | Comparison:
    """Return the table that suits the number of contenders."""
    flags = bench.flags
    if len(bench.contenders) == 1:
        return Table(title, bench.values.type_name, style, flags)
    names = [one.name for one in bench.contenders]
    about = f"{title}, {bench.ranks} ranks, {bench.run.data} ({bench.run.dtype}): medians of the slowest rank"
    return Comparison(about, names, flags.columns or ["ratio"])


def sizes_of(bench: Bench, kind: Collective) -> list[int]:
    """Return the sizes whose buffers fit into memory."""
    each = sum(bench.ranks if length == ALL else 1 for length in (kind.send, kind.receive))
    return bench.flags.sizes(bench.values.dtype.itemsize, each)


def _measure(bench: Bench, kind: Collective, size: int) -> list[Row]:
    message = Message(kind, size, bench.rank, bench.ranks, bench.memory, bench.values)
    tolerances = {one.name: one.tolerance(bench.values, message) for one in bench.contenders}
    message.poison()
    for one in bench.contenders:
        one.prepare(message, bench.timed)

    def turn(one: Contender) -> tuple[float, int]:
        message.poison()
        seconds = bench.timed(lambda: one.call(message))
        bench.comm.Barrier()
        return seconds, message.wrong(tolerances[one.name])

    rows = bench.measure(size, turn)
    for row in rows:
        bench.set_bandwidth(row, kind.total(size, bench.ranks), kind.factor(bench.ranks))
    return rows


def barrier(flags: Flags) -> int:
    """Measure a barrier, which has neither size nor data."""
    bench = Bench(flags)
    try:
        layout = table(bench, "MPI Barrier Latency")
        if isinstance(layout, Table):
            layout = Table("MPI Barrier Latency", "", "latency", flags, sized=False)
        return carry_out(
            bench, layout, [0], lambda size: bench.measure(size, lambda one: (bench.timed(one.barrier), 0))
        )
    finally:
        bench.close()


# Collectives that are started: how much of their time a rank can compute in.
#
# First alone, which is the pure communication time; then with a computation of that length between start and wait.


def overlap(flags: Flags) -> int:
    """Measure a collective that is started."""
    kind, bench = COLLECTIVES[flags.benchmark.removeprefix("i")], Bench(flags)
    layout = table(bench, f"{bench.device} Non-blocking {kind.title} Latency", "overlap")
    try:
        return carry_out(bench, layout, sizes_of(bench, kind), lambda size: _nonblocking_measure(bench, kind, size))
    finally:
        bench.close()


def _nonblocking_measure(bench: Bench, kind: Collective, size: int) -> list[Row]:
    message = Message(kind, size, bench.rank, bench.ranks, bench.memory, bench.values)
    tolerances = {one.name: one.tolerance(bench.values, message) for one in bench.contenders}
    for one in bench.contenders:
        one.prepare(message, bench.timed)

    def pure(one: Contender) -> tuple[float, int]:
        message.poison()
        seconds = bench.timed(lambda: one.start(message).Wait())
        return seconds, message.wrong(tolerances[one.name])

    alone = bench.measure(size, pure)
    lengths = {row.contender: row.average_us / 1e6 for row in alone}
    computed: dict[str, list[float]] = {one.name: [] for one in bench.contenders}

    def overlapped(one: Contender) -> tuple[float, int]:
        message.poison()
        seconds = bench.timed(
            lambda: computed[one.name].append(_both(one, message, lengths[one.name], bench.flags.num_test_calls))
        )
        return seconds, message.wrong(tolerances[one.name])

    overall = bench.measure(size, overlapped)
    for row, both in zip(alone, overall, strict=True):
        _combine(bench, row, both, float(np.mean(computed[row.contender])) * 1e6)
        bench.set_bandwidth(row, kind.total(size, bench.ranks), kind.factor(bench.ranks))
    return alone


def _both(one: Contender, message: Message, seconds: float, tests: int) -> float:
    """Start, compute for so long, wait; return how long the computation alone took."""
    request = one.start(message)
    spent = 0.0
    for _ in range(tests + 1):
        spent += _compute(seconds / (tests + 1))
        if tests:
            request.Test()
    request.Wait()
    return spent


def _compute(seconds: float) -> float:
    """Keep this core busy with numbers for so long."""
    numbers, start = _NUMBERS, perf_counter()
    while (spent := perf_counter() - start) < seconds:
        np.multiply(numbers, 1.0000001, out=numbers)
    return spent


_NUMBERS: np.ndarray[Any, Any] = np.ones(4096)


def _combine(bench: Bench, row: Row, both: Row, compute_us: float) -> None:
    """Put pure, overall and computing time together, in the way of the OSU micro-benchmarks."""
    compute_us = bench.comm.allreduce(compute_us) / bench.ranks
    row.wrong += both.wrong
    exposed = max(0.0, both.average_us - compute_us)
    row.extra = {
        "overall_us": both.average_us,
        "compute_us": compute_us,
        "pure_us": row.average_us,
        "overlap": max(0.0, 100.0 - 100.0 * exposed / row.average_us),
    }
