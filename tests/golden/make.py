"""Creates the golden vectors: `python tests/golden/make.py`.

It writes missing vectors and compares the others, which it never changes: a different vector is a changed wire format,
which needs a new wire id. To drop a vector on purpose, delete its file and its entry. Small cases are stored in full,
large ones as checksums.
"""

from __future__ import annotations

import ctypes
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.device import as_buffer, get_device

HERE = Path(__file__).resolve().parent
INDEX = HERE / "vectors.json"
SMALL, LARGE = 300, 70_001
TYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SPECS = [
    *("none", "mpc", "mpc:stride=4", "split", "bound:abs=0.001", "bound:rel=0.01"),
    *("zfp:rate=1", "zfp:rate=8", "zfp:rate=16.5", "zfp:rate=32", "zfp:rate=64"),
    *("cast:bf16", "cast:f16", "cast:f32"),
]


class Case(NamedTuple):
    """A codec with its parameters, an element type and a number of elements."""

    spec: str
    dtype: str
    count: int

    def __str__(self) -> str:
        """Return a name that is valid for a file."""
        return f"{self.spec.replace(':', '-')}-{self.dtype}-{self.count}"

    @property
    def path(self) -> Path | None:
        """Return the file of the encoded bytes; small cases only."""
        return HERE / f"{self}.bin" if self.count == SMALL else None


CASES = [
    Case(spec, dtype, count)
    for spec in SPECS
    for dtype in TYPES
    if dtype in get_codec(spec).dtypes
    for count in (SMALL, LARGE)
]


def plain_values(case: Case) -> np.ndarray:
    """Return elements from integers and exact fractions: slopes, noise, zeros, large and small values."""
    i = np.arange(case.count, dtype=np.int64)
    noise = (i * 0x9E3779B1 % (1 << 32) >> 20) / 4096 - 0.5
    x = ((i % 257) - 128) / 64 + noise / 16
    x = np.where(i % 97 == 5, 0.0, np.where(i % 101 == 7, x * 1024, np.where(i % 103 == 9, x / 1024, x)))
    values = x.astype(TYPES[case.dtype])
    if case.spec.startswith(("none", "mpc", "split", "bound")):
        put_special_values(values)
    return values


def put_special_values(values: np.ndarray) -> None:
    """Set special bit patterns near the start: -0.0, infinity, a NaN with a payload, a denormal."""
    size = values.itemsize
    sign = 1 << (8 * size - 1)
    infinity = int(np.array(np.inf, values.dtype).view(f"u{size}"))
    values.view(f"u{size}")[[40, 41, 42, 43]] = [sign, sign | infinity, infinity | 3, 1]


def encoded_bytes(case: Case, values: np.ndarray) -> bytes:
    """Encode on the host."""
    codec, host = get_codec(case.spec), get_device("host")
    source, stream = as_buffer(values), host.stream()
    with host.alloc(codec.max_encoded(source.count, source.dtype)) as room:
        size = codec.encode(source, room, stream).result()
        stream.close()
        return ctypes.string_at(room.address, size or 0)


def decoded_values(case: Case, data: bytes) -> np.ndarray:
    """Decode on the host."""
    values, host = np.zeros(case.count, TYPES[case.dtype]), get_device("host")
    stream = host.stream()
    with host.alloc(len(data)) as memory:
        ctypes.memmove(memory.address, data, len(data))
        get_codec(case.spec).decode(memory, len(data), as_buffer(values), stream).result()
        stream.close()
    return values


def checksum(data: bytes) -> str:
    """Return a digest of bytes."""
    return sha256(data).hexdigest()[:32]


def entry(case: Case) -> tuple[dict[str, str | int], bytes]:
    """Return the entry of a case, and its encoded bytes."""
    values = plain_values(case)
    data = encoded_bytes(case, values)
    facts: dict[str, str | int] = {
        "wire_id": f"{get_codec(case.spec).wire_id:#010x}",
        "plain": checksum(values.tobytes()),
        "encoded": checksum(data),
        "encoded_nbytes": len(data),
        "decoded": checksum(decoded_values(case, data).tobytes()),
    }
    return facts, data


def main() -> int:
    """Add missing vectors and report different ones."""
    index = json.loads(INDEX.read_text()) if INDEX.exists() else {}
    different = []
    for case in CASES:
        facts, data = entry(case)
        if index.setdefault(str(case), facts) != facts:
            different.append(str(case))
        elif case.path is not None and not case.path.exists():
            case.path.write_bytes(data)
    INDEX.write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    for name in different:
        print(f"{name}: the bytes are not those of the vector", file=sys.stderr)
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
