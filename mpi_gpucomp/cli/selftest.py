"""The command `selftest`: checks the library on this machine's GPUs, or on the host, and measures what limits it.

Under mpirun all ranks run the checks together. The report of rank 0 is text that can be pasted into an issue. Nothing
here needs the test suite: encodings are compared with those of the host, sums with numpy's, data with what was sent.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mpi_gpucomp import __version__
from mpi_gpucomp.cli.codecs import Bench, random_weights
from mpi_gpucomp.cli.command import Command, add_options, allgather_json, format_size, table
from mpi_gpucomp.cli.doctor import describe_gpu
from mpi_gpucomp.codec.auto import Auto
from mpi_gpucomp.codec.kernel_codec import KernelCodec
from mpi_gpucomp.codec.registry import get_codec, registered
from mpi_gpucomp.device import Buffer, dtype_of_name, get_device
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.errors import GpucompError
from mpi_gpucomp.schedule.cost import default_chunk_bytes
from mpi_gpucomp.schedule.topology import GPU_CODECS
from mpi_gpucomp.transport import gpu_aware

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.communicator import Communicator
    from mpi_gpucomp.device import Device, Stream
    from mpi_gpucomp.device.cuda import CudaDevice, CudaStream

    Array = np.ndarray[Any, Any]

__all__ = ["CHECKS", "COMMAND", "CheckFailed"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
COUNTS, FULL_COUNTS = (1, 31, 5000), (1, 31, 32, 33, 4095, 4097, 70_001, 1 << 20)
"""Elements of the arrays whose encodings are compared."""
STREAM_ROUNDS, STALE_COPIES = 5, 20
"""Broadcasts of data that a stream is still writing, and the copies of wrong data that it makes first."""
TURNS = 5
TOO_MUCH = 1 << 48
"""Bytes that no GPU has."""
CODEC_SECONDS, FULL_CODEC_SECONDS = 0.5, 3.0
LEAST_COPY = 1 << 20
MOST_RANKS = 4
"""Ranks whose failures are printed."""
MEASURED = (("zfp:rate=8", "float32"), ("bound:rel=1e-3", "float32"), ("split", "float32"), ("split", "bfloat16"))


class _Context(NamedTuple):
    """What the checks work with."""

    comm: MPI.Intracomm
    communicator: Communicator
    device: Device
    nbytes: int
    full: bool

    @property
    def gpu(self) -> CudaDevice | None:
        """The device if it is a GPU."""
        return None if isinstance(self.device, HostDevice) else cast("CudaDevice", self.device)

    def array(self, values: Array) -> Any:
        """Return values as an array on the device."""
        return values.copy() if self.gpu is None else self.gpu.cupy.asarray(values)

    def values(self, array: Any) -> Array:
        """Return the elements of an array on the device."""
        return cast("Array", array if self.gpu is None else array.get())


class CheckFailed(Exception):
    """A check failed."""


def _run(args: Namespace) -> int:
    from mpi4py import MPI

    from mpi_gpucomp.communicator import Communicator  # here, because other commands run without MPI

    comm = MPI.COMM_WORLD
    device = get_device(f"cuda:{_ordinal(comm)}" if args.gpu else "host")
    with _gpu_selected(device):
        _print(comm, _header(comm, device))
        communicator = Communicator(comm)
        failures = 0
        try:
            context = _Context(comm, communicator, device, args.size, args.full)
            for title, check in CHECKS:
                failures += _report(context, title, check)
        finally:
            communicator.Free()
    _print(comm, f"\n{failures} of {len(CHECKS)} checks failed" if failures else f"\nall {len(CHECKS)} checks passed")
    return 1 if failures else 0


def _ordinal(comm: MPI.Intracomm) -> int:
    """Return the GPU of this rank: one for each rank of a node, as far as there are as many."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local = node.rank
    node.Free()
    first = cast("CudaDevice", get_device("cuda:0"))
    return int(local % first.cupy.cuda.runtime.getDeviceCount())


@contextmanager
def _gpu_selected(device: Device) -> Iterator[None]:
    if isinstance(device, HostDevice):
        yield
    else:
        with cast("CudaDevice", device).current:
            yield


def _header(comm: MPI.Intracomm, device: Device) -> str:
    from mpi4py import MPI

    library = MPI.Get_library_version().split("\n")[0].partition(",")[0].replace("\0", "").strip()
    on_gpu = not isinstance(device, HostDevice)
    place = describe_gpu(device) if on_gpu else f"host, {os.cpu_count()} cores"
    lines = [f"mpi_gpucomp {__version__} selftest", f"{comm.size} rank{'s' * (comm.size > 1)}, {library}, {place}"]
    if "simulated" in place.lower():
        lines.append("This GPU is simulated in software: results are real, times are those of this host.")
    return "\n".join(lines)


