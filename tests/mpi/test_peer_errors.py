"""Collectives that fail on one rank, under mpirun: all ranks get an error, and the communicator stays usable."""

from __future__ import annotations

import json
import re

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun

COLLECTIVES = {"chain": "broadcast", "tree": "broadcast", "ring": "allreduce", "pairwise": "alltoall"}
REMEDY = "Fix the error there. The output here is incomplete; the communicator can still be used."
EXPECTED = "expected success on every rank, got on rank"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_corrupted_message_is_an_error_on_all_ranks_and_affects_no_other_call(ranks):
    done = run(ranks, "tests/mpi/peer_errors.py", "wire", "20")
    assert done.returncode == 0, done.stderr
    found = 0
    for results in zip(*json.loads(done.stdout), strict=True):
        culprit, kind = results[0]["culprit"], results[0]["kind"]
        assert all(one["others"] == ["no error"] and one["again"] == "no error" for one in results), results
        finder = results[culprit]["finder"]
        if finder is None:  # this rank sends fewer messages
            assert all(one["target"] == "no error" for one in results)
            continue
        found += 1
        title, error = f"{COLLECTIVES[kind]} 'target'", results[finder]["target"]
        where = rf"FrameError: rank {finder}: {title}, chunk \d of loop \d+, from rank {culprit}: "
        assert re.fullmatch(rf"{where}expected .+, got .+\. .+", error), error
        for rank, one in enumerate(results):
            # A rank whose part was already complete has its result.
            received = f"PeerError: rank {rank}: {title}: {EXPECTED} {finder} {error} {REMEDY}"
            assert rank == finder or one["target"] in ("no error", received), one
    assert found >= 8


def test_exceptions_of_codecs_and_callbacks_reach_all_ranks():
    done = run(3, "tests/mpi/peer_errors.py", "code")
    assert done.returncode == 0, done.stderr
    by_rank = json.loads(done.stdout)
    for rank, found in enumerate(by_rank):
        for raises in ("encode", "decode", "queued encode", "queued decode"):
            error = f"ZeroDivisionError: cannot {raises.split()[-1]}"
            for kind, title in (("chain", "broadcast 'one'"), ("ring", "allreduce 'one'")):
                received = f"PeerError: rank {rank}: {title}: {EXPECTED} 1 {error}. {REMEDY}"
                complete = (
                    ["no error"] if (rank, kind) == (0, "chain") else []
                )  # the root completes before others decode
                assert found[f"{raises} {kind}"] in ([error] if rank == 1 else [received, *complete])
                assert found[f"{raises} {kind}, other"] == found[f"{raises} {kind}, again"] == "no error"
        called_back = (
            "PeerError: rank 1: callback of allreduce 'one': expected success on every rank, "
            "got ZeroDivisionError: cannot call back. Fix the callback; the collective itself has completed."
        )
        assert found["callback"] == ("ZeroDivisionError: cannot call back" if rank == 1 else "no error")
        assert found["callback, next"] == (
            called_back
            if rank == 1
            else f"PeerError: rank {rank}: allreduce (call 1): {EXPECTED} 1 {called_back} {REMEDY}"
        )
        assert found["callback, again"] == "no error"
