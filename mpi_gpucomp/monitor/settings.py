"""What the environment says about the monitor; an argument of the program comes before it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor.trace_buffer import RECORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PREFIX", "MonitorSettings", "fill", "host_name", "read"]

PREFIX = "MPI_GPUCOMP_"
OFF = ("0", "off", "no", "false")
ON = ("", "1", "on", "yes", "true")
HANG_SECONDS = 10.0


@dataclass(frozen=True)
class MonitorSettings:
    """What is recorded, and where it goes."""

    on: bool = True
    directory: str | None = None
    """Where boxes are files, for other processes to read; in memory otherwise."""
    records: int = RECORDS
    hang: float = HANG_SECONDS
    """Seconds without any progress after which somebody who waits asks who is behind it."""
    flight: str | None = None
    """The directory for flight records."""
    log: str | None = None
    """A file for alarms, besides Python's logging."""
    csv: str | None = None
    prometheus: str | None = None
    serve: str | None = None
    """[address:]port of an endpoint for Prometheus."""


def read(environment: Mapping[str, str] = os.environ) -> MonitorSettings:
    """Read the environment."""

    def text(name: str) -> str | None:
        return environment.get(PREFIX + name) or None

    said = environment.get(PREFIX + "MONITOR", "").strip()
    return MonitorSettings(
        on=said.lower() not in OFF,
        directory=None if said.lower() in (*OFF, *ON) else said,
        records=_records(environment),
        hang=_number(environment, "HANG", HANG_SECONDS),
        flight=text("FLIGHT"),
        log=text("LOG"),
        csv=text("CSV"),
        prometheus=text("PROMETHEUS"),
        serve=text("SERVE"),
    )


def _number(environment: Mapping[str, str], name: str, otherwise: float) -> float:
    text = environment.get(PREFIX + name)
    if not text:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise _refused(name, "a number above 0", text)
    return value


def _records(environment: Mapping[str, str]) -> int:
    """Return the records of a box: a power of two, so that a place in the ring is a mask away."""
    text = environment.get(PREFIX + "RECORDS") or str(RECORDS)
    if not text.isdecimal() or not 64 <= int(text) <= 1 << 24:
        raise _refused("RECORDS", f"a whole number from 64 to {1 << 24}", text)
    return 1 << (int(text) - 1).bit_length()


def _refused(name: str, expected: str, got: str) -> SpecError:
    return SpecError(
        f"environment variable {PREFIX}{name}", expected=expected, got=repr(got), remedy="Change or unset it."
    )


def host_name() -> str:
    """Return this host's name, without its domain."""
    return socket.gethostname().partition(".")[0]


def fill(pattern: str, rank: int) -> Path:
    """Put host, process and rank into a file's name: %h, %p and %r, %% for a percent sign."""
    known = {"%h": host_name(), "%p": str(os.getpid()), "%r": str(rank), "%%": "%"}
    parts, at = [], 0
    while at < len(pattern):
        pair = pattern[at : at + 2]
        parts.append(known.get(pair, pattern[at]))
        at += 2 if pair in known else 1
    return Path("".join(parts))
