"""Collectives that return when they are done: latency, after each of which there is a barrier outside the timer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from osu_bench.bench import Bench
from osu_bench.collectives import ALL, COLLECTIVES, Message
from osu_bench.flags import Defaults
from osu_bench.output import carry_out
from osu_bench.table import Comparison, Table

if TYPE_CHECKING:
    from osu_bench.collectives import Collective
    from osu_bench.contenders import Contender
    from osu_bench.flags import Flags
    from osu_bench.results import Row

__all__ = ["DEFAULTS", "barrier", "collective", "sizes_of", "table"]

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
