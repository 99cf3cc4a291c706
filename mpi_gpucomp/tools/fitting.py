"""From measured times of messages to a topology: straight lines, classes of links, and what nodes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.cost import Link
from mpi_gpucomp.schedule.topology import WAYS, Port, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Fit", "fitted", "grouped", "node_ports", "topology_of"]

ALIKE, ALIKE_WITHIN = 1.25, 2.0
"""How many times slower a link may be than the quickest of its class; memory's times are noisier than a wire's."""
EQUAL = 1.1
"""How far ports may be apart that are taken for equal."""
LONG = 1 << 18
"""From here on the bytes of a message count, not what else it costs."""


class Fit(NamedTuple):
    """A link as a straight line through measured times, and how far they are from it: root mean square, as a share."""

    latency: float
    per_byte: float
    residual: float


def fitted(times: Sequence[tuple[int, float]]) -> Fit:
    """Fit a latency and a time per byte to bytes and seconds, of which the first is for a message of few bytes.

    The latency is that of the short message, so that errors of long ones, which are many times as large, do not hide
    it; the slope is that of the long ones, weighted so that each counts as much.
    """
    latency = times[0][1]
    long = [(nbytes, seconds) for nbytes, seconds in times if nbytes >= LONG] or [times[-1]]
    weights = [1 / seconds for _, seconds in long]
    mean_x = sum(w * nbytes for w, (nbytes, _) in zip(weights, long, strict=True)) / sum(weights)
    mean_y = sum(w * seconds for w, (_, seconds) in zip(weights, long, strict=True)) / sum(weights)
    over = sum(w * (n - mean_x) * (s - mean_y) for w, (n, s) in zip(weights, long, strict=True))
    under = sum(w * (n - mean_x) ** 2 for w, (n, _) in zip(weights, long, strict=True))
    per_byte = max(0.0, over / under if under else (long[0][1] - latency) / long[0][0])
    begin = max(0.0, mean_y - per_byte * mean_x)
    errors = [(begin + n * per_byte) / s - 1 for n, s in long]
    return Fit(latency, per_byte, (sum(error**2 for error in errors) / len(errors)) ** 0.5)


def grouped(fits: Mapping[tuple[int, int], Fit], alike: float = ALIKE) -> list[tuple[Link, list[tuple[int, int]]]]:
    """Put links of about the same speed into one class each, the quickest first, with the mean of its links."""
    classes: list[list[tuple[int, int]]] = []
    for pair in sorted(fits, key=lambda pair: fits[pair].per_byte):
        quickest = fits[classes[-1][0]].per_byte if classes else 0.0
        if classes and fits[pair].per_byte <= alike * quickest:
            classes[-1].append(pair)
        else:
            classes.append([pair])
    # A class of links that are slow one way only is a measurement that was disturbed.
    real = [pairs for pairs in classes if any(pair[::-1] in pairs for pair in pairs)] or classes
    return [(_mean([fits[pair] for pair in pairs]), pairs) for pairs in real]


def _mean(fits: Sequence[Fit]) -> Link:
    """Return the middle one of each number: one link that was disturbed does not count."""
    latencies, slopes = sorted(fit.latency for fit in fits), sorted(fit.per_byte for fit in fits)
    return Link(latencies[len(fits) // 2], slopes[len(fits) // 2])


def topology_of(
    name: str,
    nodes: tuple[tuple[int, ...], ...],
    fits: Mapping[tuple[int, int], Fit],
    source: str,
    shared: Iterable[Port] = (),
) -> Topology:
    """Make a topology of the links that were measured; others are of the class of most that were.

    Each node has a port out and one in, as quick as its quickest link to another node; `shared` are ports of several
    nodes. A link that is slower than its ports is one of its own class.
    """
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    inside = {pair: fit for pair, fit in fits.items() if node_of[pair[0]] == node_of[pair[1]]}
    outside = {pair: fit for pair, fit in fits.items() if pair not in inside}
    classes: dict[str, Link] = {}
    pairs: dict[tuple[int, int], str | None] = {}
    within = _classes("within nodes", grouped(inside, ALIKE_WITHIN), classes, pairs)
    ports = _evened([*node_ports(nodes, outside), *shared])
    explained: dict[tuple[int, int], Fit] = {}
    unexplained: dict[tuple[int, int], Fit] = {}
    for pair, fit in outside.items():
        slowest = max(port.per_byte for port in ports if _passes(port, *pair))
        (explained if fit.per_byte <= ALIKE * slowest else unexplained)[pair] = fit
    between = None
    if explained:
        between = "between nodes"
        quickest = min(fit.per_byte for fit in explained.values())
        classes[between] = Link(_mean(list(explained.values())).latency, quickest)
    for number, (link, members) in enumerate(grouped(unexplained)):
        classes[f"slow {number}"] = link
        pairs |= dict.fromkeys(members, f"slow {number}")
    return Topology(name, nodes, classes, within, between, pairs, ports, source=source)


def _classes(
    name: str,
    groups: Iterable[tuple[Link, list[tuple[int, int]]]],
    classes: dict[str, Link],
    pairs: dict[tuple[int, int], str | None],
) -> str | None:
    """Add classes, of which the largest is for all links that are not named."""
    found = sorted(groups, key=lambda group: -len(group[1]))
    for number, (link, members) in enumerate(found):
        title = name if number == 0 else f"{name}, {number}"
        classes[title] = link
        pairs |= dict.fromkeys(members if number else [], title)
    return name if found else None


def _passes(port: Port, sender: int, receiver: int) -> bool:
    inner, outer = (sender, receiver) if port.way == "out" else (receiver, sender)
    return inner in port.ranks and outer not in port.ranks


def node_ports(nodes: Sequence[Sequence[int]], fits: Mapping[tuple[int, int], Fit]) -> list[Port]:
    """Return the ports of nodes out and in, each as quick as the quickest link to another node."""
    ports = []
    for number, node in enumerate(nodes):
        for way in WAYS:
            port = Port(f"node {number}, {way}", frozenset(node), way, 0.0, "between")
            own = [fit.per_byte for pair, fit in fits.items() if _passes(port, *pair)]
            if own:
                ports.append(port._replace(per_byte=min(own)))
    return ports


def _evened(ports: list[Port]) -> tuple[Port, ...]:
    """Give ports of about the same speed the same, so that nodes that are alike look alike."""
    rates: list[list[float]] = []
    for rate in sorted(port.per_byte for port in ports):
        if rates and rate <= EQUAL * rates[-1][0]:
            rates[-1].append(rate)
        else:
            rates.append([rate])
    middle = {rate: group[len(group) // 2] for group in rates for rate in group}
    return tuple(port._replace(per_byte=middle[port.per_byte]) for port in ports)
