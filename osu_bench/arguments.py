"""Command-line parsing that all commands share: the parser itself, and option types for sizes and lists."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import NoReturn

__all__ = ["CommandParser", "message_size", "names", "number", "sizes"]

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
USAGE_SECONDS = 10.0
"""How long other ranks wait for rank 0 to print a usage error; its exit makes the launcher end them."""
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class CommandParser(argparse.ArgumentParser):
    """A parser with an example in its help, whose usage errors appear once and not on every rank."""

    def __init__(self, prog: str, description: str = "", example: str = "") -> None:
        """Name the command and describe it in one sentence; `example` holds command lines, one per line."""
        lines = "\n".join(f"  {line}" for line in example.splitlines())
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n{lines}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print usage and error on rank 0; other ranks wait for the launcher to end them."""
        if launched_rank() == 0:
            from mpi_gpucomp.cli.command import with_suggestion

            super().error(with_suggestion(message, self))
        time.sleep(USAGE_SECONDS)
        sys.exit(2)


def launched_rank() -> int:
    """Return this process's rank from the launcher's environment, without initialising MPI."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def number(text: str) -> int:
    """Parse a number of bytes: 4096, 4K, 64M, 64MB."""
    digits = text.upper().removesuffix("B").removesuffix("I")
    unit = digits[-1:] if digits[-1:] in UNITS and digits[-1:] else ""
    try:
        value = int(digits.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected bytes such as 4096, 4K or 64M, got {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected no fewer than 0 bytes, got {text!r}")
    return value


def message_size(text: str) -> tuple[int | None, int]:
    """Parse [MIN:]MAX."""
    least, colon, most = text.partition(":")
    if not colon:
        return None, number(least)
    low, high = number(least or "1"), number(most or "0") or 1 << 62
    if low > high:
        raise argparse.ArgumentTypeError(f"expected MIN:MAX with MIN no larger than MAX, got {text!r}")
    return low, high


def names(text: str) -> list[str]:
    """Parse a comma-separated list; a part such as `y=2` continues the codec spec before it."""
    found: list[str] = []
    for part in filter(None, text.split(",")):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise argparse.ArgumentTypeError("expected names separated by commas, got none")
    return found


def sizes(least: int, most: int, step: int = 2) -> list[int]:
    """Return `least` and its multiples by powers of `step`, up to `most`."""
    found = []
    while least <= most:
        found.append(least)
        least *= step
    return found
