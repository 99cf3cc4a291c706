"""Calls parsed on one of several ranks: their elements, their signature, and the errors of bad arguments."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpi_gpucomp._call.calls import PARSERS, Call, find_method, parse_call
from mpi_gpucomp._call.staging import HostStaging, mpi4py_accepts
from mpi_gpucomp.device.producer import stream_handle
from mpi_gpucomp.errors import BufferSpecError, SpecError
from mpi_gpucomp.schedule.ir import COLLECTIVE_OF, PASSTHROUGH_METHODS


def read(method: str, *args: Any, rank: int = 1, size: int = 3) -> Call:
    return parse_call(method, args, {}, rank, size)


def numbers(count: int, dtype: str = "f4") -> np.ndarray:
    return np.arange(count).astype(dtype)


def spread(count: int) -> np.ndarray:
    return np.zeros(2 * count, np.float32)[::2]


CRC = zlib.crc32(b"(2, 1, 3)")


@pytest.mark.parametrize(
    ("method", "args", "signature"),
    [
        ("Bcast", (numbers(6), 2), "Bcast of 6 x float32, root 2"),
        ("Allreduce", (numbers(6), numbers(6), MPI.MAX), "Allreduce of 6 x float32, max"),
        ("Alltoall", (numbers(6, "i2"), numbers(6, "i2")), "Alltoall of 2 x int16"),
        ("Gather", (numbers(6), None, 2), "Gather of 6 x float32, root 2"),
        ("Scatter", (None, numbers(6), 2), "Scatter of 6 x float32, root 2"),
        ("Gatherv", (numbers(6), None, 2), "Gatherv of local counts x float32, root 2"),
        ("Reduce_scatter_block", (numbers(6), numbers(2)), "Reduce_scatter_block of 2 x float32, sum"),
        (
            "Reduce_scatter",
            (numbers(6), numbers(1), [2, 1, 3]),
            f"Reduce_scatter of counts {CRC:08x} (sum 6) x float32, sum",
        ),
        ("Scan", (MPI.IN_PLACE, numbers(6), MPI.PROD), "Scan of 6 x float32, prod"),
    ],
)
def test_the_signature_names_everything_that_ranks_must_agree_on(method, args, signature):
    assert read(method, *args).signature == signature
    nonblocking = parse_call(method, args, {}, 1, 3, blocking=False).signature
    assert nonblocking == signature.replace(method, f"I{method.lower()}", 1)


@pytest.mark.parametrize(
    ("method", "args", "reason"),
    [
        ("Allreduce", (numbers(6, "i4"), numbers(6, "i4"), MPI.BOR), "the operation MPI.BOR"),
        ("Reduce", (numbers(6, "i4"), None, MPI.BXOR, 0), "the operation MPI.BXOR"),
        ("Scan", (numbers(6, "i4"), numbers(6, "i4"), MPI.LAND), "the operation MPI.LAND"),
        ("Reduce_scatter_block", (numbers(6, "i4"), numbers(2, "i4"), MPI.MINLOC), "the operation MPI.MINLOC"),
        ("Bcast", ([numbers(6), 1, MPI.FLOAT_INT], 0), "the datatype MPI_FLOAT_INT"),
        ("Allgather", ([MPI.BOTTOM, 0, MPI.FLOAT], numbers(6)), "MPI.BOTTOM"),
    ],
)
def test_what_only_the_mpi_library_supports_is_marked(method, args, reason):
    assert read(method, *args).unsupported == reason


@pytest.mark.parametrize("method", ["Reduce", "Gather", "Gatherv", "Scatter", "Scatterv"])
def test_only_the_root_works_in_place(method):
    args = (None, MPI.IN_PLACE, 0) if method.startswith("Scatter") else (MPI.IN_PLACE, None)
    if method.startswith("Gather"):
        args = (MPI.IN_PLACE, None, 0)
    with pytest.raises(BufferSpecError) as caught:
        read(method, *args)
    assert str(caught.value) == (
        f"rank 1: {method}: expected a buffer, got MPI.IN_PLACE on a rank that is not the root. "
        "Pass MPI.IN_PLACE at the root only."
    )


SAME = np.zeros(6, np.float32)


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        (
            "Allreduce",
            (numbers(6), numbers(5)),
            "to receive 6 elements of float32, as sent, got a receive buffer of 5 of float32. "
            "Pass buffers of one type, and of the lengths that mpi4py requires.",
        ),
        (
            "Allgather",
            (numbers(2), numbers(6, "f8")),
            "to receive 2 elements of float32, as sent, got a receive buffer of 2 of float64. "
            "Pass buffers of one type, and of the lengths that mpi4py requires.",
        ),
        (
            "Reduce_scatter",
            (numbers(6), numbers(2), [2, 1, 3]),
            "counts for 3 ranks that add up to the 6 elements sent, and this rank's in the receive buffer, "
            "got [2, 1, 3], and 2 elements to receive. Pass recvcounts, one for each rank, the same on every rank.",
        ),
        (
            "Reduce_scatter_block",
            (SAME, SAME[:2]),
            "send and receive buffers in different memory, got the same memory. Pass MPI.IN_PLACE to send from it.",
        ),
    ],
)
def test_bad_arguments_are_errors(method, args, message):
    with pytest.raises(BufferSpecError) as caught:
        read(method, *args)
    assert str(caught.value) == f"rank 1: {method}: expected {message}"


def test_the_output_of_a_reduce_scatter_in_place_is_deferred_even_with_gaps():
    for buffer in (numbers(6), spread(6)):
        call = read("Reduce_scatter", MPI.IN_PLACE, buffer, [2, 1, 3])
        assert call.deferred_output
        assert call.sent is not None and (list(call.sent.starts), call.sent.counts) == ([0, 2, 3], [2, 1, 3])
        assert call.received is not None and (call.received.starts, call.received.counts) == ([0], [1])


# Staged through the host


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
def test_staged_arguments_have_the_counts_that_mpi4py_requires(method, args, place, count, start):
    call = read(method, *args)
    assert not mpi4py_accepts(call)
    staging = HostStaging(call, reaches_gpu=False)
    _, counts, starts, datatype = staging.args[place]
    assert (counts, starts, datatype) == (count, start, MPI.FLOAT)
    staging.finish()


def test_one_rank_keeps_its_displacement():
    call = read("Allgatherv", numbers(2), [spread(9), [2], [4], MPI.FLOAT], rank=0, size=1)
    staging = HostStaging(call, reaches_gpu=False)
    assert staging.args[1][1:3] == [[2], [4]]
    staging.finish()


def test_unaligned_elements_are_supported_but_not_passed_to_mpi4py_as_they_are():
    odd = np.frombuffer(bytearray(25), np.float32, 6, 1)
    call = read("Bcast", odd, 0)
    assert call.signature == "Bcast of 6 x float32, root 0"
    assert not mpi4py_accepts(call)


def test_every_method_of_the_table_of_collectives_has_a_parser():
    assert set(PARSERS) == {*COLLECTIVE_OF, *PASSTHROUGH_METHODS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codex": "split"}, "got codex=. Did you mean codec?"),
        ({"chunk": 0}, "expected chunk= as a number of bytes from 1 to 1073741824, got 0. Change it or leave it out."),
        (
            {"chunk": 3 << 30},
            "expected chunk= as a number of bytes from 1 to 1073741824, got 3221225472. Change it or leave it out.",
        ),
        ({"priority": "high"}, "expected priority= as an integer, got 'high'. Change it or leave it out."),
        ({"callback": 3}, "expected callback= as a callable, got 3. Change it or leave it out."),
    ],
)
def test_bad_options_are_errors(options, message):
    with pytest.raises(SpecError) as caught:
        parse_call("Bcast", (numbers(6),), options, 1, 3)
    assert str(caught.value).startswith("rank 1: Bcast: ") and str(caught.value).endswith(message)


@pytest.mark.parametrize("name", ["Reduce_scatter", "reduce_scatter", "Ireduce_scatter", "IREDUCE_SCATTER"])
def test_methods_have_the_names_of_mpi4py(name):
    assert find_method("explain", name, 1) == "Reduce_scatter"


@pytest.mark.parametrize(
    ("name", "remedy"), [("Bcats", "Did you mean Bcast?"), ("Quicksort", "Name a collective as mpi4py does.")]
)
def test_an_unknown_method_is_an_error(name, remedy):
    with pytest.raises(SpecError) as caught:
        find_method("explain", name, 1)
    assert str(caught.value) == f"rank 1: explain: expected one of {', '.join(PARSERS)}, got {name!r}. {remedy}"


@pytest.mark.parametrize("root", [None, "0", 3, -1, 1.0])
def test_a_bad_root_is_an_error(root):
    with pytest.raises(SpecError) as caught:
        read("Bcast", numbers(6), root)
    assert str(caught.value) == (
        f"rank 1: Bcast: expected a root from 0 to 2, got {root!r}. "
        "Pass the rank of the root in this communicator, the same on every rank."
    )


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 1),
        (7, 7),
        (SimpleNamespace(ptr=7), 7),
        (SimpleNamespace(cuda_stream=0), 1),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 7)), 7),
        (SimpleNamespace(__cuda_stream__=(0, 7)), 7),
        (None, None),
        (True, None),
        (-1, None),
        ("7", None),
        (SimpleNamespace(ptr="7"), None),
    ],
)
def test_a_stream_is_a_handle_or_an_object_that_has_one(stream, handle):
    assert stream_handle(stream) == handle


def test_a_stream_option_says_what_it_may_be():
    with pytest.raises(SpecError) as caught:
        parse_call("Bcast", (numbers(6),), {"stream": "fast"}, 1, 3)
    assert "stream= as a CUDA stream: its handle, or an object with ptr, cuda_stream or" in str(caught.value)
    assert parse_call("Bcast", (numbers(6),), {"stream": 7}, 1, 3).nbytes
