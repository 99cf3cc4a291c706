"""Every setting of the library: its environment variable, type, default and meaning, declared once.

Precedence: an explicit argument, then the environment variable, then the default. An empty variable counts as unset; a
value that cannot be read is a `SpecError` that names the variable. `gpucomp doctor` and docs/SETTINGS.md are made from
SETTINGS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SETTINGS", "Resolved", "Setting", "markdown_table", "unknown_variables"]

PREFIX = "MPI_GPUCOMP_"
ARGUMENT, ENVIRONMENT, DEFAULT = "argument", "environment", "default"
MIN_SEGMENT_BYTES = (1 << 13) + 1
MAX_RECORDS = 1 << 24
WIRES, RAIL_WIRES = ("auto", "mpi", "tcp"), ("tcp", "ucx", "auto")
OFF, ON = ("0", "off", "no", "false"), ("", "1", "on", "yes", "true")

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """The value of a setting that is in force, and its source: argument, environment or default."""

    value: T
    source: str


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One setting; `parse` reads the text of its environment variable and raises ValueError if it cannot."""

    name: str
    summary: str
    parse: Callable[[str], T]
    expected: str
    """The values that are valid, as error messages and the documentation name them."""
    default: T
    default_text: str = ""
    """The default in words, where it depends on the machine or is not a value to write down."""
    remedy: str = "Change or unset it."
    page: str = ""
    """The page of the documentation with the details."""
    argument: str = ""
    """The argument that takes precedence over the variable."""

    @property
    def variable(self) -> str:
        """Return the name of the environment variable."""
        return PREFIX + self.name

    def resolve(self, argument: T | None = None, environment: Mapping[str, str] | None = None) -> Resolved[T]:
        """Return the value in force and its source; None means that the argument was not given."""
        if argument is not None:
            return Resolved(argument, ARGUMENT)
        text = (os.environ if environment is None else environment).get(self.variable)
        if not text:
            return Resolved(self.default, DEFAULT)
        return Resolved(self.read(text), ENVIRONMENT)

    def get(self, argument: T | None = None, environment: Mapping[str, str] | None = None) -> T:
        """Return the value in force."""
        return self.resolve(argument, environment).value

    def read(self, text: str, topic: str = "") -> T:
        """Parse a value; an invalid one is an error about the environment variable, or about `topic`."""
        try:
            return self.parse(text)
        except ValueError:
            raise self.error(repr(text), topic) from None

    def error(self, got: str, topic: str = "", rank: int | None = None) -> SpecError:
        """Return the error for an invalid value."""
        topic = topic or f"environment variable {self.variable}"
        return SpecError(topic, expected=self.expected, got=got, remedy=self.remedy, rank=rank)


def _text(text: str) -> str | None:
    return text


def _flag(text: str) -> bool | None:
    return bool(("0", "1").index(text))


def _workers(text: str) -> int | None:
    return _decimal(text, 1)


def _segment_bytes(text: str) -> int | None:
    return 0 if _decimal(text) == 0 else _decimal(text, MIN_SEGMENT_BYTES)


def _records(text: str) -> int:
    """Round up to a power of two: the index into the ring is then a mask."""
    return 1 << (_decimal(text, 64, MAX_RECORDS) - 1).bit_length()


def _decimal(text: str, least: int = 0, most: int | None = None) -> int:
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not isfinite(seconds) or seconds <= 0:
        raise ValueError(text)
    return seconds


def _rails(text: str) -> str:
    names = [name.strip() for tier in text.split(",") for name in tier.split("+")]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(text)
    return text


def _wire(text: str) -> str:
    return WIRES[WIRES.index(text)]


def _rail_wire(text: str) -> str:
    return RAIL_WIRES[RAIL_WIRES.index(text)]


def _endpoint(text: str) -> str | None:
    _decimal(text.rpartition(":")[2], 0, 65535)
    return text


def _monitor(text: str) -> bool | str:
    word = text.strip().lower()
    return word not in OFF if word in (*OFF, *ON) else text.strip()


