"""Who takes part in a comparison.

`mpi` is MPI's own collective, `mpi-tuned` the same with its best algorithm for the size, `gloo` that of torch,
`p2p:CODEC` and `p2p-chain:CODEC` compress message by message, and every codec's spec, with `@ALGORITHM` behind it if
wanted, is a Communicator's.
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
"""Longer messages are tried once with each of MPI's algorithms, others twice."""
LOSSY_MARGIN = 2.0
"""By how much a lossy result may differ more than a sample of the data did: blocks begin elsewhere in each message."""


class Traffic(NamedTuple):
    """What a rank has sent and received."""

    sent: int
    received: int


class Channel:
    """Messages to another rank and from it."""

    def __init__(self, comm: Any, options: dict[str, Any] | None = None) -> None:
        """Use the methods of mpi4py's names."""
        self._comm, self._options = comm, options or {}

    def send(self, buffer: Any, peer: int, tag: int) -> None:
        """Send, and come back when the buffer is free."""
        self._comm.Send(buffer, peer, tag, **self._options)

    def receive(self, buffer: Any, peer: int, tag: int) -> None:
        """Receive."""
        self._comm.Recv(buffer, peer, tag, **self._options)

    def start_send(self, buffer: Any, peer: int, tag: int) -> Any:
        """Start to send."""
        return self._comm.Isend(buffer, peer, tag, **self._options)

    def start_receive(self, buffer: Any, peer: int, tag: int) -> Any:
        """Start to receive."""
        return self._comm.Irecv(buffer, peer, tag, **self._options)


class Candidate:
    """One way to carry out collectives: MPI's own."""

    name = "mpi"
    codec: Codec | None = None
    note = ""
    """What was chosen for the message at hand, if there was a choice."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Let all ranks make one."""
        self.comm = comm

    def prepare(self, message: Message, timed: Callable[[Callable[[], object]], float]) -> None:
        """Do what is done once for a message; `timed` runs something together with the other ranks and times it."""

    def call(self, message: Message) -> None:
        """Carry out a collective."""
        _plain(self.comm, message)

    def start(self, message: Message) -> Any:
        """Start a collective and return a request."""
        method = getattr(self.comm, f"I{message.collective.method.lower()}")
        return method(*_arguments(message, plain=True))

    def traffic(self) -> Traffic | None:
        """Say what has gone over the wire so far, if that is known."""
        return None

    def tolerance(self, values: Values, message: Message) -> float:
        """Return by how much an element may differ from what it should be."""
        return _tolerance(self.codec, values, message.ranks if message.collective.sums else 1) if self.codec else 0.0

    def message_tolerance(self, values: Values) -> float:
        """Return the same for a message between two ranks."""
        return _tolerance(self.codec, values, 1) if self.codec else 0.0

    def channel(self) -> Channel:
        """Return the way to another rank."""
        return Channel(self.comm)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def close(self) -> None:
        """Free what was made; all ranks do."""


class _Tuned(Candidate):
    name = "mpi-tuned"

    def prepare(self, message: Message, timed: Callable[[Callable[[], object]], float]) -> None:
        """Try the algorithms that this MPI has."""
        from mpi_gpucomp._tuning.mpi_algorithms import AlgorithmSweep

        self.close()
        self._tuned = AlgorithmSweep(self.comm, message.collective.name)
        rounds = 1 if message.count * message.dtype.itemsize > LONG_SWEEP else 2
        self.note = self._tuned.sweep(lambda comm: timed(lambda: _plain(comm, message)), rounds)

    def call(self, message: Message) -> None:
        """Use the one that was fastest."""
        with self._tuned.best() as comm:
            _plain(comm, message)

    def start(self, message: Message) -> Any:
        """Refuse: the settings are those of blocking calls."""
        raise _cannot(self.name, f"I{message.collective.method.lower()}")

    def close(self) -> None:
        """Free the communicators of the last message."""
        if hasattr(self, "_tuned"):
            self._tuned.close()


class _Rival(Candidate):
    """Somebody else's collectives, on arrays in host memory, by their names in lower case."""

    def __init__(self, comm: MPI.Intracomm, name: str, methods: Any, codec: Codec | None = None) -> None:
        super().__init__(comm)
        self.name, self._methods, self.codec = name, methods, codec

    def call(self, message: Message) -> None:
        """Call its method, if it has it."""
        method = getattr(self._methods, message.collective.name, None)
        if method is None or message.on_gpu:
            raise _cannot(self.name, f"{message.collective.name}{' on a GPU' * message.on_gpu}")
        buffers = message.host_buffers()
        if message.collective.sums and buffers[-1] is None:
            buffers = (buffers[0], np.empty_like(buffers[0]))  # for partial sums, which others keep there
        method(*buffers)

    def start(self, message: Message) -> Any:
        """Refuse."""
        raise _cannot(self.name, f"I{message.collective.method.lower()}")

    def channel(self) -> Channel:
        """Refuse: it has no messages between two ranks."""
        raise _cannot(self.name, "messages between two ranks")

    def traffic(self) -> Traffic | None:
        """Ask it, if it can tell."""
        stats = getattr(self._methods, "stats", None)
        return Traffic(*stats()) if stats else None

    def tolerance(self, values: Values, message: Message) -> float:
        """Allow for an error at each hop."""
        return super().tolerance(values, message) * message.ranks

    def close(self) -> None:
        """End it."""
        self._methods.close()