def _print(comm: MPI.Intracomm, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)  # at once, in case that the next check ends the process


def _report(context: _Context, title: str, check: Callable[[_Context], str]) -> bool:
    """Run a check on all ranks, print its result, and return True if it failed on any."""
    _print(context.comm, f"\n{title}")
    start = perf_counter()
    try:
        text, failed = check(context), False
    except (CheckFailed, GpucompError) as error:
        text, failed = str(error), True
    except Exception as error:  # such as CuPy's, whose types cannot be imported without CuPy
        text, failed = f"{type(error).__name__}: {error}", True
    found = allgather_json(context.comm, [failed, text])
    wrong = [f"rank {rank}: {own}" for rank, (bad, own) in enumerate(found) if bad]
    if len(wrong) > MOST_RANKS:
        wrong[MOST_RANKS:] = [f"and {len(wrong) - MOST_RANKS} more ranks"]
    verdict = f"{'FAILED' if wrong else 'ok'}, {perf_counter() - start:.1f} s"
    lines = [verdict, *(line for text in wrong or [found[0][1]] for line in text.splitlines())]
    _print(context.comm, "\n".join(f"  {line}".rstrip() for line in lines))
    return bool(wrong)


# Checks


def _check_kernels(context: _Context) -> str:
    """Compare what the codecs write and read with the host's."""
    if context.gpu is None:
        return "the host is the reference"
    host, compared = get_device("host"), 0
    ours, theirs = context.device.stream(), host.stream()
    for codec, name in _codings():
        for count in FULL_COUNTS if context.full else COUNTS:
            values = random_weights(name).array[:count]
            encoded, expected = _encoded(codec, name, values, ours), _encoded(codec, name, values, theirs)
            if encoded != expected:
                raise CheckFailed(f"{codec.spec} encodes {count} x {name} differently from the host")
            if encoded is not None and _decoded(codec, name, values, encoded, ours) != _decoded(
                codec, name, values, encoded, theirs
            ):
                raise CheckFailed(f"{codec.spec} decodes {count} x {name} differently from the host")
            compared += 1
    ours.close()
    theirs.close()
    return f"{compared} arrays, encoded and decoded with {len(_codings())} pairs of codec and type: as on the host"


def _codings() -> list[tuple[Codec, str]]:
    """Return the codecs that run as our kernels, with the types that each supports."""
    examples = [get_codec(entry.example) for name, entry in registered().items() if name != "delta"]
    ours = [codec for codec in examples if isinstance(codec, KernelCodec) and not isinstance(codec, Auto)]
    return [(codec, name) for codec in ours for name in FLOATS if name in codec.dtypes]


def _encoded(codec: Codec, name: str, values: Array, stream: Stream) -> bytes | None:
    dtype = dtype_of_name(name)
    assert dtype is not None
    with stream.device.alloc(values.nbytes) as memory, stream.device.alloc(codec.max_encoded(values.size, dtype)) as to:
        stream.copy(memory.address, values.ctypes.data, values.nbytes)
        source = Buffer(memory.address, dtype, values.shape, device=stream.device.name, owner=memory)
        size = codec.encode(source, to, stream).result()
        return None if size is None else _bytes_at(to.address, size, stream)


def _decoded(codec: Codec, name: str, values: Array, encoded: bytes, stream: Stream) -> bytes:
    dtype = dtype_of_name(name)
    assert dtype is not None
    data = np.frombuffer(encoded, np.uint8)
    with stream.device.alloc(data.nbytes) as memory, stream.device.alloc(values.nbytes) as back:
        stream.copy(memory.address, data.ctypes.data, data.nbytes)
        to = Buffer(back.address, dtype, values.shape, device=stream.device.name, owner=back)
        codec.decode(memory, data.nbytes, to, stream).result()
        return _bytes_at(back.address, values.nbytes, stream)


def _bytes_at(address: int, nbytes: int, stream: Stream) -> bytes:
    found = np.empty(nbytes, np.uint8)
    stream.copy(found.ctypes.data, address, nbytes)
    stream.synchronize()
    return found.tobytes()


