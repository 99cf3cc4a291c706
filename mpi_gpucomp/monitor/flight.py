"""Flight records: the state of a rank when something went wrong, in a JSON file, and the blame that all of them yield.

A record is written when a call fails, when calls make no progress any more, and on SIGUSR1, also while the program is
blocked in a call that does not return. It holds the calls begun and waited for, the transfers in flight, the last
operations, and the stack of each thread.

Blame compares the records of all ranks and names the cause of a hang in one sentence: a rank without a record, a rank
that has not begun a call that others wait in, a link whose bytes have been in flight while the receiver waits for them,
or a rank with nothing in flight to those that wait for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.monitor import files
from mpi_gpucomp.monitor.settings import fill
from mpi_gpucomp.trace import KINDS, SEND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mpi_gpucomp.monitor.detector import AnomalyDetector
    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.recorder import CommRecorder
    from mpi_gpucomp.trace import CallSnapshot

    Records = Mapping[int, Mapping[str, Any]]

__all__ = ["FILES", "Blame", "FlightRecorder", "blame", "read", "read_flight"]

VERSION = 2
FILES = "flight.*.json"
NAME = "flight.%h.%p.%r.json"
LAST = 64
"""Operations and alarms that are kept."""
AGAIN_SECONDS = 2.0
"""A failure this soon after another one follows from it: the first record explains more."""
TRIES = 3
MAX_BYTES = 64 << 20
MAX_RANKS = 1 << 24
MAX_NUMBER = 1 << 63

OURS = ("mpi_gpucomp", "mpi4py", "threading.py")
"""Parts of the paths of stack frames that are not the program's."""
LONG_MS = 100.0


class FlightRecorder:
    """Writes the flight records of a process."""

    def __init__(self, process: ProcessMonitor, directory: str) -> None:
        """Write to a directory; also on SIGUSR1, unless the program handles it."""
        self._process = process
        self.path = Path(directory) / fill(NAME, process.rank)
        self._written, self._lock = 0.0, threading.Lock()
        self._handle_signal()

    def write(self, reason: str, *, again: bool = False) -> bool:
        """Write a record, unless one was written just before; never raises."""
        with self._lock:
            if not again and time.monotonic() - self._written < AGAIN_SECONDS:
                return False
            self._written = time.monotonic()
            try:
                files.replace(self.path, json.dumps(self._record(reason), indent=1))
            except OSError as error:
                print(f"rank {self._process.rank}: no flight record: {error}", file=sys.stderr)
                return False
            return True

    def _record(self, reason: str) -> dict[str, Any]:
        process = self._process
        return {
            "version": VERSION,
            **{"rank": process.rank, "size": process.size, "host": process.host, "pid": os.getpid()},
            "time": time.time(),
            "reason": reason,
            "communicators": [_communicator(detector) for detector in list(process.detectors)],
            "alarms": [alarm.text for alarm in process.alarms.all[-LAST:]],
            "operations": self._operations(),
            "threads": _threads(),
        }

    def _operations(self) -> list[dict[str, Any]]:
        buffer, now = self._process.buffer, time.perf_counter_ns()
        names = buffer.names
        return [
            {
                **{"kind": KINDS[int(one["kind"])], "collective": names[one["name"]], "call": int(one["call"])},
                **{"peer": int(one["peer"]), "bytes": int(one["nbytes"]), "lane": int(one["lane"])},
                "begun_ms_ago": round((now - int(one["post"])) / 1e6, 3),
                "ended_ms_ago": round((now - int(one["complete"])) / 1e6, 3) if one["complete"] else None,
            }
            for one in buffer.records()[-LAST:]
        ]

    def _handle_signal(self) -> None:
        """Write on SIGUSR1, by a thread: the main one may be blocked in a call, and then runs no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return
        read, write = socket.socketpair()
        write.setblocking(False)
        before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        if before != -1:  # the program is woken by signals itself
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        threading.Thread(target=self._wait_for_signals, args=(read, write), name="gpucomp-flight", daemon=True).start()

    def _wait_for_signals(self, read: socket.socket, write: socket.socket) -> None:
        while (signals := read.recv(16)) and write:
            if signal.SIGUSR1 in signals:
                self.write("SIGUSR1", again=True)


def _communicator(detector: AnomalyDetector) -> dict[str, Any]:
    """Describe a communicator, which another thread may be changing."""
    for _ in range(TRIES):
        try:
            return _describe(detector)
        except RuntimeError:
            time.sleep(1e-3)
    return {}


def _describe(detector: AnomalyDetector) -> dict[str, Any]:
    """Return the calls begun, in progress and waited for; ranks are those of the world."""
    state, trace = detector.snapshot(), detector.trace
    links = [
        {
            **{"to": link.peer, "rail": link.rail, "chunks": link.chunks, "bytes": link.nbytes},
            "bandwidth": round(link.recent),
        }
        for link in list(trace.counters.links.values())
    ]
    return {
        "number": trace.number,
        "world": list(trace.world),
        "begun": state.begun,
        "waits": [wait._asdict() for wait in state.waits],
        "calls": [_call(trace, call) for call in state.calls],
        "links": links,
        "failure": state.failure,
    }


def _call(trace: CommRecorder, call: CallSnapshot) -> dict[str, Any]:
    now, world = perf_counter_ns(), trace.world
    sends, receives = [], []
    for transfer in call.in_flight:
        found = {"rank": world[transfer.peer], "rail": transfer.rail, "ms": round((now - transfer.posted) / 1e6, 1)}
        if transfer.kind == SEND:
            sends.append({**found, "bytes": transfer.nbytes})
        else:
            waited = round((now - transfer.waited) / 1e6, 1) if transfer.waited else None
            receives.append({**found, "waited_ms": waited})
    return {
        **{"name": call.name, "run": call.run, "title": call.title, "signature": call.signature},
        **{"absent": [world[peer] for peer in call.absent], "waited_for": call.waited_for, "state": call.state},
        **{"sending": sends, "receiving": receives, "coding": call.coding},
    }


def _threads() -> dict[str, list[str]]:
    """Return the stack of each Python thread, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(number, str(number)): [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(frames)
        ]
        for number, frames in sys._current_frames().items()
    }


