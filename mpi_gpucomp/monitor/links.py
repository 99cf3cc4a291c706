"""How fast a link to a peer is, over a sliding window of chunks, and whether that is far below what it was before.

The bandwidth of a window is its bytes over the time from when the wire was free for its first chunk (it was posted, and
the one before was complete) to its last completion, without the pauses in which there was simply nothing to send: those
that are longer than chunks usually are apart. It is compared with its own mean in calls of the same sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.trace import DECODE, ENCODE, RECV, SEND

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["KNOWN", "MOST_SORTS", "SLOW", "WEIGHT", "WINDOW", "Durations", "LinkStats", "RateWindow", "Tally"]

WINDOW = 8
"""Chunks of a window: one alone is noise, 32 hide what happens.

It is longer where more have left since somebody looked: a thread that asks MPI now and then sees chunks end in bunches.
"""
SLOW, RECOVERED = 0.5, 0.75
"""Shares of the mean from before, below which a link is slow, and from which on it is well again."""
BUSY = 0.5
"""The share of a window in which a link must have had something to send to be judged, and to count for the mean.

A chunk that is sent alone may be gone at once, into some buffer: that says little of the wire.
"""
KNOWN, KNOWN_LOOKS = 32, 4
"""Chunks after which the mean of a sort of calls is known, and looks at them: the first goes into empty buffers."""
WEIGHT, MOST_WEIGHT = 1 / 32, 1 / 8
"""Of a new chunk in the mean, and of a window of many."""
LASTS_NS = 250_000_000
"""How long it must last before it counts: a machine with more ranks than cores has slow moments."""
ACCEPTED_NS = 60_000_000_000
"""How long until what was slow is the new mean: the link will not get better."""
STALE_NS = 3_000_000_000
"""How long what was seen last of a link holds."""
QUIET = 8
"""Chunk times without a completion after which a link with something under way counts as slow too."""
MOST_SORTS = 256


class LinkStats:
    """From this rank to a peer, over one rail."""

    def __init__(self, peer: int, rail: int = 0) -> None:
        """Start with nothing sent."""
        self.peer, self.rail = peer, rail
        self.sent = self.count = 0
        """Bytes and chunks that have left."""
        self.recent = 0.0
        """Bytes a second of the last window in which the link was busy all the time."""
        self.mean = self.before = 0.0
        """Those of its sort of calls, now and before it became slow."""
        self.since = 0
        """Since when it is slow, or 0."""
        self._means: dict[int, list[float]] = {}
        """Of each sort of calls: bytes a second, of how many chunks, and by how many looks."""
        self._window = np.zeros((3, 0), np.int64)
        """When the wire was free for each chunk, when it was complete, its bytes."""
        self.last = self._judged = 0
        """When the last chunk had left."""

    def extend(self, sent: npt.NDArray[Any]) -> None:
        """Take notice of chunks that have left, in the order in which they have; see RECORD."""
        complete, nbytes = sent["complete"], sent["nbytes"]
        free = np.maximum(sent["post"], np.concatenate(([self.last], complete[:-1])))
        self.sent += int(nbytes.sum())
        self.count += len(sent)
        self.last = int(complete[-1])
        fresh = np.stack((free, complete, nbytes))
        kept = max(WINDOW, len(sent))
        self._window = np.concatenate((self._window, fresh), axis=1)[:, -kept:]
        if self._window.shape[1] >= WINDOW:
            self._look(int(sent["sort"][-1]), len(sent))

    def _look(self, sort: int, chunks: int) -> None:
        """Judge the window, by the time in which something was under way, unless that was little of it."""
        free, complete, nbytes = self._window
        took, busy = max(1, int(complete[-1] - free[0])), max(1, int((complete - free).sum()))
        # A chunk that some buffer takes at once is followed by a pause in which the wire empties it.
        pauses = int(np.minimum(free[1:] - complete[:-1], np.median(np.diff(complete))).sum())
        if busy + pauses >= BUSY * took:
            bandwidth = int(nbytes.sum()) * 1e9 / (busy + pauses)
            self._judge(bandwidth, self.last, sort, chunks, waited_for=busy >= BUSY * took)

    def _judge(self, bandwidth: float, now: int, sort: int, chunks: int, *, waited_for: bool) -> None:
        """Compare a window with what calls of its sort had before, and let it count for those to come.

        Only one that was waited for is slow: another one may have had no more to carry.
        """
        if len(self._means) >= MOST_SORTS and sort not in self._means:
            self._means.clear()
        known = self._means.setdefault(sort, [bandwidth, 0, 0])
        is_low = known[1] >= KNOWN and known[2] >= KNOWN_LOOKS and bandwidth < SLOW * known[0]
        if is_low and not waited_for:
            return
        self.recent, self._judged, self.mean = bandwidth, now, known[0]
        if is_low:
            if not self.since:
                self.since, self.before = now, known[0]
            elif now - self.since > ACCEPTED_NS:
                self._means[sort] = [bandwidth, 0, 0]
                self.since = 0
        elif not self.since or bandwidth >= RECOVERED * self.before:
            self.since = 0
            # What looks far faster than ever was seen to end in a bunch: it must not carry the mean away.
            weight = max(1 / (known[2] + 1), min(MOST_WEIGHT, WEIGHT * chunks))
            known[0] += (min(bandwidth, known[0] / SLOW) - known[0]) * weight
            known[1], known[2] = known[1] + chunks, known[2] + 1

    def is_slow(self, now: int) -> bool:
        """Say whether it has been slow for long enough to speak of, and still is."""
        return self.since > 0 and now - self.since > LASTS_NS and now - self._judged < STALE_NS

    def is_quiet(self, now: int) -> bool:
        """Say whether nothing has left for many times as long as it used to take: bad, if something is under way."""
        if not self.mean or self.count < KNOWN:
            return False
        chunk = float(self._window[2].mean()) * 1e9 / self.mean
        return max(LASTS_NS, QUIET * chunk) < now - self.last < ACCEPTED_NS

    def forget(self) -> None:
        """Let go of a suspicion."""
        self.since = 0


# How fast a rank encodes and decodes, and how long its calls take, against its own mean in calls of the same sort.

LEAST_NS = 50_000_000
"""Work of a window below which it is not judged: a slow moment of the machine may take all of less."""
SLOW_CALLS, SLOW_CALLS_NS, KNOWN_CALLS = 3, 300_000_000, 5
"""So many calls of a sort in a row, so long together, that take over twice their mean, once so many have made it."""


class RateWindow:
    """Bytes over the time that the stream was at work on them, in a sliding window of chunks."""

    def __init__(self) -> None:
        """Start with nothing coded."""
        self.share = 1.0
        """The pace of the last window as a share of the mean, where that is far below it."""
        self._means: dict[int, list[float]] = {}
        self._windows: dict[int, list[tuple[int, int]]] = {}
        """The time that each of the last chunks of a sort took, and its bytes."""
        self._last = 0

    def extend(self, coded: npt.NDArray[Any]) -> None:
        """Take notice of chunks that are coded; the stream does one after the other. See RECORD."""
        newest, touched = coded[-2 * WINDOW :], {}
        if len(newest) == 2 * WINDOW:
            self._last = int(newest["complete"][0])
            newest = newest[1:]
        fields = ("post", "complete", "plain", "sort", "kind")
        for post, complete, plain, sort, kind in zip(*(newest[name].tolist() for name in fields), strict=True):
            key = 2 * sort + (kind == ENCODE)
            window = self._windows.setdefault(key, [])
            window.append((complete - max(post, self._last), plain))
            del window[:-WINDOW]
            self._last, touched[key] = complete, window
        if len(self._windows) > MOST_SORTS:
            self._windows.clear()
        shares = [self._judge(key, window, len(coded)) for key, window in touched.items() if len(window) == WINDOW]
        self.share = min(shares, default=1.0)

    def _judge(self, key: int, window: list[tuple[int, int]], chunks: int) -> float:
        """Return a window's share of the mean, or 1 where there is nothing to say; let it count for those to come."""
        spent = sum(took for took, _ in window)
        pace = sum(plain for _, plain in window) / max(1, spent)
        if len(self._means) >= MOST_SORTS and key not in self._means:
            self._means.clear()
        known = self._means.setdefault(key, [pace, 0])
        if known[1] >= KNOWN and pace < SLOW * known[0]:
            return pace / known[0] if spent > LEAST_NS else 1.0
        known[0] += (pace - known[0]) * min(0.5, WEIGHT * chunks)
        known[1] += chunks
        return 1.0


