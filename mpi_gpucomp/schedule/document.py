"""Reads JSON documents part by part, and says where something is wrong: file, path, what was expected."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Document", "load"]

LARGEST = 64 << 20
"""Longer files are refused before they are parsed."""


def load(path: str | Path, kind: str) -> Document:
    """Read the file of a document of some kind, such as a topology."""
    path = Path(path)
    topic = f"{kind} {path}"
    try:
        if path.stat().st_size > LARGEST:
            raise _wrong(topic, f"at most {LARGEST} bytes", "more")
        return Document(json.loads(path.read_text(encoding="utf-8")), topic)
    except OSError as error:
        raise _wrong(topic, "a file that can be read", error.strerror or str(error)) from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise _wrong(topic, "JSON", str(error).rstrip(".")) from error


def _wrong(topic: str, expected: str, got: str) -> SpecError:
    return SpecError(topic, expected=expected, got=got, remedy="Correct the file.")


class Document:
    """A value of a document, and where it stands, for the sake of clear errors."""

    def __init__(self, value: Any, where: str) -> None:
        """Begin with the whole, or go on with a part."""
        self.value, self.where = value, where

    def fail(self, expected: str, got: str | None = None) -> NoReturn:
        """Raise the error that names this part."""
        raise _wrong(self.where, expected, shown(self.value) if got is None else got)

    def fields(self, known: Collection[str]) -> None:
        """Make sure that this is an object, and that it has no others than the known fields."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name in self.value:
            if name not in known:
                self.fail(f"fields among {', '.join(known)}", f"'{name}'")

    def __contains__(self, name: str) -> bool:
        """Say whether a field is there and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def __getitem__(self, name: str) -> Document:
        """Return a field that must be there."""
        if name not in self:
            self.fail(f"a field '{name}'", "none")
        return Document(self.value[name], f"{self.where}: {name}")

    def get(self, name: str, default: Any) -> Document:
        """Return a field, or the default in its place."""
        return self[name] if name in self else Document(default, f"{self.where}: {name}")

    def items(self) -> Iterator[tuple[str, Document]]:
        """Yield the fields of an object."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name, value in self.value.items():
            yield name, Document(value, f"{self.where}: {name}")

    def list(self, length: int | None = None) -> list[Document]:
        """Return the elements of a list, of so many if that is known."""
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            self.fail("a list [...]" if length is None else f"a list of {length}")
        return [Document(value, f"{self.where}[{at}]") for at, value in enumerate(self.value)]

    def text(self, allowed: Collection[str] = ()) -> str:
        """Return a text, one of those that are allowed if there is a choice."""
        if not isinstance(self.value, str) or (allowed and self.value not in allowed):
            self.fail(f"one of {', '.join(allowed)}" if allowed else "a text")
        return self.value

    def number(self, least: float = 0.0) -> float:
        """Return a number that is not below the least."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < least:
            self.fail(f"a number from {least:g} on")
        return float(value)

    def whole(self, least: int = 0, end: int | None = None) -> int:
        """Return a whole number from the least on, below the end if there is one."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (end is not None and value >= end):
            self.fail(f"a whole number from {least} {'on' if end is None else f'to {end - 1}'}")
        return value

    def ranks(self, end: int) -> tuple[int, ...]:
        """Return a list of different ranks below the end."""
        found = tuple(part.whole(0, end) for part in self.list())
        if len(set(found)) != len(found):
            self.fail("each rank once")
        return found


def shown(value: Any) -> str:
    """Write a value as the file has it, shortened."""
    said = json.dumps(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
