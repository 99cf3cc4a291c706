"""Islands: nodes with quick links among them and slow ones to the others, such as the hosts of a rack.

That the links between islands are slow shows in pairs that were measured alone. Whether what leaves an island also
shares one way shows only in several pairs at once: if they take longer than each of them alone, they do.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.topology import WAYS, Port
from mpi_gpucomp.tools.fitting import ALIKE, node_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpi_gpucomp.tools.fitting import Fit

    Pair = tuple[int, int]
    Nodes = Sequence[Sequence[int]]

__all__ = ["Trial", "island_port", "islands", "trials"]

AT_ONCE = 4
"""Pairs that are measured together at most."""
SHARED = 1.3
"""How many times longer than the slowest of them alone several pairs take together, if they share their way."""


class Trial(NamedTuple):
    """Pairs of sender and receiver to be measured at once, all of which leave (`out`) or enter (`in`) an island."""

    island: int
    ranks: frozenset[int]
    way: str
    pairs: tuple[Pair, ...]


def islands(nodes: Nodes, fits: Mapping[Pair, Fit]) -> list[list[int]]:
    """Return the numbers of the nodes of each island, in the order of their first; a node may be one by itself.

    Nodes belong together if they reach each other as quickly as either reaches anybody.
    """
    best = {(port.ranks, port.way): port.per_byte for port in node_ports(nodes, fits)}
    quickest: dict[Pair, float] = {}
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    for (a, b), fit in fits.items():
        if home[a] != home[b]:
            key = home[a], home[b]
            quickest[key] = min(fit.per_byte, quickest.get(key, fit.per_byte))

    def joined(a: int, b: int) -> bool:
        ends = best.get((frozenset(nodes[a]), "out")), best.get((frozenset(nodes[b]), "in"))
        limits = [end for end in ends if end is not None]
        return bool(limits) and quickest.get((a, b), float("inf")) <= ALIKE * min(limits)

    found: list[list[int]] = []
    left = list(range(len(nodes)))
    while left:
        island = [left.pop(0)]
        for member in island:  # which grows meanwhile
            near = [other for other in left if joined(member, other) and joined(other, member)]
            island += near
            left = [other for other in left if other not in near]
        found.append(sorted(island))
    return found


def trials(nodes: Nodes, found: Sequence[Sequence[int]]) -> list[Trial]:
    """Return what is to be measured at once: of each island with several nodes, out of it and into it."""
    made = []
    for number, island in enumerate(found):
        # Of the other islands in turn, so that their own ways are shared by as few as possible.
        others = zip_longest(*(other for other in found if other is not island))
        outside = [node for turn in others for node in turn if node is not None]
        pairs = [(nodes[a][0], nodes[b][0]) for a, b in zip(island, outside, strict=False)][:AT_ONCE]
        if len(pairs) < 2:
            continue
        ranks = frozenset(rank for node in island for rank in nodes[node])
        made += [Trial(number, ranks, WAYS[0], tuple(pairs)), Trial(number, ranks, WAYS[1], tuple(map(_turned, pairs)))]
    return made


def _turned(pair: Pair) -> Pair:
    return pair[1], pair[0]


def island_port(trial: Trial, fits: Mapping[Pair, Fit], nbytes: int, seconds: float) -> Port | None:
    """Return the port that the pairs of a trial share, given how long their messages took together; None if none."""
    alone = max(fits[pair].latency + nbytes * fits[pair].per_byte for pair in trial.pairs)
    if seconds < SHARED * alone:
        return None
    per_byte = seconds / (nbytes * len(trial.pairs))
    return Port(f"island {trial.island}, {trial.way}", trial.ranks, trial.way, per_byte, "between")
