"""The parts of the benchmarks by themselves: data and what is right, sizes and names, tables and files."""

from __future__ import annotations

import argparse
import json

import ml_dtypes
import numpy as np
import pytest

from mpi_gpucomp.errors import BufferSpecError, SpecError
from osu_bench import arguments
from osu_bench.experiments.headline import Conditions, jobs
from osu_bench.suite import flags
from osu_bench.suite.buffers import Memory
from osu_bench.suite.collectives import COLLECTIVES, Message
from osu_bench.suite.data import KINDS, Values, differing
from osu_bench.suite.results import Network, Results, Row, Run, load, merge, row_of
from osu_bench.suite.table import Comparison, bars

# Data


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_the_same_wherever_they_are_made(kind):
    first, second = Values(kind), Values(kind)
    a, b = np.empty(300_000, first.dtype), np.empty(300_000, first.dtype)
    first.write(a, 3)
    second.write(b, 3)
    assert a.tobytes() == b.tobytes()
    assert first.wrong(b, 3) == 0
    if kind != "zeros":
        assert first.wrong(b, 2) > 1000


@pytest.mark.parametrize("kind", ["weights", "weights-bf16", "random"])
def test_one_wrong_bit_is_found_wherever_it_is(kind):
    values = Values(kind)
    message = np.empty(values.pool.size + 1000, values.dtype)  # the pool twice, and more
    values.write(message, 5)
    for place in (0, values.pool.size - 1, values.pool.size, message.size - 1):
        spoilt = message.copy()
        spoilt.view(np.uint8)[place * message.itemsize] ^= 1
        assert values.wrong(spoilt, 5) == 1


def test_a_tolerance_is_kept_and_nan_is_never_right():
    expected = np.zeros(4, np.float32)
    got = np.array([0.1, -0.1, 0.11, np.nan], np.float32)
    assert differing(got, expected, 0.1001) == 2
    assert differing(got.astype(ml_dtypes.bfloat16), expected.astype(ml_dtypes.bfloat16), 0.2) == 1


def test_sums_are_looked_at_to_the_last_place_that_rounding_leaves():
    values = Values("weights")
    parts = [np.empty(10_000, np.float32) for _ in range(4)]
    for rank, part in enumerate(parts):
        values.write(part, rank)
    total = np.sum(parts, axis=0, dtype=np.float32)
    assert values.wrong_sum(total, range(4)) == 0
    assert values.wrong_sum(total[100:], range(4), first=100) == 0
    total[17] += 1e-4
    assert values.wrong_sum(total, range(4)) == 1
    assert values.wrong_sum(total, range(4), tolerance=2e-4) == 0


def test_types_of_the_osu_benchmarks():
    assert Values("weights", "mpi_char").dtype == np.uint8
    assert Values("weights", "mpi_double").type_name == "MPI_DOUBLE"
    assert Values("weights", "mpi_int").pool.tobytes() == Values("weights").pool.tobytes()
    assert Values("weights-bf16").type_name == "BFLOAT16"


def test_data_that_nobody_knows():
    with pytest.raises(SpecError) as caught:
        Values("wights")
    assert str(caught.value) == (
        "option --data: expected weights, weights-bf16, gradients, smooth, zeros, random or a .npy file, got wights. "
        "Save your own values with numpy.save."
    )


# Collectives


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_must_be_received_is_what_the_definition_says(name, ranks):
    """By hand from what the ranks send; an exchange of two elements is noticed."""
    kind, values = COLLECTIVES[name], Values("weights")
    messages = [Message(kind, 4 * 1000, rank, ranks, Memory(), values) for rank in range(ranks)]
    for message in messages:
        message.poison()
    _carry_out(name, messages)
    assert [message.wrong(0.0) for message in messages] == [0] * ranks
    receivers = [message for message in messages if message.receives is not None and (ranks > 1 or not kind.root_sends)]
    for message in receivers:
        if name != "bcast" or message.rank:
            message.receives[[3, 4]] = message.receives[[4, 3]]
            assert message.wrong(0.0) == 2


def _carry_out(name, messages):
    """Do what the collective is defined to do, in numpy."""
    sends = [message.sends for message in messages]
    ranks, count = len(messages), messages[0].count
    for rank, message in enumerate(messages):
        if message.receives is None:
            continue
        if name == "bcast":
            message.receives[:] = messages[0].receives
        elif name in ("reduce", "allreduce"):
            message.receives[:] = np.sum(sends, axis=0)
        elif name == "reduce_scatter":
            first = sum(message.shares()[:rank])
            message.receives[:] = np.sum(sends, axis=0)[first : first + len(message.receives)]
        elif name in ("allgather", "gather"):
            message.receives[:] = np.concatenate(sends)
        elif name == "scatter":
            message.receives[:] = sends[0].reshape(ranks, count)[rank]
        else:
            message.receives[:] = np.concatenate([send.reshape(ranks, count)[rank] for send in sends])


def test_bytes_that_have_to_cross_the_wire():
    expected = {
        "bcast": 100,
        "reduce": 100,
        "allreduce": 150,
        "allgather": 300,
        "reduce_scatter": 75,
        "alltoall": 300,
        "gather": 300,
        "scatter": 300,
    }
    assert {name: kind.wire_bytes(100, 4) for name, kind in COLLECTIVES.items()} == expected
    assert {kind.wire_bytes(100, 1) for kind in COLLECTIVES.values()} == {0}


