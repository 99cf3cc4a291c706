"""The simulated CUDA machine itself: a small wrong program is found, and a right one is not."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_gpucomp.device.build import kernels_directory
from simulated_cuda import SETTINGS, CudaError, Machine, machine
from simulated_cuda.build import kernel_layouts
from simulated_cuda.program import Program

pytestmark = pytest.mark.skipif(SETTINGS in os.environ, reason="these tests start the machine again: others use it")
SEEDS = range(6)
SIZE = 5000
BIG = 1 << 16
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=SEEDS)
def simulated(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Start the machine with two GPUs and a seed; nothing runs by itself."""
    made = machine()
    made.configure(f"seed={request.param},devices=2,background=0")
    yield made
    made.configure("")


@pytest.fixture
def program(simulated: Machine) -> Program:
    return Program(simulated)


def found(program: Program, pattern: str) -> None:
    """Check that each finding matches, and that there is one."""
    program.end()
    assert program.machine.findings
    for finding in program.machine.findings:
        assert re.search(pattern, finding), finding


def nothing_found(program: Program) -> None:
    program.end()
    assert program.machine.findings == []


# What is found.


@pytest.mark.parametrize("ordered", [True, False])
def test_use_before_the_producer_is_done(program: Program, ordered: bool) -> None:
    data, result, producer, consumer = program.alloc(SIZE), program.alloc(SIZE), program.stream(), program.stream()
    program.fill(data, SIZE, 7, producer)
    if ordered:
        program.wait(consumer, program.record(producer))
    program.add(result, data, SIZE, 1, consumer)
    program.synchronize(producer, consumer)
    if ordered:
        nothing_found(program)
        assert program.bytes_at(result, SIZE) == b"\x08" * SIZE
    else:
        found(program, "^use before the producer is done: kernel sim_(add|fill) on stream .* kernel sim_(add|fill) on")


@pytest.mark.parametrize("ordered", [True, False])
def test_reuse_before_the_stream_is_done(program: Program, ordered: bool) -> None:
    data, result, reader, writer = program.alloc(SIZE), program.alloc(SIZE), program.stream(), program.stream()
    program.fill(data, SIZE, 7, reader)
    program.synchronize(reader)
    program.add(result, data, SIZE, 1, reader)
    if ordered:
        program.synchronize(reader)
    program.fill(data, SIZE, 9, writer)
    if ordered:
        nothing_found(program)
    else:
        found(program, "^reuse: kernel sim_(add|fill) on stream")


@pytest.mark.parametrize("apart", [True, False])
def test_parts_of_an_allocation_have_hazards_of_their_own(program: Program, apart: bool) -> None:
    data, one, two = program.alloc(2 * BIG), program.stream(), program.stream()
    program.fill(data, BIG, 1, one)
    program.fill(data + BIG - (not apart), BIG, 2, two)
    if apart:
        nothing_found(program)
    else:
        found(program, rf"^reuse: .* writes byte {BIG - 1} of {2 * BIG} bytes")


def test_a_stream_that_waited_for_an_earlier_record_is_not_ordered_behind_a_later_one(program: Program) -> None:
    data, one, two, event = program.alloc(SIZE), program.stream(), program.stream(), program.event()
    program.call("cuEventRecord", event, one)
    program.wait(two, event)
    program.fill(data, SIZE, 1, one)
    program.call("cuEventRecord", event, one)
    program.fill(data, SIZE, 2, two)
    found(program, "^reuse: kernel sim_fill")


@pytest.mark.parametrize("blocking", [True, False])
def test_the_legacy_default_stream_orders_blocking_streams_alone(program: Program, blocking: bool) -> None:
    data, one, two = program.alloc(SIZE), program.stream(blocking=blocking), program.stream(blocking=blocking)
    program.fill(data, SIZE, 1, one)
    program.fill(program.alloc(1), 1, 0, None)
    program.add(data, data, SIZE, 1, two)
    program.synchronize(two)
    if blocking:
        nothing_found(program)
        assert program.bytes_at(data, SIZE) == b"\x02" * SIZE
    else:
        found(program, "nothing orders the two")


