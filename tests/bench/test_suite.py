"""The benchmarks under mpirun: they run, print what OSU's scripts read, verify results and say when they are wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, needs_mpirun, run

from osu_bench.launcher import find

pytestmark = needs_mpirun
HERE = Path(__file__).parent
COLLECTIVES = ["bcast", "reduce", "allreduce", "allgather", "reduce_scatter", "alltoall", "gather", "scatter"]
QUICK = ["-i", "2", "-x", "1"]


def bench(ranks: int, *arguments: str, **options):
    done = run(ranks, "-m", "osu_bench", *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_output_is_that_of_the_osu_benchmarks():
    lines = bench(2, "bcast", "-m", "64", *QUICK, "--codec", "none").splitlines()
    assert lines[:4] == [
        "",
        "# OSU MPI Broadcast Latency Test v7.4",
        "# Datatype: MPI_FLOAT.",
        "# Size         Avg Latency(us)",
    ]
    assert [line[:10] for line in lines[4:]] == [f"{1 << power:<10d}" for power in range(2, 7)]
    assert all(re.fullmatch(r"\d+ +\d+\.\d\d", line) and len(line) == 30 for line in lines[4:])


def test_every_flag_adds_its_columns_behind_osu_s():
    options = ["-m", "4:4", "-f", "-z", "-c", "--columns", "ratio,wire,algbw,busbw,wrong,limit,note"]
    head, line = bench(2, "allreduce", *options, *QUICK).splitlines()[-2:]
    names = [head[start : start + 20].strip() for start in range(10, len(head), 20)]
    assert names == [
        *("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations"),
        *("P50 Tail Lat(us)", "P90 Tail Lat(us)", "P99 Tail Lat(us)", "Validation"),
        *("Ratio", "Wire(bytes)", "algbw(GB/s)", "busbw(GB/s)", "#wrong", "Wire limit(us)", "Note"),
    ]
    assert line.split()[4:5] == ["2"] and "Pass" in line.split()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_with_all_candidates(name):
    """Three ranks: shares are uneven, trees are lopsided. The lengths are no multiple of a chunk or of the ranks."""
    candidates = "mpi,mpi-tuned,none,split,bound:abs=2e-4,zfp:rate=16,auto"
    shown = bench(3, name, "-m", "4:300K", "--step", "40", "--chunk", "10000", *QUICK, "--compare", candidates)
    rows = [line.split() for line in shown.splitlines()[3:]]
    assert [row[:2] for row in rows] == [
        [str(size), name] for size in (4, 160, 6400, 256000) for name in candidates.split(",")
    ]
    largest = {row[1]: row for row in rows[-7:]}
    assert 1.1 < float(largest["split"][-1]) < float(largest["zfp:rate=16"][-1]) < float(largest["bound:abs=2e-4"][-1])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_that_are_started(name):
    shown = bench(2, f"i{name}", "-m", "64K:64K", *QUICK, "-t", "3", "--codec", "split")
    assert shown.splitlines()[1].startswith("# OSU MPI Non-blocking ")
    names = shown.splitlines()[-2].split("(us)")
    assert [name.strip() for name in names[:3]] == ["# Size             Overall", "Compute", "Pure Comm."]
    size, overall, compute, pure, overlap = map(float, shown.splitlines()[-1].split())
    assert size == 65536 and min(overall, compute, pure) > 0 and 0 <= overlap <= 100


@pytest.mark.parametrize(
    ("name", "ranks", "columns"),
    [("latency", 2, 2), ("bw", 2, 2), ("bibw", 2, 2), ("mbw_mr", 4, 3)],
)
def test_messages_between_two(name, ranks, columns):
    for codec in ("mpi", "auto", "split", "zfp:rate=8"):
        shown = bench(ranks, name, "-m", "1K:128K", "--step", "128", *QUICK, "--codec", codec)
        rows = [line.split() for line in shown.splitlines() if line and not line.startswith("#")]
        assert [row[0] for row in rows] == ["1024", "131072"] and all(len(row) == columns for row in rows)
    done = run(3, "-m", "osu_bench", "latency")
    assert done.returncode == 2
    assert "benchmark latency: expected 2 ranks, got 3. Use mpirun -n 2." in done.stderr


def test_a_barrier_has_no_size():
    lines = bench(2, "barrier", *QUICK).splitlines()
    assert lines[1:3] == ["# OSU MPI Barrier Latency Test v7.4", "# Avg Latency(us)"]
    assert re.fullmatch(r" +\d+\.\d\d", lines[3])


@pytest.mark.parametrize("buffer", ["numpy", "torch"])
@pytest.mark.parametrize("data", ["weights", "weights-bf16", "gradients", "smooth", "zeros", "random"])
def test_data_and_buffers(data, buffer):
    candidates = "mpi,none,auto" if data == "random" else "mpi,none,split,auto"
    bench(
        2, "bcast", "-m", "64K:1M", "--step", "4", "--data", data, "--buffer", buffer, *QUICK, "--compare", candidates
    )


def test_values_of_the_user_s(tmp_path):
    import numpy as np

    np.save(tmp_path / "mine.npy", np.arange(1000, dtype=np.float64))
    shown = bench(2, "allgather", "-m", "64K:64K", "--data", str(tmp_path / "mine.npy"), *QUICK, "--compare", "mpi,mpc")
    assert "mine.npy (float64)" in shown


def test_files_that_are_written(tmp_path):
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    for codec in ("none", "split"):
        bench(2, "bcast", "-m", "64K:256K", "--codec", codec, *QUICK, *files)
    first, second = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [row["size"] for row in first["rows"]] == [1 << 16, 1 << 17, 1 << 18]
    assert {row["candidate"] for row in second["rows"]} == {"split"}
    assert second["rows"][-1]["wire_bytes"] < (1 << 18) / 1.1 and second["rows"][-1]["wrong"] == 0
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 4


def test_a_wrong_result_fails_the_run():
    done = run(2, str(HERE / "suite_broken.py"), "bcast", "-m", "64K:256K", *QUICK, "--codec", "broken", "-c")
    assert done.returncode == 1
    assert re.search(r"broken: \d+ wrong elements in messages of 65536 bytes", done.stderr)
    assert done.stdout.split()[-1] == "Fail" and "131072" not in done.stdout


def test_what_cannot_be_done_is_said_once():
    done = run(2, "-m", "osu_bench", "bcast", "--codec", "zpf:rate=8")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "codec: expected one of" in done.stderr and "Did you mean zfp?" in done.stderr
    done = run(2, "-m", "osu_bench", "bcast", "-m", "4:x")
    assert done.returncode != 0
    message = "osu_bench bcast: error: argument -m/--message-size: expected bytes such as 4096, 4K or 64M, got 'x'"
    assert done.stderr.count(message) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_interrupting_tells_what_was_measured(mpi, number, tmp_path, request):
    """Open MPI's mpirun takes no more output from ranks that it ends, so there only the sizes before are shown."""
    arguments = ["allreduce", "-m", "4:4M", "--step", "1024", "-i", "1000000", "-x", "0", "--seconds", "2"]
    program = [sys.executable, "-m", "osu_bench", *arguments, "--codec", "none", "--json", str(tmp_path / "r.json")]
    launcher = find() if mpi == "openmpi" else find(mpi, request.getfixturevalue("mpich"))
    command = launcher.command(2, program)
    environment = {**os.environ, **launcher.environment, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as running:
        lines = []
        while not lines or not lines[-1].startswith("4096"):
            lines.append(running.stdout.readline())
        time.sleep(1)
        running.send_signal(number)
        rest, _ = running.communicate(timeout=60)
    if mpi == "mpich":
        assert re.search(
            r"# interrupted: 2 sizes measured; then 4194304 bytes, medians and iterations: (none \d|nothing)", rest
        )
    assert running.returncode != 0
    (only,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [row["size"] for row in only["rows"]] == [4, 4096]


def test_a_gpu_that_is_not_there_is_named():
    try:
        import cupy

        gpus = cupy.cuda.runtime.getDeviceCount()
    except Exception:
        gpus = 0
    if gpus:
        assert "MPI-CUDA Broadcast" in bench(2, "bcast", "-d", "cuda", "-m", "1M:4M", *QUICK)
        return
    done = run(2, "-m", "osu_bench", "bcast", "-d", "cuda")
    assert done.returncode == 2 and "option --buffer cupy: expected cupy, and for cupy a GPU, got " in done.stderr


def test_mpich_too(mpich):
    candidates = "mpi,mpi-tuned,none,split,p2p,p2p-chain,auto"
    shown = bench(3, "bcast", "-m", "64K:1M", "--step", "16", *QUICK, "--compare", candidates, mpich=mpich)
    assert len(shown.splitlines()) == 3 + 2 * 7
