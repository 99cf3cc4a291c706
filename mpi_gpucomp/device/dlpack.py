"""Reads DLPack capsules, old (`dltensor`) and versioned (`dltensor_versioned`), without taking them over.

A capsule that nobody takes over calls the producer's deleter when it goes: keeping the capsule keeps the memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from mpi_gpucomp.errors import BufferError

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "Tensor", "capsule_pointer", "export", "read"]

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
VERSION = (1, 0)
READ_ONLY = 1

_NAMES = {0: "int{}", 1: "uint{}", 2: "float{}", 4: "bfloat{}", 5: "complex{}", 6: "bool{}"}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class Tensor(NamedTuple):
    """What a capsule says: where, on which device, the name of its type, its layout (strides in bytes)."""

    address: int
    device: tuple[int, int]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool


# Taken by index, not by attribute: an attribute would be the same object for every library in the process.
capsule_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi["PyCapsule_IsValid"]
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def export(obj: Any, stream: int | None) -> object:
    """Ask an object for its capsule, never for a copy; `stream` is for GPUs: -1 orders nothing."""
    try:
        return obj.__dlpack__(stream=stream, max_version=VERSION, copy=False)
    except TypeError:  # a producer from before version 1.0
        return obj.__dlpack__() if stream is None else obj.__dlpack__(stream=stream)


def read(capsule: object) -> Tensor:
    """Read a capsule that stays alive for as long as the memory is used."""
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != VERSION[0]:
            raise BufferError(
                "buffer",
                expected=f"a DLPack tensor of version {VERSION[0]}",
                got=f"version {managed.major}.{managed.minor}",
                remedy="Pass a numpy, CuPy or torch array.",
            )
        return _described(managed.tensor, bool(managed.flags & READ_ONLY))
    return _described(_Tensor.from_address(capsule_pointer(capsule, b"dltensor")), False)


def _described(tensor: _Tensor, readonly: bool) -> Tensor:
    ndim, itemsize = tensor.ndim, tensor.dtype.bits * tensor.dtype.lanes // 8
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        (tensor.device.kind, tensor.device.ordinal),
        _name(tensor.dtype),
        tuple(tensor.shape[:ndim]) if ndim else (),
        tuple(x * itemsize for x in tensor.strides[:ndim]) if tensor.strides else None,
        readonly,
    )


def _name(dtype: _Type) -> str:
    name = _NAMES.get(dtype.code, f"DLPack type {dtype.code} of {{}} bits").format(dtype.bits)
    name = "bool" if name == "bool8" else name
    return name if dtype.lanes == 1 else f"{name} in groups of {dtype.lanes}"