def test_the_per_thread_default_stream_is_one_of_each_thread(program: Program) -> None:
    data, per_thread = program.alloc(SIZE), ctypes.c_void_p(2)
    program.fill(data, SIZE, 1, per_thread)

    def other() -> None:
        program.call("cuCtxSetCurrent", program.contexts[0])
        program.fill(data, SIZE, 2, per_thread)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    found(program, "per-thread default stream .* per-thread default stream .* nothing orders the two")


@pytest.mark.parametrize("asked", ["event", "query", "stream", "device", "copy"])
def test_what_the_host_has_waited_for_is_ordered(program: Program, asked: str) -> None:
    data, one, two = program.alloc(SIZE), program.stream(), program.stream()
    program.fill(data, SIZE, 1, one)
    if asked == "event":
        program.call("cuEventSynchronize", program.record(one))
    elif asked == "query":
        event = program.record(one)
        while not program.ready(event):
            pass
    elif asked == "stream":
        program.synchronize(one)
    elif asked == "device":
        program.synchronize()
    else:
        to = ctypes.create_string_buffer(SIZE)
        program.copy(ctypes.addressof(to), data, SIZE, one)
        assert to.raw == b"\x01" * SIZE
    program.fill(data, SIZE, 2, two)
    nothing_found(program)


@pytest.mark.parametrize("waited", [True, False])
def test_memory_is_freed_before_its_work_is_done(program: Program, waited: bool) -> None:
    data, stream = program.alloc(SIZE), program.stream()
    program.fill(data, SIZE, 1, stream)
    if waited:
        program.synchronize(stream)
    program.free(data)
    if waited:
        nothing_found(program)
    else:
        found(program, "^reuse: cuMemFree frees byte 0 of 5000 bytes of device memory of GPU 0")


def test_memory_is_freed_on_another_stream_than_that_of_its_work(program: Program) -> None:
    one, two, made = program.stream(), program.stream(), ctypes.c_uint64()
    program.call("cuMemAllocAsync", ctypes.byref(made), ctypes.c_size_t(SIZE), one)
    program.fill(made.value, SIZE, 1, one)
    program.wait(two, program.record(one))
    program.call("cuMemFreeAsync", made, two)
    nothing_found(program)
    program.call("cuMemAllocAsync", ctypes.byref(made), ctypes.c_size_t(SIZE), one)
    program.fill(made.value, SIZE, 1, two)
    found(program, "^use before the producer is done|^reuse|^memory")


def test_use_after_free_and_double_free(program: Program) -> None:
    data, stream = program.alloc(SIZE), program.stream()
    program.free(data)
    assert program.code("cuMemFree_v2", ctypes.c_uint64(data)) == 1
    assert program.code("cuMemsetD8Async", ctypes.c_uint64(data), 0, ctypes.c_size_t(10), stream) == 1
    found(program, "freed device memory")
    program.machine.clear()
    program.fill(data, SIZE, 1, stream)
    assert program.code("cuStreamSynchronize", stream) == 700
    found(program, "^memory: kernel sim_fill .* writes 1 bytes at byte \\d+ of 5000 bytes of freed device")


@pytest.mark.parametrize("excess", [0, 1])
def test_an_access_behind_the_end(program: Program, excess: int) -> None:
    data, stream = program.alloc(SIZE), program.stream()
    program.fill(data, SIZE + excess, 1, stream)
    assert program.code("cuStreamSynchronize", stream) == 700 * excess
    if excess:
        found(program, "^memory: kernel sim_fill .* writes 1 bytes at address .* 0 bytes behind byte 0 of 5000 bytes")
        assert program.machine.fault().startswith("memory: kernel sim_fill")
        assert program.code("cuMemcpyAsync", data, data, 1, stream) == 700
    else:
        nothing_found(program)


