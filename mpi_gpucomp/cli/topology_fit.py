"""Builds a topology from measured times: link costs, classes of links, the ports of nodes, and shared uplinks.

An island is a set of nodes with fast links among them and slow links to the others, such as the hosts of a rack.
Measuring pairs one at a time shows that the links between islands are slow, but not whether they share an uplink:
several pairs are measured at once for that, and share one if they take longer than each of them alone.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.cost import LinkCost
from mpi_gpucomp.schedule.topology import DIRECTIONS, Port, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Pair = tuple[int, int]
    Nodes = Sequence[Sequence[int]]

__all__ = [
    "ContentionTest",
    "Fit",
    "build_topology",
    "contention_tests",
    "find_islands",
    "fit_link",
    "link_classes",
    "shared_port",
]

SAME_CLASS, SAME_CLASS_WITHIN_NODE = 1.25, 2.0
"""Links of one class differ at most by this factor; times through shared memory vary more than those of a network."""
SAME_PORT = 1.1
"""Ports that differ at most by this factor get the same rate."""
MIN_BANDWIDTH_BYTES = 1 << 18
"""Messages of at least this size determine the bandwidth of a link."""
MAX_CONCURRENT = 4
"""Pairs that are measured at once."""
CONTENTION = 1.3
"""Pairs share a link if together they take this many times longer than the slowest of them alone."""


class Fit(NamedTuple):
    """A linear fit of the times of one link, and its relative root-mean-square error."""

    latency: float
    per_byte: float
    residual: float


def fit_link(times: Sequence[tuple[int, float]]) -> Fit:
    """Fit a latency and a time per byte to pairs of bytes and seconds, the shortest message first.

    The latency is the time of the shortest message: the errors of long messages are many times larger. The time per
    byte is fitted to the long messages, weighted by the inverse of their times.
    """
    latency = times[0][1]
    long = [(nbytes, seconds) for nbytes, seconds in times if nbytes >= MIN_BANDWIDTH_BYTES] or [times[-1]]
    weights = [1 / seconds for _, seconds in long]
    mean_x = sum(w * nbytes for w, (nbytes, _) in zip(weights, long, strict=True)) / sum(weights)
    mean_y = sum(w * seconds for w, (_, seconds) in zip(weights, long, strict=True)) / sum(weights)
    over = sum(w * (n - mean_x) * (s - mean_y) for w, (n, s) in zip(weights, long, strict=True))
    under = sum(w * (n - mean_x) ** 2 for w, (n, _) in zip(weights, long, strict=True))
    per_byte = max(0.0, over / under if under else (long[0][1] - latency) / long[0][0])
    begin = max(0.0, mean_y - per_byte * mean_x)
    errors = [(begin + n * per_byte) / s - 1 for n, s in long]
    return Fit(latency, per_byte, (sum(error**2 for error in errors) / len(errors)) ** 0.5)


def link_classes(fits: Mapping[Pair, Fit], factor: float = SAME_CLASS) -> list[tuple[LinkCost, list[Pair]]]:
    """Return classes of links of about the same speed, the fastest first, each with its cost and its links."""
    classes: list[list[Pair]] = []
    for pair in sorted(fits, key=lambda pair: fits[pair].per_byte):
        fastest = fits[classes[-1][0]].per_byte if classes else 0.0
        if classes and fits[pair].per_byte <= factor * fastest:
            classes[-1].append(pair)
        else:
            classes.append([pair])
    # A class of links that are slow in one direction only comes from a disturbed measurement.
    real = [pairs for pairs in classes if any(pair[::-1] in pairs for pair in pairs)] or classes
    return [(_median([fits[pair] for pair in pairs]), pairs) for pairs in real]


def _median(fits: Sequence[Fit]) -> LinkCost:
    """Return the medians, so that one disturbed measurement has no effect."""
    latencies, slopes = sorted(fit.latency for fit in fits), sorted(fit.per_byte for fit in fits)
    return LinkCost(latencies[len(fits) // 2], slopes[len(fits) // 2])


def build_topology(
    name: str,
    nodes: tuple[tuple[int, ...], ...],
    fits: Mapping[Pair, Fit],
    source: str,
    shared: Iterable[Port] = (),
) -> Topology:
    """Return the topology of the measured links; links that were not measured get the most common class.

    Each node has a port in each direction, as fast as its fastest link to another node; `shared` are ports of several
    nodes. Links that are slower than their ports get classes of their own.
    """
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    inside = {pair: fit for pair, fit in fits.items() if node_of[pair[0]] == node_of[pair[1]]}
    outside = {pair: fit for pair, fit in fits.items() if pair not in inside}
    classes: dict[str, LinkCost] = {}
    pairs: dict[Pair, str | None] = {}
    within = _add_classes("within nodes", link_classes(inside, SAME_CLASS_WITHIN_NODE), classes, pairs)
    ports = _equalize([*node_ports(nodes, outside), *shared])
    explained: dict[Pair, Fit] = {}
    unexplained: dict[Pair, Fit] = {}
    for pair, fit in outside.items():
        slowest = max(port.per_byte for port in ports if _passes(port, *pair))
        (explained if fit.per_byte <= SAME_CLASS * slowest else unexplained)[pair] = fit
    between = None
    if explained:
        between = "between nodes"
        fastest = min(fit.per_byte for fit in explained.values())
        classes[between] = LinkCost(_median(list(explained.values())).latency, fastest)
    for number, (link, members) in enumerate(link_classes(unexplained)):
        classes[f"slow {number}"] = link
        pairs |= dict.fromkeys(members, f"slow {number}")
    return Topology(name, nodes, classes, within, between, pairs, ports, source=source)


def _add_classes(
    name: str,
    groups: Iterable[tuple[LinkCost, list[Pair]]],
    classes: dict[str, LinkCost],
    pairs: dict[Pair, str | None],
) -> str | None:
    """Add classes; the largest is that of all links that are not in `pairs`."""
    found = sorted(groups, key=lambda group: -len(group[1]))
    for number, (link, members) in enumerate(found):
        title = name if number == 0 else f"{name}, {number}"
        classes[title] = link
        pairs |= dict.fromkeys(members if number else [], title)
    return name if found else None


def _passes(port: Port, sender: int, receiver: int) -> bool:
    inner, outer = (sender, receiver) if port.direction == "out" else (receiver, sender)
    return inner in port.ranks and outer not in port.ranks


def node_ports(nodes: Sequence[Sequence[int]], fits: Mapping[Pair, Fit]) -> list[Port]:
    """Return the outgoing and incoming port of each node, as fast as its fastest link to another node."""
    ports = []
    for number, node in enumerate(nodes):
        for direction in DIRECTIONS:
            port = Port(f"node {number}, {direction}", frozenset(node), direction, 0.0, "between")
            own = [fit.per_byte for pair, fit in fits.items() if _passes(port, *pair)]
            if own:
                ports.append(port._replace(per_byte=min(own)))
    return ports


def _equalize(ports: list[Port]) -> tuple[Port, ...]:
    """Set ports of about the same rate to their median, so that symmetric nodes are symmetric in the topology."""
    rates: list[list[float]] = []
    for rate in sorted(port.per_byte for port in ports):
        if rates and rate <= SAME_PORT * rates[-1][0]:
            rates[-1].append(rate)
        else:
            rates.append([rate])
    middle = {rate: group[len(group) // 2] for group in rates for rate in group}
    return tuple(port._replace(per_byte=middle[port.per_byte]) for port in ports)


class ContentionTest(NamedTuple):
    """Pairs of sender and receiver to measure at once; all messages leave (`out`) or enter (`in`) the island."""

    island: int
    ranks: frozenset[int]
    direction: str
    pairs: tuple[Pair, ...]


def find_islands(nodes: Nodes, fits: Mapping[Pair, Fit]) -> list[list[int]]:
    """Return the islands, each as the indices of its nodes; a node may be an island by itself.

    Two nodes are in one island if the link between them is as fast as the fastest link of either.
    """
    best = {(port.ranks, port.direction): port.per_byte for port in node_ports(nodes, fits)}
    fastest: dict[Pair, float] = {}
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    for (a, b), fit in fits.items():
        if home[a] != home[b]:
            key = home[a], home[b]
            fastest[key] = min(fit.per_byte, fastest.get(key, fit.per_byte))

    def joined(a: int, b: int) -> bool:
        ends = best.get((frozenset(nodes[a]), "out")), best.get((frozenset(nodes[b]), "in"))
        limits = [end for end in ends if end is not None]
        return bool(limits) and fastest.get((a, b), float("inf")) <= SAME_CLASS * min(limits)

    found: list[list[int]] = []
    left = list(range(len(nodes)))
    while left:
        island = [left.pop(0)]
        for member in island:  # grows during the loop
            near = [other for other in left if joined(member, other) and joined(other, member)]
            island += near
            left = [other for other in left if other not in near]
        found.append(sorted(island))
    return found


def contention_tests(nodes: Nodes, islands: Sequence[Sequence[int]]) -> list[ContentionTest]:
    """Return the tests for shared uplinks: of each island with several nodes, out of it and into it."""
    tests = []
    for number, island in enumerate(islands):
        # Peers alternate between the other islands, so that as few as possible share the uplink of one.
        rounds = zip_longest(*(other for other in islands if other is not island))
        outside = [node for peers in rounds for node in peers if node is not None]
        pairs = [(nodes[a][0], nodes[b][0]) for a, b in zip(island, outside, strict=False)][:MAX_CONCURRENT]
        if len(pairs) < 2:
            continue
        ranks = frozenset(rank for node in island for rank in nodes[node])
        reverse = tuple((receiver, sender) for sender, receiver in pairs)
        tests += [
            ContentionTest(number, ranks, DIRECTIONS[0], tuple(pairs)),
            ContentionTest(number, ranks, DIRECTIONS[1], reverse),
        ]
    return tests


def shared_port(test: ContentionTest, fits: Mapping[Pair, Fit], nbytes: int, seconds: float) -> Port | None:
    """Return the port that the pairs of a test share, given the time of their messages together; None if none."""
    alone = max(fits[pair].latency + nbytes * fits[pair].per_byte for pair in test.pairs)
    if seconds < CONTENTION * alone:
        return None
    per_byte = seconds / (nbytes * len(test.pairs))
    return Port(f"island {test.island}, {test.direction}", test.ranks, test.direction, per_byte, "between")
