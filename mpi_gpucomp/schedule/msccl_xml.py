"""MSCCL XML, the format of msccl-tools and TACCL: files of one algorithm, and directories of them, schedule libraries.

Attributes that real files omit get defaults: `ngpus`, `nchunksperloop`, buffer lengths, counts, dependencies. Two
attributes are ours: `root` of <algo>, 0 by default, and `plain` of <tb>, 1 if its messages are sent raw. An algorithm
that was read has not been checked: use `schedule.verify.checked`.

The schedules of a library are checked. Each is for a collective, message sizes and a topology. The attributes
`minBytes` and `maxBytes` are MSCCL's; `topology`, the hash of the topology that a schedule was made for, is ours. That
topology is in the file `HASH.json` of the same directory. A schedule is used only where the ranks are on the same nodes
as in its topology; one without a topology is used everywhere.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from xml.etree import ElementTree

from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule.ir import COLLECTIVES, HAS_SOURCE, HAS_TARGET, KINDS, Algorithm, Lane, Place, Program, Step
from mpi_gpucomp.schedule.topology import read_file, read_topology, write_topology
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi_gpucomp.schedule.topology import Topology

__all__ = [
    "MAX_LENGTH",
    "LibraryEntry",
    "ScheduleLibrary",
    "XmlHeader",
    "add_schedule",
    "file_name",
    "read",
    "read_header",
    "write",
]

MAX_LENGTH = 64 << 20
"""Longer files are rejected before they are parsed."""
SPELLINGS = {name.replace("_", ""): one.name for one in COLLECTIVES.values() for name in (one.name, one.mpi_name)}
BUFFERS = ("i", "o", "s")
MAX_BYTES = (1 << 63) - 1
"""The upper limit of a file without `maxBytes`."""


class XmlHeader(NamedTuple):
    """What a file is for: the hash of a topology, empty for all of them, and a range of message sizes."""

    topology: str = ""
    min_bytes: int = 0
    max_bytes: int = MAX_BYTES


def read_header(source: str | Path) -> XmlHeader:
    """Return the header of an XML text or file."""
    element = _parse(source)
    topology = element.optional("topology")
    if not re.fullmatch(r"[\w-]{0,64}", topology):
        element.fail("topology", "the hash of a topology", f"'{topology[:60]}'")
    # In real files a maxBytes of 0 means no limit.
    least, most = element.number("minBytes", 0), element.number("maxBytes", MAX_BYTES) or MAX_BYTES
    if least > most:
        element.fail("minBytes", f"at most maxBytes, {most}", f"'{least}'")
    return XmlHeader(topology, least, most)


def read(source: str | Path) -> Algorithm:
    """Return the algorithm of an XML text or, if it does not start with a tag, of the file with that name."""
    return _algorithm(_parse(source))


def _parse(source: str | Path) -> _Element:
    is_text = isinstance(source, str) and source.lstrip().startswith("<")
    topic = "MSCCL XML" if is_text else f"MSCCL XML {source}"
    text = str(source) if is_text else _content(Path(source), topic)
    if len(text) > MAX_LENGTH:
        raise _error(topic, f"at most {MAX_LENGTH} characters", "more", "Write a schedule of fewer steps.")
    # A document type could define entities that grow without bounds, or name files; algorithms have no use for one.
    if re.search(r"<!(?!--)", text):
        raise _error(topic, "only elements and comments", "a declaration (<!...>)", "Remove it.")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise _error(topic, "well-formed XML", str(error), "Correct the file.") from error
    element = _Element(root, topic, "")
    if root.tag != "algo":
        element.fail("", "<algo> as the outermost element", f"<{root.tag}>")
    return element


def _content(path: Path, topic: str) -> str:
    try:
        return read_file(path, MAX_LENGTH).decode("utf-8-sig")
    except OSError as error:
        raise _error(topic, "a readable file", error.strerror or str(error), "Name another file.") from error
    except ValueError as error:
        got = "bytes that are not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise _error(topic, "a readable file", got, "Name another file.") from error


def _error(topic: str, expected: str, got: str, remedy: str) -> ScheduleError:
    return ScheduleError(topic, expected=expected, got=got, remedy=remedy)


class _Element:
    """An XML element and its location in the file."""

    def __init__(self, element: ElementTree.Element, topic: str, parent: str) -> None:
        """Wrap an element; `topic` names the file, `parent` the location of its parent."""
        self._element, self._topic = element, topic
        number = next((f" {key}={element.get(key)}" for key in ("id", "s") if element.get(key)), "")
        self._where = f"{parent} <{element.tag}{number}>".lstrip()

    def children(self, tag: str) -> list[_Element]:
        """Return the child elements, which must all have this tag."""
        for child in self._element:
            if child.tag != tag:
                self.fail("", f"only <{tag}> elements inside", f"<{child.tag}>")
        return [_Element(child, self._topic, self._where) for child in self._element]

    def text(self, name: str, allowed: Iterable[str] = ()) -> str:
        """Return a required attribute, which must be one of those allowed if there are any."""
        value = self._element.get(name)
        allowed = tuple(allowed)
        if value is None or (allowed and value not in allowed):
            expected = f"one of {', '.join(allowed)}" if allowed else "a value"
            self.fail(name, expected, "none" if value is None else f"'{value}'")
        return value

    def optional(self, name: str) -> str:
        """Return an attribute, or an empty string if it is missing."""
        return self._element.get(name, "")

    def number(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return an integer attribute, or the default if it is missing."""
        value = self._element.get(name)
        if value is None and default is not None:
            return default
        if value is None or not re.fullmatch(r"\s*[-+]?[0-9]{1,19}\s*", value) or int(value) < least:
            self.fail(name, f"an integer of at least {least}", "none" if value is None else f"'{value}'")
        return int(value)

    def fail(self, attribute: str, expected: str, got: str) -> NoReturn:
        """Raise ScheduleError for this element, and an attribute of it."""
        topic = f"{self._topic}: {self._where}" + (f": {attribute}" if attribute else "")
        raise _error(topic, expected, got, "Correct the file.")


