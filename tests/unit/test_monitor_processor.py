"""A process that is stopped is stalled; one that computes or sleeps is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

CHILD = """
import sys, time
from mpi_gpucomp.monitor.processor import CpuUsage, ThreadCounters
processor, found, naps, end = CpuUsage(ThreadCounters()), [], 0, time.perf_counter_ns() + 20_000_000_000
print("ready", flush=True)
last = time.perf_counter_ns()
processor.note(last, naps)
while time.perf_counter_ns() < end and not found:
    time.sleep(0.001)
    naps += 1
    now = time.perf_counter_ns()
    if now - last > 250_000_000:
        found.append(processor.stalled_ns(last, now, naps))
    else:
        processor.note(now, naps)
    last = time.perf_counter_ns()
processor.note(last, naps)
while time.perf_counter_ns() - last < 300_000_000:
    pass
computing = processor.stalled_ns(last, time.perf_counter_ns(), naps)
last = time.perf_counter_ns()
processor.note(last, naps)
time.sleep(0.3)  # a nap that takes too long, as on a machine that is paused
paused = processor.stalled_ns(last, time.perf_counter_ns(), naps + 1)
unplanned = processor.stalled_ns(last, time.perf_counter_ns(), naps)
print(found[0] if found else 0, computing, paused, unplanned, flush=True)
"""


def test_stopped_process_is_stalled() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGCONT)
        stalled, computing, paused, unplanned = map(int, child.stdout.readline().split())
    assert stalled > 200_000_000
    assert computing == 0 and paused == 0
    assert unplanned > 200_000_000
