"""Communication sketches: hints of a user that narrow the search for an algorithm.

The fields are TACCL's. Ranks in a sketch are positions in a node, except in `symmetry_offsets`.

    {"nnodes": 2,
     "intranode_sketch": {"strategy": "switch", "switches": [[0, 1, 2, 3]], "switch_hyperedge_strategy": ["uc-min"]},
     "internode_sketch": {"strategy": "relay", "internode_conn": {"1": [0], "3": [2]},
                          "gpus_to_sender_rev_map": {"1": [0, 1], "3": [2, 3]}, "enforce_ordering": true},
     "symmetry_offsets": [[2, 4], [4, 8]],
     "hyperparameters": {"input_chunkup": 2}}

- `switches`: inside its node a rank sends only to ranks on a switch with it. `uc-min` prefers few distinct connections
  there, `uc-max` many. `minmax` and `maxmin` are the same for the links of a node without switches; `none` has no
  preference.
- `internode_conn`: which ranks of a node send to which of another; "fully-connected" for all to all.
- `gpus_to_sender_rev_map`: the ranks whose chunks each sender takes out of the node.
- `enforce_ordering`: a sender takes the chunks of its node out in the order of their ranks.
- `symmetry_offsets`: [offset, group]: the rank `offset` further on in its group of `group` ranks does the same.
- `input_chunkup`: the number of chunks into which each rank's data are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.topology import Document, read_document

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["Sketch", "check_symmetries", "default_sketch", "is_symmetry", "read_sketch", "rotation"]

STRATEGIES = ("switch", "minmax", "maxmin", "none")
HYPEREDGES = ("uc-min", "uc-max")
FULL = "fully-connected"
MAX_CHUNKUP = 64
MAX_UNRESTRICTED_RANKS = 16
"""Up to this many ranks a default sketch leaves all links between nodes to the solver."""


@dataclass(frozen=True)
class Sketch:
    """A communication sketch; the default leaves everything to the solver."""

    switches: tuple[frozenset[int], ...] = ()
    """Positions on each switch of a node; if empty, all links may be used."""
    connections: int = 0
    """1: prefer few distinct connections inside nodes, -1: many, 0: no preference."""
    internode: Mapping[int, frozenset[int]] | None = None
    """Positions that a position sends to on other nodes; None: all to all."""
    sender_of: Mapping[int, int] = field(default_factory=dict)
    """The position that takes a position's chunks out of the node."""
    in_order: bool = False
    """True if a sender takes the chunks of its node out in the order of their ranks."""
    symmetries: tuple[tuple[int, int], ...] = ()
    """(offset, group) of each symmetry."""
    chunkup: int = 1

    def allows(self, topology: Topology, sender: int, receiver: int) -> bool:
        """Return True if a link may be used."""
        here, there = topology.position(sender), topology.position(receiver)
        if topology.node_of(sender) == topology.node_of(receiver):
            return not self.switches or any({here, there} <= switch for switch in self.switches)
        return self.internode is None or there in self.internode.get(here, ())


def read_sketch(path: str | Path, topology: Topology) -> Sketch:
    """Read a sketch from its file; raise SpecError if it is invalid or does not fit the topology."""
    document = read_document(path, "sketch")
    document.fields(("nnodes", "intranode_sketch", "internode_sketch", "symmetry_offsets", "hyperparameters"))
    nodes = len(topology.nodes)
    if "nnodes" in document and document["nnodes"].whole(1) != nodes:
        document["nnodes"].fail(f"{nodes}, as in topology {topology.name}")
    size = max(map(len, topology.nodes))
    switches, connections = _intranode(document.get("intranode_sketch", {}), size)
    internode, sender_of, in_order = _internode(document.get("internode_sketch", {}), size)
    offsets = [_symmetry(part, topology) for part in document.get("symmetry_offsets", []).list()]
    settings = document.get("hyperparameters", {})
    settings.fields(("input_chunkup",))
    chunkup = settings.get("input_chunkup", 1).whole(1, MAX_CHUNKUP + 1)
    return Sketch(switches, connections, internode, sender_of, in_order, tuple(offsets), chunkup)


def _intranode(part: Document, size: int) -> tuple[tuple[frozenset[int], ...], int]:
    part.fields(("strategy", "switches", "switch_hyperedge_strategy"))
    strategy = part.get("strategy", "none").text(STRATEGIES)
    if strategy != "switch":
        return (), {"minmax": 1, "maxmin": -1, "none": 0}[strategy]
    switches = tuple(frozenset(switch.ranks(size)) for switch in part["switches"].list())
    if not switches:
        part["switches"].fail("at least one switch")
    kinds = part.get("switch_hyperedge_strategy", []).list()
    if len(kinds) not in (0, len(switches)):
        part["switch_hyperedge_strategy"].fail(f"one for each of {len(switches)} switches")
    distinct = {kind.text(HYPEREDGES) for kind in kinds}
    if len(distinct) > 1:
        part["switch_hyperedge_strategy"].fail("the same for all switches")
    return switches, {"uc-min": 1, "uc-max": -1, "": 0}[distinct.pop() if distinct else ""]


