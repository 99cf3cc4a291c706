"""The flight recorder: what each rank was doing when something went wrong, in a file, for `blame` to compare.

A file is written when a call fails, when nothing moves any more, and on SIGUSR1, also while the program is stuck in a
call that does not return. It says what was begun and what is waited for, what is under way, the last operations, and
where each thread is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor.settings import fill
from mpi_gpucomp.trace import KINDS, SEND

if TYPE_CHECKING:
    from mpi_gpucomp.monitor.detector import AnomalyDetector
    from mpi_gpucomp.monitor.process_monitor import ProcessMonitor
    from mpi_gpucomp.monitor.recorder import CommRecorder
    from mpi_gpucomp.trace import CallSnapshot

__all__ = ["FILES", "Flight"]

FILES = "flight.*.json"
NAME = "flight.%h.%p.%r.json"
LAST = 64
"""Operations that are told."""
AGAIN_SECONDS = 2.0
"""What goes wrong this soon after something else follows from it: the first record says more."""
TRIES = 3


class Flight:
    """Writes the flight records of a process."""

    def __init__(self, station: ProcessMonitor, directory: str) -> None:
        """Write to a directory, and begin to listen to SIGUSR1 if nobody else does."""
        self._station = station
        self.path = Path(directory) / fill(NAME, station.rank)
        self._written, self._lock = 0.0, threading.Lock()
        self._listen()

    def write(self, reason: str, *, again: bool = False) -> bool:
        """Write what goes on now, unless that was done just before; never raises."""
        with self._lock:
            if not again and time.monotonic() - self._written < AGAIN_SECONDS:
                return False
            self._written = time.monotonic()
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                part = self.path.with_suffix(".part")
                part.write_text(json.dumps(self._whole(reason), indent=1), encoding="utf-8")
                part.replace(self.path)
            except OSError as error:
                print(f"rank {self._station.rank}: no flight record: {error}", file=sys.stderr)
                return False
            return True

    def _whole(self, reason: str) -> dict[str, Any]:
        station = self._station
        return {
            "version": 1,
            **{"rank": station.rank, "size": station.size, "host": station.host, "pid": os.getpid()},
            "time": time.time(),
            "reason": reason,
            "communicators": [_communicator(detector) for detector in list(station.detectors)],
            "alarms": [alarm.text for alarm in station.alarms.all[-LAST:]],
            "operations": self._operations(),
            "threads": _threads(),
        }

    def _operations(self) -> list[dict[str, Any]]:
        box, now = self._station.box, time.perf_counter_ns()
        names = box.names
        return [
            {
                **{"kind": KINDS[int(one["kind"])], "collective": names[one["name"]], "call": int(one["call"])},
                **{"peer": int(one["peer"]), "bytes": int(one["nbytes"]), "lane": int(one["lane"])},
                "begun_ms_ago": round((now - int(one["post"])) / 1e6, 3),
                "ended_ms_ago": round((now - int(one["complete"])) / 1e6, 3) if one["complete"] else None,
            }
            for one in box.records()[-LAST:]
        ]

    def _listen(self) -> None:
        """Write on SIGUSR1, by a thread: the main one may be in a call that does not return, and runs no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return
        read, write = socket.socketpair()
        write.setblocking(False)
        before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        if before != -1:  # somebody else is woken by signals: leave that to them
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        threading.Thread(target=self._heed, args=(read, write), name="gpucomp-flight", daemon=True).start()

    def _heed(self, read: socket.socket, write: socket.socket) -> None:
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
        {"to": link.peer, "rail": link.rail, "chunks": link.count, "bytes": link.sent, "speed": round(link.recent)}
        for link in list(trace.tally.links.values())
    ]
    return {
        "number": trace.number,
        "world": list(trace.world),
        "begun": state.begun,
        "waits": [wait._asdict() for wait in state.waits],
        "calls": [_call(trace, call) for call in state.calls],
        "links": links,
        "broken": state.failure,
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
        **{"name": call.name, "run": call.run, "title": call.title, "said": call.signature},
        **{"absent": [world[peer] for peer in call.absent], "waited_for": call.waited_for, "state": call.state},
        **{"sending": sends, "receiving": receives, "coding": call.coding},
    }


def _threads() -> dict[str, list[str]]:
    """Return where each of Python's threads is, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(number, str(number)): [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(frames)
        ]
        for number, frames in sys._current_frames().items()
    }
