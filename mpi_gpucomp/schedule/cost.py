"""Cost parameters of links, codecs and messages, closed formulas for pipelines, and traffic counts of algorithms."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.schedule.verify.deadlock import execution_order, match_messages
from mpi_gpucomp.schedule.verify.structure import StepRef, step_at

if TYPE_CHECKING:
    from mpi_gpucomp.schedule.ir import Algorithm

__all__ = [
    "FREE",
    "MB",
    "NO_MESSAGE_COST",
    "PER_MB",
    "RELAY_BYTES",
    "CodecCost",
    "LinkCost",
    "MessageCost",
    "StagingCost",
    "TrafficCount",
    "chain_seconds",
    "default_chunk_bytes",
    "longest_chain",
    "steps_and_bytes",
]

MB = 1_000_000
"""The decimal megabyte of files and reports; memory sizes such as 512 KiB are written out."""
PER_MB = 1e-6 / MB
"""One microsecond per MB in seconds per byte; 1 Gbit/s is 8000 of them."""

RAW_UNIT, LONG_RAW_UNIT = 1 << 14, 1 << 16
MIN_RAW_CHUNK, MAX_RAW_CHUNK = 1 << 18, 1 << 22
"""Without a codec the chunk size is `sqrt(message_bytes * unit)`, clamped: 1 MiB for 64 MiB.

In a chain a longer chunk delays the last rank, while more chunks cost more overhead, so the best size grows with the
square root of the message size. Chunks may be longer where they delay nobody: through shared memory they take less
time, and sockets relay them while they arrive.
"""
ENCODED_CHUNKS, MIN_ENCODED_CHUNK, MAX_ENCODED_CHUNK = 16, 1 << 19, 1 << 21
"""With a codec a message is cut into this many chunks, whose size in bytes is clamped."""
GPU_CHUNKS, MIN_GPU_CHUNK, MAX_GPU_CHUNK, GPU_UNIT = 24, 1 << 20, 1 << 24, 1 << 16
"""The same on GPUs: a short chunk leaves multiprocessors without work, and launches cost more than the kernels do."""


RELAY_BYTES = 1 << 16
"""The segment after which a message between nodes is relayed."""


class LinkCost(NamedTuple):
    """The cost of a message to a neighbour while all ranks send one."""

    latency: float
    """Seconds."""
    per_byte: float
    """Seconds per byte."""

    def seconds(self, nbytes: float) -> float:
        """Return the time of a message on an idle link."""
        return self.latency + nbytes * self.per_byte


class CodecCost(NamedTuple):
    """The cost of a codec: seconds per raw byte to encode and to decode, and raw bytes per encoded byte."""

    encode: float = 0.0
    decode: float = 0.0
    ratio: float = 1.0


class MessageCost(NamedTuple):
    """The cost of a message at its sender and its receiver, besides the link."""

    message: float = 0.0
    """CPU seconds per message."""
    per_byte: float = 0.0
    """CPU seconds per byte, such as those of copies and of TCP."""
    wait: float = 0.0
    """Seconds until a rank notices an arrived message; the CPU is free meanwhile."""
    frame: float = 0.0
    """CPU seconds per encoded or decoded chunk, besides the cost per byte."""

    def seconds(self, nbytes: float) -> float:
        """Return the CPU time of a message at either end."""
        return self.message + nbytes * self.per_byte


class StagingCost(NamedTuple):
    """The cost of moving a frame between a GPU and page-locked host memory, beside its kernels."""

    per_byte: float
    """Seconds; the two directions do not share bandwidth."""
    latency: float = 0.0
    """Seconds per copy."""
    raw: bool = True
    """True if messages without a codec are staged too: the MPI library cannot access GPU memory."""

    def seconds(self, nbytes: float) -> float:
        """Return the time of a copy."""
        return self.latency + nbytes * self.per_byte


FREE = CodecCost()
NO_MESSAGE_COST = MessageCost()


def chain_seconds(
    nbytes: int, chunk: int, ranks: int, link: LinkCost, codec: CodecCost = FREE, relay_bytes: int = 0
) -> float:
    """Return the time of an undisturbed chunked chain, whose ranks relay segments of `relay_bytes`, or whole chunks.

    Without a codec it is (n - 1) a + M b + (n - 2) S b, where S is the segment or the chunk. With a codec the first
    chunk is encoded, then each stage takes as long as the slowest of encoding, link and decoding, and the last chunk is
    decoded.
    """
    if ranks < 2 or not nbytes:
        return 0.0
    loops, chunk_bytes = -(-nbytes // chunk), min(chunk, nbytes)
    sent = chunk_bytes / codec.ratio
    forwarded = min(sent, relay_bytes or sent)
    encode, decode = chunk_bytes * codec.encode, chunk_bytes * codec.decode
    stage = max(encode, sent * link.per_byte, decode)
    return encode + link.seconds(sent) + (ranks - 2) * link.seconds(forwarded) + (loops - 1) * stage + decode


def default_chunk_bytes(
    nbytes: int, *, coded: bool, shared: bool = False, relayed: bool = False, gpu: bool = False
) -> int:
    """Return the chunk size that a communicator uses by default.

    `coded` is True with a codec, `shared` if all ranks are on one node, `relayed` if ranks forward chunks while they
    arrive, `gpu` if elements are on GPUs.
    """
    if coded and gpu:
        return min(MAX_GPU_CHUNK, max(MIN_GPU_CHUNK, nbytes // GPU_CHUNKS & -GPU_UNIT))
    if not coded:
        best = isqrt(nbytes * (LONG_RAW_UNIT if shared or relayed else RAW_UNIT))
        return min(MAX_RAW_CHUNK, max(MIN_RAW_CHUNK, best & -MIN_RAW_CHUNK))
    return min(MAX_ENCODED_CHUNK, max(MIN_ENCODED_CHUNK, nbytes // ENCODED_CHUNKS))


class TrafficCount(NamedTuple):
    """The traffic of one loop; bytes are those of the busiest rank, as a fraction of the loop's data."""

    steps: int
    """The longest chain of messages that depend on each other."""
    messages: int
    """The most messages that one rank sends."""
    sent: Fraction
    """The most bytes that one rank sends."""
    received: Fraction
    """The most bytes that one rank receives."""


def steps_and_bytes(algorithm: Algorithm) -> TrafficCount:
    """Count the steps, messages and bytes of a checked algorithm."""
    sent, received = ([0] * algorithm.ranks for _ in range(2))
    messages = [0] * algorithm.ranks
    for rank, program in enumerate(algorithm.programs):
        for _, _, step in program.steps():
            sent[rank] += step.count * step.sends
            received[rank] += step.count * step.receives
            messages[rank] += step.sends
    fractions = (Fraction(max(counts), algorithm.chunks) for counts in (sent, received))
    return TrafficCount(longest_chain(algorithm), max(messages), *fractions)


def longest_chain(algorithm: Algorithm, *, relays: bool = False) -> int:
    """Return the longest chain of messages that depend on each other, if `relays` without those that can be relayed."""
    messages = match_messages(algorithm)
    length: dict[StepRef, int] = {}
    for ref in execution_order(algorithm, messages):
        before = [length[StepRef(ref.rank, *other)] for other in step_at(algorithm, ref).after]
        if ref.step:
            before.append(length[ref._replace(step=ref.step - 1)])
        send = messages.send_of.get(ref)
        if send is not None:
            before.append(length[send] + (not relays or step_at(algorithm, send).kind != "rcs"))
        length[ref] = max(before, default=0)
    return max(length.values(), default=0)
