"""The candidates of a comparison.

`mpi` is native MPI, `mpi-tuned` native MPI with its fastest algorithm for the size, `gloo` torch's library, `p2p:CODEC`
and `p2p-chain:CODEC` compress each message separately, and a codec spec, optionally followed by `@ALGORITHM`, is this
library's Communicator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpi_gpucomp import Communicator
from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.device import as_buffer, get_device
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.gpu_aware import cuda_aware

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_gpucomp.codec import Codec
    from osu_bench.suite.collectives import Message
    from osu_bench.suite.data import Values

__all__ = ["Candidate", "Channel", "Traffic", "make_candidate"]

PER_MESSAGE = "zfp:rate=8"
LONG_SWEEP = 1 << 27
"""Longer messages run each native algorithm once in the sweep, others twice."""
LOSSY_MARGIN = 2.0
"""Tolerated error of a lossy result over that of a sample, because blocks are aligned differently in each message."""


class Traffic(NamedTuple):
    """Bytes that a rank has sent and received."""

    sent: int
    received: int


class Channel:
    """Point-to-point messages of a communicator."""

    def __init__(self, comm: Any, options: dict[str, Any] | None = None) -> None:
        """Call the methods of mpi4py's names with these options."""
        self._comm, self._options = comm, options or {}

    def send(self, buffer: Any, peer: int, tag: int) -> None:
        """Send, and return when the buffer may be reused."""
        self._comm.Send(buffer, peer, tag, **self._options)

    def receive(self, buffer: Any, peer: int, tag: int) -> None:
        """Receive."""
        self._comm.Recv(buffer, peer, tag, **self._options)

    def start_send(self, buffer: Any, peer: int, tag: int) -> Any:
        """Start a send."""
        return self._comm.Isend(buffer, peer, tag, **self._options)

    def start_receive(self, buffer: Any, peer: int, tag: int) -> Any:
        """Start a receive."""
        return self._comm.Irecv(buffer, peer, tag, **self._options)


class Candidate:
    """An implementation of the collectives; this one is native MPI."""

    name = "mpi"
    codec: Codec | None = None
    note = ""
    """The plan chosen for the current message, if there was a choice."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Create the candidate; collective."""
        self.comm = comm

    def prepare(self, message: Message, timed: Callable[[Callable[[], object]], float]) -> None:
        """Tune for a message, before it is measured; `timed` runs a call on all ranks and times it."""

    def call(self, message: Message) -> None:
        """Run a collective."""
        _native(self.comm, message)

    def start(self, message: Message) -> Any:
        """Start a collective and return a request."""
        method = getattr(self.comm, f"I{message.collective.method.lower()}")
        return method(*_arguments(message, native=True))

    def traffic(self) -> Traffic | None:
        """Return the traffic so far, if known."""
        return None

    def tolerance(self, values: Values, message: Message) -> float:
        """Return the error that is allowed in an element."""
        return _tolerance(self.codec, values, message.ranks if message.collective.sums else 1) if self.codec else 0.0

    def message_tolerance(self, values: Values) -> float:
        """Return the error that is allowed in a point-to-point message."""
        return _tolerance(self.codec, values, 1) if self.codec else 0.0

    def channel(self) -> Channel:
        """Return the channel for point-to-point messages."""
        return Channel(self.comm)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def close(self) -> None:
        """Free resources; collective."""


class _Tuned(Candidate):
    name = "mpi-tuned"

    def prepare(self, message: Message, timed: Callable[[Callable[[], object]], float]) -> None:
        """Measure the algorithms of this MPI library."""
        from mpi_gpucomp._tuning.mpi_algorithms import AlgorithmSweep

        self.close()
        self._tuned = AlgorithmSweep(self.comm, message.collective.name)
        rounds = 1 if message.count * message.dtype.itemsize > LONG_SWEEP else 2
        self.note = self._tuned.sweep(lambda comm: timed(lambda: _native(comm, message)), rounds)

    def call(self, message: Message) -> None:
        """Use the fastest one."""
        with self._tuned.best() as comm:
            _native(comm, message)

    def start(self, message: Message) -> Any:
        """Refuse: the tuning applies to blocking calls."""
        raise _cannot(self.name, f"I{message.collective.method.lower()}")

    def close(self) -> None:
        """Free the communicators of the last message."""
        if hasattr(self, "_tuned"):
            self._tuned.close()


class _Baseline(Candidate):
    """Collectives of another implementation, on arrays in host memory, named in lower case."""

    def __init__(self, comm: MPI.Intracomm, name: str, methods: Any, codec: Codec | None = None) -> None:
        super().__init__(comm)
        self.name, self._methods, self.codec = name, methods, codec

    def call(self, message: Message) -> None:
        """Call the method, if the baseline has it."""
        method = getattr(self._methods, message.collective.name, None)
        if method is None or message.on_gpu:
            raise _cannot(self.name, f"{message.collective.name}{' on a GPU' * message.on_gpu}")
        buffers = message.host_buffers()
        if message.collective.sums and buffers[-1] is None:
            buffers = (buffers[0], np.empty_like(buffers[0]))  # scratch space for partial sums
        method(*buffers)

    def start(self, message: Message) -> Any:
        """Refuse."""
        raise _cannot(self.name, f"I{message.collective.method.lower()}")

    def channel(self) -> Channel:
        """Refuse: baselines have no point-to-point messages."""
        raise _cannot(self.name, "point-to-point messages")

    def traffic(self) -> Traffic | None:
        """Return the baseline's counters, if it has any."""
        stats = getattr(self._methods, "stats", None)
        return Traffic(*stats()) if stats else None

    def tolerance(self, values: Values, message: Message) -> float:
        """Allow one error per hop."""
        return super().tolerance(values, message) * message.ranks

    def close(self) -> None:
        """Close the baseline."""
        self._methods.close()