def test_a_copy_beyond_an_allocation_is_an_error(program: Program) -> None:
    data, host = program.alloc(SIZE), program.pinned(2 * SIZE)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        program.copy(host, data, SIZE + 1, None)
    found(program, "^memory: the source of cuMemcpyAsync has 5001 bytes from byte 0 of 5000 bytes of device memory")


def test_a_kernel_cannot_reach_pageable_memory_or_another_gpu(program: Program) -> None:
    pageable = ctypes.create_string_buffer(SIZE)
    program.fill(ctypes.addressof(pageable), SIZE, 1, None)
    found(program, "pageable host memory")
    program.machine.clear()
    program.machine.repair()
    data = program.alloc(SIZE)
    program.use(1)
    program.fill(data, SIZE, 1, None)
    found(program, "of GPU 0 .*, which this GPU cannot reach")


def test_a_kernel_reaches_memory_by_an_address_that_it_reads(program: Program) -> None:
    data, address, to = program.alloc(1), program.alloc(8), program.alloc(1)
    program.fill(data, 1, 42, None)
    number = ctypes.c_uint64(data)
    program.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.byref(number), ctypes.c_size_t(8))
    program.launch("sim_indirect", None, 1, address, to)
    assert program.bytes_at(to, 1) == b"\x2a"
    nothing_found(program)


def test_a_double_is_passed_by_value(program: Program) -> None:
    data, values = program.alloc(16), (ctypes.c_double * 2)(1.5, -2.0)
    program.call("cuMemcpyHtoD_v2", ctypes.c_uint64(data), values, ctypes.c_size_t(16))
    program.launch("sim_scale", None, 1, data, 2, 2.0)
    assert program.bytes_at(data, 16) == bytes((ctypes.c_double * 2)(3.0, -4.0))


@pytest.mark.parametrize("waited", [True, False])
def test_the_host_reads_an_unfinished_result(program: Program, waited: bool) -> None:
    data, host, stream = program.alloc(BIG), program.pinned(BIG), program.stream()
    program.fill(data, BIG, 7, stream)
    program.copy(host, data, BIG, stream)
    if waited:
        program.synchronize(stream)
    seen = ctypes.string_at(host + 4096, 1)
    if waited:
        assert seen == b"\x07"
        nothing_found(program)
    elif program.machine.findings:
        found(
            program,
            "^host: the host accesses byte 4096 of 65536 bytes of pinned memory .*, which an unfinished copy of",
        )
    else:
        assert seen == b"\x07"  # the copy had run already, as CUDA allows


def test_the_host_overwrites_what_a_copy_has_yet_to_read(simulated: Machine) -> None:
    program = Program(simulated)
    data, host, stream, other = program.alloc(BIG), program.pinned(BIG), program.stream(), program.stream()
    outcomes = set()
    for _ in range(40):
        program.copy(data, host, BIG, stream)
        ctypes.memset(host + 8192, 1, 1)
        outcomes.add(bool(simulated.findings))
        simulated.clear()
        program.synchronize(stream, other)
    assert True in outcomes


def test_an_access_of_the_host_can_be_declared(program: Program) -> None:
    data, host, stream = program.alloc(64), program.pinned(64), program.stream()
    program.fill(data, 64, 1, stream)
    program.machine.host_access(data, 64, "MPI_Send")
    found(program, "MPI_Send")
    program.synchronize(stream)
    program.machine.clear()
    program.machine.host_access(data, 64, "MPI_Send")
    program.copy(host, data, 64, stream)
    nothing_found(program)


