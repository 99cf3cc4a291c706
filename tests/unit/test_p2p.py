"""Messages of a rank to itself, corrupted in transit: the receiver's error, and that nothing leaks."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp._dispatch.p2p import Announcement, SendOperation
from mpi_gpucomp.codec import get_codec, register, registry
from mpi_gpucomp.codec.registry import registered
from mpi_gpucomp.device import dtype_of_name, get_device
from mpi_gpucomp.errors import FrameError, SpecError

WHERE = "rank 0: Recv from rank 0, tag 3"
DAMAGED = "The frame was damaged or truncated in transit, or the buffer was overwritten."


@pytest.fixture
def comm():
    with Communicator(MPI.COMM_SELF, codec="split", chunk=4000, passthrough_bytes=100) as made:
        yield made


def exchange(comm: Communicator, count: int) -> np.ndarray:
    received = np.zeros(count, np.float32)
    comm.Sendrecv(np.arange(count, dtype=np.float32), 0, 3, received, 0, 3)
    return received


class Corrupting:
    """A wire that corrupts one message."""

    def __init__(self, wire, number: int, at: int) -> None:
        self._wire, self._left, self._at = wire, number, at
        self.largest_tag = wire.largest_tag

    def send(self, peer: int, tag: int, address: int, nbytes: int):
        if self._left == 0:
            ctypes.c_uint8.from_address(address + self._at).value ^= 1
        self._left -= 1
        return self._wire.send(peer, tag, address, nbytes)

    def receive(self, *args):
        return self._wire.receive(*args)


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (0, f"{WHERE}, chunk 2: expected the magic bytes 47504346, got 46504346. {DAMAGED}"),
        (60, f"{WHERE}, chunk 2: expected the checksum "),
    ],
)
def test_a_corrupted_frame_is_an_error_and_the_rest_of_the_message_is_drained(comm, at, error):
    in_use = get_device("host").pool.statistics.in_use
    line = comm._p2p._channel
    whole, line.wire = line.wire, Corrupting(line.wire, 2, at)
    with pytest.raises(FrameError) as raised:
        exchange(comm, 10_000)
    assert str(raised.value).startswith(error)
    line.wire = whole
    assert (exchange(comm, 10_000) == np.arange(10_000)).all()
    assert get_device("host").pool.statistics.in_use == in_use


def test_a_frame_of_another_chunk_is_an_error(comm):
    line = comm._p2p._channel
    whole, line.wire = line.wire, Corrupting(line.wire, 1, 16)
    with pytest.raises(FrameError, match=r"chunk 1: expected the checksum 0x[0-9a-f]{8}, got 0x[0-9a-f]{8}"):
        exchange(comm, 10_000)
    line.wire = whole


@pytest.mark.parametrize("count", [10, 10_000])
def test_a_corrupted_envelope_is_an_error(comm, monkeypatch, count):
    def corrupting(put):
        def corrupt(message, *args):
            written = put(message, *args)
            ctypes.c_uint8.from_address(message._envelope_memory.address + written - 1).value ^= 1
            return written

        return corrupt

    for name in ("_write_short", "_announce"):
        monkeypatch.setattr(SendOperation, name, corrupting(getattr(SendOperation, name)))
    room = np.zeros(count, np.float32)
    request = comm.Irecv(room, 0, 3)
    comm.Isend(np.ones(count, np.float32), 0, 3)
    with pytest.raises(FrameError) as raised:
        request.Wait()
    assert str(raised.value) == (
        f"{WHERE}: expected an envelope with a valid checksum, got a checksum mismatch. "
        "The message was corrupted or truncated in transit, or its buffer was overwritten."
    )
    assert not room.any()


def test_a_codec_that_only_the_sender_has_is_an_error(comm, monkeypatch):
    class Private(type(get_codec("none"))):
        name, wire_id = "private", 0xF0030000
        spec = "private"

    in_use = get_device("host").pool.statistics.in_use
    request = comm.Isend(np.ones(10_000, np.float32), 0, codec=Private())
    with pytest.raises(SpecError, match=r"^codec: expected one of .*, got 'private'\. "):
        comm.Recv(np.zeros(10_000, np.float32))
    request.Wait()
    monkeypatch.setattr(registry, "_entries", registered())
    register("private", lambda parameters: Private(), "tests")
    room = np.zeros(10_000, np.float32)
    comm.Sendrecv(np.ones(10_000, np.float32), 0, 0, room, codec="private")
    assert room.all()
    assert get_device("host").pool.statistics.in_use == in_use


def test_an_invalid_rank_or_tag_is_an_error_of_mpi(comm):
    in_use = get_device("host").pool.statistics.in_use
    values = np.ones(10_000, np.float32)
    for wrong in (lambda: comm.Send(values, 5), lambda: comm.Send(values, 0, -7), lambda: comm.Recv(values, 5)):
        with pytest.raises(MPI.Exception):
            wrong()
    assert get_device("host").pool.statistics.in_use == in_use


def test_an_envelope_survives_encoding():
    dtype = dtype_of_name("bfloat16")
    announced = Announcement(dtype, 1 << 40, 1 << 20, (1 << 20) + 48, (1 << 31) - 1, "zfp:rate=8")
    assert Announcement.begins(announced.pack())
    assert Announcement.read(announced.pack(), "here") == announced
    for length in range(len(announced.pack())):
        with pytest.raises(FrameError):
            Announcement.read(announced.pack()[:length], "here")
