"""Topologies of well-known machines, of any number of nodes, from published figures.

| preset | node | figures |
|---|---|---|
| ndv2 | 8 V100 in a cube mesh of NVLinks, one 100 Gbit/s card | TACCL, examples/topo/topo-ndv2-1MB.json |
| dgx2 | 16 V100 on NVSwitch, eight 100 Gbit/s cards | TACCL, examples/topo/topo-dgx2-1MB.json |
| dgx-a100 | 8 A100 on NVSwitch, eight 200 Gbit/s cards | NVIDIA's data sheet: 600 GB/s of NVLink per GPU, HDR |
| v100-ib | one V100, one 100 Gbit/s card | the network of ndv2 |
| gigabit | one rank, one 1 Gbit/s card | the wire's rate; latency as usual with TCP |

Times per MB of the first two were measured by TACCL's authors. For the A100 they follow from the rates, which are those
of one direction: 300 GB/s and 25 GB/s; its latencies are those of dgx2.
"""

from __future__ import annotations

from typing import NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import PER_MB, Coding, Link
from mpi_gpucomp.schedule.topology import Matrix, Port, Topology, even_nodes

__all__ = ["GPU_CODECS", "PRESETS", "preset"]

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
    "zfp:rate=16": Coding(1 / 110e9, 1 / 110e9, 2.0),
    "zfp:rate=8": Coding(1 / 150e9, 1 / 150e9, 4.0),
    "zfp:rate=4": Coding(1 / 180e9, 1 / 180e9, 8.0),
    "mpc": Coding(1 / 25e9, 1 / 25e9, 1.4),
    "none": Coding(1 / 400e9, 1 / 400e9),
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
    inside, outside = (Link(alpha * 1e-6, beta * PER_MB) for alpha, beta in (machine.inside, machine.outside))
    classes = {ONE: inside, "network": outside}
    within: str | Matrix = ONE
    if name == "ndv2":
        classes[TWO] = Link(inside.latency, inside.per_byte / 2)
        within = _cube_mesh(min(ranks, machine.ranks))
    ports = [port for number, node in enumerate(nodes) for port in _ports(machine, number, node, inside, outside)]
    between = "network" if len(nodes) > 1 else None
    title = f"{name}, {len(nodes)} node{'s' * (len(nodes) > 1)}"
    return Topology(title, nodes, classes, within, between, {}, tuple(ports), GPU_CODECS, source=machine.source)


def _cube_mesh(ranks: int) -> Matrix:
    kinds = {"-": None, "1": ONE, "2": TWO}
    return tuple(tuple(kinds[cell] for cell in row[:ranks]) for row in CUBE_MESH[:ranks])


def _ports(machine: Machine, number: int, node: tuple[int, ...], inside: Link, outside: Link) -> list[Port]:
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