class Durations:
    """How long calls take, by sort."""

    def __init__(self) -> None:
        """Start with none."""
        self._means: dict[int, list[float]] = {}
        self._row = self._row_ns = 0

    @property
    def slow(self) -> bool:
        """Say whether the last calls took far longer than they used to."""
        return self._row >= SLOW_CALLS and self._row_ns >= SLOW_CALLS_NS

    def complete(self, took: int, sort: int) -> None:
        """Take notice of a call that is over."""
        if len(self._means) >= MOST_SORTS and sort not in self._means:
            self._means.clear()
        known = self._means.setdefault(sort, [took, 0])
        if known[1] >= KNOWN_CALLS and took * SLOW > known[0]:
            self._row, self._row_ns = self._row + 1, self._row_ns + took
            return
        self._row = self._row_ns = 0
        known[1] += 1
        known[0] += (took - known[0]) / min(known[1], 1 / WEIGHT)


# What the records of a communicator add up to: the state of its links, its coder's pace, how long its calls take.


class Tally:
    """Counted in the order of completion, many records at once."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.links: dict[tuple[int, int], LinkStats] = {}
        """To each peer, by its rank in the world and the rail."""
        self.received: dict[int, int] = {}
        """Bytes of each peer."""
        self.pace, self.calls = RateWindow(), Durations()
        self.waited = 0
        """Nanoseconds that calls have waited for ranks to join them."""
        self.plain = self.encoded = self.chunks = 0
        """Bytes before and behind encoding, and how many chunks that were."""

    def add(self, records: npt.NDArray[Any]) -> None:
        """Count new records."""
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
        self.pace.extend(coded)
        encoded = coded[coded["kind"] == ENCODE]
        self.plain += int(encoded["plain"].sum(dtype=np.int64))
        self.encoded += int(encoded["nbytes"].sum())
        self.chunks += len(encoded)

    def forget(self) -> None:
        """Let go of suspicions: a call has failed, which says more."""
        for link in self.links.values():
            link.forget()