def _algorithm(element: _Element) -> Algorithm:
    spelling = element.text("coll")
    collective = SPELLINGS.get(re.sub("[_-]", "", spelling.lower()))
    if collective is None:
        element.fail("coll", f"one of {', '.join(COLLECTIVES)}", f"'{spelling}'")
    gpus = element.children("gpu")
    by_rank = {gpu.number("id"): gpu for gpu in gpus}
    ranks = len(gpus)
    if not gpus or element.number("ngpus", ranks) != ranks or set(by_rank) != set(range(ranks)):
        got = ", ".join(str(gpu.number("id")) for gpu in gpus) or "none"
        element.fail("ngpus", "one <gpu> for each id from 0 to ngpus - 1", f"ids {got}")
    programs = tuple(_program(by_rank[rank]) for rank in range(ranks))
    longest = max(max(program.input_chunks, program.output_chunks) for program in programs)
    root = element.number("root", 0) if COLLECTIVES[collective].rooted else None
    chunks, in_place = element.number("nchunksperloop", longest), element.number("inplace", 0) > 0
    return Algorithm(element.text("name"), collective, ranks, chunks, in_place, programs, root)


def _program(gpu: _Element) -> Program:
    inputs, outputs, scratch = (gpu.number(name, 0) for name in ("i_chunks", "o_chunks", "s_chunks"))
    blocks = gpu.children("tb")
    lane_of = {block.number("id", position): position for position, block in enumerate(blocks)}
    steps = [block.children("step") for block in blocks]
    index_of = [{step.number("s", at): at for at, step in enumerate(lane)} for lane in steps]
    if len(lane_of) != len(blocks):
        gpu.fail("id", "a distinct id for each <tb>", "a duplicate")
    lanes = []
    for block, own, numbers in zip(blocks, steps, index_of, strict=True):
        if len(numbers) != len(own):
            block.fail("s", "a distinct number for each <step>", "a duplicate")
        send, receive = (block.number(name, -1, -1) for name in ("send", "recv"))
        made = tuple(_step(step, lane_of, index_of) for step in own)
        raw = block.number("plain", 0) > 0
        lanes.append(Lane(_peer(send), _peer(receive), block.number("chan", 0), made, raw))
    return Program(inputs, outputs, scratch, tuple(lanes))


