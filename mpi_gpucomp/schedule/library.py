"""A directory of schedules, each for a collective, sizes of messages and a topology, and the one that fits a call.

A plan is an MSCCL XML file with the attributes `minBytes` and `maxBytes` of that format, and ours: `root`, and
`topology`, the hash of the topology that it was made for. That topology lies beside it, as `HASH.json`: a plan is used
only where ranks lie on nodes as they do there. One that names no topology is for all.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule import msccl_xml as xml
from mpi_gpucomp.schedule.documents import read_topology, write_topology
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["LibraryEntry", "ScheduleLibrary", "add_plan", "file_name"]


class LibraryEntry(NamedTuple):
    """A plan of the directory, checked."""

    path: Path
    algorithm: Algorithm
    facts: xml.XmlHeader

    def suits(self, collective: str, ranks: int, nbytes: int, root: int, in_place: bool) -> bool:
        """Say whether it is for such a call."""
        made = self.algorithm
        same = (made.collective, made.ranks, made.spec.root, made.in_place) == (collective, ranks, root, in_place)
        return same and self.facts.least <= nbytes <= self.facts.most


class ScheduleLibrary:
    """The plans of a directory, read and checked once."""

    def __init__(self, folder: str | Path, nodes: tuple[tuple[int, ...], ...] | None = None) -> None:
        """Look in a folder, for plans of topologies with these nodes, or of any."""
        self._folder, self._nodes = Path(folder), nodes

    @cached_property
    def entries(self) -> list[LibraryEntry]:
        """The plans that can be used here, in the order of their names."""
        if not self._folder.is_dir():
            remedy = "Fill one with `python -m mpi_gpucomp synthesize ... --plans DIR`."
            raise SpecError("plans", expected="a directory", got=f"'{self._folder}'", remedy=remedy)
        files = ((path, xml.facts(path)) for path in sorted(self._folder.glob("*.xml")))
        return [
            LibraryEntry(path, checked(xml.read(path)), facts) for path, facts in files if self._is_here(facts.topology)
        ]

    def _is_here(self, topology: str) -> bool:
        if not topology or self._nodes is None:
            return True
        path = self._folder / f"{topology}.json"
        return path.exists() and read_topology(path).nodes == self._nodes

    def find(
        self, collective: str, ranks: int, nbytes: int, root: int = 0, *, in_place: bool = False
    ) -> Algorithm | None:
        """Return the plan for a call, that for the narrowest range of sizes where several fit; None if none does."""
        in_place = in_place or collective == "broadcast"
        fitting = [entry for entry in self.entries if entry.suits(collective, ranks, nbytes, root, in_place)]
        best = min(fitting, key=lambda entry: entry.facts.most - entry.facts.least, default=None)
        return best.algorithm if best else None


def add_plan(folder: Path, algorithm: Algorithm, topology: Topology, least: int, most: int) -> Path:
    """Write a plan, for messages of so many bytes, and its topology to a folder; return the plan's file."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = xml.XmlHeader(topology.hash, least, most)
    write_topology(topology, folder / f"{topology.hash}.json")
    path = folder / file_name(algorithm, facts)
    path.write_text(xml.write(algorithm, facts), encoding="utf-8")
    return path


def file_name(algorithm: Algorithm, facts: xml.XmlHeader) -> str:
    """Name the file of a plan by what it is for."""
    parts = [algorithm.collective, f"{algorithm.ranks}ranks", facts.topology or "any"]
    if algorithm.root:
        parts.append(f"root{algorithm.root}")
    if algorithm.in_place and algorithm.collective != "broadcast":
        parts.append("inplace")
    return (
        "-".join([*parts, f"{facts.least}-{facts.most}" if facts != xml.XmlHeader(facts.topology) else "all"]) + ".xml"
    )
