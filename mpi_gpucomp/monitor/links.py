"""Rates of one communicator, each compared with its own mean: of its links, its codec and its calls.

The bandwidth of a link is measured over a sliding window of chunks: their bytes over the time in which they were in
flight, plus the short gaps in which the link drains a socket buffer that took a chunk at once. Longer gaps, in which
there was nothing to send, do not count. Every rate is compared with its mean in calls of the same class: those with the
same signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.trace import DECODE, ENCODE, RECV, SEND

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["KNOWN_CHUNKS", "KNOWN_WINDOWS", "MAX_CLASSES", "SLOW", "WINDOW", "CallDurations", "CodecRate"]
__all__ += ["CommCounters", "LinkStats"]

WINDOW = 8
"""Chunks of a window: one alone is noise, and 32 hide changes.

A window has more chunks if more have completed since the last one: a polling thread sees completions in bursts.
"""
SLOW, RECOVERED = 0.5, 0.75
"""Shares of the mean below which a link is slow, and from which on it has recovered."""
SPREADS, MAX_SPREAD = 3.0, log(4.0)
"""A slow link is also this many times its usual deviation below the mean, as a logarithm.

Bandwidth that the wire limits hardly deviates. Bandwidth that busy processors limit may halve from window to window.
"""
BUSY = 0.5
"""The share of a window in which a link must have had chunks in flight to be compared, and to count for the mean.

