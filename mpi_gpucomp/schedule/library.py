"""A library of schedules: a directory of MSCCL XML files, each for a collective, message sizes and a topology.

The attributes `minBytes` and `maxBytes` are MSCCL's; `root` and `topology`, the hash of the topology that a schedule
was made for, are ours. That topology is in the file `HASH.json` of the same directory. A schedule is used only where
the ranks are on the same nodes as in its topology; one without a topology is used everywhere.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule import msccl_xml as xml
from mpi_gpucomp.schedule.topology import read_topology, write_topology
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm
    from mpi_gpucomp.schedule.topology import Topology

__all__ = ["LibraryEntry", "ScheduleLibrary", "add_schedule", "file_name"]


class LibraryEntry(NamedTuple):
    """A checked schedule of the directory."""

    path: Path
    algorithm: Algorithm
    header: xml.XmlHeader

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
        headers = ((path, xml.read_header(path)) for path in sorted(self._folder.glob("*.xml")))
        return [LibraryEntry(path, _read_checked(path), header) for path, header in headers if self._is_usable(header)]

    def _is_usable(self, header: xml.XmlHeader) -> bool:
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
    algorithm = xml.read(path)
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
    header = xml.XmlHeader(topology.hash, min_bytes, max_bytes)
    write_topology(topology, folder / f"{topology.hash}.json")
    path = folder / file_name(algorithm, header)
    path.write_text(xml.write(algorithm, header), encoding="utf-8")
    return path


def file_name(algorithm: Algorithm, header: xml.XmlHeader) -> str:
    """Return the file name of a schedule, made of what it is for."""
    parts = [algorithm.collective, f"{algorithm.ranks}ranks", header.topology or "any"]
    if algorithm.root:
        parts.append(f"root{algorithm.root}")
    if algorithm.in_place and algorithm.collective != "broadcast":
        parts.append("inplace")
    all_sizes = header == xml.XmlHeader(header.topology)
    parts.append("all" if all_sizes else f"{header.min_bytes}-{header.max_bytes}")
    return "-".join(parts) + ".xml"
