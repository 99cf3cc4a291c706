"""Topologies: the placement of ranks on nodes, the cost of each link, and the ports that links share.

A link has a latency and a time per byte (alpha and beta). A *port* is shared by all messages that leave, or all that
enter, a set of ranks. A node's network card is two ports of its ranks, a GPU's connection to a switch two ports of one
rank, the uplink of a rack two ports of all ranks in it.

Files are JSON, with microseconds and microseconds per MB:

    {"name": "two nodes", "source": "measured on ...",
     "nodes": [[0, 1], [2, 3]],
     "classes": {"memory": {"alpha_us": 2, "beta_us_per_MB": 150},
                 "network": {"alpha_us": 60, "beta_us_per_MB": 8000}},
     "links": {"within": "memory", "between": "network", "pairs": [[0, 3, null]]},
     "ports": [{"name": "node 0, out", "ranks": [0, 1], "way": "out", "beta_us_per_MB": 8000, "traffic": "between"}],
     "codecs": {"zfp:rate=8": {"encode_us_per_MB": 700, "decode_us_per_MB": 900, "ratio": 4}},
     "processors": [{"ranks": [0, 1, 2, 3], "cores": 2}],
     "per_chunk_us": 100,
     "relay_bytes": 65536,
     "handling": {"message_us": 60, "us_per_MB": 800, "wait_us": 300, "frame_us": 200},
     "staging": {"us_per_MB": 40, "copy_us": 3, "raw": true}}

`staging` says that elements are on GPUs: frames, and messages without a codec if `raw`, pass through host memory.

`within` may also be a matrix of classes by position in the node. Everything from `pairs` on is optional. JSON files are
read as a `Document`, sketches too: its errors name the file, the field, what was expected and what was found.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import (
    NO_MESSAGE_COST,
    PER_MB,
    RELAY_BYTES,
    CodecCost,
    LinkCost,
    MessageCost,
    StagingCost,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = [
    "DIRECTIONS",
    "GPU_CODECS",
    "MAX_FILE_BYTES",
    "PRESETS",
    "Document",
    "Port",
    "ProcessorModel",
    "Topology",
    "even_nodes",
    "preset",
    "read_document",
    "read_file",
    "read_topology",
    "write_topology",
]

DIRECTIONS = ("out", "in")
TRAFFIC = ("all", "within", "between")

MAX_FILE_BYTES = 64 << 20
"""Longer files are rejected before they are parsed."""
MAX_NUMBER = 1e300
MAX_SHOWN = 60
"""Characters of a value that an error shows."""


class Port(NamedTuple):
    """Bandwidth shared by all messages that leave (`out`) or enter (`in`) a set of ranks."""

    name: str
    ranks: frozenset[int]
    direction: str
    per_byte: float
    """Seconds per byte."""
    traffic: str = "all"
    """`within` or `between` if it carries only messages within nodes or between nodes."""


class ProcessorModel(NamedTuple):
    """Cores that some ranks share for codecs and messages; a fraction if other processes use them too."""

    ranks: frozenset[int]
    cores: float


Matrix = tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True)
class Topology:
    """Ranks on nodes, and the costs of links, ports and codecs, in seconds and bytes."""

    name: str
    nodes: tuple[tuple[int, ...], ...]
    classes: Mapping[str, LinkCost]
    within: str | Matrix | None
    """The class of links inside a node: one for all, or by the positions of two ranks; None for no link."""
    between: str | None = None
    """The class of links between nodes."""
    pairs: Mapping[tuple[int, int], str | None] = field(default_factory=dict)
    """Exceptions, by sender and receiver."""
    ports: tuple[Port, ...] = ()
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    """By codec spec; `none` is the cost of copying or reducing raw elements."""
    processors: tuple[ProcessorModel, ...] = ()
    """If empty, every rank has private cores."""
    per_chunk: float = 0.0
    """CPU seconds per chunk received or sent."""
    source: str = ""
    """Origin of the figures."""
    message_cost: MessageCost = NO_MESSAGE_COST
    """The cost of a message at its sender and its receiver."""
    relay_bytes: int = RELAY_BYTES
    """The segment after which a message between nodes is relayed; 0 if only whole messages are forwarded."""
    staging: StagingCost | None = None
    """How messages of elements on GPUs reach the network; None for elements on the host."""

    def __post_init__(self) -> None:
        """Raise SpecError if the parts contradict each other."""
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.nodes):
            got = str([list(node) for node in self.nodes])
            raise _error(self, "nodes", "each rank from 0 on exactly once, and no empty node", got)
        for name in self._class_names():
            if name is not None and name not in self.classes:
                known = ", ".join(self.classes) or "none"
                raise _error(self, "links", f"classes among {known}", f"'{name}'")

    def _class_names(self) -> Iterator[str | None]:
        yield from self.pairs.values()
        yield self.between
        if isinstance(self.within, str):
            yield self.within
        for row in self.within if isinstance(self.within, tuple) else ():
            yield from row

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.nodes))

    @cached_property
    def _home(self) -> tuple[tuple[int, int], ...]:
        """The node of each rank, and its position in the node."""
        found = {rank: (number, at) for number, node in enumerate(self.nodes) for at, rank in enumerate(node)}
        return tuple(found[rank] for rank in range(self.ranks))

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._home[rank][0]

    def position(self, rank: int) -> int:
        """Return a rank's position in its node."""
        return self._home[rank][1]

    def class_of(self, sender: int, receiver: int) -> str | None:
        """Return the class of a link, or None if there is no link."""
        if (sender, receiver) in self.pairs:
            return self.pairs[sender, receiver]
        (node, row), (other, column) = self._home[sender], self._home[receiver]
        if node != other:
            return self.between
        return self.within[row][column] if isinstance(self.within, tuple) else self.within

    def link(self, sender: int, receiver: int) -> LinkCost | None:
        """Return the cost of a link, or None if there is no link."""
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
        found: dict[str, list[list[int]]] = {direction: [[] for _ in range(self.ranks)] for direction in DIRECTIONS}
        for number, port in enumerate(self.ports):
            for rank in port.ranks:
                found[port.direction][rank].append(number)
        return found

    def ports_of(self, sender: int, receiver: int) -> list[int]:
        """Return the numbers of the ports that a message passes."""
        kind = "within" if self.node_of(sender) == self.node_of(receiver) else "between"
        out = (number for number in self._ports_of["out"][sender] if receiver not in self.ports[number].ranks)
        back = (number for number in self._ports_of["in"][receiver] if sender not in self.ports[number].ranks)
        return [number for number in (*out, *back) if self.ports[number].traffic in ("all", kind)]

    def unloaded_link(self, sender: int, receiver: int) -> LinkCost | None:
        """Return the cost of a message with no other in flight: that of the slowest of its link and ports."""
        link = self.link(sender, receiver)
        if link is None:
            return None
        slowest = max((self.ports[number].per_byte for number in self.ports_of(sender, receiver)), default=0.0)
        return LinkCost(link.latency, max(link.per_byte, slowest))

    def document(self) -> dict[str, Any]:
        """Return the content of its file."""
        within: Any = [list(row) for row in self.within] if isinstance(self.within, tuple) else self.within
        links: dict[str, Any] = {"within": within, "between": self.between}
        if self.pairs:
            links["pairs"] = [[*pair, name] for pair, name in sorted(self.pairs.items())]
        found: dict[str, Any] = {"name": self.name, "source": self.source, "nodes": [list(node) for node in self.nodes]}
        found["classes"] = {
            name: {"alpha_us": _rounded(link.latency * 1e6), "beta_us_per_MB": _rounded(link.per_byte / PER_MB)}
            for name, link in self.classes.items()
        }
        found["links"] = links
        found["ports"] = [_port_document(port) for port in self.ports]
        found["codecs"] = {
            spec: {
                "encode_us_per_MB": _rounded(cost.encode / PER_MB),
                "decode_us_per_MB": _rounded(cost.decode / PER_MB),
                "ratio": _rounded(cost.ratio),
            }
            for spec, cost in self.codecs.items()
        }
        found["processors"] = [{"ranks": sorted(one.ranks), "cores": one.cores} for one in self.processors]
        found["per_chunk_us"] = _rounded(self.per_chunk * 1e6)
        found["relay_bytes"] = self.relay_bytes
        if self.message_cost != NO_MESSAGE_COST:
            found["handling"] = {
                "message_us": _rounded(self.message_cost.message * 1e6),
                "us_per_MB": _rounded(self.message_cost.per_byte / PER_MB),
                "wait_us": _rounded(self.message_cost.wait * 1e6),
                "frame_us": _rounded(self.message_cost.frame * 1e6),
            }
        if self.staging is not None:
            found["staging"] = {
                "us_per_MB": _rounded(self.staging.per_byte / PER_MB),
                "copy_us": _rounded(self.staging.latency * 1e6),
                "raw": self.staging.raw,
            }
        return found

    @cached_property
    def hash(self) -> str:
        """The identity of its shape: nodes, classes of links and ports, but no measured figures."""
        ports = [(sorted(port.ranks), port.direction, port.traffic) for port in self.ports]
        shape = json.dumps([self.nodes, self.within, self.between, sorted(self.pairs.items()), ports])
        return hashlib.sha256(shape.encode()).hexdigest()[:12]


