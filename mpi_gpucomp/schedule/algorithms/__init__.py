"""The table of algorithms of every collective, and checked schedules built from it."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.algorithms import allgather, allreduce, alltoall, broadcast, gather, reduce
from mpi_gpucomp.schedule.algorithms.common import AlgorithmInfo
from mpi_gpucomp.schedule.builder import ScheduleBuilder, rotate
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["TABLE", "AlgorithmInfo", "algorithms", "build"]

_T = TypeVar("_T")

TABLE: dict[str, dict[str, AlgorithmInfo]] = {
    collective: {info.name: info for info in table}
    for collective, table in (
        ("broadcast", broadcast.ALGORITHMS),
        ("reduce", reduce.REDUCE),
        ("allreduce", allreduce.ALGORITHMS),
        ("allgather", allgather.ALGORITHMS),
        ("reduce_scatter", reduce.REDUCE_SCATTER),
        ("alltoall", alltoall.ALGORITHMS),
        ("gather", gather.GATHER),
        ("scatter", gather.SCATTER),
    )
}


def algorithms(collective: str) -> tuple[AlgorithmInfo, ...]:
    """Return the algorithms of a collective; the first is the default."""
    return tuple(_lookup("collective", collective, TABLE).values())


def build(
    collective: str,
    name: str,
    ranks: int,
    root: int = 0,
    nodes: Sequence[Iterable[int]] | None = None,
    in_place: bool = False,
) -> Algorithm:
    """Return a checked algorithm by name, from a cache if it is there.

    `nodes` lists the ranks of each node, for two-level algorithms; the default is one node. `in_place` means that input
    and output share memory, as they always do in a broadcast.
    """
    info = _lookup(f"{collective} algorithm", name, _lookup("collective", collective, TABLE))
    _check_range("number of ranks", ranks, 1, None)
    _check_range("root", root, 0, ranks)
    partition = _partition(nodes, ranks) if nodes is not None and info.two_level else ()
    in_place = in_place or collective == "broadcast"
    return _built(collective, name, ranks, root if COLLECTIVES[collective].rooted else 0, partition, in_place)


@lru_cache(maxsize=512)
def _built(
    collective: str, name: str, ranks: int, root: int, nodes: tuple[tuple[int, ...], ...], in_place: bool
) -> Algorithm:
    info = TABLE[collective][name]
    if root and not info.two_level and not COLLECTIVES[collective].blocks:
        return rotate(_built(collective, name, ranks, 0, nodes, in_place), root)
    builder = ScheduleBuilder(name, collective, ranks, root=root, in_place=in_place, nodes=nodes)
    info.fill(builder)
    return checked(builder.algorithm(), in_flight=1)  # so that any runtime can run it


def _lookup(topic: str, name: str, table: dict[str, _T]) -> _T:
    if name not in table:
        near = get_close_matches(name, table, 1)
        remedy = f"Did you mean {near[0]}?" if near else "List them with `python -m mpi_gpucomp algorithms`."
        raise SpecError(topic, expected=f"one of {', '.join(table)}", got=f"'{name}'", remedy=remedy)
    return table[name]


def _check_range(topic: str, number: int, first: int, end: int | None) -> None:
    if number < first or (end is not None and number >= end):
        expected = f"{first} or more" if end is None else f"a rank from {first} to {end - 1}"
        raise SpecError(topic, expected=expected, got=str(number), remedy="Ranks are counted from 0.")


def _partition(nodes: Sequence[Iterable[int]], ranks: int) -> tuple[tuple[int, ...], ...]:
    partition = tuple(tuple(node) for node in nodes)
    if sorted(rank for node in partition for rank in node) != list(range(ranks)) or not all(partition):
        raise SpecError(
            "nodes",
            expected=f"every rank from 0 to {ranks - 1} on exactly one node, and no empty node",
            got=str([list(node) for node in partition]),
            remedy="List the ranks of each node, such as [[0, 1], [2, 3]].",
        )
    return partition
