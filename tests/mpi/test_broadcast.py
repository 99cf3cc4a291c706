"""The broadcast benchmark under mpirun: it runs, verifies what it broadcasts, and prints its table."""

from __future__ import annotations

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_table_of_verified_broadcasts(ranks):
    codecs = "none,split,zfp:rate=16,bound:rel=1e-3"
    sizes = ["-m", "4:65536", "--chunk", "10000", "-i", "1"]
    done = run(ranks, "-m", "osu_bench.bcast", *sizes, "--codecs", codecs)
    assert done.returncode == 0, done.stderr
    title, columns, *rows = done.stdout.strip().splitlines()
    assert title == f"# Broadcast of float32 weights to {ranks} ranks: MPI's own, and the chain with each codec"
    assert columns.split("(us)")[0].split() == ["#", "Size", "mpi"]
    assert [int(row.split()[0]) for row in rows] == [1 << power for power in range(2, 17)]
    ratios = dict(zip(codecs.split(","), map(float, rows[-1].split()[4::2]), strict=True))
    assert 0.95 < ratios["none"] <= 1 < ratios["split"] < ratios["zfp:rate=16"] < ratios["bound:rel=1e-3"]


def test_a_wrong_codec_ends_the_job_with_one_sentence():
    done = run(2, "-m", "osu_bench.bcast", "--codecs", "zpf:rate=8")
    assert done.returncode != 0
    assert "codec: expected one of" in done.stderr and "Did you mean zfp?" in done.stderr
    assert "Traceback" not in done.stderr