def _check_collectives(context: _Context) -> str:
    """Compare broadcasts and sums with what they must be."""
    comm, size, count = context.communicator, context.comm.size, 50_000
    whole = [np.random.default_rng(rank).integers(-99, 99, count).astype(np.float32) for rank in range(size)]
    for codec in ("none", "split", "auto"):
        for root in {0, size - 1}:
            array = context.array(whole[root] if comm.rank == root else np.zeros(count, np.float32))
            comm.Bcast(array, root=root, codec=codec)
            _expect(context, array, whole[root], f"Bcast from {root}, codec {codec}")
        total = context.array(np.zeros(count, np.float32))
        comm.Allreduce(context.array(whole[comm.rank]), total, codec=codec)
        _expect(context, total, sum(whole, np.zeros(count, np.float32)), f"Allreduce, codec {codec}")
        every = context.array(np.zeros(count * size, np.float32))
        comm.Allgather(context.array(whole[comm.rank]), every, codec=codec)
        _expect(context, every, np.concatenate(whole), f"Allgather, codec {codec}")
    return "Bcast, Allreduce and Allgather without a codec, with split and with auto: every element as it must be"


def _expect(context: _Context, array: Any, wanted: Array, what: str) -> None:
    found = context.values(array)
    if found.tobytes() != wanted.tobytes():
        raise CheckFailed(f"{what}: {int((found != wanted).sum())} of {wanted.size} elements are wrong")


def _check_streams(context: _Context) -> str:
    """Broadcast arrays that a stream of the caller is still writing, and overwrite them on that stream afterwards."""
    gpu = context.gpu
    if gpu is None:
        return "the host has no streams of the caller"
    comm, count = context.communicator, context.nbytes // 4
    stale, array = context.array(np.full(count, -1, np.float32)), context.array(np.zeros(count, np.float32))
    fresh = [context.array(np.full(count, number, np.float32)) for number in range(2)]
    gpu.cupy.cuda.Device().synchronize()
    producer = gpu.stream()
    for number in range(STREAM_ROUNDS):
        if comm.rank == 0:
            for source in [stale] * STALE_COPIES + [fresh[number % 2]]:
                producer.copy(array.data.ptr, source.data.ptr, array.nbytes)
        comm.Bcast(array, root=0, codec="split" if number % 2 else "none", stream=producer.handle)
        _expect(context, array, np.full(count, number % 2, np.float32), f"broadcast {number} of a stream's result")
    producer.close()
    return f"{STREAM_ROUNDS} broadcasts of arrays that a stream was still writing: right"


def _check_memory(context: _Context) -> str:
    """Ask for more memory than there is; go on afterwards."""
    gpu = context.gpu
    if gpu is None:
        return "not asked of the host"
    try:
        gpu.alloc(TOO_MUCH)
    except Exception as error:  # CuPy's error types cannot be imported without CuPy
        text = str(error).partition("\n")[0]
    else:
        raise CheckFailed(f"{format_size(TOO_MUCH)} were allocated")
    gpu.alloc(LEAST_COPY).release()
    return f"an allocation that cannot succeed says: {text}"


