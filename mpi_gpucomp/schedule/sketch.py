"""Communication sketches: what a person knows about a good algorithm, so that a solver need not find it out.

The fields are TACCL's. Ranks in a sketch are positions in a node, except in `symmetry_offsets`.

    {"nnodes": 2,
     "intranode_sketch": {"strategy": "switch", "switches": [[0, 1, 2, 3]], "switch_hyperedge_strategy": ["uc-min"]},
     "internode_sketch": {"strategy": "relay", "internode_conn": {"1": [0], "3": [2]},
                          "gpus_to_sender_rev_map": {"1": [0, 1], "3": [2, 3]}, "enforce_ordering": true},
     "symmetry_offsets": [[2, 4], [4, 8]],
     "hyperparameters": {"input_chunkup": 2}}

- `switches`: a rank sends inside its node only to those on a switch with it; `uc-min` asks for few different
  connections there, `uc-max` for many. `minmax` and `maxmin` ask the same of the links of a node without switches;
  `none` leaves them as they are.
- `internode_conn`: which ranks of a node send to which of another; "fully-connected" for all to all.
- `gpus_to_sender_rev_map`: whose chunks each sender takes out of the node.
- `enforce_ordering`: a sender takes the chunks of its node out in the order of their ranks.
- `symmetry_offsets`: [offset, group]: what rank r does, the rank `offset` further on in its group of so many does too.
- `input_chunkup`: into how many chunks each rank's data are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.documents import Document, load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["Sketch", "derived", "is_symmetry", "read_sketch", "rotation"]

STRATEGIES = ("switch", "minmax", "maxmin", "none")
HYPEREDGES = ("uc-min", "uc-max")
FULL = "fully-connected"
FREE_RANKS = 16
"""Up to so many ranks a derived sketch leaves all links between nodes to the solver."""


@dataclass(frozen=True)
class Sketch:
    """A sketch that has been read; the default leaves everything to the solver."""

    switches: tuple[frozenset[int], ...] = ()
    """Positions on each switch of a node; none: all links."""
    connections: int = 0
    """1: few different connections inside nodes, -1: many, 0: as it comes."""
    internode: Mapping[int, frozenset[int]] | None = None
    """Positions that a position sends to on other nodes; None: all to all."""
    sender_of: Mapping[int, int] = field(default_factory=dict)
    """The position that takes a position's chunks out of the node."""
    in_order: bool = False
    symmetries: tuple[tuple[int, int], ...] = ()
    chunkup: int = 1

    def allows(self, topology: Topology, sender: int, receiver: int) -> bool:
        """Say whether a link may be used."""
        here, there = topology.position(sender), topology.position(receiver)
        if topology.node_of(sender) == topology.node_of(receiver):
            return not self.switches or any({here, there} <= switch for switch in self.switches)
        return self.internode is None or there in self.internode.get(here, ())


def read_sketch(path: str | Path, topology: Topology) -> Sketch:
    """Read a sketch from its file, and make sure that it fits a topology."""
    document = load(path, "sketch")
    document.fields(("nnodes", "intranode_sketch", "internode_sketch", "symmetry_offsets", "hyperparameters"))
    nodes = len(topology.nodes)
    if "nnodes" in document and document["nnodes"].whole(1) != nodes:
        document["nnodes"].fail(f"{nodes}, as topology {topology.name} has")
    size = max(map(len, topology.nodes))
    switches, connections = _intranode(document.get("intranode_sketch", {}), size)
    internode, sender_of, in_order = _internode(document.get("internode_sketch", {}), size)
    offsets = [_offset(part, topology) for part in document.get("symmetry_offsets", []).list()]
    settings = document.get("hyperparameters", {})
    settings.fields(("input_chunkup",))
    chunkup = settings.get("input_chunkup", 1).whole(1, 65)
    return Sketch(switches, connections, internode, sender_of, in_order, tuple(offsets), chunkup)


def _intranode(part: Document, size: int) -> tuple[tuple[frozenset[int], ...], int]:
    part.fields(("strategy", "switches", "switch_hyperedge_strategy"))
    strategy = part.get("strategy", "none").text(STRATEGIES)
    if strategy != "switch":
        return (), {"minmax": 1, "maxmin": -1, "none": 0}[strategy]
    switches = tuple(frozenset(switch.ranks(size)) for switch in part["switches"].list())
    if not switches:
        part["switches"].fail("a switch at least")
    kinds = part.get("switch_hyperedge_strategy", []).list()
    if len(kinds) not in (0, len(switches)):
        part["switch_hyperedge_strategy"].fail(f"one for each of {len(switches)} switches")
    chosen = {kind.text(HYPEREDGES) for kind in kinds}
    if len(chosen) > 1:
        part["switch_hyperedge_strategy"].fail("the same for all switches")
    return switches, {"uc-min": 1, "uc-max": -1, "": 0}[chosen.pop() if chosen else ""]