def _internode(part: Document, size: int) -> tuple[dict[int, frozenset[int]] | None, dict[int, int], bool]:
    part.fields(("strategy", "internode_conn", "gpus_to_sender_rev_map", "enforce_ordering"))
    part.get("strategy", "relay").text(("relay",))
    conn = part.get("internode_conn", FULL)
    receivers = (
        None
        if conn.value == FULL
        else {_position(conn, name, size): frozenset(to.ranks(size)) for name, to in conn.items()}
    )
    sender_of: dict[int, int] = {}
    rev_map = part.get("gpus_to_sender_rev_map", {})
    for name, owners in rev_map.items():
        sender = _position(rev_map, name, size)
        if receivers is not None and sender not in receivers:
            owners.fail("a sender listed in internode_conn", f"'{name}'")
        for owner in owners.ranks(size):
            if owner in sender_of:
                owners.fail("one sender for each rank", f"two for rank {owner}")
            sender_of[owner] = sender
    return receivers, sender_of, part.get("enforce_ordering", False).boolean()


def _position(part: Document, name: str, size: int) -> int:
    """Return a field name as a position in a node."""
    positions = {str(position): position for position in range(size)}
    if name not in positions:
        part.fail(f"ranks of a node, from 0 to {size - 1}, as field names", f"'{name[:60]}'")
    return positions[name]


def _symmetry(part: Document, topology: Topology) -> tuple[int, int]:
    offset, group = (number.whole(1) for number in part.list(2))
    if topology.ranks % group or offset >= group:
        part.fail(f"an offset below its group, and a group that divides the {topology.ranks} ranks")
    if not is_symmetry(topology, rotation(topology.ranks, offset, group)):
        part.fail(f"a symmetry of topology {topology.name}")
    return offset, group


def rotation(ranks: int, offset: int, group: int) -> tuple[int, ...]:
    """Return the permutation that moves each rank by an offset within its group."""
    return tuple(rank // group * group + (rank % group + offset) % group for rank in range(ranks))


def is_symmetry(topology: Topology, permutation: tuple[int, ...]) -> bool:
    """Return True if a permutation of the ranks preserves all link costs and ports."""
    ranks = range(topology.ranks)
    image = permutation
    same = all(topology.link(a, b) == topology.link(image[a], image[b]) for a in ranks for b in ranks if a != b)
    ports = {(port.ranks, port.direction, port.per_byte, port.traffic) for port in topology.ports}
    images = {(frozenset(image[r] for r in port[0]), *port[1:]) for port in ports}
    return same and images == ports


def default_sketch(topology: Topology, *, rooted: bool, chunkup: int | None = None) -> Sketch:
    """Return a sketch of a topology: its symmetries and, with many ranks, few links between nodes.

    With many ranks, one of those that share a network card sends to the same position on other nodes.
    """
    internode = None
    if topology.ranks > MAX_UNRESTRICTED_RANKS and len(topology.nodes) > 1:
        internode = {position: frozenset({position}) for position in _card_positions(topology)}
    offsets = () if rooted else _symmetries(topology)
    if internode is not None and len(internode) < len(topology.nodes[0]):
        offsets = tuple(one for one in offsets if one[1] == topology.ranks)
    if chunkup is None:
        chunkup = 2 if rooted and topology.ranks <= MAX_UNRESTRICTED_RANKS else 1
    return Sketch(internode=internode, symmetries=offsets, chunkup=chunkup)


def _card_positions(topology: Topology) -> list[int]:
    """Return one position for each network card of a node: the first of those that share it."""
    node, found, served = topology.nodes[0], list[int](), set[int]()
    cards = [port.ranks for port in topology.ports if port.traffic == "between" and port.ranks <= set(node)]
    for position, rank in enumerate(node):
        if rank not in served:
            found.append(position)
            served |= {rank}.union(*(ranks for ranks in cards if rank in ranks))
    return found


def _symmetries(topology: Topology) -> tuple[tuple[int, int], ...]:
    """Return the rotations of nodes, and of ranks in their nodes, that are symmetries."""
    size, ranks = len(topology.nodes[0]), topology.ranks
    in_order = topology.nodes == tuple(tuple(range(first, first + size)) for first in range(0, ranks, size))
    candidates = [(1, size)] * (size > 1) + [(size, ranks)] * (size < ranks) if in_order else []
    return tuple(one for one in candidates if is_symmetry(topology, rotation(ranks, *one)))


def check_symmetries(sketch: Sketch, topology: Topology) -> None:
    """Raise SpecError if the symmetries of a sketch are not those of a topology."""
    for offset, group in sketch.symmetries:
        if topology.ranks % group or not is_symmetry(topology, rotation(topology.ranks, offset, group)):
            raise SpecError(
                f"sketch: symmetry_offsets [{offset}, {group}]",
                expected=f"a symmetry of topology {topology.name}",
                got="a rotation that changes links or ports",
                remedy="Remove it.",
            )