def _check_gpu_awareness(context: _Context) -> str:
    """Send GPU memory around a ring without a codec: as it is, if the MPI library says that it accepts that."""
    comm, answer = context.communicator, gpu_aware.cuda_aware()
    size, rank = context.comm.size, context.comm.rank
    awareness = f"{'GPU-aware' if answer.aware else 'not GPU-aware'}: {answer.why}"
    for count in (1000, context.nbytes // 4):
        sent = context.array(np.full(count, rank, np.float32))
        received = context.array(np.zeros(count, np.float32))
        request = comm.Isend(sent, dest=(rank + 1) % size)
        comm.Recv(received, source=(rank - 1) % size)
        request.Wait()
        _expect(context, received, np.full(count, (rank - 1) % size, np.float32), f"a message of {count} x float32")
    return f"messages of device memory arrive. The MPI library is {awareness}"


# Measurements


def _measure_copies(context: _Context) -> str:
    """Time copies between GPU and host, and inside the GPU."""
    if context.gpu is None:
        return "not measured on the host"
    gpu, nbytes = context.gpu, max(LEAST_COPY, context.nbytes)
    stream = gpu.stream()
    with gpu.alloc(nbytes) as one, gpu.alloc(nbytes) as other, gpu.pinned(nbytes) as pinned:
        pairs = {
            "GPU to host": (pinned.address, one.address),
            "host to GPU": (one.address, pinned.address),
            "inside the GPU, read and written": (other.address, one.address),
        }
        rows = []
        for name, (to, source) in pairs.items():
            seconds = _seconds(partial(_copied, stream, to, source, nbytes))
            rows.append((name, f"{nbytes * (2 if 'inside' in name else 1) / seconds / 1e9:.1f}"))
    stream.close()
    return table((f"copies of {format_size(nbytes)}", "GB/s"), rows, ("GB/s",))


def _copied(stream: CudaStream, to: int, source: int, nbytes: int) -> None:
    stream.copy(to, source, nbytes)
    stream.synchronize()


def _measure_codecs(context: _Context) -> str:
    """Time the codecs on chunks of the size that is used on this device."""
    seconds = FULL_CODEC_SECONDS if context.full else CODEC_SECONDS
    chunk = default_chunk_bytes(1 << 30, coded=True, gpu=context.gpu is not None)
    rows = []
    for spec, name in MEASURED:
        with Bench(random_weights(name), context.device, min(chunk, context.nbytes)) as bench:
            found = bench.measure(get_codec(spec), seconds)
        if found.wrong:
            raise CheckFailed(f"{spec} of {name} {found.wrong}")
        model = GPU_CODECS.get(spec)
        rows.append(
            (
                *(spec, name, f"{found.ratio:.2f}", f"{(found.encode_speed or 0) / 1e9:.1f}"),
                *(f"{(found.decode_speed or 0) / 1e9:.1f}", f"{1e-9 / model.encode:.0f}" if model else "-"),
            )
        )
    header = ("codec", "type", "ratio", "encode GB/s", "decode GB/s", "model of an A100, encode")
    return table(header, rows, header[2:])


def _measure_link(context: _Context) -> str:
    """Time messages of host memory around a ring of the ranks."""
    comm = context.comm
    if comm.size == 1:
        return "one rank: start several with mpirun to measure the network"
    count = context.nbytes
    sent, received = np.ones(count, np.uint8), np.empty(count, np.uint8)
    ends = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def exchange(nbytes: int) -> None:
        comm.Sendrecv(sent[:nbytes], ends[0], 0, received[:nbytes], ends[1], 0)

    short, long = (_slowest(comm, partial(exchange, nbytes)) for nbytes in (1, count))
    return f"MPI, every rank to the next: {short * 1e6:.1f} us for a byte, {count / long / 1e9:.2f} GB/s"


def _measure_broadcast(context: _Context) -> str:
    """Broadcast weights by turns without a codec and with each of some."""
    comm = context.communicator
    if comm.size == 1:
        return "one rank: start several with mpirun to measure broadcasts"
    weights = random_weights("float32").array
    array = context.array(np.resize(weights, context.nbytes // 4))
    codecs = ("none", "zfp:rate=8", "split", "auto")
    times: dict[str, list[float]] = {codec: [] for codec in codecs}
    for turn in range(TURNS + 1):
        for codec in codecs:
            seconds = _slowest(context.comm, partial(comm.Bcast, array, root=0, codec=codec), rounds=1)
            if turn:  # the first one warms up
                times[codec].append(seconds)
    raw = median(times["none"])
    rows = [(codec, f"{median(own) * 1e3:.3f}", f"{median(own) / raw:.2f}") for codec, own in times.items()]
    header = (f"Bcast of {format_size(array.nbytes)}, {comm.size} ranks", "ms", "relative")
    return table(header, rows, header[1:])


def _slowest(comm: MPI.Intracomm, run: Callable[[], object], rounds: int = TURNS) -> float:
    """Return the least time of the slowest rank."""
    times: list[float] = []
    for _ in range(rounds):
        comm.Barrier()
        times.append(max(allgather_json(comm, _timed(run))))
    return min(times)


def _seconds(run: Callable[[], object]) -> float:
    run()
    return median(_timed(run) for _ in range(TURNS))


def _timed(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


CHECKS: tuple[tuple[str, Callable[[_Context], str]], ...] = (
    ("kernels", _check_kernels),
    ("collectives", _check_collectives),
    ("streams", _check_streams),
    ("out of memory", _check_memory),
    ("GPU-aware MPI", _check_gpu_awareness),
    ("copies", _measure_copies),
    ("codecs", _measure_codecs),
    ("network", _measure_link),
    ("broadcast", _measure_broadcast),
)
"""In this order; a check that may end the process comes after those that cannot."""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", help="test the GPUs; by default the host")
    parser.add_argument("--full", action="store_true", help="more sizes and longer measurements")
    add_options(parser, "--size", help="size of messages and copies (default 64MB)")


COMMAND = Command(
    "selftest",
    "check kernels, streams and collectives on this machine, and measure copies, codecs and broadcasts",
    "--gpu",
    _add_arguments,
    _run,
    mpirun=2,
)
