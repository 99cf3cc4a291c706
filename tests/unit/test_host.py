"""Host streams: order, failures, threads, fork and interpreter exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_memory import view
from hardware import SIMULATED

from mpi_gpucomp.device import Device, get_device
from mpi_gpucomp.errors import DeviceError

LONG = 30.0  # seconds: a test that takes longer has hung


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_queueing_work_does_not_block(host: Device) -> None:
    stream, gate, ran = host.stream(), threading.Event(), []
    stream.run(lambda: gate.wait(LONG))
    stream.run(lambda: ran.append(1))
    event = stream.record()
    assert not event.done()
    assert ran == []
    gate.set()
    event.wait()
    assert ran == [1]
    stream.close()


def test_work_of_concurrent_callers_is_serialised(host: Device) -> None:
    stream, order = host.stream(), []
    callers = [
        threading.Thread(target=lambda me=me: [stream.run(lambda n=n: order.append((me, n))) for n in range(200)])
        for me in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    stream.synchronize()
    assert [[n for caller, n in order if caller == me] for me in range(8)] == [list(range(200))] * 8
    stream.close()


def test_a_stream_waits_for_an_event_of_another(host: Device) -> None:
    first, second, gate, order = host.stream(), host.stream(), threading.Event(), []
    first.run(lambda: gate.wait(LONG))
    first.run(lambda: order.append("first"))
    second.wait(first.record())
    second.run(lambda: order.append("second"))
    event = second.record()
    assert not event.done()
    gate.set()
    event.wait()
    assert order == ["first", "second"]


def test_work_behind_a_failure_is_skipped_until_it_is_reported(host: Device) -> None:
    stream, ran, error = host.stream(), [], ValueError("broken")
    before = stream.record()
    stream.run(raising(error))
    stream.run(lambda: ran.append("behind"))
    events = [stream.record(), stream.record()]
    before.wait()
    for event in events:
        with pytest.raises(ValueError, match="broken") as caught:
            event.wait()
        assert caught.value is error
    stream.run(lambda: ran.append("later"))
    stream.synchronize()
    assert ran == ["later"]


def test_a_failure_propagates_to_waiting_streams_and_is_cleared_in_all(host: Device) -> None:
    first, second, ran, error = host.stream(), host.stream(), [], ValueError("broken")
    first.run(raising(error))
    second.wait(first.record())
    second.run(lambda: ran.append("behind"))
    with pytest.raises(ValueError, match="broken") as caught:
        second.synchronize()
    assert caught.value is error
    for stream in (first, second):
        stream.run(lambda: ran.append("later"))
        stream.synchronize()
    assert ran == ["later", "later"]


def test_system_exit_and_interrupts_are_failures(host: Device) -> None:
    stream = host.stream()
    for error in (SystemExit(3), KeyboardInterrupt()):
        stream.run(raising(error))
        with pytest.raises(type(error)):
            stream.synchronize()
    stream.close()


def test_the_traceback_ends_in_the_work_and_does_not_grow(host: Device) -> None:
    stream = host.stream()
    stream.run(raising(ValueError("broken")))
    event, depths = stream.record(), []
    for _ in range(3):
        with pytest.raises(ValueError, match="broken") as caught:
            event.wait()
        depths.append(len(caught.traceback))
        assert caught.traceback[-1].name == "work"
    assert len(set(depths)) == 1


def test_close_raises_an_unreported_failure_and_ends_the_thread(host: Device) -> None:
    stream = host.stream()
    stream.run(raising(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        stream.close()
    stream.close()
    with pytest.raises(DeviceError) as caught:
        stream.record()
    assert str(caught.value) == (
        "stream of host: expected an open stream, got a closed one. Create another with device.stream()."
    )


def stream_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gpucomp-stream"}


def test_the_thread_starts_with_the_first_work_and_ends_with_the_stream(host: Device) -> None:
    before = stream_threads()
    stream = host.stream()
    stream.synchronize()
    assert not stream_threads() - before
    stream.run(lambda: None)
    stream.synchronize()
    assert len(stream_threads() - before) == 1
    stream.close()
    assert not stream_threads() - before


def test_a_dropped_stream_completes_its_work_and_ends(host: Device) -> None:
    before, ran = stream_threads(), []
    stream = host.stream()
    for n in range(100):
        stream.run(lambda n=n: ran.append(n))
    assert len(stream_threads() - before) == 1
    del stream
    assert eventually(lambda: not stream_threads() - before)
    assert ran == list(range(100))


def test_a_stream_drops_completed_work(host: Device) -> None:
    class Thing:
        def work(self) -> None:
            pass

    stream, thing = host.stream(), Thing()
    gone = weakref.ref(thing)
    stream.run(thing.work)
    del thing
    assert eventually(lambda: gone() is None)
    stream.close()


def test_an_inline_stream_runs_immediately_in_the_calling_thread(host: Device) -> None:
    stream, where = host.stream(inline=True), []
    stream.run(lambda: where.append(threading.current_thread()))
    assert where == [threading.current_thread()]
    assert stream.record().done()


def test_an_inline_stream_does_not_catch_interrupts(host: Device) -> None:
    stream = host.stream(inline=True)
    with pytest.raises(KeyboardInterrupt):
        stream.run(raising(KeyboardInterrupt()))
    stream.synchronize()


def python(program: str) -> subprocess.Popen[str]:
    start = (
        "import os, sys, threading, time, numpy as np\nfrom mpi_gpucomp.device import *\nhost = get_device('host')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "program",
    [
        "s = host.stream(); s.run(lambda: None); s.synchronize()",
        "s, b = host.stream(), threading.Barrier(2); s.run(lambda: (b.wait(), time.sleep(1000))); b.wait()",
        "s, t = host.stream(), host.stream(); s.run(lambda: time.sleep(0.2)); t.wait(s.record()); t.run(print)",
        "x = np.zeros(1 << 26, np.uint8); s = host.stream()\n"
        "for _ in range(1000): s.fill(x.ctypes.data, 1, x.nbytes)\n"
        "time.sleep(0.1)",
        "s = host.stream(); s.run(lambda: 1 / 0)",
    ],
    ids=["idle", "blocked", "waiting", "filling", "failed"],
)
def test_the_interpreter_exits_whatever_the_streams_do(program: str) -> None:
    process = python(program)
    out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_wait_can_be_interrupted() -> None:
    process = python(
        "s = host.stream(); s.run(lambda: time.sleep(1000)); e = s.record(); print('waiting', flush=True); e.wait()"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LONG)
    assert err.rstrip().endswith("KeyboardInterrupt")


FORK = """
from mpi_gpucomp.device import host as host_module

