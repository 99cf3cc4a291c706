"""The machines that ranks run on: nodes, what a link between any two ranks costs, and what links share.

A link has a latency and a time per byte (alpha and beta). What several links share is a *port*: of a set of ranks, for
all that leaves the set or all that enters it. A node's network card is two ports of its ranks, a GPU's way into a
switch two ports of one rank, the uplink of a rack two ports of all ranks in it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import NO_MESSAGE_COST, PER_MB, CodecCost, LinkCost, MessageCost

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["GPU_CODECS", "PRESETS", "Port", "ProcessorModel", "Topology", "even_nodes", "preset"]

WAYS = ("out", "in")
TRAFFIC = ("all", "within", "between")


class Port(NamedTuple):
    """What all messages that leave (`out`) or enter (`in`) a set of ranks share: seconds per byte."""

    name: str
    ranks: frozenset[int]
    way: str
    per_byte: float
    traffic: str = "all"
    """Whether only messages within nodes, or between nodes, go through it."""


class ProcessorModel(NamedTuple):
    """Cores that some ranks share, for codecs and messages: not always a whole number, where others use them too."""

    ranks: frozenset[int]
    cores: float


Matrix = tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True)
class Topology:
    """Ranks on nodes, and what links, ports and codecs cost; seconds and bytes throughout."""

    name: str
    nodes: tuple[tuple[int, ...], ...]
    classes: Mapping[str, LinkCost]
    within: str | Matrix | None
    """The class of links inside a node: of all, or by the positions of two ranks in their node; None for no link."""
    between: str | None = None
    """The class of links between nodes."""
    pairs: Mapping[tuple[int, int], str | None] = field(default_factory=dict)
    """Links, by sender and receiver, that are of another class than the rest."""
    ports: tuple[Port, ...] = ()
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    """By spec; `none` is what it takes to copy or to add up elements as they are."""
    processors: tuple[ProcessorModel, ...] = ()
    """None: every rank codes at its own pace."""
    per_chunk: float = 0.0
    """Seconds that a rank's processor spends on every chunk that it receives or sends, however short."""
    source: str = ""
    """Where the figures come from."""
    handling: MessageCost = NO_MESSAGE_COST
    """What a message costs the ranks at its ends."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.nodes):
            got = str([list(node) for node in self.nodes])
            raise _wrong(self, "nodes", "every rank from 0 on, on one node each, and no empty node", got)
        for name in self._named():
            if name is not None and name not in self.classes:
                known = ", ".join(self.classes) or "none"
                raise _wrong(self, "links", f"classes among {known}", f"'{name}'")

    def _named(self) -> Iterator[str | None]:
        yield from self.pairs.values()
        yield self.between
        if isinstance(self.within, str):
            yield self.within
        for row in self.within if isinstance(self.within, tuple) else ():
            yield from row

    @cached_property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.nodes))

    @cached_property
    def _home(self) -> tuple[tuple[int, int], ...]:
        """The node of each rank, and its position there."""
        found = {rank: (number, at) for number, node in enumerate(self.nodes) for at, rank in enumerate(node)}
        return tuple(found[rank] for rank in range(self.ranks))

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._home[rank][0]

    def position(self, rank: int) -> int:
        """Return a rank's place on its node."""
        return self._home[rank][1]

    def class_of(self, sender: int, receiver: int) -> str | None:
        """Return the class of a link; None where there is none."""
        if (sender, receiver) in self.pairs:
            return self.pairs[sender, receiver]
        (node, row), (other, column) = self._home[sender], self._home[receiver]
        if node != other:
            return self.between
        return self.within[row][column] if isinstance(self.within, tuple) else self.within

    def link(self, sender: int, receiver: int) -> LinkCost | None:
        """Return what a link costs; None where there is none."""
        name = self.class_of(sender, receiver) if sender != receiver else None
        return None if name is None else self.classes[name]

    def links(self) -> Iterator[tuple[int, int]]:
        """Yield sender and receiver of every link."""
        for sender in range(self.ranks):
            for receiver in range(self.ranks):
                if self.link(sender, receiver) is not None:
                    yield sender, receiver

    @cached_property
    def _ports_of(self) -> dict[str, list[list[int]]]:
        found: dict[str, list[list[int]]] = {way: [[] for _ in range(self.ranks)] for way in WAYS}
        for number, port in enumerate(self.ports):
            for rank in port.ranks:
                found[port.way][rank].append(number)
        return found

    def ports_of(self, sender: int, receiver: int) -> list[int]:
        """Return the numbers of the ports that a message goes through."""
        kind = "within" if self.node_of(sender) == self.node_of(receiver) else "between"
        out = (number for number in self._ports_of["out"][sender] if receiver not in self.ports[number].ranks)
        back = (number for number in self._ports_of["in"][receiver] if sender not in self.ports[number].ranks)
        return [number for number in (*out, *back) if self.ports[number].traffic in ("all", kind)]

    def alone(self, sender: int, receiver: int) -> LinkCost | None:
        """Return what a message takes with no other under way: the slowest part of its way counts."""
        link = self.link(sender, receiver)
        if link is None:
            return None
        slowest = max((self.ports[number].per_byte for number in self.ports_of(sender, receiver)), default=0.0)
        return LinkCost(link.latency, max(link.per_byte, slowest))

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it: microseconds, and microseconds per MB."""
        within: Any = [list(row) for row in self.within] if isinstance(self.within, tuple) else self.within
        links: dict[str, Any] = {"within": within, "between": self.between}
        if self.pairs:
            links["pairs"] = [[*pair, name] for pair, name in sorted(self.pairs.items())]
        found: dict[str, Any] = {"name": self.name, "source": self.source, "nodes": [list(node) for node in self.nodes]}
        found["classes"] = {
            name: {"alpha_us": _tidy(link.latency * 1e6), "beta_us_per_MB": _tidy(link.per_byte / PER_MB)}
            for name, link in self.classes.items()
        }
        found["links"] = links
        found["ports"] = [_port_document(port) for port in self.ports]
        found["codecs"] = {
            spec: {
                "encode_us_per_MB": _tidy(coding.encode / PER_MB),
                "decode_us_per_MB": _tidy(coding.decode / PER_MB),
                "ratio": _tidy(coding.ratio),
            }
            for spec, coding in self.codecs.items()
        }
        found["processors"] = [{"ranks": sorted(one.ranks), "cores": one.cores} for one in self.processors]
        found["per_chunk_us"] = _tidy(self.per_chunk * 1e6)
        if self.handling != NO_MESSAGE_COST:
            found["handling"] = {
                "message_us": _tidy(self.handling.message * 1e6),
                "us_per_MB": _tidy(self.handling.per_byte / PER_MB),
                "wait_us": _tidy(self.handling.wait * 1e6),
                "frame_us": _tidy(self.handling.frame * 1e6),
            }
        return found

    @cached_property
    def hash(self) -> str:
        """What identifies its shape: nodes, which links are alike, what they share; not what was measured some day."""
        ports = [(sorted(port.ranks), port.way, port.traffic) for port in self.ports]
        said = json.dumps([self.nodes, self.within, self.between, sorted(self.pairs.items()), ports])
        return hashlib.sha256(said.encode()).hexdigest()[:12]


def _port_document(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "ranks": sorted(port.ranks),
        "way": port.way,
        "beta_us_per_MB": _tidy(port.per_byte / PER_MB),
        "traffic": port.traffic,
    }


def _tidy(number: float) -> float:
    """Round to what is worth writing, whatever the size of the number."""
    return float(f"{number:.6g}")


def _wrong(topology: Topology, part: str, expected: str, got: str) -> SpecError:
    return SpecError(f"topology {topology.name}: {part}", expected=expected, got=got, remedy="Correct the topology.")


def even_nodes(ranks: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Put the ranks on nodes in order, so many on each; the last may have fewer."""
    return tuple(tuple(range(first, min(first + per_node, ranks))) for first in range(0, ranks, per_node))


