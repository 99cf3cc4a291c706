"""The cause that `blame` names for every kind of hang; real ones are in tests/mpi/test_flight.py."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from mpi_gpucomp.cli.main import main
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.flight import Blame, blame, read

CALL = {"name": "", "run": 7, "title": "broadcast (call 7)"}


def record(rank: int, *, begun: int = 7, waits: bool = True, **call: Any) -> dict[str, Any]:
    in_progress = {**CALL, "signature": "", "absent": [], "sending": [], "receiving": [], "coding": False, **call}
    comm = {"number": 0, "world": [0, 1, 2, 3], "begun": {"": begun}, "links": [], "failure": None}
    comm |= {"waits": [CALL] if waits else [], "calls": [in_progress] if begun == 7 else []}
    threads = {"MainThread": ["/x/train.py:12 main", "/x/train.py:80 load", "/lib/mpi4py/x.py:3 wait"]}
    own = {
        "version": 2,
        "rank": rank,
        "size": 4,
        "host": f"h{rank}",
        "pid": 100 + rank,
        "time": 1.0,
        "reason": "SIGUSR1",
    }
    return {**own, "communicators": [comm], "threads": threads, "alarms": [], "operations": []}


def waits_for(source: int) -> dict[str, Any]:
    return {"receiving": [{"rank": source, "rail": 0, "ms": 9000.0, "waited_ms": 8000.0}]}


def sends(to: int) -> dict[str, Any]:
    return {"sending": [{"rank": to, "rail": 0, "ms": 9000.0, "bytes": 2_000_000}]}


def test_rank_without_a_record() -> None:
    assert blame({rank: record(rank) for rank in (0, 1, 3)}) == Blame(
        "rank 2 is behind it: it left no record (dead or stopped), and ranks 0, 1, 3 wait in broadcast (call 7).", (2,)
    )


def test_rank_that_has_not_begun_a_call() -> None:
    records = {rank: record(rank) for rank in range(4)} | {2: record(2, begun=6, waits=False)}
    assert blame(records) == Blame(
        "rank 2 (h2) is behind it: it has begun 6 of 7 calls, ranks 0, 1, 3 wait in broadcast (call 7);"
        " it is at train.py:80 in load.",
        (2,),
    )


def test_stuck_link() -> None:
    calls = [sends(1), {**waits_for(0), **sends(2)}, waits_for(1), waits_for(2)]
    calls[0] = {}  # what rank 0 has sent is complete
    records = {rank: record(rank, **one) for rank, one in enumerate(calls)}
    assert blame(records) == Blame(
        "the link from rank 1 to rank 2 is behind it: 2.0 MB of broadcast (call 7) have been in flight for 9.0 s,"
        " and rank 2 waits for them.",
        (1, 2),
    )


def test_rank_that_does_not_send() -> None:
    calls = [{"coding": True}, waits_for(0), waits_for(1), waits_for(2)]
    records = {rank: record(rank, **one) for rank, one in enumerate(calls)}
    assert blame(records) == Blame("rank 0 (h0) is behind it: rank 1 waits for it, and it encodes or decodes.", (0,))


def test_no_hang() -> None:
    records = {rank: record(rank, waits=False) for rank in range(4)}
    assert blame(records) == Blame("no rank waits for another: no hang")


def test_command_prints_the_cause_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_directory_without_records(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        read(tmp_path)
    assert str(refused.value) == (
        f"directory {tmp_path}: expected flight records (flight.*.json), got none."
        " Set MPI_GPUCOMP_FLIGHT to a directory for the run, and name it here."
    )


def mutated(value: Any, rng: random.Random) -> Any:
    """Replace, remove or repeat one thing somewhere in JSON data."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        return (
            {**value, key: mutated(value[key], rng)}
            if rng.random() < 0.8
            else {k: v for k, v in value.items() if k != key}
        )
    if isinstance(value, list) and value and rng.random() < 0.9:
        return [mutated(value[0], rng), *value[1:]]
    return rng.choice([None, True, -1, 10**400, 1.5, float("nan"), "text", [], {}, [[]], {"": []}, "\x1b[2J"])


def test_damaged_records_are_errors_or_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, path, refused = random.Random(0), tmp_path / "flight.h.0.0.json", 0
    for rank in range(1, 4):
        (tmp_path / f"flight.h.{rank}.{rank}.json").write_text(json.dumps(record(rank, **waits_for(0))))
    for _ in range(300):
        path.write_text(json.dumps(mutated(record(0, **sends(1), **waits_for(3)), rng)))
        status = main(["blame", str(tmp_path), "-v"])
        error = capsys.readouterr().err
        assert status == 0 or (status == 2 and f"file {path}: expected a flight record, got " in error)
        refused += status == 2
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"\x80\x04N.", "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte"),
        (b"[]", "JSON that is no object"),
        (b'{"version": 7}', "version 7, this library reads version 2"),
        (b'{"version": 2}', "no field rank"),
        (
            b"[" * 100_000,
            "RecursionError: maximum recursion depth exceeded while decoding a JSON array from a unicode string",
        ),
    ],
)
def test_file_that_is_no_flight_record(tmp_path: Path, content: bytes, got: str) -> None:
    path = tmp_path / "flight.h.0.0.json"
    path.write_bytes(content)
    with pytest.raises(SpecError) as refused:
        read(tmp_path)
    assert str(refused.value) == (
        f"file {path}: expected a flight record, got {got}."
        " Remove it, or name the directory that MPI_GPUCOMP_FLIGHT was set to."
    )


def test_wrong_type_names_the_field(tmp_path: Path) -> None:
    one = record(0, **waits_for(3))
    one["communicators"][0]["calls"][0]["receiving"][0]["waited_ms"] = "long"
    path = tmp_path / "flight.h.0.0.json"
    path.write_text(json.dumps(one))
    field = "communicators[0].calls[0].receiving[0].waited_ms"
    with pytest.raises(SpecError, match=re.escape(f"got field {field} with str instead of float or null. ")):
        read(tmp_path)


def test_fifo_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flight.h.0.0.json")
    with pytest.raises(SpecError, match="got something that is not a file"):
        read(tmp_path)