def _port_document(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "ranks": sorted(port.ranks),
        "way": port.direction,
        "beta_us_per_MB": _rounded(port.per_byte / PER_MB),
        "traffic": port.traffic,
    }


def _rounded(number: float) -> float:
    """Round to six significant digits."""
    return float(f"{number:.6g}")


def _error(topology: Topology, part: str, expected: str, got: str) -> SpecError:
    return SpecError(f"topology {topology.name}: {part}", expected=expected, got=got, remedy="Correct the topology.")


def even_nodes(ranks: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return nodes of `per_node` consecutive ranks; the last may have fewer."""
    return tuple(tuple(range(first, min(first + per_node, ranks))) for first in range(0, ranks, per_node))


FIELDS = (
    "name",
    "source",
    "nodes",
    "classes",
    "links",
    "ports",
    "codecs",
    "processors",
    "per_chunk_us",
    "relay_bytes",
    "handling",
    "staging",
    "fitted",
)


def read_topology(path: str | Path) -> Topology:
    """Read a topology from its file; raise SpecError if the file is invalid."""
    return _from_document(read_document(path, "topology"))


def write_topology(topology: Topology, path: str | Path, fitted: Any = None) -> None:
    """Write a topology to a file; `fitted` is added for human readers and ignored when the file is read."""
    document = topology.document() | ({"fitted": fitted} if fitted else {})
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in document.items())
    Path(path).write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def _from_document(document: Document) -> Topology:
    document.fields(FIELDS)
    nodes = _read_nodes(document["nodes"])
    ranks = sum(map(len, nodes))
    classes = {name: _read_link(part) for name, part in document["classes"].items()}
    links = document["links"]
    links.fields(("within", "between", "pairs"))
    names = tuple(classes)
    return Topology(
        document["name"].text(),
        nodes,
        classes,
        _read_within(links.get("within", None), max(map(len, nodes)), names),
        _read_class(links.get("between", None), names),
        dict(_read_pair(part, ranks, names) for part in links.get("pairs", []).list()),
        tuple(_read_port(part, ranks) for part in document.get("ports", []).list()),
        {spec: _read_codec(part) for spec, part in document.get("codecs", {}).items()},
        tuple(_read_processor(part, ranks) for part in document.get("processors", []).list()),
        document.get("per_chunk_us", 0).number() * 1e-6,
        document.get("source", "").text(),
        _read_message_cost(document.get("handling", {})),
        document.get("relay_bytes", RELAY_BYTES).whole(),
        _read_staging(document["staging"]) if "staging" in document else None,
    )


def _read_nodes(part: Document) -> tuple[tuple[int, ...], ...]:
    nodes = tuple(tuple(rank.whole() for rank in node.list()) for node in part.list())
    ranks = [rank for node in nodes for rank in node]
    if not ranks or sorted(ranks) != list(range(len(ranks))) or not all(nodes):
        part.fail("each rank from 0 on exactly once, and no empty node")
    return nodes


def _read_link(part: Document) -> LinkCost:
    part.fields(("alpha_us", "beta_us_per_MB"))
    return LinkCost(part["alpha_us"].number() * 1e-6, part["beta_us_per_MB"].number() * PER_MB)


def _read_class(part: Document, names: tuple[str, ...]) -> str | None:
    if part.value is None:
        return None
    return part.text(names) if names else part.fail("a class that is defined in 'classes'")


def _read_within(part: Document, longest: int, names: tuple[str, ...]) -> str | Matrix | None:
    if not isinstance(part.value, list):
        return _read_class(part, names)
    rows = part.list(longest)
    return tuple(tuple(_read_class(cell, names) for cell in row.list(longest)) for row in rows)


def _read_pair(part: Document, ranks: int, names: tuple[str, ...]) -> tuple[tuple[int, int], str | None]:
    sender, receiver, name = part.list(3)
    return (sender.whole(0, ranks), receiver.whole(0, ranks)), _read_class(name, names)


def _read_port(part: Document, ranks: int) -> Port:
    part.fields(("name", "ranks", "way", "beta_us_per_MB", "traffic"))
    return Port(
        part["name"].text(),
        frozenset(part["ranks"].ranks(ranks)),
        part["way"].text(DIRECTIONS),
        part["beta_us_per_MB"].number() * PER_MB,
        part.get("traffic", "all").text(TRAFFIC),
    )


def _read_codec(part: Document) -> CodecCost:
    part.fields(("encode_us_per_MB", "decode_us_per_MB", "ratio"))
    encode, decode = (part[f"{action}_us_per_MB"].number() * PER_MB for action in ("encode", "decode"))
    return CodecCost(encode, decode, part.get("ratio", 1.0).positive())


def _read_processor(part: Document, ranks: int) -> ProcessorModel:
    part.fields(("ranks", "cores"))
    return ProcessorModel(frozenset(part["ranks"].ranks(ranks)), part["cores"].positive())


def _read_message_cost(part: Document) -> MessageCost:
    names = ("message_us", "us_per_MB", "wait_us", "frame_us")
    part.fields(names)
    message, per_byte, wait, frame = (part.get(name, 0).number() for name in names)
    return MessageCost(message * 1e-6, per_byte * PER_MB, wait * 1e-6, frame * 1e-6)


def _read_staging(part: Document) -> StagingCost:
    part.fields(("us_per_MB", "copy_us", "raw"))
    latency = part.get("copy_us", 0).number() * 1e-6
    return StagingCost(part["us_per_MB"].number() * PER_MB, latency, part.get("raw", True).boolean())


TACCL = "https://github.com/microsoft/taccl, taccl/examples/topo"
DGX_A100 = (
    "NVIDIA DGX A100 data sheet: NVLink 600 GB/s per GPU (sum of both directions), 8 x 200 Gbit/s; latencies of dgx2"
)
PCIE4 = StagingCost(1 / 24e9, 3e-6, raw=False)
"""Three quarters of what 16 lanes of generation 4 carry in one direction, 32 GB/s; the MPI library reads GPU memory."""
ONE, TWO = "NVLink", "two NVLinks"
CUBE_MESH = ("-2112---", "2-12-1--", "11-2--2-", "122----1", "2----211", "-1--2-12", "--2-11-2", "---1122-")
"""NVLinks between the GPUs of an NDv2 node, from TACCL."""


class NodePreset(NamedTuple):
    """A node: ranks, network cards, and (alpha, beta) of links inside and outside, in microseconds and per MB."""

    ranks: int
    cards: int
    inside: tuple[float, float]
    outside: tuple[float, float]
    source: str
    relay_bytes: int = 0
    """A GPU-aware MPI sends whole messages."""
    staging: StagingCost | None = None
    """For nodes whose GPUs and cards are modelled with the copies between them."""


PRESETS = {
    "ndv2": NodePreset(8, 1, (0.3, 46), (2.6, 105), f"{TACCL}/topo-ndv2-1MB.json"),
    "dgx2": NodePreset(16, 8, (0.3, 8), (2.6, 105), f"{TACCL}/topo-dgx2-1MB.json"),
    "dgx-a100": NodePreset(8, 8, (0.3, 1e3 / 300), (2.6, 1e3 / 25), DGX_A100, staging=PCIE4),
    "a100-hdr": NodePreset(1, 1, (0.3, 1e3 / 300), (2.6, 1e3 / 25), DGX_A100, staging=PCIE4),
    "v100-ib": NodePreset(1, 1, (0.3, 46), (2.6, 105), f"{TACCL}/topo-ndv2-1MB.json"),
    "gigabit": NodePreset(
        1, 1, (1, 100), (50, 8000), "1 Gbit/s; 50 us, a typical latency of TCP in one room", RELAY_BYTES
    ),
}
"""Nodes of well-known machines.

| preset | node | figures |
|---|---|---|
| ndv2 | 8 V100 in a cube mesh of NVLinks, one 100 Gbit/s card | TACCL, examples/topo/topo-ndv2-1MB.json |
| dgx2 | 16 V100 on NVSwitch, eight 100 Gbit/s cards | TACCL, examples/topo/topo-dgx2-1MB.json |
| dgx-a100 | 8 A100 on NVSwitch, eight 200 Gbit/s cards | NVIDIA's data sheet: 600 GB/s of NVLink per GPU, HDR |
| a100-hdr | one A100, one 200 Gbit/s card | the same |
| v100-ib | one V100, one 100 Gbit/s card | the network of ndv2 |
| gigabit | one rank, one 1 Gbit/s card | the rate of the link; a typical latency of TCP |

Times per MB of the first two were measured by TACCL's authors. Those of the A100 follow from the rates of one
direction, 300 GB/s and 25 GB/s; its latencies are those of dgx2.
"""
GPU_CODECS = {
    "zfp:rate=16": CodecCost(1 / 110e9, 1 / 110e9, 2.0),
    "zfp:rate=8": CodecCost(1 / 150e9, 1 / 150e9, 4.0),
    "zfp:rate=4": CodecCost(1 / 180e9, 1 / 180e9, 8.0),
    "mpc": CodecCost(1 / 25e9, 1 / 25e9, 1.4),
    "none": CodecCost(1 / 400e9, 1 / 400e9),
}
"""Rough assumptions for codecs on a V100, neither measured with our kernels nor published; ratios of float32."""


def preset(name: str, ranks: int) -> Topology:
    """Return the topology of `ranks` ranks on nodes of a preset."""
    machine = PRESETS.get(name)
    if machine is None:
        remedy = "Use one of these, or a topology file."
        raise SpecError("topology", expected=f"one of {', '.join(PRESETS)}", got=f"'{name}'", remedy=remedy)
    if ranks < 1 or (ranks > machine.ranks and ranks % machine.ranks):
        expected = f"at most {machine.ranks}, or a multiple of the {machine.ranks} ranks of a node of {name}"
        raise SpecError("number of ranks", expected=expected, got=str(ranks), remedy="Use full nodes.")
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
    return Topology(
        title,
        nodes,
        classes,
        within,
        between,
        ports=tuple(ports),
        codecs=GPU_CODECS,
        source=machine.source,
        relay_bytes=machine.relay_bytes,
        staging=machine.staging,
    )


def _cube_mesh(ranks: int) -> Matrix:
    kinds = {"-": None, "1": ONE, "2": TWO}
    return tuple(tuple(kinds[cell] for cell in row[:ranks]) for row in CUBE_MESH[:ranks])


def _ports(machine: NodePreset, number: int, node: tuple[int, ...], inside: LinkCost, outside: LinkCost) -> list[Port]:
    """Return the ports of a node: those of its network cards, and of its ranks' connections to the switch."""
    per_card = -(-machine.ranks // machine.cards)
    ports = []
    for card in range(-(-len(node) // per_card)):
        ranks = frozenset(node[card * per_card : (card + 1) * per_card])
        name = f"node {number}" + (f", card {card}" if machine.cards > 1 else "")
        ports += [Port(f"{name}, {one}", ranks, one, outside.per_byte, "between") for one in DIRECTIONS]
    if machine.cards > 1:  # NVSwitch; in a mesh every pair has its own links
        for rank in node:
            own = frozenset({rank})
            ports += [Port(f"rank {rank}, {one}", own, one, inside.per_byte, "within") for one in DIRECTIONS]
    return ports


def read_file(path: Path, limit: int) -> bytes:
    """Return a file of at most `limit` bytes; raise ValueError for a longer one, a device or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("something that is not a file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes")
    return data


def read_document(path: str | Path, kind: str) -> Document:
    """Read a JSON file; `kind`, such as "topology", is named in errors."""
    path = Path(path)
    topic = f"{kind} {path}"
    try:
        return Document(json.loads(read_file(path, MAX_FILE_BYTES).decode()), topic)
    except OSError as error:
        raise _document_error(topic, "a readable file", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _document_error(topic, "JSON", "bytes that are not UTF-8") from error
    except RecursionError as error:
        raise _document_error(topic, "JSON", "too many levels of nesting") from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise _document_error(topic, "JSON", str(error).rstrip(".")) from error


def _document_error(topic: str, expected: str, got: str) -> SpecError:
    return SpecError(topic, expected=expected, got=got, remedy="Correct the file.")


class Document:
    """A JSON value and its location in the file."""

    def __init__(self, value: Any, where: str) -> None:
        """Wrap a value; `where` is its location, for errors."""
        self.value, self.where = value, where

    def fail(self, expected: str, got: str | None = None) -> NoReturn:
        """Raise SpecError for this value."""
        raise _document_error(self.where, expected, _shown(self.value) if got is None else got)

    def fields(self, known: Collection[str]) -> None:
        """Check that this is an object that has no other than the known fields."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name in self.value:
            if name not in known:
                self.fail(f"fields among {', '.join(known)}", f"'{name}'")

    def __contains__(self, name: str) -> bool:
        """Return True if a field is present and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def __getitem__(self, name: str) -> Document:
        """Return a required field."""
        if name not in self:
            self.fail(f"a field '{name}'", "none" if isinstance(self.value, dict) else None)
        return Document(self.value[name], f"{self.where}: {name}")

    def get(self, name: str, default: Any) -> Document:
        """Return a field, or the default if it is missing or null."""
        return self[name] if name in self else Document(default, f"{self.where}: {name}")

    def items(self) -> Iterator[tuple[str, Document]]:
        """Yield name and value of the fields of an object."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name, value in self.value.items():
            yield name, Document(value, f"{self.where}: {name}")

    def list(self, length: int | None = None) -> list[Document]:
        """Return the elements of a list, which must have `length` of them if that is given."""
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            self.fail("a list [...]" if length is None else f"a list of {length}")
        return [Document(value, f"{self.where}[{at}]") for at, value in enumerate(self.value)]

    def text(self, allowed: Collection[str] = ()) -> str:
        """Return a string, which must be one of those allowed if there are any."""
        if not isinstance(self.value, str) or (allowed and self.value not in allowed):
            self.fail(f"one of {', '.join(allowed)}" if allowed else "a string")
        return self.value

    def boolean(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            self.fail("true or false")
        return self.value

    def number(self, least: float = 0.0) -> float:
        """Return a finite number that is not below the least."""
        value = self.value
        # The upper bound also excludes NaN, infinity, and integers that have no float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < MAX_NUMBER:
            self.fail(f"a number of at least {least:g}")
        return float(value)

    def positive(self) -> float:
        """Return a finite number above 0."""
        value = self.number()
        if not value:
            self.fail("a number above 0")
        return value

    def whole(self, least: int = 0, end: int | None = None) -> int:
        """Return an integer that is not below the least, and below the end if there is one."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (end is not None and value >= end):
            self.fail(f"an integer of at least {least}" if end is None else f"an integer from {least} to {end - 1}")
        return value

    def ranks(self, end: int) -> tuple[int, ...]:
        """Return a list of distinct ranks below the end."""
        found = tuple(part.whole(0, end) for part in self.list())
        if len(set(found)) != len(found):
            self.fail("each rank once")
        return found


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
