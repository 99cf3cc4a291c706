"""How fast a link to a peer is, over a sliding window of chunks, and whether that is far below what it was before.

The bandwidth of a window is its bytes over the time from when the wire was free for its first chunk (it was posted, and
the one before was complete) to its last completion, without the pauses in which there was simply nothing to send: those
that are longer than chunks usually are apart. It is compared with its own mean in calls of the same sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["KNOWN", "MOST_SORTS", "SLOW", "WEIGHT", "WINDOW", "Link"]

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


class Link:
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