class _Codec(Candidate):
    """A Communicator with one codec."""

    def __init__(self, comm: MPI.Intracomm, name: str, chunk: int | None) -> None:
        super().__init__(comm)
        spec, _, algorithm = name.partition("@")
        self.name, self._codec = name, get_codec(spec)
        self.codec = self._codec
        self._options: dict[str, Any] = {"algorithm": algorithm} if algorithm else {}
        self._ours = Communicator(comm, spec, chunk=chunk)

    def prepare(self, message: Message, timed: Callable[[Callable[[], object]], float]) -> None:
        """Let `auto` find the fastest plan, as `mpi-tuned` does; non-blocking calls use its measurements."""
        if self._codec.name == "auto":
            self._ours.calibrate(message.collective.method)
            self.note = self._ours.autotune(message.collective.method, *_arguments(message), **self._options).summary

    def call(self, message: Message) -> None:
        """Call the Communicator's method."""
        getattr(self._ours, message.collective.method)(*_arguments(message), **self._options)

    def start(self, message: Message) -> Any:
        """Call the non-blocking method."""
        return getattr(self._ours, f"I{message.collective.method.lower()}")(*_arguments(message), **self._options)

    def traffic(self) -> Traffic:
        """Return the Communicator's counters."""
        stats = self._ours.stats()
        return Traffic(stats.bytes_sent, stats.bytes_received)

    def channel(self) -> Channel:
        """Name the codec in each call; `auto` uses native MPI."""
        return Channel(self._ours, {} if self._codec.name == "auto" else {"codec": self._codec.spec})

    def barrier(self) -> None:
        """Call the Communicator's barrier."""
        self._ours.Barrier()

    def close(self) -> None:
        """Free the Communicator."""
        self._ours.Free()


def make_candidate(name: str, comm: MPI.Intracomm, chunk: int | None) -> Candidate:
    """Create the candidate of a name; collective."""
    kind, _, codec = name.partition(":")
    if name == "mpi":
        return Candidate(comm)
    if name == "mpi-tuned":
        return _Tuned(comm)
    if name == "gloo":
        from osu_bench.suite.baselines import Gloo

        return _Baseline(comm, name, Gloo(comm))
    if kind in ("p2p", "p2p-chain"):
        from osu_bench.suite.baselines import PerMessage, PerMessageChain

        spec, options = codec or PER_MESSAGE, {"chunk": chunk} if chunk else {}
        made = PerMessageChain if kind == "p2p-chain" else PerMessage
        return _Baseline(comm, name, made(comm, spec, **options), get_codec(spec))
    return _Codec(comm, name, chunk)


def _native(comm: MPI.Intracomm, message: Message) -> None:
    """Call native MPI, staged through host memory if it is not GPU-aware."""
    if message.on_gpu and not cuda_aware().aware:
        with message.staged() as copies:
            getattr(comm, message.collective.method)(*_arguments(copies, native=True))
        return
    getattr(comm, message.collective.method)(*_arguments(message, native=True))


def _arguments(message: Message, *, native: bool = False) -> tuple[Any, ...]:
    """Return the method's arguments; for `native` MPI, types that mpi4py lacks become bytes."""
    buffers = message.buffers
    if native and message.dtype.kind == "V":
        if message.collective.sums:
            raise SpecError(
                "candidate mpi",
                expected="an element type that MPI can reduce",
                got=str(message.dtype),
                remedy="Choose other data, or a type with -T mpi_float.",
            )
        buffers = tuple(None if buffer is None else message.as_bytes(buffer) for buffer in buffers)
    if message.collective.method == "Reduce_scatter":
        return (*buffers, message.shares())
    return buffers


def _tolerance(codec: Codec, values: Values, ranks: int) -> float:
    """Return the codec's error bound, or its error on a sample, for sums over `ranks` ranks."""
    if codec.lossless:
        return 0.0
    promised = getattr(codec, "abs", None)
    if promised is not None:
        return float(promised) * ranks
    # Sums grow with the number of ranks, and so does the error of a codec relative to their magnitude.
    return LOSSY_MARGIN * _sampled_error(codec, values.pool[: 1 << 20]) * ranks * ranks


def _sampled_error(codec: Codec, sample: np.ndarray[Any, Any]) -> float:
    """Return the largest error of a codec on sample values."""
    source, back, device = as_buffer(sample), np.empty_like(sample), get_device("host")
    stream = device.stream()
    with device.alloc(frame.max_frame_bytes(codec, source.count, source.dtype)) as room:
        frame.encode(codec, source, room, 0, stream).result()
        header = frame.read_header(room, stream)
        frame.decode(codec, header, room, as_buffer(back, writable=True), stream).result()
    return float(np.max(np.abs(back.astype(np.float64) - sample.astype(np.float64))))


def _cannot(name: str, what: str) -> SpecError:
    return SpecError(f"candidate {name}", expected="a supported operation", got=what, remedy="Remove the candidate.")
