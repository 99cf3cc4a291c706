"""The settings of the monitor, from the environment; an argument of the program precedes them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpi_gpucomp import config

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MonitorSettings", "fill", "host_name", "read"]


@dataclass(frozen=True)
class MonitorSettings:
    """The settings of the monitor of a process."""

    on: bool = True
    directory: str | None = None
    """Where trace buffers are files, for other processes to read; in memory otherwise."""
    records: int = config.RECORDS.default
    hang: float = config.HANG.default
    """Seconds without progress that make a hang."""
    flight: str | None = None
    """The directory for flight records."""
    log: str | None = None
    """A file for alarms, besides Python's logging."""
    csv: str | None = None
    prometheus: str | None = None
    serve: str | None = None
    """[address:]port of an endpoint for Prometheus."""


def read(environment: Mapping[str, str] | None = None) -> MonitorSettings:
    """Read the environment."""
    where = config.MONITOR.get(None, environment)
    return MonitorSettings(
        on=bool(where),
        directory=where if isinstance(where, str) else None,
        records=config.RECORDS.get(None, environment),
        hang=config.HANG.get(None, environment),
        flight=config.FLIGHT.get(None, environment),
        log=config.LOG.get(None, environment),
        csv=config.CSV.get(None, environment),
        prometheus=config.PROMETHEUS.get(None, environment),
        serve=config.SERVE.get(None, environment),
    )


def host_name() -> str:
    """Return this host's name, without its domain."""
    return socket.gethostname().partition(".")[0]


def fill(pattern: str, rank: int) -> Path:
    """Insert host, process and rank into a file's name: %h, %p and %r, %% for a percent sign."""
    known = {"%h": host_name(), "%p": str(os.getpid()), "%r": str(rank), "%%": "%"}
    parts, at = [], 0
    while at < len(pattern):
        pair = pattern[at : at + 2]
        parts.append(known.get(pair, pattern[at]))
        at += 2 if pair in known else 1
    return Path("".join(parts))
