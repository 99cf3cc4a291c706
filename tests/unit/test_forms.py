"""What a call of each collective means to one of several ranks: which elements, and what is refused."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpi_gpucomp._call.calls import FORMS, Form, Place
from mpi_gpucomp._call.staging import Detour, passes
from mpi_gpucomp.errors import BufferSpecError


def read(method: str, *args: Any, rank: int = 1, size: int = 3) -> Form | None:
    return FORMS[method](Place(method, rank, size), *args)


def numbers(count: int, dtype: str = "f4") -> np.ndarray:
    return np.arange(count).astype(dtype)


def spread(count: int) -> np.ndarray:
    return np.zeros(2 * count, np.float32)[::2]


CRC = zlib.crc32(b"(2, 1, 3)")


@pytest.mark.parametrize(
    ("method", "args", "said"),
    [
        ("Bcast", (numbers(6), 2), "6 x float32, root 2, replace"),
        ("Allreduce", (numbers(6), numbers(6), MPI.MAX), "6 x float32, root 0, max"),
        ("Alltoall", (numbers(6, "i2"), numbers(6, "i2")), "2 x int16, root 0, replace"),
        ("Gather", (numbers(6), None, 2), "6 x float32, root 2, replace"),
        ("Scatter", (None, numbers(6), 2), "6 x float32, root 2, replace"),
        ("Gatherv", (numbers(6), None, 2), "counts of its own x float32, root 2, replace"),
        ("Reduce_scatter_block", (numbers(6), numbers(2)), "2 x float32, root 0, sum"),
        ("Reduce_scatter", (numbers(6), numbers(1), [2, 1, 3]), f"counts {CRC:08x} (sum 6) x float32, root 0, sum"),
        ("Scan", (MPI.IN_PLACE, numbers(6), MPI.PROD), "6 x float32, root 0, prod"),
    ],
)
def test_what_a_rank_says_of_a_call(method, args, said):
    form = read(method, *args)
    assert form is not None and form.said == said


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("Allreduce", (numbers(6, "i4"), numbers(6, "i4"), MPI.BOR)),
        ("Reduce", (numbers(6, "i4"), None, MPI.BXOR, 0)),
        ("Scan", (numbers(6, "i4"), numbers(6, "i4"), MPI.LAND)),
        ("Reduce_scatter_block", (numbers(6, "i4"), numbers(2, "i4"), MPI.MINLOC)),
        ("Bcast", ([numbers(6), 1, MPI.FLOAT_INT], 0)),
        ("Allgather", ([MPI.BOTTOM, 0, MPI.FLOAT], numbers(6))),
    ],
)
def test_what_only_mpi_knows_is_left_to_it(method, args):
    assert read(method, *args) is None


@pytest.mark.parametrize("method", ["Reduce", "Gather", "Gatherv", "Scatter", "Scatterv"])
def test_only_the_root_works_in_place(method):
    args = (None, MPI.IN_PLACE, 0) if method.startswith("Scatter") else (MPI.IN_PLACE, None)
    if method.startswith("Gather"):
        args = (MPI.IN_PLACE, None, 0)
    with pytest.raises(BufferSpecError) as caught:
        read(method, *args)
    assert str(caught.value) == (
        f"rank 1: {method}: expected a buffer, got MPI.IN_PLACE where nothing is received. "
        "Pass MPI.IN_PLACE at the root alone."
    )


SAME = np.zeros(6, np.float32)


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        (
            "Allreduce",
            (numbers(6), numbers(5)),
            "6 elements of float32 to be received, as they are sent, got 5 of float32. "
            "Pass buffers of one type, and of the lengths that mpi4py asks for.",
        ),
        (
            "Allgather",
            (numbers(2), numbers(6, "f8")),
            "2 elements of float32 to be received, as they are sent, got 2 of float64. "
            "Pass buffers of one type, and of the lengths that mpi4py asks for.",
        ),
        (
            "Reduce_scatter",
            (numbers(6), numbers(2), [2, 1, 3]),
            "counts for 3 ranks that add up to the 6 elements that are sent, and this rank's in the receive buffer, "
            "got [2, 1, 3], and 2 elements to receive. Pass recvcounts, one for each rank, the same on every rank.",
        ),
        (
            "Reduce_scatter_block",
            (SAME, SAME[:2]),
            "other memory to receive into than what is sent from, got the same. Pass MPI.IN_PLACE as what is sent.",
        ),
    ],
)
def test_what_cannot_be(method, args, message):
    with pytest.raises(BufferSpecError) as caught:
        read(method, *args)
    assert str(caught.value) == f"rank 1: {method}: expected {message}"


def test_a_reduce_scatter_in_place_lands_at_the_start_of_its_buffer_even_with_gaps():
    for buffer in (numbers(6), spread(6)):
        form = read("Reduce_scatter", MPI.IN_PLACE, buffer, [2, 1, 3])
        assert form is not None and form.lands_at_start
        assert form.sent is not None and (list(form.sent.starts), form.sent.counts) == ([0, 2, 3], [2, 1, 3])
        assert form.received is not None and (form.received.starts, form.received.counts) == ([0], [1])


# For MPI's own


@pytest.mark.parametrize(
    ("method", "args", "place", "count", "start"),
    [
        ("Bcast", (spread(6), 0), 0, 6, 0),
        ("Allgather", (numbers(2), spread(6)), 1, 2, 0),
        ("Alltoall", (spread(6), numbers(6)), 0, 2, 0),
        ("Alltoall", (spread(6), [numbers(9), 2, 1, MPI.FLOAT]), 1, 2, 1),
        ("Allgatherv", (numbers(2), [spread(9), [1, 2, 3], [4, 0, 5], MPI.FLOAT]), 1, [1, 2, 3], [4, 0, 5]),
        ("Alltoallv", ([spread(9), [1, 2, 3]], [numbers(6), [1, 2, 3]]), 0, [1, 2, 3], [0, 1, 3]),
        ("Reduce_scatter", (spread(6), numbers(1), [2, 1, 3]), 0, 6, 0),
        ("Reduce_scatter", (MPI.IN_PLACE, spread(6), [2, 1, 3]), 1, 6, 0),
        ("Reduce_scatter_block", (spread(6), numbers(2)), 0, 2, 0),
        ("Reduce_scatter_block", (MPI.IN_PLACE, spread(6)), 1, 2, 0),
    ],
)
def test_counts_on_the_way_by_host_memory_are_those_that_mpi4py_wants(method, args, place, count, start):
    form = read(method, *args)
    assert form is not None and not passes(form, args)
    detour = Detour(method, form, args)
    _, counts, starts, datatype = detour.args[place]
    assert (counts, starts, datatype) == (count, start, MPI.FLOAT)
    detour.finish()


def test_one_rank_keeps_its_displacement():
    form = read("Allgatherv", numbers(2), [spread(9), [2], [4], MPI.FLOAT], rank=0, size=1)
    assert form is not None
    detour = Detour("Allgatherv", form, (numbers(2), [spread(9), [2], [4], MPI.FLOAT]))
    assert detour.args[1][1:3] == [[2], [4]]
    detour.finish()


def test_elements_at_odd_addresses_go_the_way_that_all_ranks_go_but_not_as_they_are():
    odd = np.frombuffer(bytearray(25), np.float32, 6, 1)
    form = read("Bcast", odd, 0)
    assert form is not None and form.said == "6 x float32, root 0, replace"
    assert not passes(form, (odd, 0))
