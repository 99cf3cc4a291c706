"""The codec auto: its choice for given costs, and bit-exact round trips with every choice."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from coding import decode, encode, values
from floats import FLOATS, any_bits
from hypothesis import given
from hypothesis import strategies as st
from running import Ranks, expected

from mpi_gpucomp.codec import frame, get_codec
from mpi_gpucomp.codec.auto import CODINGS, Auto, CodecSpeed, Costs
from mpi_gpucomp.device import DTYPES, Memory, as_buffer, dtype_of_name, get_device
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.errors import DecodeError, FrameError
from mpi_gpucomp.schedule.algorithms import build

if TYPE_CHECKING:
    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Device, DType

SPEEDS = {(codec.name, name): CodecSpeed(0.5e-9, 0.4e-9) for codec, name in CODINGS}
SPEEDS["none", "uint8"] = CodecSpeed(0.1e-9, 0.1e-9)
SLOW = Costs(wire=8e-9, coding=SPEEDS, sample=0)
"""1 Gbit/s: any compression pays; samples are free."""
FAST = Costs(wire=0.1e-9, coding=SPEEDS, sample=0)
"""10 GB/s: no compression pays."""
CHUNK = 1 << 18


def dtype_named(name: str) -> DType:
    found = dtype_of_name(name)
    assert found is not None
    return found


def numpy_type(name: str) -> np.dtype:
    return FLOATS.get(name) or np.dtype(name)


def kinds(name: str, count: int) -> dict[str, np.ndarray]:
    """Return elements of a type that compress in different ways, or not at all."""
    dtype = numpy_type(name)
    bits = any_bits(np.dtype(np.uint8), count * dtype.itemsize, 1)
    some = {"zeros": np.zeros(count, dtype), "few values": values(name, count)}
    if name == "bool":
        return {**some, "random": (bits & 1).view(dtype)}
    some["random"] = bits.view(dtype)
    if name in FLOATS:
        some["weights"] = np.random.default_rng(2).normal(0, 0.02, count).astype(dtype)
        some["smooth"] = np.sin(np.arange(count) / 1e4).astype(dtype)
    return some


def chosen(auto: Auto, array: np.ndarray, inline: bool = True) -> str:
    """Return the name of the codec chosen for an array."""
    return run_to_end(auto.choose(as_buffer(array), get_device("host").stream(inline=inline))).name  # type: ignore[attr-defined]


def run_to_end(steps: Generator[Any, None, Any]) -> Any:
    """Run a generator that yields conditions to wait for, and return its result."""
    deadline = time.monotonic() + 30
    try:
        while True:
            ready = next(steps)
            while not ready():
                assert time.monotonic() < deadline
                time.sleep(1e-4)
    except StopIteration as end:
        return end.value


def encode_frame(coder: Coder, array: np.ndarray) -> bytes:
    source = as_buffer(array)
    with get_device("host").alloc(coder.room(source.count, source.dtype)) as room:
        nbytes = run_to_end(coder.encode(source, room, 0))
        return bytes((np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(room.address))


def decode_frame(coder: Coder, data: bytes, like: np.ndarray) -> bytes:
    host, back = get_device("host"), np.full_like(like, 1)
    held = np.frombuffer(data, np.uint8)
    memory = Memory(held.ctypes.data, held.nbytes, host, held)
    header = coder.open(memory, "test")
    coder.decode(header, memory, as_buffer(back), "replace", 0, "test").result()
    return back.tobytes()


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES])
@pytest.mark.parametrize("costs", [SLOW, FAST, Costs()], ids=["slow link", "fast link", "default costs"])
def test_every_type_round_trips(name: str, costs: Costs, host: Device) -> None:
    sender, receiver = (Coder(Auto(known), host, inline=True) for known in (costs, Costs()))
    stream = host.stream()
    for count in (0, 1, 3, 5000, CHUNK):
        for kind, array in kinds(name, count).items():
            assert decode_frame(receiver, encode_frame(sender, array), array) == array.tobytes(), (kind, count)
            back = np.full_like(array, 1)
            data = encode(Auto(costs), array, stream)
            assert decode(get_codec("auto"), data, back, stream) == len(data)
            assert back.tobytes() == array.tobytes(), (kind, count)
    stream.close()


def test_every_device(device: Device) -> None:
    stream = device.stream()
    for kind, array in kinds("float32", CHUNK).items():
        back = np.full_like(array, 1)
        data = encode(Auto(SLOW), array, stream)
        assert decode(get_codec("auto"), data, back, stream) == len(data)
        assert back.tobytes() == array.tobytes(), kind
        assert (len(data) < array.nbytes) == (kind != "random")
    stream.close()


CHOICES = [
    *((name, kind, "split") for name in FLOATS for kind in ("weights",)),
    *((name, "random", "none") for name in ("float32", "float64", "int32", "uint8", "complex64")),
    ("float32", "smooth", "mpc"),
    ("float32", "zeros", "mpc"),
    ("int64", "few values", "zstd"),
    ("complex128", "few values", "zstd"),
    ("uint8", "zeros", "lz4"),
]


@pytest.mark.parametrize(("name", "kind", "codec"), CHOICES)
@pytest.mark.parametrize("inline", [True, False])
def test_the_choice_on_a_slow_link(name: str, kind: str, codec: str, inline: bool) -> None:
    assert chosen(Auto(SLOW), kinds(name, CHUNK)[kind], inline) == codec


def test_a_slow_codec_is_not_chosen_however_well_it_compresses() -> None:
    slow_zstd = Costs(SLOW.wire, {**SPEEDS, ("zstd", "uint8"): CodecSpeed(9e-9, 1e-9)}, 0)
    slow_decoder = Costs(SLOW.wire, {**SPEEDS, ("zstd", "uint8"): CodecSpeed(1e-9, 9e-9)}, 0)
    numbers = kinds("int64", CHUNK)["few values"]
    assert chosen(Auto(slow_zstd), numbers) == chosen(Auto(slow_decoder), numbers) == "lz4"


def test_a_codec_without_costs_is_not_used() -> None:
    without = {key: coding for key, coding in SPEEDS.items() if key[0] != "zstd"}
    assert chosen(Auto(Costs(SLOW.wire, without, 0)), kinds("int64", CHUNK)["few values"]) == "lz4"


def test_a_codec_whose_package_is_missing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    auto, zeros = Auto(SLOW), np.zeros(CHUNK, np.uint8)
    assert chosen(auto, zeros, inline=False) == "none"
    monkeypatch.undo()
    assert chosen(auto, zeros) == "none", "not asked for again"
    assert chosen(Auto(SLOW), zeros) == "lz4"


@pytest.mark.parametrize(
    "costs",
    [FAST, Costs(wire=0.5e-9, coding=SPEEDS, sample=0), Costs(wire=8e-9, coding=SPEEDS, sample=1)],
    ids=["fast link", "no faster than the codec", "sample too dear"],
)
def test_no_sample_is_taken_if_none_can_pay(costs: Costs, host: Device) -> None:
    statistics = host.pool.statistics  # type: ignore[attr-defined]
    assert chosen(Auto(costs), kinds("float32", CHUNK)["zeros"]) == "none"
    assert host.pool.statistics == statistics  # type: ignore[attr-defined]


def test_the_chunk_size_limits_the_number_of_sampled_codecs(host: Device) -> None:
    smooth = kinds("float32", CHUNK)["smooth"]  # a chunk of 8.4 ms, and 3 % of eight such are 2013 microseconds
    assert chosen(Auto(Costs(8e-9, SPEEDS, 1000e-6)), smooth) == "mpc"
    assert chosen(Auto(Costs(8e-9, SPEEDS, 1010e-6)), smooth) == "split"
    assert chosen(Auto(Costs(8e-9, SPEEDS, 2020e-6)), smooth) == "none"


def test_the_memory_of_samples_is_released(host: Device) -> None:
    before = host.pool.statistics.in_use  # type: ignore[attr-defined]
    for inline in (True, False):
        for array in kinds("float64", CHUNK).values():
            chosen(Auto(SLOW), array, inline)
    assert host.pool.statistics.in_use == before  # type: ignore[attr-defined]


def test_adjacent_chunks_share_a_sample() -> None:
    random = kinds("float32", 10 * CHUNK)["random"].copy()
    random[:CHUNK] = kinds("float32", CHUNK)["weights"]
    auto = Auto(SLOW)
    names = [chosen(auto, random[at * CHUNK : (at + 1) * CHUNK]) for at in range(10)]
    assert names == ["split"] * 8 + ["none"] * 2
    assert chosen(auto, random[CHUNK : 2 * CHUNK]) == "none", "it does not follow the last one"
    chosen(auto, random[:CHUNK])
    assert chosen(auto, random[CHUNK : 2 * CHUNK].view(np.int32)) == "none", "other elements"


def test_remembered_chunks_are_bounded() -> None:
    weights, auto = kinds("float32", 100 * 5000)["weights"], Auto(SLOW)
    for at in range(0, weights.size, 5000):
        assert chosen(auto, weights[at : at + 4000]) == "split"
    assert len(auto._next) <= 64


def test_the_sample_is_taken_in_stream_order(host: Device) -> None:
    data, gate, stream = kinds("float32", CHUNK), threading.Event(), host.stream()
    array = data["random"].copy()
    stream.run(lambda: gate.wait(30) and None)
    stream.copy(array.ctypes.data, data["weights"].ctypes.data, array.nbytes)
    choosing = Auto(SLOW).choose(as_buffer(array), stream)
    ready = next(choosing)
    assert not ready()
    gate.set()
    stream.synchronize()
    assert ready() and run_to_end(choosing).name == "split"
    stream.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_max_frame_bytes_covers_the_choice_of_any_rank(dtype: DType) -> None:
    for count in (1, 1000, CHUNK):
        room = frame.max_frame_bytes(Auto(FAST), count, dtype)
        assert room == frame.max_frame_bytes(Auto(SLOW), count, dtype)
        takers = [codec for codec, _ in CODINGS if dtype.name in codec.dtypes]
        usual = [codec for codec in takers if dtype.kind != "f" or codec.name in ("none", "split", "mpc")]
        assert room >= max(frame.max_frame_bytes(codec, count, dtype) for codec in usual)


@pytest.mark.parametrize("kind", ["weights", "random", "smooth"])
def test_a_frame_has_the_wire_id_of_the_chosen_codec(kind: str, host: Device) -> None:
    array = kinds("float32", CHUNK)[kind]
    header = frame.parse(encode_frame(Coder(Auto(SLOW), host, inline=True), array))
    assert header.wire_id == get_codec({"weights": "split", "random": "none", "smooth": "mpc"}[kind]).wire_id
    assert (header.payload_bytes < header.decoded_bytes) == (kind != "random")


def test_a_frame_of_another_codec_is_an_error(host: Device) -> None:
    array = kinds("float32", 1000)["weights"]
    data = encode_frame(Coder(get_codec("zfp:rate=8"), host, inline=True), array)
    with pytest.raises(FrameError) as caught:
        decode_frame(Coder(Auto(SLOW), host, inline=True), data, array)
    assert str(caught.value) == (
        "test: expected codec auto (wire id 0x6010000), got wire id 0x1010020. "
        "Pass the same codec, type and count on every rank."
    )


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"", "0 bytes"),
        (b"\0" * 7, "7 bytes"),
        (b"\0\0\1\6" + b"\0" * 400, "bytes of wire id 0x6010000"),
        (b"\0\0\1\x12" + b"\0" * 400, "bytes of wire id 0x12010000"),
        (b"\0\0\0\0\1\0\0\0" + b"\0" * 400, "bytes of wire id 0x0"),
    ],
)
def test_invalid_prefixes_are_errors(data: bytes, got: str, host: Device) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Auto(), data, np.zeros(100, np.float32), host.stream(inline=True))  # type: ignore[call-arg]
    assert str(caught.value) == (
        f"codec auto: expected an encoding of 100 elements, got {got}. "
        "The bytes were damaged or truncated in transit, or written by another codec."
    )


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_decoding_reduces(op: str, host: Device) -> None:
    stream = host.stream()
    for costs in (SLOW, FAST):
        there, here = values("float32", 5000, 1), values("float32", 5000, 2)
        wanted = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op](there, here)
        decode(Auto(), encode(Auto(costs), here, stream), there, stream, op)
        assert np.array_equal(there, wanted)
    stream.close()


@pytest.mark.parametrize(("collective", "name"), [("broadcast", "chain"), ("allreduce", "ring"), ("alltoall", "bruck")])
def test_collectives(collective: str, name: str) -> None:
    for dtype in ("float32", "int32"):
        run = Ranks(build(collective, name, 4), 3000, Auto(SLOW), dtype)
        run.drive()
        for rank, output in enumerate(run.outputs):
            wanted = expected(collective, run.inputs, rank, 0, "sum")
            assert wanted is not None and output.tobytes() == wanted.astype(dtype).tobytes()


seconds = st.floats(1e-12, 1e-7)


@given(wire=seconds, coding=st.tuples(seconds, seconds), raw=st.tuples(seconds, seconds), ratio=st.floats(0.1, 1e4))
def test_the_choice_is_never_expected_to_be_slower_than_raw(
    wire: float, coding: tuple[float, float], raw: tuple[float, float], ratio: float
) -> None:
    split, dtype = get_codec("split"), dtype_named("bfloat16")
    costs = Costs(wire, {("split", "bfloat16"): CodecSpeed(*coding), ("none", "uint8"): CodecSpeed(*raw)})
    found, raw_time = Auto(costs).best(dtype, {split: ratio}), max(wire, *raw)
    if max(*coding, wire / ratio) * 1.05 > raw_time or max(coding) * 1.05 > wire:
        assert (found.codec.name, found.ratio) == ("none", 1.0)
    else:
        assert found == (split, ratio)
        assert Auto(costs).best(dtype, {split: 2 * ratio}).codec is split, "a better ratio must not change the choice"


def test_the_fastest_codec_wins_not_the_smallest_result() -> None:
    small, fast = get_codec("split"), get_codec("mpc")
    coding = {("split", "float32"): CodecSpeed(5e-9, 1e-9), ("mpc", "float32"): CodecSpeed(1e-9, 1e-9)}
    ratios: dict[Codec, float] = {small: 4.0, fast: 2.0}
    assert Auto(Costs(8e-9, coding)).best(dtype_named("float32"), ratios) == (fast, 2.0)
    assert Auto(Costs(80e-9, coding)).best(dtype_named("float32"), ratios) == (small, 4.0)


def test_nothing_is_encoded_where_the_wire_is_faster_than_the_codec() -> None:
    coding = {("split", "bfloat16"): CodecSpeed(1e-9, 1e-9), ("none", "uint8"): CodecSpeed(9e-9, 9e-9)}
    auto, split, dtype = Auto(Costs(0.9e-9, coding, sample=0)), get_codec("split"), dtype_named("bfloat16")
    assert auto.worth_sampling(dtype, 1 << 20) == []
    assert auto.best(dtype, {split: 100.0}).codec.name == "none"
    slower = Auto(Costs(1.1e-9, coding, sample=0))
    assert [codec.name for codec in slower.worth_sampling(dtype, 1 << 20)] == ["split"]
    assert slower.best(dtype, {split: 2.0}) == (split, 2.0)


def test_chunks_on_gpus_have_costs_of_their_own(host: Device) -> None:
    elsewhere: Any = SimpleNamespace(name="cuda:0")
    auto = Auto(SLOW, FAST)
    assert (auto.costs_on(host), auto.costs_on(elsewhere)) == (SLOW, FAST)
    assert Auto(SLOW).costs_on(elsewhere) == SLOW


def test_auto_is_available_by_name() -> None:
    auto = get_codec("auto")
    assert isinstance(auto, Auto) and (auto.spec, auto.lossless, auto.costs) == ("auto", True, Costs())