# The command line


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("4K", 4096), ("64M", 1 << 26), ("64mb", 1 << 26), ("1GiB", 1 << 30)]
)
def test_numbers_of_bytes(text, expected):
    assert arguments.number(text) == expected


@pytest.mark.parametrize("text", ["", "K", "4X", "-1", "1.5M"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.number(text)


def test_commas_within_a_codec_s_spec():
    assert arguments.names("mpi,none,zfp:rate=8,mpc:stride=4,auto") == [
        "mpi",
        "none",
        "zfp:rate=8",
        "mpc:stride=4",
        "auto",
    ]
    assert arguments.names("a:x=1,y=2,b") == ["a:x=1,y=2", "b"]


def test_sizes_go_from_the_smallest_to_the_largest():
    assert arguments.sizes(4, 64) == [4, 8, 16, 32, 64]
    assert arguments.sizes(3, 13) == [3, 6, 12]
    assert arguments.sizes(1 << 20, 1 << 26, step=4) == [1 << 20, 1 << 22, 1 << 24, 1 << 26]
    assert arguments.sizes(8, 4) == []


# Results


def some_run() -> Run:
    rows = [row_of(1 << 20, name, [[10.0, 14.0], [12.0, 16.0]], wire_bytes=77, extra={"overlap": 3.0}) for name in "ab"]
    return Run("bcast", 2, "Open MPI v5", network=Network(2, 1e9), rows=rows)


def test_a_row_says_what_the_osu_benchmarks_say():
    row = row_of(8, "x", [[1.0, 3.0], [2.0, 10.0], [3.0, 5.0]])
    assert (row.average_us, row.fastest_us, row.slowest_us) == (4.0, 2.0, 6.0)
    assert row.times_us == [3.0, 10.0, 5.0] and row.median_us == 5.0
    assert row.percentile(50) == 5.0 and row.percentile(99) == pytest.approx(9.9)


def test_results_come_back_as_they_were(tmp_path):
    results = Results([some_run()], {"cores": 2})
    results.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json") == results
    assert merge([results, results]).runs == results.runs * 2
    results.save_csv(tmp_path / "r.csv")
    head, first, _ = (tmp_path / "r.csv").read_text().splitlines()
    found = dict(zip(head.split(","), first.split(","), strict=True))
    assert (found["hosts"], found["rate_bits"], found["candidate"], found["median_us"]) == (
        "2",
        "1000000000.0",
        "a",
        "15.0",
    )


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"format": "other", "version": 1}', "[1]", "[" * 100_000],
    ids=["empty", "{}", "other", "[1]", "deep"],
)
def test_files_that_hold_no_results(content, tmp_path):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(BufferSpecError) as caught:
        load(tmp_path / "r.json")
    assert str(caught.value).startswith(f"file {tmp_path / 'r.json'}: expected results of osu_bench, got ")
    assert str(caught.value).endswith("Create one with `osu_bench NAME --json FILE`.")


def test_a_comparison_has_a_line_for_each_candidate():
    table = Comparison("Broadcast", ["mpi", "zfp:rate=8"], ["ratio"])
    rows = [Row(8, "mpi", [20.0], 20, 20, 20), Row(8, "zfp:rate=8", [5.0], 5, 5, 5, ratio=4.0)]
    assert table.header().splitlines()[-1].split() == ["#", "Size", "Candidate", "Median(us)", "/", "mpi", "Ratio"]
    assert [line.split() for line in table.line(rows).splitlines()] == [
        ["8", "mpi", "20.00", "1.000", "-"],
        ["8", "zfp:rate=8", "5.00", "0.250", "4.00"],
    ]
    assert [line.count("#") for line in bars(rows).splitlines()[2:]] == [60, 1]


# The sweep


def test_a_sweep_knows_what_it_has_done():
    conditions, sizes = Conditions(4, "1gbit"), (1 << 20, 1 << 22)
    planned = list(jobs(conditions, sizes, ("weights", "smooth"), mpich=True))
    assert [(job.benchmark, job.data, job.mpi) for job in planned] == [
        ("bcast", "weights", "openmpi"),
        ("bcast", "smooth", "openmpi"),
        ("bcast", "weights", "mpich"),
        ("allreduce", "gradients", "openmpi"),
        ("allgather", "gradients", "openmpi"),
    ]
    job = planned[0]
    rows = [Row(size, name, [1.0], 1, 1, 1) for size in sizes for name in job.candidates]
    run = Run("bcast", 4, "Open MPI v5.0.8", "weights", network=Network(4, 1e9), rows=rows)
    assert job.is_in(run, conditions)
    assert not job.is_in(run, Conditions(4, "5gbit")) and not planned[2].is_in(run, conditions)
    run.rows.pop()
    run.rows = [row for row in run.rows if row.size == sizes[0]]
    assert not job.is_in(run, conditions)


def test_the_command_line_of_a_job_is_one_that_the_benchmark_takes(tmp_path):
    from osu_bench.command import benchmark_parser

    for job in jobs(Conditions(8, "unlimited"), (1 << 20, 1 << 22), ("weights", "gradients"), mpich=True):
        name, *words = job.arguments(3.0, tmp_path / "r.json")
        parsed = benchmark_parser(name).parse_args(words, flags.Flags())
        assert parsed.candidates == list(job.candidates)
        assert parsed.sizes(4) == list(job.sizes)
    assert json.dumps(parsed.json) == json.dumps(str(tmp_path / "r.json"))
