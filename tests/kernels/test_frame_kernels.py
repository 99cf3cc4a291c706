"""The kernels of frames write and check the bytes that zlib and the layout of a frame say."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.codec.frame import HEADER_BYTES, VERSION, FrameHeader, parse
from mpi_gpucomp.device.base import dtype_of_name

if TYPE_CHECKING:
    from machines import Machine

TILE, STATE, LONGEST = 4096, 5, 1 << 21
LENGTHS = [0, 1, 3, 31, 127, 128, 129, TILE - 1, TILE, TILE + 4, 33 * TILE + 77]
BAD_CHECKSUM, OTHER_STATUS = 4, 2
BYTES = dtype_of_name("uint8")
assert BYTES is not None


def tiles(nbytes: int) -> int:
    return max(1, -(-nbytes // TILE))


def seal(
    machine: Machine, payload: bytes, *, base: int, slope: int, size: int, status: int = 0, calls: int = 3
) -> np.ndarray:
    """Return a sealed frame; check the report, and that the state is zero again."""
    frame, state, report = machine.zeros(len(payload) + 64, np.uint8), machine.zeros(STATE, np.uint64), None
    report = machine.zeros(2, np.uint64)
    frame[HEADER_BYTES : HEADER_BYTES + len(payload)] = np.frombuffer(payload, np.uint8)
    state[3], state[4] = size, status
    kind = int.from_bytes(struct.pack("<4sBBBB", b"GPCF", VERSION, 2, BYTES.code, 0), "little")
    most = tiles(max(base + 9 * slope, len(payload)))
    machine.launch(
        *("frame_seal", most, frame, state, most, base, slope, kind, 77, 5, len(payload) + 100, report),
        calls=min(most, calls),
    )
    assert not state.any()
    assert report.tolist() == [len(payload), status]
    return frame


def verify(machine: Machine, frame: np.ndarray, nbytes: int, status: int = 0) -> int:
    state, report = machine.zeros(STATE, np.uint64), machine.zeros(2, np.uint64)
    state[4] = status
    machine.launch(
        "frame_verify", tiles(nbytes), frame, state, tiles(nbytes), nbytes, report, calls=min(tiles(nbytes), 2)
    )
    assert not state.any()
    return int(report[1])


def check(machine: Machine, payload: bytes, **sizes: int) -> None:
    frame = seal(machine, payload, **sizes)
    data = frame.tobytes()
    header = parse(data[:HEADER_BYTES])
    unsealed = FrameHeader(77, BYTES, 5, len(payload) + 100, len(payload), checked=True).pack()
    assert header.checksum == zlib.adler32(unsealed + payload)
    assert data[:HEADER_BYTES] == header.pack() and data[HEADER_BYTES:][: len(payload)] == payload
    assert verify(machine, frame, len(payload)) == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_sealed_frames_are_what_the_layout_says(machine: Machine, length: int) -> None:
    payload = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    check(machine, payload, base=length, slope=0, size=0)
    if length >= 3:
        check(machine, payload, base=length - 3, slope=1, size=3)


@pytest.mark.parametrize("length", [TILE, 700 * TILE + 5])
def test_the_largest_sums_fit(machine: Machine, length: int) -> None:
    check(machine, b"\xff" * length, base=length, slope=0, size=0)


@given(st.binary(max_size=3 * TILE))
def test_any_payload(machine: Machine, payload: bytes) -> None:
    check(machine, payload, base=len(payload), slope=0, size=0)


@pytest.mark.parametrize("at", [0, 5, 8, 16, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5000])
def test_damage_is_reported(machine: Machine, at: int) -> None:
    payload = np.arange(9000, dtype=np.uint32).astype(np.uint8).tobytes()
    frame = seal(machine, payload, base=len(payload), slope=0, size=0)
    frame[at] ^= 16
    assert verify(machine, frame, len(payload)) == BAD_CHECKSUM
    assert verify(machine, frame, len(payload), OTHER_STATUS) == BAD_CHECKSUM | OTHER_STATUS


def test_frames_without_checksum_are_not_checked(machine: Machine) -> None:
    frame = machine.zeros(200, np.uint8)
    assert verify(machine, frame, 100, OTHER_STATUS) == OTHER_STATUS