# The fields that `blame` reads, and their types. A list has one element: the schema of all elements. A dictionary with
# the key "*" has the schema of all values; any other has the schema of each field.
_TRANSFER = {"rank": int, "ms": float}
_SCHEMA: dict[str, Any] = {
    **{"rank": int, "size": int, "host": str, "pid": int, "time": float, "reason": str},
    "communicators": [
        {
            **{"number": int, "world": [int], "begun": {"*": int}, "failure": (str, type(None))},
            "waits": [{"name": str, "run": int, "title": str}],
            "calls": [
                {
                    **{"title": str, "absent": [int], "coding": bool},
                    "sending": [{**_TRANSFER, "bytes": int}],
                    "receiving": [{**_TRANSFER, "waited_ms": (float, type(None))}],
                }
            ],
        }
    ],
    "alarms": [str],
    "threads": {"*": [str]},
}


def read_flight(path: Path) -> dict[str, Any]:
    """Read and validate a flight record; raise SpecError if it is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("something that is not a file")
            if status.st_size > MAX_BYTES:
                raise ValueError(f"{status.st_size} bytes, more than the {MAX_BYTES} of any record")
            record = json.loads(file.read(MAX_BYTES))
        if not isinstance(record, dict):
            raise ValueError("JSON that is no object")
        if record.get("version") != VERSION:
            raise ValueError(f"version {record.get('version')!r}, this library reads version {VERSION}")
        # A communicator that kept changing while it was recorded has no fields.
        if isinstance(record.get("communicators"), list):
            record["communicators"] = [one for one in record["communicators"] if one != {}]
        _validate(record, _SCHEMA, "")
        if not 0 <= record["rank"] < record["size"] <= MAX_RANKS:
            raise ValueError(f"rank {record['rank']} of {record['size']}")
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(
            f"file {path}",
            expected="a flight record",
            got=f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}",
            remedy="Remove it, or name the directory that MPI_GPUCOMP_FLIGHT was set to.",
        ) from error
    return record


def _validate(value: Any, schema: Any, where: str) -> None:
    """Raise ValueError unless a value has the types of a schema."""
    if isinstance(schema, dict):
        _expect(value, dict, where)
        for key in value if "*" in schema else schema:
            if key not in value:
                raise ValueError(f"no field {where}.{key}".replace(" .", " "))
            _validate(value[key], schema.get("*", schema.get(key)), f"{where}.{key}")
    elif isinstance(schema, list):
        _expect(value, list, where)
        for number, one in enumerate(value):
            _validate(one, schema[0], f"{where}[{number}]")
    else:
        _expect(value, schema, where)


def _expect(value: Any, kind: Any, where: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join("null" if one is type(None) else one.__name__ for one in kinds)
    if type(value) not in (*kinds, *([int] if float in kinds else [])):
        raise ValueError(f"field {where.lstrip('.')} with {type(value).__name__} instead of {names}")
    if isinstance(value, int | float) and not abs(value) < MAX_NUMBER:
        raise ValueError(f"field {where.lstrip('.')} with a number out of range")


class Blame(NamedTuple):
    """The cause of a hang."""

    text: str
    ranks: tuple[int, ...] = ()
    """The rank; of a link, its two ends; none without a cause."""


def read(directory: Path) -> dict[int, dict[str, Any]]:
    """Read the newest record of each rank; raise SpecError for a file that is no flight record."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(directory.glob(FILES)):
        record = read_flight(path)
        if record["rank"] not in found or record["time"] > found[record["rank"]]["time"]:
            found[record["rank"]] = record
    if not found:
        remedy = "Set MPI_GPUCOMP_FLIGHT to a directory for the run, and name it here."
        raise SpecError(f"directory {directory}", expected=f"flight records ({FILES})", got="none", remedy=remedy)
    return found


