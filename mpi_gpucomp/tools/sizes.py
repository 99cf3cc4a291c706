"""Sizes of messages as people write them: 512K, 64MB, 1GiB; all in powers of 1024, as in the benchmarks."""

from __future__ import annotations

import argparse
import re

__all__ = ["in_words", "parse_size"]

UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(text: str) -> int:
    """Return the bytes that a text means."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:I?B)?\s*", text.upper())
    nbytes = int(float(match[1]) * (1 << UNITS[match[2]])) if match else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 512K or 64MB, got '{text}'")
    return nbytes


def in_words(nbytes: float) -> str:
    """Write a size with the unit that suits it."""
    for unit, power in reversed(UNITS.items()):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}B"
    return f"{nbytes:.4g} B"