def _peer(number: int) -> int | None:
    return None if number < 0 else number


def _step(step: _Element, lane_of: dict[int, int], index_of: list[dict[int, int]]) -> Step:
    kind = step.text("type", KINDS)
    source = _place(step, "src") if kind in HAS_SOURCE else None
    target = _place(step, "dst") if kind in HAS_TARGET else None
    count = 1 if kind == "nop" else step.number("cnt", 1, 1)
    block, number = step.number("depid", -1, -1), step.number("deps", -1, -1)
    if block < 0 or number < 0:
        return Step(kind, source, target, count)
    if block not in lane_of or number not in index_of[lane_of[block]]:
        step.fail("depid, deps", "a <tb> and a <step> of this <gpu>", f"'{block}', '{number}'")
    lane = lane_of[block]
    return Step(kind, source, target, count, ((lane, index_of[lane][number]),))


def _place(step: _Element, end: str) -> Place:
    return Place(step.text(f"{end}buf", BUFFERS), step.number(f"{end}off"))


def write(algorithm: Algorithm, header: XmlHeader | None = None) -> str:
    """Return an algorithm as XML; a step with several dependencies is preceded by nop steps, one for each other."""
    channels = [lane.channel for program in algorithm.programs for lane in program.lanes]
    algo = ElementTree.Element("algo", name=algorithm.name, proto="Simple")
    algo.set("nchannels", str(max(channels, default=0) + 1))
    algo.set("nchunksperloop", str(algorithm.chunks))
    algo.set("ngpus", str(algorithm.ranks))
    algo.set("coll", algorithm.collective.replace("_", ""))
    algo.set("inplace", str(int(algorithm.in_place)))
    if algorithm.root is not None:
        algo.set("root", str(algorithm.root))
    if header is not None:
        algo.set("minBytes", str(header.min_bytes))
        algo.set("maxBytes", str(header.max_bytes))
        algo.set("topology", header.topology)
    for rank, program in enumerate(algorithm.programs):
        lengths = (program.input_chunks, program.output_chunks, program.scratch_chunks)
        named = zip(("i_chunks", "o_chunks", "s_chunks"), map(str, lengths), strict=True)
        _write_lanes(ElementTree.SubElement(algo, "gpu", {"id": str(rank), **dict(named)}), program)
    ElementTree.indent(algo)
    return ElementTree.tostring(algo, encoding="unicode") + "\n"


def _write_lanes(gpu: ElementTree.Element, program: Program) -> None:
    number: dict[tuple[int, int], int] = {}
    for lane, block in enumerate(program.lanes):
        position = -1
        for index, step in enumerate(block.steps):
            position += max(1, len(step.after))
            number[lane, index] = position
    dependencies = {other for _, _, step in program.steps() for other in step.after}
    for lane, block in enumerate(program.lanes):
        peers = {"send": block.send, "recv": block.receive}
        attributes = {name: str(-1 if peer is None else peer) for name, peer in peers.items()}
        tb = ElementTree.SubElement(gpu, "tb", {"id": str(lane), **attributes, "chan": str(block.channel)})
        if block.raw:
            tb.set("plain", "1")
        for index, step in enumerate(block.steps):
            for at, other in enumerate(step.after[1:]):
                position = number[lane, index] - len(step.after) + 1 + at
                _write_step(tb, Step("nop", after=(other,)), position, number, False)
            _write_step(tb, step, number[lane, index], number, (lane, index) in dependencies)


