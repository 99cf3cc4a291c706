"""Whom `blame` names, by records of every kind of hang; real ones are in tests/mpi/test_flight.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.blame import Blame, blame, read

CALL = {"name": "", "run": 7, "title": "broadcast (call 7)"}


def record(rank: int, *, begun: int = 7, waits: bool = True, **call: Any) -> dict[str, Any]:
    under_way = {**CALL, "said": "", "absent": [], "sending": [], "receiving": [], "coding": False, **call}
    told = {"number": 0, "world": [0, 1, 2, 3], "begun": {"": begun}, "links": [], "broken": None}
    communicator = {**told, "waits": [CALL] if waits else [], "calls": [under_way] if begun == 7 else []}
    threads = {"MainThread": ["/x/train.py:12 main", "/x/train.py:80 load", "/lib/mpi4py/x.py:3 wait"]}
    own = {"rank": rank, "size": 4, "host": f"h{rank}", "pid": 100 + rank, "time": 1.0, "reason": "SIGUSR1"}
    return {**own, "communicators": [communicator], "threads": threads, "alarms": [], "operations": []}


def starves(source: int) -> dict[str, Any]:
    return {"receiving": [{"rank": source, "rail": 0, "ms": 9000.0, "waited_ms": 8000.0}]}


def sends(to: int) -> dict[str, Any]:
    return {"sending": [{"rank": to, "rail": 0, "ms": 9000.0, "bytes": 2_000_000}]}


def test_one_that_left_no_record() -> None:
    assert blame({rank: record(rank) for rank in (0, 1, 3)}) == Blame(
        "rank 2 is behind it: it left no record (dead or stopped), and ranks 0, 1, 3 wait in broadcast (call 7).", (2,)
    )


def test_one_that_has_not_begun_what_others_wait_for() -> None:
    records = {rank: record(rank) for rank in range(4)} | {2: record(2, begun=6, waits=False)}
    assert blame(records) == Blame(
        "rank 2 (h2) is behind it: it has begun 6 of 7 calls, ranks 0, 1, 3 wait in broadcast (call 7);"
        " it is at train.py:80 in load.",
        (2,),
    )


def test_a_link_that_bytes_do_not_get_over() -> None:
    told = [sends(1), {**starves(0), **sends(2)}, starves(1), starves(2)]
    told[0] = {}  # what rank 0 has sent is complete
    records = {rank: record(rank, **one) for rank, one in enumerate(told)}
    assert blame(records) == Blame(
        "the link from rank 1 to rank 2 is behind it: 2.0 MB of broadcast (call 7) have been under way for 9.0 s,"
        " and rank 2 waits for them.",
        (1, 2),
    )


def test_one_that_does_not_send_what_others_wait_for() -> None:
    told = [{"coding": True}, starves(0), starves(1), starves(2)]
    records = {rank: record(rank, **one) for rank, one in enumerate(told)}
    assert blame(records) == Blame("rank 0 (h0) is behind it: rank 1 waits for it, and it encodes or decodes.", (0,))


def test_nobody_where_nobody_waits() -> None:
    records = {rank: record(rank, waits=False) for rank in range(4)}
    assert blame(records) == Blame("no rank waits for another: no hang shows")


def test_the_command_prints_the_sentence_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        one = record(rank, begun=6, waits=False) if rank == 2 else record(rank)
        (tmp_path / f"flight.h.{rank}.{rank}.json").write_text(json.dumps(one))
    assert main(["blame", str(tmp_path), "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 2 (h2) is behind it")
    assert lines[2].split() == [
        "rank",
        "host",
        "pid",
        "reason",
        "begun",
        "waits",
        "for",
        "absent",
        "sending",
        "receiving",
    ]
    assert lines[5].split() == ["2", "h2", "102", "SIGUSR1", "6", "-", "-", "-", "-"]


def test_no_records_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read(tmp_path)
    assert str(refused.value) == (
        f"directory {tmp_path}: expected flight records (flight.*.json), got none."
        " Set MPI_GPUCOMP_FLIGHT to a directory for the run, and name it here."
    )
