"""Point-to-point benchmarks: latency, uni- and bidirectional bandwidth, and message rate of many pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpi_gpucomp.errors import SpecError
from osu_bench.suite.collectives import table
from osu_bench.suite.flags import Defaults
from osu_bench.suite.runner import Bench, run_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from osu_bench.suite.candidates import Candidate, Channel
    from osu_bench.suite.flags import Flags
    from osu_bench.suite.results import Row

__all__ = ["BANDWIDTH", "LATENCY", "bandwidth", "latency", "message_rate"]

LATENCY = Defaults(largest=1 << 22, iterations=(10000, 1000), warm_up=(100, 10))
BANDWIDTH = Defaults(largest=1 << 22, iterations=(100, 20), warm_up=(10, 2))
TAG, REPLY = 11, 12


class _Pair:
    """The peer of this rank, and the buffers between them."""

    def __init__(self, bench: Bench, size: int, pairs: int) -> None:
        self.bench, self.pairs = bench, pairs
        self.active, self.first = bench.rank < 2 * pairs, bench.rank < pairs
        self.peer = (bench.rank + pairs) % (2 * pairs) if self.active else MPI.PROC_NULL
        count = max(1, size // bench.values.dtype.itemsize)
        self.outgoing, self.incoming = (bench.memory.empty(count, bench.values.dtype) for _ in range(2))
        host = np.empty(count, bench.values.dtype)
        bench.values.write(host, bench.rank)
        bench.memory.write(self.outgoing, host)
        bench.memory.write(self.incoming, np.full(count, 77, bench.values.dtype))

    def wrong(self, tolerance: float) -> int:
        """Return the number of wrong elements in the last message received."""
        return self.bench.values.wrong(self.bench.memory.host(self.incoming), self.peer, tolerance)


def latency(flags: Flags) -> int:
    """Measure half the round-trip time of a message."""
    return _run(flags, "Latency", "latency", _ping_pong, halves=2, receives_all=True)


def bandwidth(flags: Flags) -> int:
    """Measure the bandwidth of windows of messages, in one direction (`bw`) or both (`bibw`)."""
    both = flags.benchmark == "bibw"
    title = "Bi-Directional Bandwidth" if both else "Bandwidth"
    return _run(flags, title, "bandwidth", _exchange if both else _stream, directions=1 + both, receives_all=both)


def message_rate(flags: Flags) -> int:
    """Measure bandwidth and message rate of many pairs."""
    return _run(flags, "Multiple Bandwidth / Message Rate", "message rate", _stream, many=True)


def _run(
    flags: Flags,
    title: str,
    style: str,
    transfer: Callable[[Channel, _Pair, int], None],
    *,
    halves: int = 1,
    directions: int = 1,
    many: bool = False,
    receives_all: bool = False,
) -> int:
    bench = Bench(flags)
    pairs = _pairs(bench, many=many)
    window = getattr(flags, "window_size", 1)

    def measure(size: int) -> list[Row]:
        pair = _Pair(bench, size, pairs)

        def iterate(one: Candidate) -> tuple[float, int]:
            channel = one.channel()
            seconds = bench.timed(lambda: transfer(channel, pair, window) if pair.active else None)
            received = pair.active and (receives_all or not pair.first)
            return seconds / halves, pair.wrong(one.message_tolerance(bench.values)) if received else 0

        rows = bench.measure(size, iterate)
        for row in rows:
            _set_rate(row, size * window * directions * pairs, window * directions * pairs)
        return rows

    try:
        layout = table(bench, f"{bench.device} {title}", style)
        return run_sizes(bench, layout, flags.sizes(bench.values.dtype.itemsize, 2), measure)
    finally:
        bench.close()


def _pairs(bench: Bench, *, many: bool) -> int:
    pairs = getattr(bench.flags, "pairs", None) or (bench.ranks // 2 if many else 1)
    enough = bench.ranks >= 2 * pairs > 0
    if enough and (many or bench.ranks == 2):
        return int(pairs)
    raise SpecError(
        f"benchmark {bench.flags.benchmark}",
        expected=f"{2 * max(1, pairs)} ranks{' or more' * many}",
        got=str(bench.ranks),
        remedy=f"Use mpirun -n {2 * max(1, pairs)}.",
        rank=bench.rank,
    )


def _set_rate(row: Row, nbytes: int, messages: int) -> None:
    row.extra = {"bandwidth": nbytes / row.slowest_us, "message_rate": messages / row.slowest_us * 1e6}
    row.algbw = row.busbw = nbytes / row.slowest_us / 1e3


def _ping_pong(channel: Channel, pair: _Pair, window: int) -> None:
    if pair.first:
        channel.send(pair.outgoing, pair.peer, TAG)
        channel.receive(pair.incoming, pair.peer, TAG)
    else:
        channel.receive(pair.incoming, pair.peer, TAG)
        channel.send(pair.outgoing, pair.peer, TAG)


def _stream(channel: Channel, pair: _Pair, window: int) -> None:
    """Send a window of messages and wait for a short reply."""
    if pair.first:
        _wait([channel.start_send(pair.outgoing, pair.peer, TAG) for _ in range(window)])
        pair.bench.comm.Recv(np.empty(1, np.uint8), pair.peer, REPLY)
    else:
        _wait([channel.start_receive(pair.incoming, pair.peer, TAG) for _ in range(window)])
        pair.bench.comm.Send(np.zeros(1, np.uint8), pair.peer, REPLY)


def _exchange(channel: Channel, pair: _Pair, window: int) -> None:
    receives = [channel.start_receive(pair.incoming, pair.peer, TAG) for _ in range(window)]
    sends = [channel.start_send(pair.outgoing, pair.peer, TAG) for _ in range(window)]
    _wait(receives + sends)


def _wait(requests: list[Any]) -> None:
    for request in requests:
        request.Wait()