HOST_LIBRARY: Setting[str | None] = Setting(
    "HOST_LIBRARY",
    "Build of the host library to load, instead of the best one that this processor runs.",
    _text,
    "baseline, x86-64-v3, x86-64-v4 or the path of a file",
    None,
    "the best",
)
WORKERS: Setting[int | None] = Setting(
    "WORKERS",
    "Threads that encode and decode on the host, shared by all collectives of the process.",
    _workers,
    "a whole number of at least 1",
    None,
    "the cores of the process",
    "Set the number of threads that share one kernel, or unset it to use every core.",
    "BENCHMARKS.md",
)
CUDA_AWARE: Setting[bool | None] = Setting(
    "CUDA_AWARE",
    "Whether the MPI library accepts GPU memory: 1, or 0 to stage through pinned host memory.",
    _flag,
    "0 or 1",
    None,
    "detected",
    "Set 1 if MPI is GPU-aware, 0 to stage through pinned memory, or unset it to detect it.",
)
SEGMENT_BYTES: Setting[int | None] = Setting(
    "SEGMENT_BYTES",
    "Bytes of a segment of a long message between hosts; 0 sends messages whole. The smallest of all ranks counts.",
    _segment_bytes,
    "at least 8193 bytes, or 0 for messages that are sent whole",
    None,
    "65280, or 0 if MPI is GPU-aware",
    page="BENCHMARKS.md",
)
WIRE: Setting[str] = Setting(
    "WIRE",
    "What carries messages between hosts: our own sockets, MPI, or sockets where MPI itself would use TCP.",
    _wire,
    "auto, mpi or tcp",
    "auto",
    remedy="Choose one of them.",
    page="RAILS.md",
    argument="Communicator(wire=)",
)
RAILS: Setting[str] = Setting(
    "RAILS",
    "Network devices to use instead of MPI's network: `eth0+eth1` at once, `eth0,eth1` the second as a spare.",
    _rails,
    "devices that differ, such as eth0,eth1 or eth0+eth1",
    "",
    "none",
    "Name each device once.",
    "RAILS.md",
    "Communicator(rails=)",
)
RAIL_TIMEOUT: Setting[float] = Setting(
    "RAIL_TIMEOUT",
    "Seconds of silence after which a path counts as down.",
    _seconds,
    "a number of seconds above 0",
    1.0,
    page="RAILS.md",
    argument="Rails(timeout=)",
)
RAIL_LIMIT: Setting[float] = Setting(
    "RAIL_LIMIT",
    "Seconds without any path after which a peer counts as failed.",
    _seconds,
    "a number of seconds above 0",
    30.0,
    page="RAILS.md",
    argument="Rails(limit=)",
)
RAIL_WIRE: Setting[str] = Setting(
    "RAIL_WIRE",
    "What rails send with: TCP sockets, UCX, or UCX where all ranks have it and the device has RDMA.",
    _rail_wire,
    "tcp, ucx or auto",
    "tcp",
    remedy="Choose one of them.",
    page="RAILS.md",
    argument="Rails(wire=)",
)
MONITOR: Setting[bool | str] = Setting(
    "MONITOR",
    "Whether to record traces, and the directory to keep them in for `gpucomp monitor`, `report` and `trace`.",
    _monitor,
    "on, off or a directory",
    True,
    "on, in memory",
    page="MONITOR.md",
    argument="Communicator(monitor=)",
)
RECORDS: Setting[int] = Setting(
    "RECORDS",
    "Records of 64 bytes that a trace buffer holds; rounded up to a power of two.",
    _records,
    f"a whole number from 64 to {MAX_RECORDS}",
    1 << 14,
    page="MONITOR.md",
)
HANG: Setting[float] = Setting(
    "HANG",
    "Seconds without progress after which a call counts as hanging.",
    _seconds,
    "a number above 0",
    10.0,
    page="MONITOR.md",
)
FLIGHT: Setting[str | None] = Setting(
    "FLIGHT",
    "Directory for flight records, which `gpucomp blame` reads.",
    _text,
    "a directory",
    None,
    "none",
    page="MONITOR.md",
)
LOG: Setting[str | None] = Setting(
    "LOG",
    "File for alarms, in addition to Python's logging; %h, %p and %r are host, process and rank.",
    _text,
    "a file",
    None,
    "none",
    page="MONITOR.md",
)
CSV: Setting[str | None] = Setting(
    "CSV",
    "File for the throughput of every link, a row per second; %h, %p and %r as in LOG.",
    _text,
    "a file",
    None,
    "none",
    page="MONITOR.md",
)
PROMETHEUS: Setting[str | None] = Setting(
    "PROMETHEUS",
    "Text file for Prometheus' node exporter, written every second; %h, %p and %r as in LOG.",
    _text,
    "a file",
    None,
    "none",
    page="MONITOR.md",
)
SERVE: Setting[str | None] = Setting(
    "SERVE",
    "Address and port of a Prometheus endpoint; each rank adds its number to the port.",
    _endpoint,
    "[address:]port",
    None,
    "none",
    "Write 9400, or 0.0.0.0:9400 to let other machines read it.",
    "MONITOR.md",
)

SETTINGS: tuple[Setting[Any], ...] = (
    *(HOST_LIBRARY, WORKERS, CUDA_AWARE, WIRE, SEGMENT_BYTES),
    *(RAILS, RAIL_TIMEOUT, RAIL_LIMIT, RAIL_WIRE),
    *(MONITOR, RECORDS, HANG, FLIGHT, LOG, CSV, PROMETHEUS, SERVE),
)


def unknown_variables(environment: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the variables with the library's prefix that are no settings, each with the closest setting's variable."""
    given = os.environ if environment is None else environment
    known = [setting.name for setting in SETTINGS]
    names = sorted(name.removeprefix(PREFIX) for name in given if name.startswith(PREFIX))
    unknown = {name: get_close_matches(name, known, n=1) for name in names if name not in known}
    return {PREFIX + name: PREFIX + close[0] if close else None for name, close in unknown.items()}


def markdown_table() -> str:
    """Return the table of all settings that docs/SETTINGS.md shows."""
    lines = ["| variable | meaning | values | default | argument | details |", "|---|---|---|---|---|---|"]
    for setting in SETTINGS:
        default = setting.default_text or f"`{setting.default}`"
        argument = f"`{setting.argument}`" if setting.argument else ""
        page = f"[{setting.page}]({setting.page})" if setting.page else ""
        cells = (f"`{setting.variable}`", setting.summary, setting.expected, default, argument, page)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