def _write_step(
    tb: ElementTree.Element, step: Step, position: int, number: dict[tuple[int, int], int], has_dependent: bool
) -> None:
    source, target = step.source or step.target, step.target or step.source
    places = {"src": source or Place("i", -1), "dst": target or Place("o", -1)}
    attributes = {"s": str(position), "type": step.kind}
    for end, place in places.items():
        attributes |= {f"{end}buf": place.buffer, f"{end}off": str(place.offset)}
    attributes["cnt"] = "0" if step.kind == "nop" else str(step.count)
    lane, index = (step.after[0][0], number[step.after[0]]) if step.after else (-1, -1)
    ElementTree.SubElement(tb, "step", attributes, depid=str(lane), deps=str(index), hasdep=str(int(has_dependent)))


class LibraryEntry(NamedTuple):
    """A checked schedule of the directory."""

    path: Path
    algorithm: Algorithm
    header: XmlHeader

    def matches(self, collective: str, ranks: int, nbytes: int, root: int, in_place: bool) -> bool:
        """Return True if it can be used for a call."""
        own = self.algorithm
        same = (own.collective, own.ranks, own.spec.root, own.in_place) == (collective, ranks, root, in_place)
        return same and self.header.min_bytes <= nbytes <= self.header.max_bytes


class ScheduleLibrary:
    """The schedules of a directory, read and checked once."""

    def __init__(self, folder: str | Path, nodes: tuple[tuple[int, ...], ...] | None = None) -> None:
        """Use the schedules of a directory that are for these nodes, or all of them."""
        self._folder, self._nodes = Path(folder), nodes

    @cached_property
    def entries(self) -> list[LibraryEntry]:
        """The usable schedules, by file name; raise ScheduleError or SpecError if a file is invalid."""
        if not self._folder.is_dir():
            remedy = "Fill one with `python -m mpi_gpucomp synthesize ... --plans DIR`."
            raise SpecError("plans", expected="a directory", got=f"'{self._folder}'", remedy=remedy)
        headers = ((path, read_header(path)) for path in sorted(self._folder.glob("*.xml")))
        return [LibraryEntry(path, _read_checked(path), header) for path, header in headers if self._is_usable(header)]

    def _is_usable(self, header: XmlHeader) -> bool:
        if not header.topology or self._nodes is None:
            return True
        path = self._folder / f"{header.topology}.json"
        return path.exists() and read_topology(path).nodes == self._nodes

    def find(
        self, collective: str, ranks: int, nbytes: int, root: int = 0, *, in_place: bool = False
    ) -> Algorithm | None:
        """Return the schedule for a call, that with the narrowest range of sizes if there are several, or None."""
        in_place = in_place or collective == "broadcast"
        matches = [entry for entry in self.entries if entry.matches(collective, ranks, nbytes, root, in_place)]
        best = min(matches, key=lambda entry: entry.header.max_bytes - entry.header.min_bytes, default=None)
        return best.algorithm if best else None


def _read_checked(path: Path) -> Algorithm:
    algorithm = read(path)
    try:
        return checked(algorithm)
    except ScheduleError as error:
        # The checker names the algorithm; the user needs the file.
        raise ScheduleError(
            f"{path}: {error.topic}", expected=error.expected, got=error.got, remedy=error.remedy, rank=error.rank
        ) from error


def add_schedule(folder: Path, algorithm: Algorithm, topology: Topology, min_bytes: int, max_bytes: int) -> Path:
    """Write a schedule for a range of message sizes, and its topology, to a directory; return the schedule's file."""
    folder.mkdir(parents=True, exist_ok=True)
    header = XmlHeader(topology.hash, min_bytes, max_bytes)
    write_topology(topology, folder / f"{topology.hash}.json")
    path = folder / file_name(algorithm, header)
    path.write_text(write(algorithm, header), encoding="utf-8")
    return path


def file_name(algorithm: Algorithm, header: XmlHeader) -> str:
    """Return the file name of a schedule, made of what it is for."""
    parts = [algorithm.collective, f"{algorithm.ranks}ranks", header.topology or "any"]
    if algorithm.root:
        parts.append(f"root{algorithm.root}")
    if algorithm.in_place and algorithm.collective != "broadcast":
        parts.append("inplace")
    all_sizes = header == XmlHeader(header.topology)
    parts.append("all" if all_sizes else f"{header.min_bytes}-{header.max_bytes}")
    return "-".join(parts) + ".xml"