class _Ours(Candidate):
    """A Communicator with one codec."""

    def __init__(self, comm: MPI.Intracomm, name: str, chunk: int | None) -> None:
        super().__init__(comm)
        spec, _, algorithm = name.partition("@")
        self.name, self._codec = name, get_codec(spec)
        self.codec = self._codec
        self._options: dict[str, Any] = {"algorithm": algorithm} if algorithm else {}
        self._ours = Communicator(comm, spec, chunk=chunk)

    def prepare(self, message: Message, timed: Callable[[Callable[[], object]], float]) -> None:
        """Let `auto` find the fastest way, as `mpi-tuned` does; calls with an I then know what it has measured."""
        if self._codec.name == "auto":
            self._ours.calibrate(message.collective.method)
            self.note = self._ours.autotune(message.collective.method, *_arguments(message), **self._options).summary

    def call(self, message: Message) -> None:
        """Call the Communicator's method."""
        getattr(self._ours, message.collective.method)(*_arguments(message), **self._options)

    def start(self, message: Message) -> Any:
        """Call the one with an I."""
        return getattr(self._ours, f"I{message.collective.method.lower()}")(*_arguments(message), **self._options)

    def traffic(self) -> Traffic:
        """Ask the Communicator."""
        stats = self._ours.stats()
        return Traffic(stats.bytes_sent, stats.bytes_received)

    def channel(self) -> Channel:
        """Say the codec in both calls, which `auto` would leave to MPI otherwise."""
        return Channel(self._ours, {} if self._codec.name == "auto" else {"codec": self._codec.spec})

    def barrier(self) -> None:
        """Use the Communicator's."""
        self._ours.Barrier()

    def close(self) -> None:
        """Free the Communicator."""
        self._ours.Free()


def make_candidate(name: str, comm: MPI.Intracomm, chunk: int | None) -> Candidate:
    """Make the candidate of a name; all ranks do."""
    kind, _, codec = name.partition(":")
    if name == "mpi":
        return Candidate(comm)
    if name == "mpi-tuned":
        return _Tuned(comm)
    if name == "gloo":
        from osu_bench.suite.baselines import Gloo

        return _Rival(comm, name, Gloo(comm))
    if kind in ("p2p", "p2p-chain"):
        from osu_bench.suite.baselines import PerMessage, PerMessageChain

        spec, options = codec or PER_MESSAGE, {"chunk": chunk} if chunk else {}
        made = PerMessageChain if kind == "p2p-chain" else PerMessage
        return _Rival(comm, name, made(comm, spec, **options), get_codec(spec))
    return _Ours(comm, name, chunk)


def _plain(comm: MPI.Intracomm, message: Message) -> None:
    """Call MPI's own, through copies on the host where this MPI does not take the memory of a GPU."""
    if message.on_gpu and not cuda_aware().aware:
        with message.staged() as copies:
            getattr(comm, message.collective.method)(*_arguments(copies, plain=True))
        return
    getattr(comm, message.collective.method)(*_arguments(message, plain=True))


def _arguments(message: Message, *, plain: bool = False) -> tuple[Any, ...]:
    """Return the arguments of the method; `plain` ones as mpi4py takes them, which does not know every type."""
    buffers = message.buffers
    if plain and message.dtype.kind == "V":
        if message.collective.sums:
            raise SpecError(
                "candidate mpi",
                expected="elements that MPI can add",
                got=str(message.dtype),
                remedy="Choose other data or a type: -T mpi_float.",
            )
        buffers = tuple(None if buffer is None else message.as_bytes(buffer) for buffer in buffers)
    if message.collective.method == "Reduce_scatter":
        return (*buffers, message.shares())
    return buffers


def _tolerance(codec: Codec, values: Values, ranks: int) -> float:
    """Take the codec's promise, or what it does to a sample, for sums over so many ranks."""
    if codec.lossless:
        return 0.0
    promised = getattr(codec, "abs", None)
    if promised is not None:
        return float(promised) * ranks
    # Sums are as much larger as there are ranks, and so is what a codec that follows their size does to them.
    return LOSSY_MARGIN * _sampled_error(codec, values.pool[: 1 << 20]) * ranks * ranks


def _sampled_error(codec: Codec, sample: np.ndarray[Any, Any]) -> float:
    """Return the largest error that a codec makes in some values."""
    source, back, device = as_buffer(sample), np.empty_like(sample), get_device("host")
    stream = device.stream()
    with device.alloc(frame.max_frame_bytes(codec, source.count, source.dtype)) as room:
        frame.encode(codec, source, room, 0, stream).result()
        header = frame.read_header(room, stream)
        frame.decode(codec, header, room, as_buffer(back, writable=True), stream).result()
    return float(np.max(np.abs(back.astype(np.float64) - sample.astype(np.float64))))


def _cannot(name: str, what: str) -> SpecError:
    return SpecError(f"candidate {name}", expected="a collective that it has", got=what, remedy="Leave it out.")