# Topologies of well-known machines, of any number of nodes, from published figures.
#
# | preset | node | figures |
# |---|---|---|
# | ndv2 | 8 V100 in a cube mesh of NVLinks, one 100 Gbit/s card | TACCL, examples/topo/topo-ndv2-1MB.json |
# | dgx2 | 16 V100 on NVSwitch, eight 100 Gbit/s cards | TACCL, examples/topo/topo-dgx2-1MB.json |
# | dgx-a100 | 8 A100 on NVSwitch, eight 200 Gbit/s cards | NVIDIA's data sheet: 600 GB/s of NVLink per GPU, HDR |
# | v100-ib | one V100, one 100 Gbit/s card | the network of ndv2 |
# | gigabit | one rank, one 1 Gbit/s card | the wire's rate; latency as usual with TCP |
#
# Times per MB of the first two were measured by TACCL's authors. For the A100 they follow from the rates, which are
# those
# of one direction: 300 GB/s and 25 GB/s; its latencies are those of dgx2.

TACCL = "https://github.com/microsoft/taccl, taccl/examples/topo"
DGX_A100 = "NVIDIA DGX A100 data sheet: NVLink 600 GB/s per GPU both ways together, 8 x 200 Gbit/s; latencies of dgx2"

ONE, TWO = "NVLink", "two NVLinks"
CUBE_MESH = ("-2112---", "2-12-1--", "11-2--2-", "122----1", "2----211", "-1--2-12", "--2-11-2", "---1122-")
"""How many NVLinks join the GPUs of an NDv2 node, as TACCL has them."""


