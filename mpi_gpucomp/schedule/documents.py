"""Validated access to JSON files: errors name the file, the field, what was expected and what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["MAX_FILE_BYTES", "Document", "load"]

MAX_FILE_BYTES = 64 << 20
"""Longer files are rejected before they are parsed."""
MAX_NUMBER = 1e300
MAX_SHOWN = 60
"""Characters of a value that an error shows."""


def load(path: str | Path, kind: str) -> Document:
    """Read a JSON file; `kind`, such as "topology", is named in errors."""
    path = Path(path)
    topic = f"{kind} {path}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _error(topic, f"at most {MAX_FILE_BYTES} bytes", "more")
        return Document(json.loads(path.read_text(encoding="utf-8")), topic)
    except OSError as error:
        raise _error(topic, "a readable file", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _error(topic, "JSON", "bytes that are not UTF-8") from error
    except RecursionError as error:
        raise _error(topic, "JSON", "too many levels of nesting") from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise _error(topic, "JSON", str(error).rstrip(".")) from error


def _error(topic: str, expected: str, got: str) -> SpecError:
    return SpecError(topic, expected=expected, got=got, remedy="Correct the file.")


class Document:
    """A JSON value and its location in the file."""

    def __init__(self, value: Any, where: str) -> None:
        """Wrap a value; `where` is its location, for errors."""
        self.value, self.where = value, where

    def fail(self, expected: str, got: str | None = None) -> NoReturn:
        """Raise SpecError for this value."""
        raise _error(self.where, expected, _shown(self.value) if got is None else got)

    def fields(self, known: Collection[str]) -> None:
        """Check that this is an object that has no other than the known fields."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name in self.value:
            if name not in known:
                self.fail(f"fields among {', '.join(known)}", f"'{name}'")

    def __contains__(self, name: str) -> bool:
        """Return True if a field is present and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def __getitem__(self, name: str) -> Document:
        """Return a required field."""
        if name not in self:
            self.fail(f"a field '{name}'", "none" if isinstance(self.value, dict) else None)
        return Document(self.value[name], f"{self.where}: {name}")

    def get(self, name: str, default: Any) -> Document:
        """Return a field, or the default if it is missing or null."""
        return self[name] if name in self else Document(default, f"{self.where}: {name}")

    def items(self) -> Iterator[tuple[str, Document]]:
        """Yield name and value of the fields of an object."""
        if not isinstance(self.value, dict):
            self.fail("an object {...}")
        for name, value in self.value.items():
            yield name, Document(value, f"{self.where}: {name}")

    def list(self, length: int | None = None) -> list[Document]:
        """Return the elements of a list, which must have `length` of them if that is given."""
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            self.fail("a list [...]" if length is None else f"a list of {length}")
        return [Document(value, f"{self.where}[{at}]") for at, value in enumerate(self.value)]

    def text(self, allowed: Collection[str] = ()) -> str:
        """Return a string, which must be one of those allowed if there are any."""
        if not isinstance(self.value, str) or (allowed and self.value not in allowed):
            self.fail(f"one of {', '.join(allowed)}" if allowed else "a string")
        return self.value

    def boolean(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            self.fail("true or false")
        return self.value

    def number(self, least: float = 0.0) -> float:
        """Return a finite number that is not below the least."""
        value = self.value
        # The upper bound also excludes NaN, infinity, and integers that have no float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < MAX_NUMBER:
            self.fail(f"a number of at least {least:g}")
        return float(value)

    def positive(self) -> float:
        """Return a finite number above 0."""
        value = self.number()
        if not value:
            self.fail("a number above 0")
        return value

    def whole(self, least: int = 0, end: int | None = None) -> int:
        """Return an integer that is not below the least, and below the end if there is one."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (end is not None and value >= end):
            self.fail(f"an integer of at least {least}" if end is None else f"an integer from {least} to {end - 1}")
        return value

    def ranks(self, end: int) -> tuple[int, ...]:
        """Return a list of distinct ranks below the end."""
        found = tuple(part.whole(0, end) for part in self.list())
        if len(set(found)) != len(found):
            self.fail("each rank once")
        return found


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