def test_device_memory_is_not_the_hosts(simulated: Machine) -> None:
    code = (
        "import ctypes\nfrom tests.simulated_cuda import machine\nfrom tests.simulated_cuda.program import Program\n"
        "data = Program(machine()).alloc(100)\nctypes.string_at(data + 5, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -11
    assert "simulated CUDA: the host accesses byte 5 of 100 bytes of device memory of GPU 0" in done.stderr


def test_a_forked_child_cannot_use_cuda(simulated: Machine) -> None:
    code = (
        "import os\nfrom tests.simulated_cuda import machine\nfrom tests.simulated_cuda.program import Program\n"
        "program = Program(machine())\nprogram.fill(program.alloc(9), 9, 1, None)\nchild = os.fork()\n"
        "if not child:\n    os._exit(machine().driver.cuCtxSynchronize())\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\nprogram.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_leaks(program: Program) -> None:
    program.stream()
    program.alloc(1)
    program.machine.mark()
    assert program.machine.leaks() == 0
    program.stream()
    program.event()
    program.alloc(77)
    assert program.machine.leaks() == 3
    found(program, "^leak: (stream|event|byte 0 of 77 bytes)")


def test_a_context_by_accident(program: Program) -> None:
    program.machine.expect_devices(0)
    program.alloc(1)
    program.machine.mark()
    program.use(1)
    program.use(0)
    assert program.machine.leaks() == 1
    found(program, "^context: (one was created on GPU 1, which|GPU 1 has a context that nothing uses)")


# Errors that CUDA documents.


def test_work_without_a_context(program: Program) -> None:
    stream, event = program.stream(), program.event()
    program.call("cuCtxSetCurrent", None)
    made = ctypes.c_uint64()
    assert program.code("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(9)) == 201
    assert program.code("cuEventRecord", event, stream) == 201
    assert program.code("cuStreamSynchronize", stream) == 201


def test_work_on_the_wrong_device(program: Program) -> None:
    data, stream, event = program.alloc(9), program.stream(), program.event()
    program.use(1)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        program.fill(data, 9, 1, stream)
    assert program.code("cuEventRecord", event, None) == 400  # the default stream of GPU 1
    found(program, "^device: ")
    program.machine.clear()
    program.call("cuEventRecord", event, stream)  # both are of GPU 0
    program.copy(data, data, 9, stream)
    program.wait(program.stream(), event)
    nothing_found(program)


def test_destroyed_handles(program: Program) -> None:
    data, stream, event = program.alloc(SIZE), program.stream(), program.event()
    program.fill(data, SIZE, 5, stream)
    program.call("cuStreamDestroy_v2", stream)
    program.call("cuEventDestroy_v2", event)
    assert program.code("cuStreamSynchronize", stream) == 400
    assert program.code("cuStreamDestroy_v2", stream) == 400
    assert program.code("cuEventQuery", event) == 400
    assert program.code("cuEventDestroy_v2", event) == 400
    program.synchronize()
    assert program.bytes_at(data, SIZE) == b"\x05" * SIZE  # its work completes nevertheless


def test_an_event_that_was_never_recorded_is_done(program: Program) -> None:
    event = program.event()
    assert program.ready(event)
    program.call("cuEventSynchronize", event)
    program.wait(None, event)
    nothing_found(program)


def test_capture_forbids_to_wait_and_to_query(program: Program) -> None:
    data, stream, graph, status = program.alloc(9), program.stream(), ctypes.c_void_p(), ctypes.c_int()
    program.call("cuStreamBeginCapture_v2", stream, 0)
    program.fill(data, 9, 1, stream)
    program.call("cuStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 1
    assert program.code("cuEventQuery", program.record(stream)) == 907
    assert program.code("cuStreamSynchronize", stream) == 900
    assert program.code("cuStreamEndCapture", stream, ctypes.byref(graph)) == 901
    program.fill(data, 9, 2, stream)
    program.synchronize(stream)
    assert program.bytes_at(data, 9) == b"\x02" * 9


def test_pointers_have_attributes(program: Program) -> None:
    program.use(1)
    data, host, pageable = program.alloc(9), program.pinned(9), ctypes.create_string_buffer(9)
    kind, ordinal = ctypes.c_uint(), ctypes.c_int()
    for address, wanted in ((data + 3, 2), (host, 1)):
        program.call("cuPointerGetAttribute", ctypes.byref(kind), 2, ctypes.c_uint64(address))
        program.call("cuPointerGetAttribute", ctypes.byref(ordinal), 9, ctypes.c_uint64(address))
        assert (kind.value, ordinal.value) == (wanted, 1)
    assert program.code("cuPointerGetAttribute", ctypes.byref(kind), 2, pageable) == 1


# Failures that are injected.


@pytest.mark.parametrize(("kind", "code"), [("illegal_address", 700), ("launch_failed", 719)])
def test_a_launch_fails_and_the_context_with_it(program: Program, kind: str, code: int) -> None:
    program.machine.inject(f"{kind}:n=2")
    data, stream, other = program.alloc(SIZE), program.stream(), program.stream()
    event = program.record(other)
    program.fill(data, SIZE, 1, stream)
    program.synchronize(stream)
    codes = {program.code("cuStreamSynchronize", other)}
    assert codes == {0}
    program.fill(data, SIZE, 2, stream)
    assert program.code("cuStreamSynchronize", stream) == code
    assert program.code("cuStreamSynchronize", other) == code
    assert program.code("cuEventQuery", event) == code
    assert program.code("cuMemFree_v2", ctypes.c_uint64(data)) == code
    assert program.machine.fault() == "injected into kernel sim_fill"
    program.use(1)
    program.fill(program.alloc(SIZE), SIZE, 1, None)
    program.synchronize(None)  # the other GPU works


def test_a_failure_of_one_kernel(program: Program) -> None:
    program.machine.inject("illegal_address:kernel=sim_add")
    data = program.alloc(SIZE)
    program.fill(data, SIZE, 1, None)
    program.synchronize()
    program.add(data, data, SIZE, 1, None)
    assert program.code("cuCtxSynchronize") == 700


def test_out_of_memory(program: Program) -> None:
    made = ctypes.c_uint64()
    program.machine.inject("out_of_memory:n=2")
    program.alloc(9)
    assert program.code("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(9)) == 2
    program.alloc(9)
    program.machine.configure("capacity=1000")
    again = Program(program.machine)
    kept = again.alloc(600)
    assert again.code("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(600)) == 2
    again.free(kept)
    again.alloc(600)


@pytest.mark.parametrize(("kind", "code"), [("unavailable", 46), ("ecc", 214)])
def test_a_device_is_lost(program: Program, kind: str, code: int) -> None:
    stream = program.stream()
    program.machine.inject(f"{kind}:device=0;n=3")
    assert [program.code("cuStreamSynchronize", stream) for _ in range(4)] == [0, 0, code, code]


def test_a_wrong_specification_is_an_error(simulated: Machine) -> None:
    with pytest.raises(ValueError, match="expected illegal_address, launch_failed, out_of_memory"):
        simulated.inject("fire")
    with pytest.raises(ValueError, match="expected seed, devices"):
        simulated.configure("sead=3")


# Order, counts, the model's clock.


def _order(settings: str) -> list[bytes]:
    """Return what a reader sees of a race that each of many seeds decides."""
    made = machine()
    made.configure(settings)
    program = Program(made)
    data, one, two = program.alloc(1), program.stream(), program.stream()
    seen = []
    for _ in range(40):
        program.fill(data, 1, 1, one)
        program.fill(data, 1, 2, two)
        program.synchronize(one, two)
        seen.append(program.bytes_at(data, 1))
    made.configure("")
    return seen


def test_the_seed_selects_the_order() -> None:
    first, again, other = (_order(f"background=0,seed={seed}") for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert set(first) == {b"\1", b"\2"}


def test_a_stream_is_starved_while_others_can_run(simulated: Machine) -> None:
    program = Program(simulated)
    data, streams = program.alloc(8), [program.stream() for _ in range(4)]
    last = 0
    for _ in range(30):
        events = [program.record(stream) for stream in streams if not program.fill(data, 1, 1, stream)]
        program.synchronize(streams[0])
        last += sum(not program.ready(event) for event in events[1:])
    assert last > 0  # work of others was still waiting
    simulated.clear()


def test_a_host_function_runs_behind_the_work_and_holds_up_what_follows(simulated: Machine) -> None:
    program = Program(simulated)
    data, stream, may_end, seen = program.alloc(SIZE), program.stream(), threading.Event(), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: (may_end.wait(), seen.append(1))[1])
    program.call("cuLaunchHostFunc", stream, function, None)
    program.fill(data, SIZE, 3, stream)
    event = program.record(stream)
    assert not any(program.ready(event) for _ in range(50))
    may_end.set()
    program.synchronize(stream)
    assert seen == [1]
    assert program.bytes_at(data, SIZE) == b"\x03" * SIZE


def test_work_runs_by_itself_if_no_call_is_made() -> None:
    made = machine()
    made.configure("background=1")
    program = Program(made)
    host, data, stream = program.pinned(8), program.alloc(8), program.stream()
    ctypes.memset(host, 0, 8)
    program.fill(data, 8, 1, stream)
    program.copy(host, data, 8, stream)
    patience = time.monotonic() + 60
    while ctypes.string_at(host, 8) != b"\1" * 8:
        assert time.monotonic() < patience
    made.configure("")


def test_counts(program: Program) -> None:
    data, host, stream = program.alloc(SIZE), program.pinned(SIZE), program.stream()
    program.machine.reset_counts()
    program.fill(data, SIZE, 1, stream)
    program.copy(host, data, SIZE, stream)
    event = program.record(stream)
    program.call("cuEventSynchronize", event)
    assert program.ready(event)
    program.use(1)
    program.use(0)
    counts = program.machine.counts()
    wanted = {"launches": 1, "launches:sim_fill": 1, "copies_device_to_host": 1, "bytes_device_to_host": SIZE}
    wanted |= {"event_records": 1, "event_waits": 1, "event_queries": 1, "context_switches": 1}
    assert {name: counts[name] for name in wanted} == wanted
    assert program.machine.stream_counts(stream.value or 0)["launches"] == 1
    program.machine.reset_counts()
    assert not program.machine.counts()


@pytest.mark.parametrize(("model", "bandwidth"), [("A100", 32), ("H100", 64)])
def test_the_models_clock_has_the_bandwidth_of_pcie(model: str, bandwidth: int) -> None:
    made = machine()
    made.configure(f"gpu={model},seed=5")
    program = Program(made)
    size, streams = 16 << 20, [program.stream(), program.stream()]
    data, host = [program.alloc(size) for _ in streams], [program.pinned(size) for _ in streams]
    made.reset_counts()
    for one, to, stream in zip(host, data, streams, strict=True):
        program.copy(to, one, size, stream)
    program.synchronize()
    both = made.model_microseconds
    assert 2 * size / bandwidth / 1000 <= both < 2 * size / bandwidth / 1000 + 60  # one engine carries both
    made.reset_counts()
    program.copy(data[0], host[0], size, streams[0])
    program.copy(host[1], data[1], size, streams[1])
    program.synchronize()
    assert made.model_microseconds < 0.6 * both  # the two directions have engines of their own
    made.configure("")


def test_the_models_clock_does_not_depend_on_the_order_of_execution() -> None:
    made, times = machine(), []
    for seed in range(5):
        made.configure(f"seed={seed}")
        program = Program(made)
        size, streams = 4 << 20, [program.stream() for _ in range(3)]
        data, host = program.alloc(4 * size), program.pinned(4 * size)
        made.reset_counts()
        for n, stream in enumerate(streams):
            program.copy(data + n * size, host + n * size, size, stream)
            program.fill(data + n * size, size, n, stream)
        program.synchronize()
        times.append(made.model_microseconds)
    made.configure("")
    assert max(times) < 1.2 * min(times)


def test_every_kernel_has_a_layout() -> None:
    layouts = {
        name: kinds for source in kernels_directory().glob("*.cu") for name, kinds in kernel_layouts(source).items()
    }
    assert len(layouts) >= 78
    assert layouts["bound_encode_f32"] == "rqddwwww"
    assert layouts["pack_bucket"] == "rqwq"
