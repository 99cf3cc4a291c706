"""MPI_T: reads and writes the control variables of the MPI library at run time.

What a variable does, and when it is read (in each call, when a communicator is made, when MPI starts), depends on the
library: Open MPI calls them MCA parameters, MPICH CVARs.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Value = int | float | str

__all__ = ["get", "settings", "takes"]

TEXT_BYTES = 1 << 13
"""Buffer size for the description of a variable."""
ITEM_BYTES = 256

_KINDS: dict[int, Any] = {
    MPI.CHAR.handle: ctypes.c_char,
    MPI.INT.handle: ctypes.c_int,
    MPI.UNSIGNED.handle: ctypes.c_uint,
    MPI.LONG.handle: ctypes.c_long,
    MPI.UNSIGNED_LONG.handle: ctypes.c_ulong,
    MPI.UNSIGNED_LONG_LONG.handle: ctypes.c_ulonglong,
    MPI.COUNT.handle: ctypes.c_longlong,
    MPI.DOUBLE.handle: ctypes.c_double,
    MPI.C_BOOL.handle: ctypes.c_bool,
    MPI.CXX_BOOL.handle: ctypes.c_bool,
}
"""The C types of variables, by MPI datatype."""
_CHOICE = re.compile(r"^\s*(\w+) +- ", re.MULTILINE)
"""MPICH lists the named values of a variable in its description, in numeric order."""


def takes(name: str, value: Value) -> bool:
    """Return True if the MPI library has the variable, and the named value."""
    return _index(name) is not None and _Variable.find(name).takes(value)


def get(name: str) -> Value:
    """Return the value of a variable, by name if its values are named."""
    return _Variable.find(name).read()


@contextmanager
def settings(values: Mapping[str, Value]) -> Iterator[None]:
    """Set variables of this process within the block, named values by name or number."""
    with ExitStack() as stack:
        for name, value in values.items():
            variable = _Variable.find(name)
            old = variable.read()
            variable.write(value)
            stack.callback(variable.write, old)
        yield


class _Variable:
    """One control variable."""

    @staticmethod
    @cache
    def find(name: str) -> _Variable:
        """Return the variable of this name."""
        index = _index(name)
        if index is None:
            raise SpecError(
                f"control variable {name}",
                expected=f"one that {_library_name()} has",
                got="none of this name",
                remedy="List them with `ompi_info --all` or `mpivars`.",
            )
        return _Variable(name, index)

    def __init__(self, name: str, index: int) -> None:
        """Query type and named values, and allocate a handle."""
        self._name = name
        datatype, enumeration, text = _query(index)
        if datatype not in _KINDS:
            raise self._error("a number or text", "a type that MPI_T does not define")
        self._kind = _KINDS[datatype]
        self._choices = _enum_values(enumeration) if enumeration else _described_values(text)
        self._handle, count = ctypes.c_void_p(), ctypes.c_int(0)
        places = (ctypes.byref(self._handle), ctypes.byref(count))
        _mpi_t("cvar_handle_alloc", ctypes.c_int(index), None, *places, name=name)
        self._room = count.value

    def read(self) -> Value:
        """Return the value."""
        place = (self._kind * max(1, self._room))()
        _mpi_t("cvar_read", self._handle, place, name=self._name)
        if self._kind is ctypes.c_char:
            return bytes(place).partition(b"\0")[0].decode()
        value: int | float = place[0]
        return self._choices.get(int(value), value)

    def write(self, value: Value) -> None:
        """Set the value."""
        place = self._text(str(value)) if self._kind is ctypes.c_char else self._kind(self._number(value))
        _mpi_t("cvar_write", self._handle, ctypes.byref(place), name=self._name)

    def takes(self, value: Value) -> bool:
        """Return True unless the value is an unknown name."""
        return not isinstance(value, str) or self._kind is ctypes.c_char or value in self._choices.values()

    def _text(self, value: str) -> ctypes.Array[ctypes.c_char]:
        encoded = value.encode()
        if len(encoded) >= self._room:
            raise self._error(f"at most {self._room - 1} characters", str(len(encoded)))
        return ctypes.create_string_buffer(encoded, self._room)

    def _number(self, value: Value) -> int | float:
        if not isinstance(value, str):
            return value
        for number, name in self._choices.items():
            if name == value:
                return number
        names = ", ".join(self._choices.values())
        raise self._error(f"one of {names}" if names else "a number", repr(value))

    def _error(self, expected: str, got: str) -> SpecError:
        remedy = f"See the documentation of {_library_name()}."
        return SpecError(f"control variable {self._name}", expected=expected, got=got, remedy=remedy)


def _query(index: int) -> tuple[int, ctypes.c_void_p, str]:
    """Return the handle of a variable's datatype, its enumeration if it has one, and its description."""
    datatype, enumeration, text = ctypes.c_uint64(0), ctypes.c_void_p(), ctypes.create_string_buffer(TEXT_BYTES)
    name_bytes, verbosity, text_bytes, bind, scope = (ctypes.c_int(0) for _ in range(5))
    text_bytes.value = TEXT_BYTES
    numbers = [ctypes.byref(number) for number in (name_bytes, verbosity, datatype, enumeration)]
    rest = [ctypes.byref(number) for number in (text_bytes, bind, scope)]
    _mpi_t("cvar_get_info", ctypes.c_int(index), None, *numbers, text, *rest)
    return datatype.value, enumeration, text.value.decode(errors="replace")


def _enum_values(enumeration: ctypes.c_void_p) -> dict[int, str]:
    """Return the named values of an enumeration, by number."""
    count, room = ctypes.c_int(0), ctypes.c_int(ITEM_BYTES)
    name, number = ctypes.create_string_buffer(ITEM_BYTES), ctypes.c_int(0)
    _mpi_t("enum_get_info", enumeration, ctypes.byref(count), name, ctypes.byref(room))
    names = {}
    for item in range(count.value):
        room.value = ITEM_BYTES
        _mpi_t("enum_get_item", enumeration, ctypes.c_int(item), ctypes.byref(number), name, ctypes.byref(room))
        names[number.value] = name.value.decode()
    return names


def _described_values(text: str) -> dict[int, str]:
    """Return the named values listed in a description: MPICH has no enumerations."""
    return dict(enumerate(_CHOICE.findall(text)))


def _index(name: str) -> int | None:
    if not hasattr(_library(), "MPI_T_cvar_get_index"):
        return None
    index = ctypes.c_int(0)
    found: int = _library().MPI_T_cvar_get_index(name.encode(), ctypes.byref(index))
    return index.value if found == MPI.SUCCESS else None


def _mpi_t(function: str, *arguments: object, name: str = "") -> None:
    code: int = getattr(_library(), f"MPI_T_{function}")(*arguments)
    if code != MPI.SUCCESS:
        raise SpecError(
            f"control variable {name}" if name else "control variables",
            expected=f"MPI_T_{function} to succeed",
            got=MPI.Get_error_string(code),
            remedy="Some variables can only be set before MPI starts, in the environment.",
        )


@cache
def _library() -> ctypes.CDLL:
    """Load MPI_T through mpi4py's extension module, which resolves to the MPI library that mpi4py uses."""
    library = ctypes.CDLL(MPI.__file__)
    if hasattr(library, "MPI_T_init_thread"):
        # At the thread level of MPI: Open MPI would apply any other to the whole library and drop its locks.
        library.MPI_T_init_thread(ctypes.c_int(MPI.Query_thread()), ctypes.byref(ctypes.c_int(0)))
    return library


def _library_name() -> str:
    return " ".join(re.split("[\n,\0]", MPI.Get_library_version())[0].split())
