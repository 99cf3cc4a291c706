"""Reads and writes algorithms as MSCCL XML, the format of msccl-tools and TACCL.

What real files leave out is filled in: `ngpus`, `nchunksperloop`, lengths of buffers, counts, dependencies. The root of
a rooted collective is an attribute `root` of ours, 0 where there is none; `plain` is another, of a <tb> whose messages
are not encoded. What is read has not been checked:
`schedule.check.checked` does that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from xml.etree import ElementTree

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.ir import COLLECTIVES, HAS_SOURCE, HAS_TARGET, KINDS, Algorithm, Lane, Place, Program, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["XmlHeader", "facts", "read", "write"]

LARGEST = 64 << 20
"""Longer files are refused before they are parsed."""

SPELLINGS = {name.replace("_", ""): one.name for one in COLLECTIVES.values() for name in (one.name, one.mpi_name)}
BUFFERS = ("i", "o", "s")
MOST_BYTES = (1 << 63) - 1
"""What a file without `maxBytes` is good for."""


class XmlHeader(NamedTuple):
    """What a file says about its use: the topology that it was made for, and the sizes of messages."""

    topology: str = ""
    least: int = 0
    most: int = MOST_BYTES


def facts(source: str | Path) -> XmlHeader:
    """Return what an XML text or file says about its use."""
    isfile = isinstance(source, Path) or not source.lstrip().startswith("<")
    element = _parsed(_content(Path(source)) if isfile else str(source))
    least, most = element.number("minBytes", 0), element.number("maxBytes", MOST_BYTES)
    # Real files have 0 there for no limit.
    return XmlHeader(element.optional("topology"), least, most or MOST_BYTES)


def read(source: str | Path) -> Algorithm:
    """Return the algorithm of an XML text or, where it does not begin with a tag, of the file with that name."""
    if isinstance(source, Path) or not source.lstrip().startswith("<"):
        return _algorithm(_parsed(_content(Path(source))))
    return _algorithm(_parsed(source))


def _content(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            return " " * (LARGEST + 1)
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        got = (error.strerror if isinstance(error, OSError) else None) or "bytes that are not UTF-8"
        raise _wrong(f"file {path}", "MSCCL XML", got, "Name a file that can be read.") from error


def _parsed(text: str) -> _Element:
    if len(text) > LARGEST:
        raise _wrong("MSCCL XML", f"at most {LARGEST} characters", "more", "Write a schedule of fewer steps.")
    # A document type could define entities that grow without bounds, or name files; algorithms have no use for one.
    if re.search(r"<!(?!--)", text):
        raise _wrong("MSCCL XML", "elements and comments alone", "a declaration (<!...>)", "Leave it out.")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise _wrong("MSCCL XML", "well-formed XML", str(error), "Correct the file.") from error
    element = _Element(root, "")
    if root.tag != "algo":
        element.fail("", "<algo> as the outermost element", f"<{root.tag}>")
    return element


def _wrong(topic: str, expected: str, got: str, remedy: str) -> ScheduleError:
    return ScheduleError(topic, expected=expected, got=got, remedy=remedy)


class _Element:
    """An element, and where it stands, for the sake of clear errors."""

    def __init__(self, element: ElementTree.Element, parent: str) -> None:
        """Describe the element within its parent by its number."""
        self._element = element
        number = next((f" {key}={element.get(key)}" for key in ("id", "s") if element.get(key)), "")
        self.where = f"{parent} <{element.tag}{number}>".lstrip()

    def children(self, tag: str) -> list[_Element]:
        """Return the elements inside, which must all be of one kind."""
        for child in self._element:
            if child.tag != tag:
                self.fail("", f"<{tag}> elements alone inside", f"<{child.tag}>")
        return [_Element(child, self.where) for child in self._element]

    def text(self, name: str, allowed: Iterable[str] = ()) -> str:
        """Return an attribute that must be there."""
        value = self._element.get(name)
        allowed = tuple(allowed)
        if value is None or (allowed and value not in allowed):
            expected = f"one of {', '.join(allowed)}" if allowed else "a value"
            self.fail(name, expected, "nothing" if value is None else f"'{value}'")
        return value

    def optional(self, name: str) -> str:
        """Return an attribute, or nothing where it is not there."""
        return self._element.get(name, "")

    def number(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return an attribute that is a number, or the default where there is none."""
        value = self._element.get(name)
        if value is None and default is not None:
            return default
        if value is None or not re.fullmatch(r"\s*[-+]?[0-9]{1,19}\s*", value) or int(value) < least:
            self.fail(name, f"a whole number from {least} on", "nothing" if value is None else f"'{value}'")
        return int(value)

    def fail(self, attribute: str, expected: str, got: str) -> NoReturn:
        """Raise the error that names this element and the attribute."""
        topic = f"MSCCL XML: {self.where}" + (f": {attribute}" if attribute else "")
        raise _wrong(topic, expected, got, "Correct the file.")


