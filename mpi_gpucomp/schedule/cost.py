"""What links and codecs cost in numbers, and the closed formulas of pipelines that follow from them."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.verify.deadlock import executable, paired
from mpi_gpucomp.schedule.verify.diagnostics import StepRef

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = [
    "FREE",
    "MB",
    "PER_MB",
    "UNHANDLED",
    "CodecCost",
    "LinkCost",
    "MessageCost",
    "TrafficCount",
    "chain_seconds",
    "default_chunk_bytes",
    "steps_and_bytes",
]

MB = 1_000_000
"""What files and people mean by it; memory sizes such as 512 KiB are written out."""
PER_MB = 1e-6 / MB
"""Seconds per byte of one microsecond per MB, the unit of files: 1 Gbit/s is 8000."""

PLAIN_UNIT, SHARED_UNIT = 1 << 14, 1 << 16
LEAST_PLAIN, MOST_PLAIN = 1 << 18, 1 << 22
"""A chunk without a codec has the root of the message's bytes times a unit, within limits: 1 MiB for 64 MiB.

The last rank of a chain waits longer the longer a chunk is, and chunks cost more the more there are: so their best
length grows with the root of the message's. Through memory that ranks share, a chunk is soon through.
"""
CODED_CHUNKS = 16, 1 << 19, 1 << 21
"""How many chunks the engine cuts a message into with a codec, and how short and long they may be: bytes."""


class LinkCost(NamedTuple):
    """What a message to a neighbour takes, while all ranks send one: seconds, and seconds per byte besides."""

    latency: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return what a message of so many bytes takes on a link that is free."""
        return self.latency + nbytes * self.per_byte


class CodecCost(NamedTuple):
    """A codec in numbers: seconds per plain byte to make a frame and to read it, and plain bytes for each encoded."""

    encode: float = 0.0
    decode: float = 0.0
    ratio: float = 1.0


class MessageCost(NamedTuple):
    """What a message costs a rank that sends or receives it, besides the wire: most of it time of a processor."""

    message: float = 0.0
    """Seconds of a processor for each, however short."""
    per_byte: float = 0.0
    """Seconds of a processor for each byte, such as those of copies and of TCP."""
    wait: float = 0.0
    """Seconds until a rank notices that a message has come, in which the processor is free for others."""
    frame: float = 0.0
    """Seconds of a processor for each chunk that is encoded or decoded, besides what its bytes take."""

    def seconds(self, nbytes: float) -> float:
        """Return what a processor spends on a message, at either end."""
        return self.message + nbytes * self.per_byte


FREE = CodecCost()
UNHANDLED = MessageCost()


def chain_seconds(nbytes: int, chunk: int, ranks: int, link: LinkCost, coding: CodecCost = FREE) -> float:
    """Return what a chunked chain takes where nothing disturbs it.

    A plain one takes (M/C + n - 2) (a + C b). With a codec the first chunk is encoded, then each stage takes as long as
    the slowest of encoding, wire and decoding, and the last chunk is decoded.
    """
    if ranks < 2 or not nbytes:
        return 0.0
    loops, piece = -(-nbytes // chunk), min(chunk, nbytes)
    wire = link.seconds(piece / coding.ratio)
    encode, decode = piece * coding.encode, piece * coding.decode
    stage = max(encode, wire, decode)
    return encode + (ranks - 1) * wire + (loops - 1) * stage + decode


def default_chunk_bytes(nbytes: int, *, coded: bool, shared: bool = False) -> int:
    """Return the bytes of a chunk where nobody has said how long it should be, as a communicator chooses.

    `shared` where all ranks are on one node.
    """
    if not coded:
        best = isqrt(nbytes * (SHARED_UNIT if shared else PLAIN_UNIT))
        return min(MOST_PLAIN, max(LEAST_PLAIN, best & -LEAST_PLAIN))
    share, least, most = CODED_CHUNKS
    return min(most, max(least, nbytes // share))


# What an algorithm costs on the wire, counted from its steps.


class TrafficCount(NamedTuple):
    """The cost of one loop; bytes are a share of its `chunks` chunks, and those of the rank that has most to do."""

    steps: int
    """The longest chain of messages of which each waits for the one before."""
    messages: int
    """The most messages that one rank sends."""
    sent: Fraction
    """The most bytes that one rank sends."""
    received: Fraction
    """The most bytes that one rank receives."""


def steps_and_bytes(algorithm: Algorithm) -> TrafficCount:
    """Count the steps, messages and bytes of an algorithm that has passed its check."""
    sent, received = ([0] * algorithm.ranks for _ in range(2))
    messages = [0] * algorithm.ranks
    for rank, program in enumerate(algorithm.programs):
        for _, _, step in program.steps():
            sent[rank] += step.count * step.sends
            received[rank] += step.count * step.receives
            messages[rank] += step.sends
    share = (Fraction(max(counts), algorithm.chunks) for counts in (sent, received))
    return TrafficCount(_longest_chain(algorithm), max(messages), *share)


def _longest_chain(algorithm: Algorithm) -> int:
    pairs = paired(algorithm)
    length: dict[StepRef, int] = {}
    for spot in executable(algorithm, pairs):
        step = algorithm.programs[spot.rank].lanes[spot.lane].steps[spot.step]
        before = [length[StepRef(spot.rank, *other)] for other in step.after]
        if spot.step:
            before.append(length[spot._replace(step=spot.step - 1)])
        if spot in pairs.send_of:
            before.append(length[pairs.send_of[spot]] + 1)
        length[spot] = max(before, default=0)
    return max(length.values(), default=0)
