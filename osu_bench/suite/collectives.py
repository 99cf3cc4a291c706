"""Benchmarks of collectives: their buffers and expected results, latency, and overlap with computation.

Sizes are those of the OSU benchmarks: the message of a broadcast or reduction, one rank's block of an exchange.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.cli.command import allgather_json
from osu_bench.suite.buffers import Memory
from osu_bench.suite.flags import Defaults
from osu_bench.suite.runner import Bench, run_sizes
from osu_bench.suite.table import Comparison, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from osu_bench.suite.candidates import Candidate
    from osu_bench.suite.data import Values
    from osu_bench.suite.flags import Flags
    from osu_bench.suite.results import Row

__all__ = ["COLLECTIVES", "DEFAULTS", "Collective", "Message", "barrier", "collective", "overlap", "sizes_of", "table"]

ROOT = 0
NONE, ONE, ALL, SHARE = "none", "one", "all", "share"
"""Lengths of buffers: none, the message, one message per rank, this rank's share of the message."""


@dataclass(frozen=True)
class Collective:
    """A collective: its method, its buffers, and the traffic that it needs."""

    name: str
    title: str
    """Its name in the OSU benchmarks."""
    method: str
    send: str
    receive: str
    factor: Callable[[int], float]
    """Bytes that the busiest of n ranks sends or receives, as a fraction of the largest buffer."""
    sums: bool = False
    root_sends: bool = False
    """Only the root sends."""
    root_receives: bool = False

    def total(self, size: int, ranks: int) -> int:
        """Return the bytes of the largest buffer, which define bandwidth."""
        return size * ranks if ALL in (self.send, self.receive) else size

    def wire_bytes(self, size: int, ranks: int) -> float:
        """Return the bytes that the busiest rank must send or receive without compression."""
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
    """The buffers of a collective of one size, on one rank."""

    def __init__(
        self, collective: Collective, size: int, rank: int, ranks: int, memory: Memory, values: Values
    ) -> None:
        """Allocate the buffers; the size is rounded down to whole elements."""
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
        """Return the number of elements in each rank's share of the message."""
        each, more = divmod(self.count, self.ranks)
        return [each + (rank < more) for rank in range(self.ranks)]

    @property
    def buffers(self) -> tuple[Any, ...]:
        """The buffers, as the method takes them."""
        if self._in_place:
            return (self.receives,)
        return (self.sends, self.receives)

    def as_bytes(self, buffer: Any) -> Any:
        """Return a buffer as bytes, for libraries without its element type."""
        return self._memory.as_bytes(buffer)

    def host_buffers(self) -> tuple[Any, ...]:
        """Return the buffers as numpy arrays, without a copy if they are in host memory."""
        return tuple(None if buffer is None else self._memory.host(buffer) for buffer in self.buffers)

    @contextmanager
    def staged(self) -> Iterator[Message]:
        """Provide copies in host memory within the block, and copy the result back."""
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
        """Overwrite the receive buffer, so that only newly received data can be correct."""
        if self._in_place and self.rank == ROOT:
            host = np.empty(self.count, self._values.dtype)
            self._values.write(host, self._seed(ROOT))
            self._memory.write(self.receives, host)
        elif self.receives is not None:
            self._memory.write(self.receives, np.full(len(self.receives), 77, self._values.dtype))

    def wrong(self, tolerance: float) -> int:
        """Return the number of wrong elements."""
        if self.receives is None:
            return 0
        got = self._memory.host(self.receives)
        if self.collective.sums:
            first = sum(self.shares()[: self.rank]) if self.collective.receive == SHARE else 0
            return self._values.wrong_sum(got, range(self.ranks), first, tolerance)
        return sum(self._values.wrong(block, seed, tolerance) for block, seed in self._received(got))

    def max_error(self) -> float:
        """Return the largest error of a received element; not for reductions."""
        if self.receives is None:
            return 0.0
        got = self._memory.host(self.receives)
        return max(self._values.max_error(block, seed) for block, seed in self._received(got))

    def _received(self, got: Any) -> Iterator[tuple[Any, int]]:
        """Iterate over the received blocks and the seeds of their expected values."""
        if self.collective.receive == ONE:
            yield got, self._seed(ROOT, 0 if self._in_place else self.rank)
            return
        mine = self.rank if self.collective.send == ALL else 0
        for block in range(self.ranks):
            yield got[block * self.count : (block + 1) * self.count], self._seed(block, mine)


DEFAULTS = Defaults(largest=1 << 20, iterations=(1000, 100), warm_up=(100, 10))


def collective(flags: Flags) -> int:
    """Measure the latency of a blocking collective."""
    kind, bench = COLLECTIVES[flags.benchmark], Bench(flags)
    title = f"{bench.device} {kind.title} Latency"
    try:
        return run_sizes(bench, table(bench, title), sizes_of(bench, kind), lambda size: _measure(bench, kind, size))
    finally:
        bench.close()


def table(bench: Bench, title: str, style: str = "latency") -> Table | Comparison:
    """Return the table for one candidate, or for a comparison."""
    flags = bench.flags
    if len(bench.candidates) == 1:
        return Table(title, bench.values.type_name, style, flags)
    names = [one.name for one in bench.candidates]
    about = f"{title}, {bench.ranks} ranks, {bench.run.data} ({bench.run.dtype}): medians of the slowest rank"
    return Comparison(about, names, flags.columns or ["ratio"])


