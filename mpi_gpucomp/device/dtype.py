"""The element types that buffers carry, with the number that stands for each on the wire."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPES", "DType", "dtype_of_code", "dtype_of_name"]


@dataclass(frozen=True)
class DType:
    """An element type: its numpy-style name, wire number, size in bytes, kind (f, i, u, b or c) and kernel suffix."""

    name: str
    code: int
    itemsize: int
    kind: str
    suffix: str

    def __str__(self) -> str:
        """Print as the name alone."""
        return self.name


DTYPES = (
    DType("uint8", 1, 1, "u", "u8"),
    DType("int8", 2, 1, "i", "i8"),
    DType("uint16", 3, 2, "u", "u16"),
    DType("int16", 4, 2, "i", "i16"),
    DType("uint32", 5, 4, "u", "u32"),
    DType("int32", 6, 4, "i", "i32"),
    DType("uint64", 7, 8, "u", "u64"),
    DType("int64", 8, 8, "i", "i64"),
    DType("float16", 9, 2, "f", "f16"),
    DType("bfloat16", 10, 2, "f", "bf16"),
    DType("float32", 11, 4, "f", "f32"),
    DType("float64", 12, 8, "f", "f64"),
    DType("bool", 13, 1, "b", "u8"),
    DType("complex64", 14, 8, "c", "c64"),
    DType("complex128", 15, 16, "c", "c128"),
)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}


def dtype_of_name(name: str) -> DType | None:
    """Return the type with this numpy-style name, or None."""
    return _BY_NAME.get(name)


def dtype_of_code(code: int) -> DType | None:
    """Return the type with this wire number, or None."""
    return _BY_CODE.get(code)