class Machine(NamedTuple):
    """A node: ranks, cards, and links inside and outside in microseconds and microseconds per MB."""

    ranks: int
    cards: int
    inside: tuple[float, float]
    outside: tuple[float, float]
    source: str


PRESETS = {
    "ndv2": Machine(8, 1, (0.3, 46), (2.6, 105), f"{TACCL}/topo-ndv2-1MB.json"),
    "dgx2": Machine(16, 8, (0.3, 8), (2.6, 105), f"{TACCL}/topo-dgx2-1MB.json"),
    "dgx-a100": Machine(8, 8, (0.3, 1e3 / 300), (2.6, 1e3 / 25), DGX_A100),
    "v100-ib": Machine(1, 1, (0.3, 46), (2.6, 105), f"{TACCL}/topo-ndv2-1MB.json"),
    "gigabit": Machine(1, 1, (1, 100), (50, 8000), "1 Gbit/s; 50 us as usual with TCP in one room"),
}
"""By name."""

GPU_CODECS = {
    "zfp:rate=16": CodecCost(1 / 110e9, 1 / 110e9, 2.0),
    "zfp:rate=8": CodecCost(1 / 150e9, 1 / 150e9, 4.0),
    "zfp:rate=4": CodecCost(1 / 180e9, 1 / 180e9, 8.0),
    "mpc": CodecCost(1 / 25e9, 1 / 25e9, 1.4),
    "none": CodecCost(1 / 400e9, 1 / 400e9),
}
"""Codecs on a V100, as rough assumptions: neither measured with our kernels nor published; ratios of float32."""


def preset(name: str, ranks: int) -> Topology:
    """Return the topology of so many ranks on nodes of a known machine."""
    machine = PRESETS.get(name)
    if machine is None:
        remedy = "Name one of these, or the file of a topology."
        raise SpecError("topology", expected=f"one of {', '.join(PRESETS)}", got=f"'{name}'", remedy=remedy)
    if ranks < 1 or (ranks > machine.ranks and ranks % machine.ranks):
        expected = f"at most {machine.ranks} ranks or a multiple of them, as {name} has on a node"
        raise SpecError("number of ranks", expected=expected, got=str(ranks), remedy="Fill the nodes.")
    nodes = even_nodes(ranks, machine.ranks)
    inside, outside = (LinkCost(alpha * 1e-6, beta * PER_MB) for alpha, beta in (machine.inside, machine.outside))
    classes = {ONE: inside, "network": outside}
    within: str | Matrix = ONE
    if name == "ndv2":
        classes[TWO] = LinkCost(inside.latency, inside.per_byte / 2)
        within = _cube_mesh(min(ranks, machine.ranks))
    ports = [port for number, node in enumerate(nodes) for port in _ports(machine, number, node, inside, outside)]
    between = "network" if len(nodes) > 1 else None
    title = f"{name}, {len(nodes)} node{'s' * (len(nodes) > 1)}"
    return Topology(title, nodes, classes, within, between, {}, tuple(ports), GPU_CODECS, source=machine.source)


def _cube_mesh(ranks: int) -> Matrix:
    kinds = {"-": None, "1": ONE, "2": TWO}
    return tuple(tuple(kinds[cell] for cell in row[:ranks]) for row in CUBE_MESH[:ranks])


def _ports(machine: Machine, number: int, node: tuple[int, ...], inside: LinkCost, outside: LinkCost) -> list[Port]:
    """Return the cards of a node, each of as many ranks as share it, and the ways of its ranks into the switch."""
    per_card = -(-machine.ranks // machine.cards)
    ports = []
    for card in range(-(-len(node) // per_card)):
        ranks = frozenset(node[card * per_card : (card + 1) * per_card])
        name = f"node {number}" + (f", card {card}" if machine.cards > 1 else "")
        ports += [Port(f"{name}, {way}", ranks, way, outside.per_byte, "between") for way in ("out", "in")]
    if machine.cards > 1:  # on NVSwitch; in a mesh every pair has links of its own
        for rank in node:
            own = frozenset({rank})
            ports += [Port(f"rank {rank}, {way}", own, way, inside.per_byte, "within") for way in ("out", "in")]
    return ports
