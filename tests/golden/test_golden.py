"""Encoded bytes do not change: every machine encodes and decodes the stored vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import make
import numpy as np
import pytest
from device_memory import download, upload
from hardware import MACHINES
from make import CASES, HERE, INDEX, TYPES, Case, checksum, main, plain_values
from streams import open_stream

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import Buffer, dtype_of_name

if TYPE_CHECKING:
    from mpi_gpucomp.device import Memory, Stream

VECTORS = json.loads(INDEX.read_text())
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_machine = pytest.mark.parametrize("machine", MACHINES)


def elements(memory: Memory, case: Case) -> Buffer:
    dtype = dtype_of_name(case.dtype)
    assert dtype is not None
    return Buffer(memory.address, dtype, (case.count,), device=memory.device.name, owner=memory)


def encoded(case: Case, stream: Stream) -> bytes:
    codec, device = get_codec(case.spec), stream.device
    with upload(plain_values(case), device, stream) as memory:
        source = elements(memory, case)
        with device.alloc(codec.max_encoded(source.count, source.dtype)) as room:
            size = codec.encode(source, room, stream).result()
            assert size is not None
            return download(room.part(0, size), stream).tobytes()


def decoded(case: Case, data: bytes, stream: Stream) -> np.ndarray:
    back = np.zeros(case.count, TYPES[case.dtype])
    with (
        upload(np.frombuffer(data, np.uint8), stream.device, stream) as source,
        upload(back, stream.device, stream) as memory,
    ):
        assert get_codec(case.spec).decode(source, len(data), elements(memory, case), stream).result() == len(data)
        return download(memory, stream).view(back.dtype)


@every_case
def test_the_input_is_reproducible(case: Case) -> None:
    assert checksum(plain_values(case).tobytes()) == VECTORS[str(case)]["plain"]


@every_machine
@every_case
def test_encoding_matches_the_vector(case: Case, machine: str) -> None:
    stream, vector = open_stream(machine), VECTORS[str(case)]
    data = encoded(case, stream)
    assert (len(data), checksum(data)) == (vector["encoded_nbytes"], vector["encoded"])
    if case.path is not None:
        assert data == case.path.read_bytes()


@every_machine
@every_case
def test_decoding_the_vector_matches_the_values(case: Case, machine: str) -> None:
    stream = open_stream(machine)
    data = case.path.read_bytes() if case.path is not None else encoded(case, stream)
    values = decoded(case, data, stream)
    assert checksum(values.tobytes()) == VECTORS[str(case)]["decoded"]
    assert not get_codec(case.spec).lossless or values.tobytes() == plain_values(case).tobytes()


def test_wire_ids() -> None:
    assert {case.spec: get_codec(case.spec).wire_id for case in CASES} == {
        "none": 0,
        "zfp:rate=1": 0x01010004,
        "zfp:rate=8": 0x01010020,
        "zfp:rate=16.5": 0x01010042,
        "zfp:rate=32": 0x01010080,
        "zfp:rate=64": 0x01010100,
        "mpc": 0x02010001,
        "mpc:stride=4": 0x02010004,
        "bound:abs=0.001": 0x03010000,
        "bound:rel=0.01": 0x03010000,
        "split": 0x04020000,
        "cast:bf16": 0x05010001,
        "cast:f16": 0x05010002,
        "cast:f32": 0x05010003,
    }
    for case in CASES:
        assert VECTORS[str(case)]["wire_id"] == f"{get_codec(case.spec).wire_id:#010x}"


def test_the_stored_vectors_match_the_script() -> None:
    assert VECTORS.keys() == {str(case) for case in CASES}
    assert {path.name for path in HERE.glob("*.bin")} == {case.path.name for case in CASES if case.path}
    assert sum(path.stat().st_size for path in HERE.iterdir() if path.is_file()) < 200_000


def test_the_script_adds_missing_vectors_and_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [case for case in CASES if case.spec == "split" and case.path][:2]
    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(make, "INDEX", tmp_path / "vectors.json")
    monkeypatch.setattr(make, "CASES", cases)
    assert main() == 0
    assert json.loads((tmp_path / "vectors.json").read_text()) == {str(case): VECTORS[str(case)] for case in cases}
    first = tmp_path / f"{cases[0]}.bin"
    assert first.read_bytes() == (Path(__file__).parent / first.name).read_bytes()
    index = VECTORS | {str(cases[0]): {"encoded": "other"}}
    (tmp_path / "vectors.json").write_text(json.dumps(index))
    assert main() == 1
    assert capsys.readouterr().err == f"{cases[0]}: the bytes are not those of the vector\n"
    assert json.loads((tmp_path / "vectors.json").read_text()) == index
