"""What the records of a communicator add up to: the state of its links, its coder's pace, how long its calls take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_gpucomp.monitor.box import DECODE, ENCODE, RECV, SEND
from mpi_gpucomp.monitor.link import Link
from mpi_gpucomp.monitor.pace import Durations, Pace

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Tally"]


class Tally:
    """Counted in the order of completion, many records at once."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.links: dict[tuple[int, int], Link] = {}
        """To each peer, by its rank in the world and the rail."""
        self.received: dict[int, int] = {}
        """Bytes of each peer."""
        self.pace, self.calls = Pace(), Durations()
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
                link = self.links[peer, rail] = Link(peer, rail)
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
