"""Reads the parameters of codec specs, and says what is wrong with them and what would be right."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Parameter", "Parameters", "number", "whole"]


@dataclass(frozen=True)
class Parameter:
    """One parameter: how its text becomes a value (None: it does not), and what it should be in words."""

    read: Callable[[str], Any]
    meaning: str


def number(least: float, most: float | None, meaning: str, *, above: bool = False, below: bool = False) -> Parameter:
    """Make a parameter that is a finite number from `least` to `most`, or truly above and below them."""

    def read(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        low = value > least if above else value >= least
        high = most is None or (value < most if below else value <= most)
        return value if isfinite(value) and low and high else None

    return Parameter(read, meaning)


def whole(least: int, most: int, meaning: str) -> Parameter:
    """Make a parameter that is a whole number from `least` to `most`."""

    def read(text: str) -> int | None:
        plain = text.isascii() and text.isdecimal()
        return int(text) if plain and least <= int(text) <= most else None

    return Parameter(read, meaning)


class Parameters:
    """The parameters that a codec has, by name."""

    def __init__(self, *, needed: bool = False, **known: Parameter) -> None:
        """Name them; where one is `needed`, the codec's name alone is no spec."""
        self._known, self._needed = known, needed

    def read(self, codec: str, given: dict[str, str]) -> dict[str, Any]:
        """Turn the texts that were given into values."""
        values = {}
        for name, text in given.items():
            parameter = self._known.get(name)
            value = parameter.read(text) if parameter else None
            if value is None:
                raise SpecError(
                    f"codec {codec}",
                    expected=self.describe(),
                    got=f"{name}={text}" if text else f"'{name}'",
                    remedy=f"Write {', or '.join(self._forms(codec))}.",
                )
            values[name] = value
        return values

    def _forms(self, codec: str) -> list[str]:
        return [codec] * (not self._needed) + [f"{codec}:{known}=..." for known in self._known]

    def describe(self) -> str:
        """Say what can be given."""
        return " or ".join(f"{name}= ({p.meaning})" for name, p in self._known.items()) or "no parameters"