def blame(records: Records) -> Blame:
    """Name the cause of a hang."""
    rules = _silent, _behind, _link, _idle
    found = next((cause for rule in rules if (cause := rule(records)) is not None), None)
    return found or _no_hang(records)


def _joined(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _waits(records: Records) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the calls that ranks are blocked in: rank, communicator, call."""
    for rank, record in sorted(records.items()):
        for communicator in record["communicators"]:
            for call in communicator["waits"]:
                yield rank, communicator, call


def _same(record: Mapping[str, Any], communicator: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find a communicator in another rank's record."""
    key = communicator["world"], communicator["number"]
    return next((one for one in record["communicators"] if (one["world"], one["number"]) == key), None)


def _silent(records: Records) -> Blame | None:
    """Find ranks without a record while others wait in a call with them."""
    size = next(iter(records.values()))["size"]
    missing = [rank for rank in range(size) if rank not in records]
    waiting = [(rank, call) for rank, one, call in _waits(records) if set(missing) & set(one["world"])]
    if not missing or not waiting:
        return None
    who, ranks = sorted({rank for rank, _ in waiting}), _joined(missing)
    many = len(missing) > 1
    title = waiting[0][1]["title"]
    cause = f"{ranks} {'are' if many else 'is'} behind it: {'they' if many else 'it'} left no record (dead or stopped)"
    return Blame(f"{cause}, and {_joined(who)} wait{'s' * (len(who) == 1)} in {title}.", tuple(missing))


def _behind(records: Records) -> Blame | None:
    """Find a rank that has not begun a call that others wait in."""
    late: dict[int, tuple[Mapping[str, Any], int, set[int]]] = {}
    for waiting, communicator, call in _waits(records):
        for rank in communicator["world"]:
            own = _same(records[rank], communicator) if rank in records else None
            begun = own["begun"].get(call["name"], 0) if own else 0
            if rank in records and begun < call["run"]:
                late.setdefault(rank, (call, begun, set()))[2].add(waiting)
    if not late:
        return None
    # A chain of ranks that wait for each other ends at one that waits for none.
    free = [rank for rank in late if not any(one["waits"] for one in records[rank]["communicators"])]
    rank = min(free or late, key=lambda rank: (late[rank][1] - late[rank][0]["run"], rank))
    call, begun, waiting_ranks = late[rank]
    who = sorted(waiting_ranks)
    cause = f"rank {rank} ({records[rank]['host']}) is behind it: it has begun {begun} of {call['run']} calls"
    named = f" named {call['name']!r}" if call["name"] else ""
    verb = "waits" if len(who) == 1 else "wait"
    return Blame(f"{cause}{named}, {_joined(who)} {verb} in {call['title']}{_location(records[rank])}.", (rank,))


def _location(record: Mapping[str, Any]) -> str:
    """Return where the main thread is: the innermost line of the program itself."""
    frames = record["threads"].get("MainThread", ())
    own = [frame for frame in frames if not any(part in frame for part in OURS)]
    if not own:
        return ""
    place, _, name = own[-1].rpartition(" ")
    return f"; it is at {place.rpartition('/')[2]} in {name}"


def _calls(records: Records) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    for rank, record in sorted(records.items()):
        for communicator in record["communicators"]:
            for call in communicator["calls"]:
                yield rank, communicator, call


def _recv_waits(records: Records) -> dict[tuple[int, int], float]:
    """Return the links that a receiver waits on, by their ends, and for how many milliseconds."""
    return {
        (one["rank"], rank): one["waited_ms"]
        for rank, _, call in _calls(records)
        for one in call["receiving"]
        if one["waited_ms"] is not None and one["waited_ms"] >= LONG_MS
    }


def _link(records: Records) -> Blame | None:
    """Find a link with bytes in flight that the receiver waits for."""
    waits = _recv_waits(records)
    stuck: dict[tuple[int, int], tuple[int, float, str]] = {}
    for rank, _, call in _calls(records):
        for one in call["sending"]:
            key = rank, one["rank"]
            if key in waits and one["ms"] >= LONG_MS:
                nbytes, longest, _ = stuck.get(key, (0, 0.0, ""))
                stuck[key] = nbytes + one["bytes"], max(longest, one["ms"]), call["title"]
    if not stuck:
        return None
    (sender, receiver), (nbytes, longest, title) = max(stuck.items(), key=lambda item: item[1][1])
    cause = f"the link from rank {sender} to rank {receiver} is behind it: {nbytes / 1e6:.1f} MB of {title} have been"
    return Blame(
        f"{cause} in flight for {longest / 1e3:.1f} s, and rank {receiver} waits for them.", (sender, receiver)
    )


def _idle(records: Records) -> Blame | None:
    """Find a rank that others wait for, and that waits for none: it is busy itself."""
    waits = _recv_waits(records)
    waiting = {receiver for _, receiver in waits}
    free = sorted({sender for sender, _ in waits if sender in records and sender not in waiting})
    if not free:
        return None
    rank = free[0]
    who = sorted(receiver for sender, receiver in waits if sender == rank)
    coding = any(call["coding"] for other, _, call in _calls(records) if other == rank)
    why = "it encodes or decodes" if coding else "it has nothing in flight to them"
    verb = "waits" if len(who) == 1 else "wait"
    return Blame(
        f"rank {rank} ({records[rank]['host']}) is behind it: {_joined(who)} {verb} for it, and {why}.", (rank,)
    )


def _no_hang(records: Records) -> Blame:
    failures = {one["failure"] for record in records.values() for one in record["communicators"] if one["failure"]}
    if failures:
        return Blame(f"no rank waits any more; a call has failed: {sorted(failures)[0]}")
    if any(True for _ in _waits(records)):
        return Blame(
            "all ranks have begun the calls that they wait in, and nothing has been in flight for long: no hang"
        )
    return Blame("no rank waits for another: no hang")
