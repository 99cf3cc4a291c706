"""The codec contract, for every codec: sizes, results, concurrent streams, memory."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from coding import buffer_in, decode, download, encode, upload
from floats import FLOATS, any_bits, decoded, encoded_size, same_bits
from streams import LevelStream

from mpi_gpucomp.codec import get_codec, registered
from mpi_gpucomp.device import Memory, as_buffer, dtype_of_name, get_device
from mpi_gpucomp.device import host as host_module
from mpi_gpucomp.device.host import Workers

if TYPE_CHECKING:
    from mpi_gpucomp.device import Stream

GUARD = 64
SPECS = ["none", "zfp:rate=1", "zfp:rate=8", "zfp:rate=17.3", "mpc", "mpc:stride=5", "split"]
SPECS += ["bound:abs=0.001", "bound:rel=0.01", "cast:bf16", "cast:f16", "cast:f32"]
GENERAL = [name for name in ("lz4", "snappy", "zstd", "deflate") if name in registered()]
KINDS = [(spec, name) for spec in SPECS for name in get_codec(spec).dtypes if name in FLOATS]
every_kind = pytest.mark.parametrize(("spec", "name"), KINDS)
TILED = [(spec, name) for spec, name in KINDS if spec.startswith(("mpc", "split", "bound"))]


def as_dtype(name: str) -> Any:
    return dtype_of_name(name)


def weights(name: str, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(FLOATS[name])


@pytest.mark.parametrize(("spec", "name"), [*KINDS, *((spec, "float32") for spec in GENERAL)])
@pytest.mark.parametrize("count", [1, 3, 33, 1025, 40_000])
def test_no_encoding_exceeds_max_encoded(spec: str, name: str, count: int, stream: Stream) -> None:
    codec, dtype = get_codec(spec), as_dtype(name)
    bound = codec.max_encoded(count, dtype)
    for array in (any_bits(FLOATS[name], count), weights(name, count)):
        with upload(array, stream) as source, upload(np.full(bound + GUARD, 7, np.uint8), stream) as memory:
            room = Memory(memory.address, bound, memory.device, memory)
            size = codec.encode(buffer_in(source, array), room, stream).result()
            assert size is None or size <= bound
            assert download(memory.address + bound, GUARD, stream) == b"\x07" * GUARD


@every_kind
@pytest.mark.parametrize("count", [1, 4, 33, 1025, 40_001])
def test_encoded_size_is_exact(spec: str, name: str, count: int, stream: Stream) -> None:
    codec, dtype = get_codec(spec), as_dtype(name)
    fixed = codec.encoded_size(count, dtype)
    assert (fixed is None) == ((spec, name) in TILED)
    if fixed is not None:
        assert encoded_size(codec, weights(name, count), stream) == fixed == codec.max_encoded(count, dtype)


@pytest.mark.parametrize(("spec", "name"), [*KINDS, *((spec, "float32") for spec in GENERAL)])
def test_no_elements_encode_to_no_bytes(spec: str, name: str, stream: Stream) -> None:
    empty = np.empty(0, FLOATS[name])
    assert encode(get_codec(spec), empty, stream) == b""
    for op in ("replace", "sum", "max"):
        assert decode(get_codec(spec), b"", empty.copy(), stream, op) == 0


@every_kind
def test_lossless_codecs_restore_every_bit(spec: str, name: str, stream: Stream) -> None:
    array = weights(name, 5000)
    back = decoded(get_codec(spec), encode(get_codec(spec), array, stream), array, stream)
    assert same_bits(array, back) or not get_codec(spec).lossless
    assert get_codec(spec).lossless == spec.startswith(("none", "mpc", "split"))


@every_kind
def test_arrays_need_only_element_alignment(spec: str, name: str, stream: Stream) -> None:
    array = weights(name, 3001)
    data = encode(get_codec(spec), array, stream)
    assert encode(get_codec(spec), array, stream, shift=array.itemsize) == data
    back = np.zeros_like(array)
    decode(get_codec(spec), data, back, stream, shift=array.itemsize)
    assert same_bits(back, decoded(get_codec(spec), data, array, stream))


@every_kind
def test_a_result_can_be_read_repeatedly(spec: str, name: str, stream: Stream) -> None:
    codec, array = get_codec(spec), weights(name, 2000)
    with upload(array, stream) as memory:
        source = buffer_in(memory, array)
        with stream.device.alloc(codec.max_encoded(source.count, source.dtype)) as room:
            encoding = codec.encode(source, room, stream)
            size = encoding.result()
            assert size is not None and encoding.done() and encoding.result() == size
            decoding = codec.decode(room, size, source, stream)
            assert [decoding.result(), decoding.result()] == [size, size] and decoding.done()


@every_kind
@pytest.mark.parametrize("ranges", [2, 3, 7])
def test_ranges_of_tiles_do_not_change_the_bytes(spec: str, name: str, ranges: int) -> None:
    array, level = weights(name, 70_000), "baseline"
    shared, alone = LevelStream(level, ranges), LevelStream(level)
    data = encode(get_codec(spec), array, alone)
    assert encode(get_codec(spec), array, shared) == data
    assert same_bits(decoded(get_codec(spec), data, array, shared), decoded(get_codec(spec), data, array, alone))


@every_kind
def test_the_number_of_threads_does_not_change_the_bytes(spec: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, array = get_device("host"), weights(name, 300_000)
    data = encode(get_codec(spec), array, host.stream(inline=True))  # type: ignore[call-arg]
    for threads in (1, 2, 3):
        monkeypatch.setattr(host_module, "_workers", Workers(threads))
        stream = host.stream()
        assert encode(get_codec(spec), array, stream) == data
        stream.close()


@every_kind
def test_every_machine_gives_the_same_bytes(spec: str, name: str, stream: Stream) -> None:
    """Compare every instruction set, and a GPU, with the baseline."""
    codec, baseline = get_codec(spec), LevelStream("baseline")
    for array in (weights(name, 40_001), any_bits(FLOATS[name], 40_001)):
        if encoded_size(codec, array, baseline) is None:
            assert encoded_size(codec, array, stream) is None
            continue
        data = encode(codec, array, baseline)
        assert encode(codec, array, stream) == data
        assert same_bits(decoded(codec, data, array, stream), decoded(codec, data, array, baseline))


@pytest.mark.parametrize(("spec", "name"), KINDS)
@pytest.mark.parametrize("count", [1, 1000, 1025, 9000, 40_000])
def test_previous_memory_contents_are_not_encoded(spec: str, name: str, count: int, stream: Stream) -> None:
    codec, array = get_codec(spec), weights(name, count)
    bound = codec.max_encoded(count, as_dtype(name))
    found = []
    for before in (0x00, 0xFF):
        with upload(array, stream) as memory, upload(np.full(bound, before, np.uint8), stream) as room:
            size = codec.encode(buffer_in(memory, array), room, stream).result()
            found.append(download(room.address, size or 0, stream))
    assert found[0] == found[1]


@every_kind
def test_chunks_in_flight_on_several_streams(spec: str, name: str, device: Any) -> None:
    codec, arrays = get_codec(spec), [weights(name, 9000 + 17 * seed, seed) for seed in range(12)]
    first = device.stream()
    expected = [encode(codec, array, first) for array in arrays]
    streams = [device.stream() for _ in range(4)]
    sources = [upload(array, first) for array in arrays]
    rooms = [device.alloc(codec.max_encoded(array.size, as_dtype(name))) for array in arrays]
    jobs = [
        codec.encode(buffer_in(source, array), room, streams[i % 4])
        for i, (source, array, room) in enumerate(zip(sources, arrays, rooms, strict=True))
    ]
    sizes = [job.result() for job in jobs]
    assert sizes == [len(data) for data in expected]
    assert [download(room.address, len(data), first) for room, data in zip(rooms, expected, strict=True)] == expected
    for memory in (*sources, *rooms):
        memory.release()
    for stream in (first, *streams):
        stream.close()


def allocations(device: Any) -> list[int]:
    pools = [device.pool, device.pinned_pool] if hasattr(device, "pinned_pool") else [device.pool]
    return [pool.statistics.allocations for pool in pools]


@every_kind
def test_nothing_is_allocated_after_warm_up_and_everything_is_released(spec: str, name: str, device: Any) -> None:
    array, stream = weights(name, 20_000), device.stream()

    def once() -> None:
        decode(get_codec(spec), encode(get_codec(spec), array, stream), np.zeros_like(array), stream, "sum")
        stream.synchronize()

    once()
    warm, in_use = allocations(device), device.pool.statistics.in_use
    once()
    assert allocations(device) == warm
    assert device.pool.statistics.in_use == in_use
    stream.close()


@pytest.mark.parametrize(("spec", "name"), TILED)
def test_a_dropped_result_is_safe_while_kernels_run(spec: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, array, kept = get_device("host"), weights(name, 3000), []
    stream, back, gate = host.stream(), np.zeros_like(array), threading.Event()
    data = upload(encode(get_codec(spec), array, stream), stream)

    def remember(nbytes: int) -> Memory:
        memory = host.alloc(nbytes)
        kept.append(weakref.ref(memory.owner))
        return memory

    monkeypatch.setattr(host, "pinned", remember)
    stream.run(lambda: gate.wait(60) and None)
    get_codec(spec).decode(data, data.nbytes, as_buffer(back), stream)
    gc.collect()
    assert [reference() is not None for reference in kept] == [True]
    gate.set()
    stream.close()
    other = host.stream()
    assert same_bits(back, decoded(get_codec(spec), download(data.address, data.nbytes, other), array, other))
