"""Reads and writes topologies as JSON files, with microseconds and microseconds per MB.

    {"name": "two nodes", "source": "measured on ...",
     "nodes": [[0, 1], [2, 3]],
     "classes": {"memory": {"alpha_us": 2, "beta_us_per_MB": 150}, "network": {"alpha_us": 60, "beta_us_per_MB": 8000}},
     "links": {"within": "memory", "between": "network", "pairs": [[0, 3, null]]},
     "ports": [{"name": "node 0, out", "ranks": [0, 1], "way": "out", "beta_us_per_MB": 8000, "traffic": "between"}],
     "codecs": {"zfp:rate=8": {"encode_us_per_MB": 700, "decode_us_per_MB": 900, "ratio": 4}},
     "processors": [{"ranks": [0, 1, 2, 3], "cores": 2}],
     "per_chunk_us": 100,
     "handling": {"message_us": 60, "us_per_MB": 800, "wait_us": 300, "frame_us": 200}}

`within` may also be a table of classes by position in the node. Everything from `pairs` on may be left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.schedule.cost import PER_MB, Coding, Handling, Link
from mpi_gpucomp.schedule.document import Document, load
from mpi_gpucomp.schedule.topology import TRAFFIC, WAYS, Port, Processor, Topology

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.topology import Matrix

__all__ = ["from_document", "read_topology", "write_topology"]

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
    "handling",
    "fitted",
)


def read_topology(path: str | Path) -> Topology:
    """Read a topology from its file."""
    return from_document(load(path, "topology"))


def write_topology(topology: Topology, path: str | Path, fitted: Any = None) -> None:
    """Write a topology to a file; `fitted` is what else was found out when it was measured, for people to read."""
    document = topology.document() | ({"fitted": fitted} if fitted else {})
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in document.items())
    Path(path).write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def from_document(document: Document) -> Topology:
    """Make a topology of a document that was read; SpecError says what is wrong with it."""
    document.fields(FIELDS)
    nodes = _nodes(document["nodes"])
    ranks = sum(map(len, nodes))
    classes = {name: _link(part) for name, part in document["classes"].items()}
    links = document["links"]
    links.fields(("within", "between", "pairs"))
    named = tuple(classes)
    return Topology(
        document["name"].text(),
        nodes,
        classes,
        _within(links.get("within", None), max(map(len, nodes)), named),
        _class(links.get("between", None), named),
        dict(_pair(part, ranks, named) for part in links.get("pairs", []).list()),
        tuple(_port(part, ranks) for part in document.get("ports", []).list()),
        {spec: _coding(part) for spec, part in document.get("codecs", {}).items()},
        tuple(_processor(part, ranks) for part in document.get("processors", []).list()),
        document.get("per_chunk_us", 0).number() * 1e-6,
        document.get("source", "").text(),
        _handling(document.get("handling", {})),
    )


def _nodes(part: Document) -> tuple[tuple[int, ...], ...]:
    nodes = tuple(tuple(rank.whole() for rank in node.list()) for node in part.list())
    ranks = [rank for node in nodes for rank in node]
    if not ranks or sorted(ranks) != list(range(len(ranks))) or not all(nodes):
        part.fail("every rank from 0 on, on one node each, and no empty node")
    return nodes


def _link(part: Document) -> Link:
    part.fields(("alpha_us", "beta_us_per_MB"))
    return Link(part["alpha_us"].number() * 1e-6, part["beta_us_per_MB"].number() * PER_MB)


def _class(part: Document, known: tuple[str, ...]) -> str | None:
    return None if part.value is None else part.text(known)


def _within(part: Document, longest: int, known: tuple[str, ...]) -> str | Matrix | None:
    if not isinstance(part.value, list):
        return _class(part, known)
    rows = part.list(longest)
    return tuple(tuple(_class(cell, known) for cell in row.list(longest)) for row in rows)


def _pair(part: Document, ranks: int, known: tuple[str, ...]) -> tuple[tuple[int, int], str | None]:
    sender, receiver, name = part.list(3)
    return (sender.whole(0, ranks), receiver.whole(0, ranks)), _class(name, known)


def _port(part: Document, ranks: int) -> Port:
    part.fields(("name", "ranks", "way", "beta_us_per_MB", "traffic"))
    return Port(
        part["name"].text(),
        frozenset(part["ranks"].ranks(ranks)),
        part["way"].text(WAYS),
        part["beta_us_per_MB"].number() * PER_MB,
        part.get("traffic", "all").text(TRAFFIC),
    )


def _coding(part: Document) -> Coding:
    part.fields(("encode_us_per_MB", "decode_us_per_MB", "ratio"))
    encode, decode = (part[f"{way}_us_per_MB"].number() * PER_MB for way in ("encode", "decode"))
    ratio = part.get("ratio", 1.0).number()
    if not ratio:
        part["ratio"].fail("a number above 0")
    return Coding(encode, decode, ratio)


def _processor(part: Document, ranks: int) -> Processor:
    part.fields(("ranks", "cores"))
    cores = part["cores"].number()
    if not cores:
        part["cores"].fail("a number above 0")
    return Processor(frozenset(part["ranks"].ranks(ranks)), cores)


def _handling(part: Document) -> Handling:
    names = ("message_us", "us_per_MB", "wait_us", "frame_us")
    part.fields(names)
    message, per_byte, wait, frame = (part.get(name, 0).number() for name in names)
    return Handling(message * 1e-6, per_byte * PER_MB, wait * 1e-6, frame * 1e-6)
