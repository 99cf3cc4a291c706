"""The table of all algorithms, and the way from a name in it to a checked schedule."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.algorithms import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from mpi_gpucomp.schedule.algorithms.info import AlgorithmInfo
from mpi_gpucomp.schedule.builder import ScheduleBuilder, rotated
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.schedule.verify import checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = ["TABLE", "AlgorithmInfo", "algorithms", "build"]

_T = TypeVar("_T")

TABLE: dict[str, dict[str, AlgorithmInfo]] = {
    module.__name__.rpartition(".")[2]: {row.name: row for row in module.ALGORITHMS}
    for module in (broadcast, reduce, allreduce, allgather, reduce_scatter, alltoall, gather, scatter)
}


def algorithms(collective: str) -> tuple[AlgorithmInfo, ...]:
    """Return the algorithms of a collective; the first is the one to use when in doubt."""
    return tuple(_known("collective", collective, TABLE).values())


def build(
    collective: str,
    name: str,
    ranks: int,
    root: int = 0,
    nodes: Sequence[Iterable[int]] | None = None,
    in_place: bool = False,
) -> Algorithm:
    """Return the algorithm for so many ranks, built and checked once.

    `nodes` lists the ranks of each node, for those algorithms that care; without it all are on one. `in_place` says
    that input and output are one memory, as they always are in a broadcast.
    """
    row = _known(f"{collective} algorithm", name, _known("collective", collective, TABLE))
    _check_range("number of ranks", ranks, 1, None)
    _check_range("root", root, 0, ranks)
    placed = _partition(nodes, ranks) if nodes is not None and row.two_level else ()
    in_place = in_place or collective == "broadcast"
    return _built(collective, name, ranks, root if COLLECTIVES[collective].rooted else 0, placed, in_place)


@lru_cache(maxsize=512)
def _built(
    collective: str, name: str, ranks: int, root: int, nodes: tuple[tuple[int, ...], ...], in_place: bool
) -> Algorithm:
    row = TABLE[collective][name]
    turned = root and not row.two_level and not COLLECTIVES[collective].blocks
    if turned:
        return rotated(_built(collective, name, ranks, 0, nodes, in_place), root)
    plan = ScheduleBuilder(name, collective, ranks, root=root, in_place=in_place, nodes=nodes)
    row.fill(plan)
    return checked(plan.algorithm())


def _known(topic: str, name: str, table: dict[str, _T]) -> _T:
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
    placed = tuple(tuple(node) for node in nodes)
    if sorted(rank for node in placed for rank in node) != list(range(ranks)) or not all(placed):
        raise SpecError(
            "nodes",
            expected=f"every rank from 0 to {ranks - 1} on one node, and no empty node",
            got=str([list(node) for node in placed]),
            remedy="List the ranks of each node, such as [[0, 1], [2, 3]].",
        )
    return placed


# What must move: the algorithms of every collective, by name, each checked before anyone gets it.
