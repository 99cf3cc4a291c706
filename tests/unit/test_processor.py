"""A process that is stopped stands still; one that computes, or merely sleeps a little, does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

CHILD = """
import sys, time
from mpi_gpucomp.monitor.processor import Processor
processor, found, end = Processor(), [], time.perf_counter_ns() + 20_000_000_000
print("ready", flush=True)
last = time.perf_counter_ns()
processor.sample()
while time.perf_counter_ns() < end and not found:
    time.sleep(0.001)
    now = time.perf_counter_ns()
    if now - last > 250_000_000:
        found.append(processor.stood_still(now - last))
    else:
        processor.sample()
    last = time.perf_counter_ns()
before = time.perf_counter_ns()
while time.perf_counter_ns() - before < 300_000_000:
    pass
print(found[0] if found else 0, processor.stood_still(time.perf_counter_ns() - before), flush=True)
"""


def test_a_process_that_was_stopped_stood_still_and_one_that_computes_did_not() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGCONT)
        still, computing = map(int, child.stdout.readline().split())
    assert still > 200_000_000
    assert computing == 0
