"""What messages from rank to rank go over, and how the first part of one announces the rest."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.codec import frame
from mpi_gpucomp.device.dtype import dtype_of_code
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.errors import FrameError
from mpi_gpucomp.monitor.recorder import OFF, NoLog

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.comm.p2p.firsts import Firsts
    from mpi_gpucomp.device import Device, DType
    from mpi_gpucomp.monitor.recorder import Group
    from mpi_gpucomp.transport.base import Transport

__all__ = ["LEAST_ROOM", "Announcement", "Line", "damaged"]

LEAST_ROOM = 1024
"""Bytes that there is room for in every part of a message: an announcement or a note, however small the frames are."""
MAGIC, LAYOUT = b"GPCA", struct.Struct("<4sIBQQQI")


class Announcement(NamedTuple):
    """What a sender says of the frames that follow."""

    dtype: DType
    nbytes: int
    """Bytes of the message."""
    piece: int
    """Bytes of a chunk; the last one may be shorter."""
    room: int
    """Bytes that no frame exceeds."""
    tag: int
    """What the frames travel under."""
    codec: str
    """Empty where chunks travel as they are, without frames."""

    def pack(self) -> bytes:
        """Return its bytes, with a checksum of all the others behind the magic ones."""
        numbers = self.dtype.code, self.nbytes, self.piece, self.room, self.tag
        body = LAYOUT.pack(MAGIC, 0, *numbers) + self.codec.encode()
        assert len(body) <= LEAST_ROOM, f"the spec of the codec is too long: {self.codec}"
        return body[:4] + struct.pack("<I", zlib.adler32(body)) + body[8:]

    @staticmethod
    def begins(data: bytes) -> bool:
        """Say whether the first part of a message is an announcement."""
        return data.startswith(MAGIC)

    @classmethod
    def read(cls, data: bytes, where: str) -> Announcement:
        """Read what `pack` has made; `where` names the message in errors."""
        body = data[:4] + bytes(4) + data[8:]
        if len(data) < LAYOUT.size or struct.pack("<I", zlib.adler32(body)) != data[4:8]:
            raise damaged(where)
        _, _, code, nbytes, piece, room, tag = LAYOUT.unpack_from(data)
        dtype = dtype_of_code(code)
        assert dtype is not None, "the checksum is right"
        return cls(dtype, nbytes, piece, room, tag, data[LAYOUT.size :].decode())


def damaged(where: str) -> FrameError:
    """Make the error for a first part that is not as it was sent."""
    return FrameError(
        where,
        expected="a first part with the right checksum",
        got="another one",
        remedy="The message was damaged or cut short on its way, or something else wrote to this buffer.",
    )


class Line:
    """What the messages of one communicator go over, and the coders that they take turns to use."""

    def __init__(self, firsts: Firsts, transport: Transport, short: int, group: Group | None = None) -> None:
        """Send first parts by `firsts`, with whole messages of up to `short` bytes, and frames over the transport.

        Frames are recorded in a `group` of the monitor, if there is one.
        """
        self.firsts, self.transport, self.short, self._group = firsts, transport, short, group
        self.rank = firsts.rank
        self.first_bytes = max(LEAST_ROOM, frame.HEADER_BYTES + short)
        self._coders: dict[tuple[str, str, bool], list[Coder]] = {}
        self._number = 0

    def free_tag(self) -> int:
        """Return a tag for the frames of a message, from the upper half of all tags: the engine begins below."""
        self._number = (self._number + 1) % (self.transport.largest_tag // 2)
        return self.transport.largest_tag - self._number

    def log(self, name: str, said: str) -> NoLog:
        """Return where the frames of a message are recorded; messages that `said` the same can be compared."""
        return self._group.begin(name, said) if self._group is not None else OFF

    def coder(self, codec: Codec, device: Device, inline: bool) -> Coder:
        """Return a coder that no other message uses, so that one which fails takes no other with it."""
        try:
            return self._coders.setdefault((codec.spec, device.name, inline), []).pop()
        except IndexError:
            return Coder(codec, device, inline=inline)

    def give_back(self, coder: Coder, inline: bool) -> None:
        """Keep a coder for other messages."""
        self._coders[coder.codec.spec, coder.stream.device.name, inline].append(coder)

    def close(self) -> None:
        """End the streams."""
        for coder in (coder for coders in self._coders.values() for coder in coders):
            coder.close()
        self._coders.clear()