def _internode(part: Document, size: int) -> tuple[dict[int, frozenset[int]] | None, dict[int, int], bool]:
    part.fields(("strategy", "internode_conn", "gpus_to_sender_rev_map", "enforce_ordering"))
    part.get("strategy", "relay").text(("relay",))
    conn = part.get("internode_conn", FULL)
    senders = (
        None if conn.value == FULL else {_key(conn, name, size): frozenset(to.ranks(size)) for name, to in conn.items()}
    )
    sender_of: dict[int, int] = {}
    rev_map = part.get("gpus_to_sender_rev_map", {})
    for name, owners in rev_map.items():
        sender = _key(rev_map, name, size)
        if senders is not None and sender not in senders:
            owners.fail("a sender that internode_conn names", f"'{name}'")
        for owner in owners.ranks(size):
            if owner in sender_of:
                owners.fail("one sender for each rank", f"two for rank {owner}")
            sender_of[owner] = sender
    ordering = part.get("enforce_ordering", False)
    if not isinstance(ordering.value, bool):
        ordering.fail("true or false")
    return senders, sender_of, ordering.value


def _key(part: Document, name: str, size: int) -> int:
    if not name.isdecimal() or int(name) >= size:
        part.fail(f"ranks of a node, from 0 to {size - 1}, as names", f"'{name}'")
    return int(name)


def _offset(part: Document, topology: Topology) -> tuple[int, int]:
    offset, group = (number.whole(1) for number in part.list(2))
    if topology.ranks % group or offset >= group:
        part.fail(f"an offset below its group, and a group that divides the {topology.ranks} ranks")
    if not is_symmetry(topology, rotation(topology.ranks, offset, group)):
        part.fail(f"a rotation that maps the links of topology {topology.name} onto each other")
    return offset, group


def rotation(ranks: int, offset: int, group: int) -> tuple[int, ...]:
    """Return where each rank goes that is moved by an offset within its group."""
    return tuple(rank // group * group + (rank % group + offset) % group for rank in range(ranks))


def is_symmetry(topology: Topology, moved: tuple[int, ...]) -> bool:
    """Say whether every link is as good after ranks have changed places, and shares as much."""
    ranks = range(topology.ranks)
    alike = all(topology.link(a, b) == topology.link(moved[a], moved[b]) for a in ranks for b in ranks if a != b)
    ports = {(port.ranks, port.way, port.per_byte, port.traffic) for port in topology.ports}
    images = {(frozenset(moved[r] for r in port[0]), *port[1:]) for port in ports}
    return alike and images == ports


def derived(topology: Topology, *, rooted: bool, chunkup: int | None = None) -> Sketch:
    """Return a sensible sketch for a topology: its symmetries, and few links between nodes where there are many ranks.

    With many ranks, one of those that share a card sends to the one at the same place on other nodes.
    """
    internode = None
    if topology.ranks > FREE_RANKS and len(topology.nodes) > 1:
        internode = {position: frozenset({position}) for position in _on_cards(topology)}
    offsets = () if rooted else _offsets(topology)
    if internode is not None and len(internode) < len(topology.nodes[0]):
        offsets = tuple(one for one in offsets if one[1] == topology.ranks)
    if chunkup is None:
        chunkup = 2 if rooted and topology.ranks <= FREE_RANKS else 1
    return Sketch(internode=internode, symmetries=offsets, chunkup=chunkup)


def _on_cards(topology: Topology) -> list[int]:
    """Return a position for each card of a node: those that no earlier one shares a port with."""
    node, found, served = topology.nodes[0], list[int](), set[int]()
    cards = [port.ranks for port in topology.ports if port.traffic == "between" and port.ranks <= set(node)]
    for position, rank in enumerate(node):
        if rank not in served:
            found.append(position)
            served |= {rank}.union(*(ranks for ranks in cards if rank in ranks))
    return found


def _offsets(topology: Topology) -> tuple[tuple[int, int], ...]:
    """Return the rotations of nodes, and of ranks in their nodes, that change nothing."""
    size, ranks = len(topology.nodes[0]), topology.ranks
    in_order = topology.nodes == tuple(tuple(range(first, first + size)) for first in range(0, ranks, size))
    candidates = [(1, size)] * (size > 1) + [(size, ranks)] * (size < ranks) if in_order else []
    return tuple(one for one in candidates if is_symmetry(topology, rotation(ranks, *one)))


def check_fits(sketch: Sketch, topology: Topology) -> None:
    """Raise SpecError where a sketch that was not read from a file does not fit a topology."""
    for offset, group in sketch.symmetries:
        if topology.ranks % group or not is_symmetry(topology, rotation(topology.ranks, offset, group)):
            raise SpecError(
                f"sketch: symmetry_offsets [{offset}, {group}]",
                expected=f"a rotation that maps the links of topology {topology.name} onto each other",
                got="one that does not",
                remedy="Leave it out.",
            )
