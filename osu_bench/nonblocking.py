"""Collectives that are started: how much of their time a rank can compute in.

First alone, which is the pure communication time; then with a computation of that length between start and wait.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from osu_bench.bench import Bench
from osu_bench.blocking import DEFAULTS, sizes_of, table
from osu_bench.collectives import COLLECTIVES, Message
from osu_bench.output import carry_out

if TYPE_CHECKING:
    from typing import Any

    from osu_bench.collectives import Collective
    from osu_bench.contenders import Contender
    from osu_bench.flags import Flags
    from osu_bench.results import Row

__all__ = ["DEFAULTS", "overlap"]


def overlap(flags: Flags) -> int:
    """Measure a collective that is started."""
    kind, bench = COLLECTIVES[flags.benchmark.removeprefix("i")], Bench(flags)
    layout = table(bench, f"{bench.device} Non-blocking {kind.title} Latency", "overlap")
    try:
        return carry_out(bench, layout, sizes_of(bench, kind), lambda size: _measure(bench, kind, size))
    finally:
        bench.close()


def _measure(bench: Bench, kind: Collective, size: int) -> list[Row]:
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
