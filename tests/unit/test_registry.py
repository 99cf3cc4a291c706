"""Codecs by name: canonical spec strings, errors with suggestions, and user-defined codecs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from coding import decode, encode
from hypothesis import given
from hypothesis import strategies as st

from mpi_gpucomp.codec import Codec, Pending, get_codec, register, registered, registry
from mpi_gpucomp.codec.bound import Bound
from mpi_gpucomp.codec.mpc import Mpc
from mpi_gpucomp.codec.zfp import Zfp
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from mpi_gpucomp.device import Buffer, Device, DType, Memory, Stream

NAMES = "ans, auto, bitcomp, bound, cascaded, cast, deflate, gdeflate, lz4, mpc, none, snappy, split, zfp, zstd"


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("none", "none"),
        ("split", "split"),
        (" split ", "split"),
        ("split:", "split"),
        ("mpc", "mpc"),
        ("mpc:stride=1", "mpc"),
        ("mpc:stride=04", "mpc:stride=4"),
        ("zfp", "zfp:rate=16"),
        ("zfp:rate=8", "zfp:rate=8"),
        ("zfp:rate=8.0", "zfp:rate=8"),
        ("zfp: rate=2.5 ", "zfp:rate=2.5"),
        ("zfp:rate=3.1249999", "zfp:rate=3.1249999"),
        ("bound:abs=1e-3", "bound:abs=0.001"),
        ("bound:abs=1", "bound:abs=1.0"),
        ("bound:rel=1e-4", "bound:rel=0.0001"),
        ("bound:rel=1e-300", "bound:rel=1e-300"),
        ("cast:bf16", "cast:bf16"),
        ("cast:f16", "cast:f16"),
        ("cast:f32", "cast:f32"),
        ("zstd:level=3", "zstd:level=3"),
        ("auto", "auto"),
    ],
)
def test_a_spec_has_one_canonical_form(spec: str, canonical: str) -> None:
    codec = get_codec(spec)
    assert codec.spec == canonical
    assert repr(codec) == f"<codec {canonical}>"
    assert get_codec(canonical).spec == canonical
    assert get_codec(canonical).wire_id == codec.wire_id


@given(rate=st.floats(0, 64, exclude_min=True), bound=st.floats(5e-324, 1e308), stride=st.integers(1, 32))
def test_specs_round_trip(rate: float, bound: float, stride: int) -> None:
    for codec in (Zfp(rate), Zfp(np.float64(rate)), Bound(abs=bound), Bound(abs=np.float64(bound)), Mpc(stride)):
        again = get_codec(codec.spec)
        assert (again.spec, again.wire_id) == (codec.spec, codec.wire_id)
        assert type(again) is type(codec)


def test_a_codec_is_returned_unchanged() -> None:
    codec = Zfp(7)
    assert get_codec(codec) is codec


def test_equal_specs_give_the_same_codec() -> None:
    assert get_codec("zfp:rate=9") is get_codec("zfp:rate=9")


def test_every_codec_has_a_purpose_and_an_example() -> None:
    assert ", ".join(sorted(registered())) == NAMES
    for name, entry in registered().items():
        assert entry.purpose
        assert get_codec(entry.example).name == name


BOUND = (
    "codec bound: expected abs= (the largest error, above 0) or "
    "rel= (the largest error as a fraction of the chunk's range, above 0, below 1), got {}. "
    "Write bound:abs=..., or bound:rel=...."
)
ZFP = "codec zfp: expected rate= (bits per value, up to 64), got {}. Write zfp, or zfp:rate=...."
MPC = "codec mpc: expected stride= (values, 1 to 32), got {}. Write mpc, or mpc:stride=...."
CAST = "codec cast: expected one of bf16, f16, f32, got {}. Write for example cast:bf16."
UNKNOWN = f"codec: expected one of {NAMES}, got {{}}. {{}}"
EXAMPLES = "Write for example zfp:rate=8, split or none."
INVALID = {
    "spilt": UNKNOWN.format("'spilt'", "Did you mean split?"),
    "zfpp:rate=8": UNKNOWN.format("'zfpp:rate=8'", "Did you mean zfp?"),
    "ZFP:rate=8": UNKNOWN.format("'ZFP:rate=8'", EXAMPLES),
    "gzip9000": UNKNOWN.format("'gzip9000'", EXAMPLES),
    "": UNKNOWN.format("''", EXAMPLES),
    ":rate=8": UNKNOWN.format("':rate=8'", EXAMPLES),
    "zfp:bits=8": ZFP.format("bits=8"),
    "zfp:rate": ZFP.format("'rate'"),
    "zfp:rate=": ZFP.format("'rate'"),
    "zfp:rate=0": ZFP.format("rate=0"),
    "zfp:rate=-1": ZFP.format("rate=-1"),
    "zfp:rate=64.1": ZFP.format("rate=64.1"),
    "zfp:rate=nan": ZFP.format("rate=nan"),
    "zfp:rate=inf": ZFP.format("rate=inf"),
    "zfp:rate=eight": ZFP.format("rate=eight"),
    "zfp:8": ZFP.format("'8'"),
    "zfp:rate=8,level=3": ZFP.format("level=3"),
    "zfp:rate=8,rate=8": "codec zfp: expected each parameter once, got 'zfp:rate=8,rate=8'. Write zfp:rate=8.",
    "mpc:stride=0": MPC.format("stride=0"),
    "mpc:stride=33": MPC.format("stride=33"),
    "mpc:stride=2.5": MPC.format("stride=2.5"),
    "mpc:stride=-1": MPC.format("stride=-1"),
    "mpc:stride=٣": MPC.format("stride=٣"),
    "split:level=1": "codec split: expected no parameters, got level=1. Write split.",
    "auto:link=1": "codec auto: expected no parameters, got link=1. Write auto.",
    "none:x": "codec none: expected no parameters, got 'x'. Write none.",
    "bound": (
        "codec bound: expected either abs= or rel=, got neither. Write for example bound:abs=1e-3 or bound:rel=1e-4."
    ),
    "bound:abs=1,rel=0.1": (
        "codec bound: expected either abs= or rel=, got both. Write for example bound:abs=1e-3 or bound:rel=1e-4."
    ),
    "bound:abs=0": BOUND.format("abs=0"),
    "bound:abs=-1": BOUND.format("abs=-1"),
    "bound:abs=inf": BOUND.format("abs=inf"),
    "bound:rel=0": BOUND.format("rel=0"),
    "bound:rel=1": BOUND.format("rel=1"),
    "bound:rel=nan": BOUND.format("rel=nan"),
    "bound:tol=1": BOUND.format("tol=1"),
    "cast": CAST.format("''"),
    "cast:f8": CAST.format("'f8'"),
    "cast:bf16,f16": CAST.format("'bf16,f16'"),
    "cast:bf16=1": CAST.format("'bf16=1'"),
}


@pytest.mark.parametrize(("spec", "message"), INVALID.items(), ids=INVALID)
def test_invalid_specs_are_errors_with_a_suggestion(spec: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        get_codec(spec)
    assert str(caught.value) == message


@pytest.mark.parametrize("spec", [None, 8, b"zfp", ["zfp"]])
def test_a_spec_that_is_not_a_string_is_an_error(spec: object) -> None:
    with pytest.raises(SpecError) as caught:
        get_codec(spec)  # type: ignore[arg-type]
    assert str(caught.value) == UNKNOWN.format(repr(spec), EXAMPLES)


class Mine(Codec):
    """A codec that inverts every bit, `level` times."""

    name: ClassVar[str] = "mine"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    def __init__(self, level: str = "1") -> None:
        self.level = int(level)

    @property
    def spec(self) -> str:
        return f"mine:level={self.level}"

    @property
    def wire_id(self) -> int:
        return 0x80 << 24 | self.level

    def max_encoded(self, count: int, dtype: DType) -> int:
        return count * dtype.itemsize

    def invert(self, source: int, to: int, nbytes: int, stream: Stream) -> Pending:
        with stream.device.alloc(nbytes) as ones:
            stream.copy(to, source, nbytes)
            for _ in range(self.level):
                stream.fill(ones.address, 0xFF, nbytes)
                stream.launch("reduce_u8", -(-nbytes // 1024), to, ones.address, nbytes, 7)
            stream.synchronize()
        return Pending(lambda: True, lambda: nbytes)

    def encode(self, source: Buffer, to: Memory, stream: Stream) -> Pending:
        self.check_dtype(source.dtype)
        return self.invert(source.address, to.address, source.nbytes, stream)

    def decode(self, source: Memory, nbytes: int, to: Buffer, stream: Stream) -> Pending:
        return self.invert(source.address, to.address, nbytes, stream)

    def decode_reduce(self, source: Memory, nbytes: int, to: Buffer, op: str, stream: Stream) -> Pending:
        assert op == "replace"
        return self.decode(source, nbytes, to, stream)


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_entries", registered())
    yield
    registry._parsed.cache_clear()


@pytest.mark.usefixtures("clean_registry")
def test_a_user_defined_codec(device: Device) -> None:
    register("mine", lambda parameters: Mine(**parameters), "what it is good for")
    codec, stream = get_codec("mine:level=3"), device.stream()
    assert codec.spec == "mine:level=3"
    assert registered()["mine"][1:] == ("what it is good for", "mine")
    array = np.arange(5000, dtype=np.float32)
    data = encode(codec, array, stream)
    assert data == (~array.view(np.uint32)).tobytes()
    back = np.zeros_like(array)
    decode(codec, data, back, stream)
    assert (back == array).all()
    stream.close()


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("name", ["a:b", "", "9"])
def test_a_name_must_be_an_identifier(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        register(name, lambda parameters: Mine(**parameters), "mine")
    assert str(caught.value) == (
        f"name of a codec: expected an identifier, got '{name}'. Choose a name like zfp or my_codec."
    )


@pytest.mark.usefixtures("clean_registry")
def test_a_name_in_use_needs_replace() -> None:
    with pytest.raises(SpecError) as caught:
        register("zfp", lambda parameters: Mine(**parameters), "mine")
    assert str(caught.value) == (
        "name of a codec: expected a name that is not in use, got 'zfp'. "
        "Choose another name, or pass replace=True to replace the registered codec."
    )
    assert get_codec("zfp").name == "zfp"
    register("zfp", lambda parameters: Mine(**parameters), "mine", replace=True)
    assert get_codec("zfp").name == "mine"


def test_registered_is_a_copy() -> None:
    registered().clear()
    assert get_codec("none").name == "none"