def _algorithm(element: _Element) -> Algorithm:
    spelling = element.text("coll")
    collective = SPELLINGS.get(re.sub("[_-]", "", spelling.lower()))
    if collective is None:
        element.fail("coll", f"one of {', '.join(COLLECTIVES)}", f"'{spelling}'")
    ranked = {gpu.number("id"): gpu for gpu in element.children("gpu")}
    if not ranked or set(ranked) != set(range(element.number("ngpus", len(ranked)))):
        got = ", ".join(map(str, ranked)) or "none"
        element.fail("ngpus", "one <gpu> for each id from 0 to ngpus - 1", f"those with id {got}")
    programs = tuple(_program(ranked[rank]) for rank in range(len(ranked)))
    longest = max(max(program.input_chunks, program.output_chunks) for program in programs)
    root = element.number("root", 0) if COLLECTIVES[collective].rooted else None
    chunks, in_place = element.number("nchunksperloop", longest), element.number("inplace", 0) > 0
    return Algorithm(element.text("name"), collective, len(programs), chunks, in_place, programs, root)


def _program(gpu: _Element) -> Program:
    inputs, outputs, scratch = (gpu.number(name, 0) for name in ("i_chunks", "o_chunks", "s_chunks"))
    blocks = gpu.children("tb")
    lane_of = {block.number("id", position): position for position, block in enumerate(blocks)}
    steps = [block.children("step") for block in blocks]
    index_of = [{step.number("s", at): at for at, step in enumerate(lane)} for lane in steps]
    if len(lane_of) != len(blocks):
        gpu.fail("id", "an id of its own for each <tb>", "one that is there twice")
    lanes = []
    for block, own, numbers in zip(blocks, steps, index_of, strict=True):
        if len(numbers) != len(own):
            block.fail("s", "a number of its own for each <step>", "one that is there twice")
        send, receive = (block.number(name, -1, -1) for name in ("send", "recv"))
        made = tuple(_step(step, lane_of, index_of) for step in own)
        plain = block.number("plain", 0) > 0
        lanes.append(Lane(_peer(send), _peer(receive), block.number("chan", 0), made, plain))
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


def write(algorithm: Algorithm, facts: XmlHeader | None = None) -> str:
    """Return the XML of an algorithm; a step that waits for several others has idle steps (nop) before it."""
    channels = [lane.channel for program in algorithm.programs for lane in program.lanes]
    algo = ElementTree.Element("algo", name=algorithm.name, proto="Simple")
    algo.set("nchannels", str(max(channels, default=0) + 1))
    algo.set("nchunksperloop", str(algorithm.chunks))
    algo.set("ngpus", str(algorithm.ranks))
    algo.set("coll", algorithm.collective.replace("_", ""))
    algo.set("inplace", str(int(algorithm.in_place)))
    if algorithm.root is not None:
        algo.set("root", str(algorithm.root))
    if facts is not None:
        algo.set("minBytes", str(facts.least))
        algo.set("maxBytes", str(facts.most))
        algo.set("topology", facts.topology)
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
    needed = {other for _, _, step in program.steps() for other in step.after}
    for lane, block in enumerate(program.lanes):
        peers = {"send": block.send, "recv": block.receive}
        known = {name: str(-1 if peer is None else peer) for name, peer in peers.items()}
        tb = ElementTree.SubElement(gpu, "tb", {"id": str(lane), **known, "chan": str(block.channel)})
        if block.raw:
            tb.set("plain", "1")
        for index, step in enumerate(block.steps):
            for at, other in enumerate(step.after[1:]):
                position = number[lane, index] - len(step.after) + 1 + at
                _write_step(tb, Step("nop", after=(other,)), position, number, False)
            _write_step(tb, step, number[lane, index], number, (lane, index) in needed)


def _write_step(
    tb: ElementTree.Element, step: Step, position: int, number: dict[tuple[int, int], int], needed: bool
) -> None:
    source, target = step.source or step.target, step.target or step.source
    places = {"src": source or Place("i", -1), "dst": target or Place("o", -1)}
    facts = {"s": str(position), "type": step.kind}
    for end, place in places.items():
        facts |= {f"{end}buf": place.buffer, f"{end}off": str(place.offset)}
    facts["cnt"] = "0" if step.kind == "nop" else str(step.count)
    lane, index = (step.after[0][0], number[step.after[0]]) if step.after else (-1, -1)
    ElementTree.SubElement(tb, "step", facts, depid=str(lane), deps=str(index), hasdep=str(int(needed)))