A chunk that is sent alone may complete at once, in a socket buffer: it shows little of the link.
"""
KNOWN_CHUNKS, KNOWN_WINDOWS = 32, 6
"""Chunks and windows after which the mean of a class is known: the first ones go into empty buffers."""
WEIGHT, MAX_WEIGHT = 1 / 32, 1 / 8
"""Of a new chunk in the mean, and of a window of many."""
LASTS_NS = 250_000_000
"""How long a link must be slow before it counts: a machine with more ranks than cores has slow moments."""
ACCEPTED_NS = 60_000_000_000
"""How long until a slow bandwidth is accepted as the new mean."""
STALE_NS = 3_000_000_000
"""How long the last window of a link is valid."""
STUCK_CHUNKS = 8
"""Chunk times without a completion after which a link with chunks in flight is stuck."""
MIN_WORK_NS = 50_000_000
"""Work of the codec in a window below which it is not compared: less may fall into one slow moment of the machine."""
SLOW_CALLS, SLOW_CALLS_NS, KNOWN_CALLS = 3, 300_000_000, 5
"""Calls of a class in a row, and their total time, that make calls slow; and calls after which their mean is known."""
MAX_CLASSES = 256


@dataclass
class _Mean:
    """The bandwidth of a link in calls of one class."""

    bandwidth: float
    chunks: int = 0
    windows: int = 0
    spread: float = 0.4
    """The mean of abs(log(bandwidth / mean)) over windows, and of a first one that is assumed."""

    @property
    def is_known(self) -> bool:
        return self.chunks >= KNOWN_CHUNKS and self.windows >= KNOWN_WINDOWS

    @property
    def lowest(self) -> float:
        """Return the bandwidth below which a window is slow."""
        return self.bandwidth * min(SLOW, exp(-SPREADS * self.spread))

    def add(self, bandwidth: float, chunks: int) -> None:
        """Let a window count."""
        weight = max(1 / (self.windows + 1), min(MAX_WEIGHT, WEIGHT * chunks))
        self.spread_by(bandwidth)
        # A window far above the mean is a burst of completions: it must not carry the mean away.
        self.bandwidth += (min(bandwidth, self.bandwidth / SLOW) - self.bandwidth) * weight
        self.chunks, self.windows = self.chunks + chunks, self.windows + 1

    def spread_by(self, bandwidth: float) -> None:
        """Let a window count for the deviation alone."""
        deviation = min(MAX_SPREAD, abs(log(max(1.0, bandwidth) / max(1.0, self.bandwidth))))
        self.spread += (deviation - self.spread) * max(1 / (self.windows + 2), MAX_WEIGHT)


class LinkStats:
    """A link from this rank to a peer over one rail."""

    def __init__(self, peer: int, rail: int = 0) -> None:
        """Start with nothing sent."""
        self.peer, self.rail = peer, rail
        self.nbytes = self.chunks = 0
        """Totals of completed sends."""
        self.recent = 0.0
        """Bytes per second in the last window in which the link was busy."""
        self.mean = self.before = 0.0
        """The mean of that window's class: now, and before the link became slow."""
        self.slow_since = 0
        """When it became slow, or 0."""
        self.last = 0
        """When the last send completed."""
        self._means: dict[int, _Mean] = {}
        self._window = np.zeros((3, 0), np.int64)
        """Of each chunk: when the link was free for it, when it completed, its bytes."""
        self._compared = 0

    def extend(self, sent: npt.NDArray[Any]) -> None:
        """Count completed sends, in the order of completion; see RECORD."""
        complete, nbytes = sent["complete"], sent["nbytes"]
        free = np.maximum(sent["post"], np.concatenate(([self.last], complete[:-1])))
        self.nbytes += int(nbytes.sum())
        self.chunks += len(sent)
        self.last = int(complete[-1])
        fresh = np.stack((free, complete, nbytes))
        kept = max(WINDOW, len(sent))
        self._window = np.concatenate((self._window, fresh), axis=1)[:, -kept:]
        if self._window.shape[1] >= WINDOW:
            self._measure(int(sent["call_class"][-1]), len(sent))

    def _measure(self, call_class: int, chunks: int) -> None:
        """Compare the window, unless the link was idle for most of it."""
        free, complete, nbytes = self._window
        took, busy = max(1, int(complete[-1] - free[0])), max(1, int((complete - free).sum()))
        # A chunk that a socket buffer takes at once is followed by a gap in which the link drains the buffer.
        gaps = int(np.minimum(free[1:] - complete[:-1], np.median(np.diff(complete))).sum())
        if busy + gaps >= BUSY * took:
            bandwidth = int(nbytes.sum()) * 1e9 / (busy + gaps)
            self._compare(bandwidth, self.last, call_class, chunks, blocked=busy >= BUSY * took)

    def _compare(self, bandwidth: float, now: int, call_class: int, chunks: int, *, blocked: bool) -> None:
        """Compare a window with the mean of its class, and let it count for the mean.

        Only a window in which chunks were in flight most of the time (`blocked`) is slow: another one may have had no
        more to send.
        """
        if len(self._means) >= MAX_CLASSES and call_class not in self._means:
            self._means.clear()
        known = self._means.setdefault(call_class, _Mean(bandwidth))
        is_low = known.is_known and bandwidth < known.lowest
        if is_low and not blocked:
            return
        self.recent, self._compared, self.mean = bandwidth, now, known.bandwidth
        if is_low:
            if not self.slow_since:
                self.slow_since, self.before = now, known.bandwidth
                known.spread_by(bandwidth)
            elif now - self.slow_since > ACCEPTED_NS:
                self._means[call_class] = _Mean(bandwidth)
                self.slow_since = 0
        elif not self.slow_since or bandwidth >= RECOVERED * self.before:
            self.slow_since = 0
            known.add(bandwidth, chunks)

    def is_slow(self, now: int) -> bool:
        """Return True if it has been slow for long enough to report, and still is."""
        return self.slow_since > 0 and now - self.slow_since > LASTS_NS and now - self._compared < STALE_NS

    def is_stuck(self, now: int) -> bool:
        """Return True if no send has completed for many chunk times; only bad with sends in flight."""
        if not self.mean or self.chunks < KNOWN_CHUNKS:
            return False
        chunk = float(self._window[2].mean()) * 1e9 / self.mean
        return max(LASTS_NS, STUCK_CHUNKS * chunk) < now - self.last < ACCEPTED_NS

    def forget(self) -> None:
        """Drop the suspicion that it is slow."""
        self.slow_since = 0