def sizes_of(bench: Bench, kind: Collective) -> list[int]:
    """Return the sizes whose buffers fit into memory."""
    each = sum(bench.ranks if length == ALL else 1 for length in (kind.send, kind.receive))
    return bench.flags.sizes(bench.values.dtype.itemsize, each)


def _measure(bench: Bench, kind: Collective, size: int) -> list[Row]:
    message = Message(kind, size, bench.rank, bench.ranks, bench.memory, bench.values)
    tolerances = {one.name: one.tolerance(bench.values, message) for one in bench.candidates}
    message.poison()
    for one in bench.candidates:
        bench.report(f"preparing {one.name}")
        one.prepare(message, bench.timed)

    def iterate(one: Candidate) -> tuple[float, int]:
        message.poison()
        seconds = bench.timed(lambda: one.call(message))
        bench.comm.Barrier()
        return seconds, message.wrong(tolerances[one.name])

    rows = bench.measure(size, iterate)
    for one, row in zip(bench.candidates, rows, strict=True):
        if tolerances[one.name] and not kind.sums:
            row.extra["max_error"] = _max_error(bench, one, message)
        bench.set_bandwidth(row, kind.total(size, bench.ranks), kind.factor(bench.ranks))
    return rows


def _max_error(bench: Bench, one: Candidate, message: Message) -> float:
    """Return the largest error of a lossy candidate, from one more call."""
    bench.report(f"measuring the error of {one.name}")
    message.poison()
    bench.timed(lambda: one.call(message))
    return float(max(allgather_json(bench.comm, float(message.max_error()))))


def barrier(flags: Flags) -> int:
    """Measure the latency of a barrier, which has neither size nor data."""
    bench = Bench(flags)
    try:
        layout = table(bench, "MPI Barrier Latency")
        if isinstance(layout, Table):
            layout = Table("MPI Barrier Latency", "", "latency", flags, sized=False)
        return run_sizes(
            bench, layout, [0], lambda size: bench.measure(size, lambda one: (bench.timed(one.barrier), 0))
        )
    finally:
        bench.close()


def overlap(flags: Flags) -> int:
    """Measure a non-blocking collective: alone, then overlapped with a computation of the same length."""
    kind, bench = COLLECTIVES[flags.benchmark.removeprefix("i")], Bench(flags)
    layout = table(bench, f"{bench.device} Non-blocking {kind.title} Latency", "overlap")
    try:
        return run_sizes(bench, layout, sizes_of(bench, kind), lambda size: _measure_overlap(bench, kind, size))
    finally:
        bench.close()


def _measure_overlap(bench: Bench, kind: Collective, size: int) -> list[Row]:
    message = Message(kind, size, bench.rank, bench.ranks, bench.memory, bench.values)
    tolerances = {one.name: one.tolerance(bench.values, message) for one in bench.candidates}
    for one in bench.candidates:
        one.prepare(message, bench.timed)

    def pure(one: Candidate) -> tuple[float, int]:
        message.poison()
        seconds = bench.timed(lambda: one.start(message).Wait())
        return seconds, message.wrong(tolerances[one.name])

    alone = bench.measure(size, pure)
    lengths = {row.candidate: row.average_us / 1e6 for row in alone}
    computed: dict[str, list[float]] = {one.name: [] for one in bench.candidates}

    def overlapped(one: Candidate) -> tuple[float, int]:
        message.poison()
        seconds = bench.timed(
            lambda: computed[one.name].append(_both(one, message, lengths[one.name], bench.flags.num_test_calls))
        )
        return seconds, message.wrong(tolerances[one.name])

    overall = bench.measure(size, overlapped)
    for row, both in zip(alone, overall, strict=True):
        _combine(bench, row, both, float(np.mean(computed[row.candidate])) * 1e6)
        bench.set_bandwidth(row, kind.total(size, bench.ranks), kind.factor(bench.ranks))
    return alone


def _both(one: Candidate, message: Message, seconds: float, tests: int) -> float:
    """Start the collective, compute for `seconds`, wait; return the seconds of the computation."""
    request = one.start(message)
    spent = 0.0
    for _ in range(tests + 1):
        spent += _compute(seconds / (tests + 1))
        if tests:
            request.Test()
    request.Wait()
    return spent


def _compute(seconds: float) -> float:
    """Keep this core busy for `seconds`; return the seconds spent."""
    numbers, start = _NUMBERS, perf_counter()
    while (spent := perf_counter() - start) < seconds:
        np.multiply(numbers, 1.0000001, out=numbers)
    return spent


_NUMBERS: np.ndarray[Any, Any] = np.ones(4096)


def _combine(bench: Bench, row: Row, both: Row, compute_us: float) -> None:
    """Compute the overlap as the OSU micro-benchmarks do."""
    compute_us = sum(allgather_json(bench.comm, compute_us)) / bench.ranks
    row.wrong += both.wrong
    exposed = max(0.0, both.average_us - compute_us)
    row.extra = {
        "overall_us": both.average_us,
        "compute_us": compute_us,
        "pure_us": row.average_us,
        "overlap": max(0.0, 100.0 - 100.0 * exposed / row.average_us),
    }
