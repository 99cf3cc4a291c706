"""Reads JSON documents part by part, and says where something is wrong: file, path, what was expected."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import PER_MB, CodecCost, LinkCost, MessageCost
from mpi_gpucomp.schedule.topology import TRAFFIC, WAYS, Port, ProcessorModel, Topology

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from mpi_gpucomp.schedule.topology import Matrix

__all__ = ["Document", "from_document", "load", "read_topology", "write_topology"]

LARGEST = 64 << 20
"""Longer files are refused before they are parsed."""


def load(path: str | Path, kind: str) -> Document:
    """Read the file of a document of some kind, such as a topology."""
    path = Path(path)
    topic = f"{kind} {path}"
    try:
        if path.stat().st_size > LARGEST:
            raise _wrong(topic, f"at most {LARGEST} bytes", "more")
        return Document(json.loads(path.read_text(encoding="utf-8")), topic)
    except OSError as error:
        raise _wrong(topic, "a file that can be read", error.strerror or str(error)) from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise _wrong(topic, "JSON", str(error).rstrip(".")) from error


def _wrong(topic: str, expected: str, got: str) -> SpecError:
    return SpecError(topic, expected=expected, got=got, remedy="Correct the file.")


class Document:
    """A value of a document, and where it stands, for the sake of clear errors."""

    def __init__(self, value: Any, where: str) -> None:
        """Begin with the whole, or go on with a part."""
        self.value, self.where = value, where

    def fail(self, expected: str, got: str | None = None) -> NoReturn:
        """Raise the error that names this part."""
        raise _wrong(self.where, expected, shown(self.value) if got is None else got)

    def fields(self, known: Collection[str]) -> None:
        """Make sure that this is an object, and that it has no others than the known fields."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name in self.value:
            if name not in known:
                self.fail(f"fields among {', '.join(known)}", f"'{name}'")

    def __contains__(self, name: str) -> bool:
        """Say whether a field is there and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def __getitem__(self, name: str) -> Document:
        """Return a field that must be there."""
        if name not in self:
            self.fail(f"a field '{name}'", "none")
        return Document(self.value[name], f"{self.where}: {name}")

    def get(self, name: str, default: Any) -> Document:
        """Return a field, or the default in its place."""
        return self[name] if name in self else Document(default, f"{self.where}: {name}")

    def items(self) -> Iterator[tuple[str, Document]]:
        """Yield the fields of an object."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name, value in self.value.items():
            yield name, Document(value, f"{self.where}: {name}")

    def list(self, length: int | None = None) -> list[Document]:
        """Return the elements of a list, of so many if that is known."""
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            self.fail("a list [...]" if length is None else f"a list of {length}")
        return [Document(value, f"{self.where}[{at}]") for at, value in enumerate(self.value)]

    def text(self, allowed: Collection[str] = ()) -> str:
        """Return a text, one of those that are allowed if there is a choice."""
        if not isinstance(self.value, str) or (allowed and self.value not in allowed):
            self.fail(f"one of {', '.join(allowed)}" if allowed else "a text")
        return self.value

    def number(self, least: float = 0.0) -> float:
        """Return a number that is not below the least."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < least:
            self.fail(f"a number from {least:g} on")
        return float(value)

    def whole(self, least: int = 0, end: int | None = None) -> int:
        """Return a whole number from the least on, below the end if there is one."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (end is not None and value >= end):
            self.fail(f"a whole number from {least} {'on' if end is None else f'to {end - 1}'}")
        return value

    def ranks(self, end: int) -> tuple[int, ...]:
        """Return a list of different ranks below the end."""
        found = tuple(part.whole(0, end) for part in self.list())
        if len(set(found)) != len(found):
            self.fail("each rank once")
        return found


def shown(value: Any) -> str:
    """Write a value as the file has it, shortened."""
    said = json.dumps(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


# Reads and writes topologies as JSON files, with microseconds and microseconds per MB.
#
#     {"name": "two nodes", "source": "measured on ...",
#      "nodes": [[0, 1], [2, 3]],
#      "classes": {"memory": {"alpha_us": 2, "beta_us_per_MB": 150}, "network": {"alpha_us": 60, "beta_us_per_MB":
# 8000}},
#      "links": {"within": "memory", "between": "network", "pairs": [[0, 3, null]]},
#      "ports": [{"name": "node 0, out", "ranks": [0, 1], "way": "out", "beta_us_per_MB": 8000, "traffic": "between"}],
#      "codecs": {"zfp:rate=8": {"encode_us_per_MB": 700, "decode_us_per_MB": 900, "ratio": 4}},
#      "processors": [{"ranks": [0, 1, 2, 3], "cores": 2}],
#      "per_chunk_us": 100,
#      "handling": {"message_us": 60, "us_per_MB": 800, "wait_us": 300, "frame_us": 200}}
#
# `within` may also be a table of classes by position in the node. Everything from `pairs` on may be left out.

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


def _link(part: Document) -> LinkCost:
    part.fields(("alpha_us", "beta_us_per_MB"))
    return LinkCost(part["alpha_us"].number() * 1e-6, part["beta_us_per_MB"].number() * PER_MB)


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


def _coding(part: Document) -> CodecCost:
    part.fields(("encode_us_per_MB", "decode_us_per_MB", "ratio"))
    encode, decode = (part[f"{way}_us_per_MB"].number() * PER_MB for way in ("encode", "decode"))
    ratio = part.get("ratio", 1.0).number()
    if not ratio:
        part["ratio"].fail("a number above 0")
    return CodecCost(encode, decode, ratio)


def _processor(part: Document, ranks: int) -> ProcessorModel:
    part.fields(("ranks", "cores"))
    cores = part["cores"].number()
    if not cores:
        part["cores"].fail("a number above 0")
    return ProcessorModel(frozenset(part["ranks"].ranks(ranks)), cores)


def _handling(part: Document) -> MessageCost:
    names = ("message_us", "us_per_MB", "wait_us", "frame_us")
    part.fields(names)
    message, per_byte, wait, frame = (part.get(name, 0).number() for name in names)
    return MessageCost(message * 1e-6, per_byte * PER_MB, wait * 1e-6, frame * 1e-6)