class CodecRate:
    """Bytes over the time that the codec's stream worked on them, in a sliding window of chunks."""

    def __init__(self) -> None:
        """Start with nothing coded."""
        self.share = 1.0
        """The rate of the last window as a share of the mean, where that is far below it; 1 otherwise."""
        self._means: dict[int, list[float]] = {}
        """By class and direction: bytes per nanosecond, and of how many chunks."""
        self._windows: dict[int, list[tuple[int, int]]] = {}
        """By class and direction: the time that each of the last chunks took, and its bytes."""
        self._last = 0

    def extend(self, coded: npt.NDArray[Any]) -> None:
        """Count chunks that were coded; the stream works on one after the other. See RECORD."""
        newest, touched = coded[-2 * WINDOW :], {}
        if len(newest) == 2 * WINDOW:
            self._last = int(newest["complete"][0])
            newest = newest[1:]
        fields = ("post", "complete", "raw_bytes", "call_class", "kind")
        for post, complete, nbytes, call_class, kind in zip(*(newest[name].tolist() for name in fields), strict=True):
            key = 2 * call_class + (kind == ENCODE)
            window = self._windows.setdefault(key, [])
            window.append((complete - max(post, self._last), nbytes))
            del window[:-WINDOW]
            self._last, touched[key] = complete, window
        if len(self._windows) > MAX_CLASSES:
            self._windows.clear()
        shares = [self._compare(key, window, len(coded)) for key, window in touched.items() if len(window) == WINDOW]
        self.share = min(shares, default=1.0)

    def _compare(self, key: int, window: list[tuple[int, int]], chunks: int) -> float:
        """Return a window's share of the mean, or 1 if it is not slow; let it count for the mean then."""
        spent = sum(took for took, _ in window)
        rate = sum(nbytes for _, nbytes in window) / max(1, spent)
        if len(self._means) >= MAX_CLASSES and key not in self._means:
            self._means.clear()
        known = self._means.setdefault(key, [rate, 0])
        if known[1] >= KNOWN_CHUNKS and rate < SLOW * known[0]:
            return rate / known[0] if spent > MIN_WORK_NS else 1.0
        known[0] += (rate - known[0]) * min(0.5, WEIGHT * chunks)
        known[1] += chunks
        return 1.0


class CallDurations:
    """The time that calls take, by class."""

    def __init__(self) -> None:
        """Start with no calls."""
        self._means: dict[int, list[float]] = {}
        self._row = self._row_ns = 0

    @property
    def slow(self) -> bool:
        """Return True if the last calls took over twice their mean."""
        return self._row >= SLOW_CALLS and self._row_ns >= SLOW_CALLS_NS

    def complete(self, took: int, call_class: int) -> None:
        """Count a completed call."""
        if len(self._means) >= MAX_CLASSES and call_class not in self._means:
            self._means.clear()
        known = self._means.setdefault(call_class, [took, 0])
        if known[1] >= KNOWN_CALLS and took * SLOW > known[0]:
            self._row, self._row_ns = self._row + 1, self._row_ns + took
            return
        self._row = self._row_ns = 0
        known[1] += 1
        known[0] += (took - known[0]) / min(known[1], 1 / WEIGHT)


class CommCounters:
    """Totals and rates of one communicator, counted from many records at once in the order of completion."""

    def __init__(self) -> None:
        """Start with no records."""
        self.records = 0
        self.links: dict[tuple[int, int], LinkStats] = {}
        """By the peer's rank in the world, and rail."""
        self.received: dict[int, int] = {}
        """Bytes from each peer."""
        self.codec, self.calls = CodecRate(), CallDurations()
        self.join_wait = 0
        """Nanoseconds that calls have waited for ranks to join them."""
        self.raw_bytes = self.encoded_bytes = self.encoded_chunks = 0

    def add(self, records: npt.NDArray[Any]) -> None:
        """Count new records."""
        self.records += len(records)
        kinds = records["kind"]
        self._add_sent(records[kinds == SEND])
        received = records[kinds == RECV]
        for peer in set(received["peer"].tolist()):
            nbytes = int(received["nbytes"][received["peer"] == peer].sum())
            self.received[peer] = self.received.get(peer, 0) + nbytes
        coded = records[(kinds == ENCODE) | (kinds == DECODE)]
        if len(coded):
            self._add_coded(coded)

    def _add_sent(self, sent: npt.NDArray[Any]) -> None:
        keys = sent["peer"] * 256 + sent["rail"]
        for key in set(keys.tolist()):
            peer, rail = divmod(key, 256)
            link = self.links.get((peer, rail))
            if link is None:
                link = self.links[peer, rail] = LinkStats(peer, rail)
            link.extend(sent[keys == key])

    def _add_coded(self, coded: npt.NDArray[Any]) -> None:
        self.codec.extend(coded)
        encoded = coded[coded["kind"] == ENCODE]
        self.raw_bytes += int(encoded["raw_bytes"].sum(dtype=np.int64))
        self.encoded_bytes += int(encoded["nbytes"].sum())
        self.encoded_chunks += len(encoded)

    def forget(self) -> None:
        """Drop suspicions: a call has failed, which explains more."""
        for link in self.links.values():
            link.forget()
