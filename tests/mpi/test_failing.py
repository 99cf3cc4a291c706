"""Collectives that go wrong on one rank, under mpirun: all ranks hear of it, and go on."""

from __future__ import annotations

import json
import re

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun

COLLECTIVES = {"chain": "broadcast", "tree": "broadcast", "ring": "allreduce", "pairwise": "alltoall"}
REMEDY = "Mend what went wrong there. The output here is not complete; the communicator can be used on."
EXPECTED = "expected every rank to carry it out, got on rank"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_damage_on_the_wire_is_heard_by_all_and_harms_nothing_else(ranks):
    done = run(ranks, "tests/mpi/failing.py", "wire", "20")
    assert done.returncode == 0, done.stderr
    found = 0
    for told in zip(*json.loads(done.stdout), strict=True):
        culprit, kind = told[0]["culprit"], told[0]["kind"]
        assert all(one["others"] == ["no error"] and one["again"] == "no error" for one in told), told
        finder = told[culprit]["finder"]
        if finder is None:  # this rank sends fewer messages than that
            assert all(one["target"] == "no error" for one in told)
            continue
        found += 1
        title, error = f"{COLLECTIVES[kind]} 'target'", told[finder]["target"]
        where = rf"FrameError: rank {finder}: {title}, chunk \d of loop \d+, from rank {culprit}: "
        assert re.fullmatch(rf"{where}expected .+, got .+\. .+", error), error
        for rank, one in enumerate(told):
            # One whose part was complete before has its result.
            heard = f"PeerError: rank {rank}: {title}: {EXPECTED} {finder} {error} {REMEDY}"
            assert rank == finder or one["target"] in ("no error", heard), one
    assert found >= 8


def test_what_codecs_and_callbacks_raise_is_heard_by_all():
    done = run(3, "tests/mpi/failing.py", "code")
    assert done.returncode == 0, done.stderr
    everybody = json.loads(done.stdout)
    for rank, told in enumerate(everybody):
        for raises in ("encode", "decode", "queued encode", "queued decode"):
            error = f"ZeroDivisionError: cannot {raises.split()[-1]}"
            for kind, title in (("chain", "broadcast 'one'"), ("ring", "allreduce 'one'")):
                heard = f"PeerError: rank {rank}: {title}: {EXPECTED} 1 {error}. {REMEDY}"
                complete = ["no error"] if (rank, kind) == (0, "chain") else []  # the root's part, before it is decoded
                assert told[f"{raises} {kind}"] in ([error] if rank == 1 else [heard, *complete])
                assert told[f"{raises} {kind}, other"] == told[f"{raises} {kind}, again"] == "no error"
        called_back = (
            "PeerError: rank 1: callback of allreduce 'one': expected every rank's to succeed, "
            "got ZeroDivisionError: cannot call back. Mend the callback; the collective itself is complete."
        )
        assert told["callback"] == ("ZeroDivisionError: cannot call back" if rank == 1 else "no error")
        assert told["callback, next"] == (
            called_back
            if rank == 1
            else f"PeerError: rank {rank}: allreduce (call 1): {EXPECTED} 1 {called_back} {REMEDY}"
        )
        assert told["callback, again"] == "no error"