data = np.arange(1 << 22, dtype=np.uint8)

def launch_on_workers():
    device = get_device('host')
    stream, sums = device.stream(), device.alloc(1 << 20)
    stream.launch('checksum_tiles', 1 << 10, data.ctypes.data, data.nbytes, sums.address)
    stream.synchronize()

launch_on_workers()
open_stream = host.stream()
open_stream.run(lambda: None)
open_stream.synchronize()
child = os.fork()
if child == 0:
    assert get_device('host') is not host
    assert not host_module._queues and host_module._workers is None
launch_on_workers()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_creates_its_own_device_and_threads() -> None:
    process = python(FORK)
    _, err = process.communicate(timeout=LONG)
    assert (process.returncode, err) == (0, "")


TESTS = str(Path(__file__).parents[1])
FORK_WITH_GPU = """
from mpi_gpucomp.errors import DeviceError

get_device('cuda:0').stream().synchronize()
child = os.fork()
if child == 0:
    try:
        get_device('cuda:0')
    except DeviceError as error:
        assert "a child of a process that had used cuda:0 before the fork. Start processes with" in str(error), error
        get_device('host').stream().close()
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_gpu_in_a_forked_child_is_an_error(gpu: Device) -> None:
    simulated = f"import sys; sys.path.insert(0, {TESTS!r}); from simulated_cuda.cupy_standin import install; install()"
    process = python(f"{simulated if SIMULATED else ''}\n{FORK_WITH_GPU}")
    _, err = process.communicate(timeout=LONG)
    assert (process.returncode, err) == (0, "")


def test_a_large_kernel_shared_by_workers_gives_the_same_result(host: Device) -> None:
    data = np.random.default_rng(3).integers(0, 256, 1 << 24, np.uint8)
    tiles = data.nbytes // 4096
    with host.alloc(8 * tiles) as shared, host.alloc(8 * tiles) as alone:
        for stream, to in ((host.stream(), shared), (host.stream(inline=True), alone)):
            stream.launch("checksum_tiles", tiles, data.ctypes.data, data.nbytes, to.address)
            stream.close()
        assert np.array_equal(view(shared), view(alone))


def test_get_device_returns_one_object_in_every_thread() -> None:
    found: list[Device] = []
    threads = [threading.Thread(target=lambda: found.append(get_device("host"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
