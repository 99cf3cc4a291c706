"""The stand-in for CuPy keeps CuPy's semantics, also those that programs stumble over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = """
import numpy as np
from tests.simulated_cuda import machine
from tests.simulated_cuda.cupy_standin import install
install()
import cupy
from cupy.cuda import Device, Event, Stream, get_current_stream, runtime
machine().configure("seed=1,devices=3,background=0")
"""

PROGRAMS = {
    "a device as a context manager selects the previous one at its end": """
with Device(2):
    assert runtime.getDevice() == 2
assert runtime.getDevice() == 0
machine().expect_devices(1, 2)
machine().leaks(everything=True)
assert any("GPU 0 has a context that nothing uses" in finding for finding in machine().findings)
""",
    "an event is not done for ever after a fault, and waiting raises": """
array = cupy.zeros(10)
stream = Stream(non_blocking=True)
machine().inject("illegal_address")
from mpi_gpucomp.device import get_device
ours = get_device("cuda:0").stream()
ours.launch("reduce_f32", 1, array.data.ptr, array.data.ptr, 1, 0)
event = ours.record()
for _ in range(100):
    assert not event.handle.done or machine().fault() == ""
assert runtime.eventQuery(event.handle.ptr) == 700
try:
    event.handle.synchronize()
except runtime.CUDARuntimeError as error:
    assert str(error) == "cudaErrorIllegalAddress: an illegal memory access was encountered"
    assert error.status == 700
else:
    raise AssertionError("no error")
""",
    "arrays": """
array = cupy.arange(24, dtype=np.float32).reshape(2, 3, 4)
host = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
for view, wanted in ((array, host), (array.T, host.T), (array[1, ::2], host[1, ::2]), (array[..., 1], host[..., 1])):
    assert view.strides == wanted.strides and np.array_equal(view.get(), wanted)
array[0, 1] = 7
host[0, 1] = 7
array[:, ::2, 1:3] += 1
host[:, ::2, 1:3] += 1
assert np.array_equal(cupy.asnumpy(array), host) and bool((array == host).all())
assert float((2 - array).sum()) == float((2 - host).sum())
assert array.T.flags.f_contiguous and not array.T.flags.c_contiguous
try:
    np.asarray(array)
except TypeError as error:
    assert "Implicit conversion" in str(error)
else:
    raise AssertionError("no error")
""",
    "arrays are exported": """
from mpi_gpucomp.device import as_buffer
with Stream(non_blocking=True) as stream:
    array = cupy.zeros((3, 4), np.int32)
    interface = array.__cuda_array_interface__
    assert (interface["stream"], interface["data"][0], interface["shape"]) == (stream.ptr, array.data.ptr, (3, 4))
assert array.__cuda_array_interface__["stream"] == 1
class Exported:
    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__
buffer = as_buffer(Exported(array))
assert (buffer.address, buffer.shape, buffer.device) == (array.data.ptr, (3, 4), "cuda:0")
""",
    "the pool uses memory again on its stream without waiting": """
one, two = Stream(non_blocking=True), Stream(non_blocking=True)
with one:
    array = cupy.zeros(100)
    address = array.data.ptr
    del array
with two:
    other = cupy.zeros(100)
    assert other.data.ptr != address
with one:
    again = cupy.zeros(100)
    assert again.data.ptr == address
machine().drain()
assert machine().findings == []
""",
    "an array of another stream without an event": """
one, two = Stream(non_blocking=True), Stream(non_blocking=True)
with one:
    array = cupy.zeros(100)
with two:
    runtime.memsetAsync(array.data.ptr, 1, 100, two.ptr)
machine().drain()
assert any("nothing orders the two" in finding for finding in machine().findings)
""",
    "a forked child is told that it cannot use a GPU": """
import os
from mpi_gpucomp.device import get_device
from mpi_gpucomp.errors import DeviceError
get_device("cuda:0").stream().synchronize()
child = os.fork()
if not child:
    try:
        get_device("cuda:0")
    except DeviceError as error:
        os._exit("a process that was not forked from one that uses CUDA" in str(error))
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
""",
    "memory of several kinds": """
managed = cupy.cuda.ManagedMemory(100)
assert runtime.pointerGetAttributes(managed.ptr).type == runtime.memoryTypeManaged
pinned = cupy.cuda.alloc_pinned_memory(100)
assert runtime.pointerGetAttributes(pinned.ptr).type == runtime.memoryTypeHost
np.frombuffer(pinned, np.uint8, 100)[:] = 3
pageable = np.zeros(100, np.uint8)
assert runtime.pointerGetAttributes(pageable.ctypes.data).type == runtime.memoryTypeUnregistered
stream = Stream()
made = cupy.cuda.MemoryAsync(100, stream)
runtime.memcpyAsync(made.ptr, pinned.ptr, 100, runtime.memcpyDefault, stream.ptr)
runtime.memcpyAsync(pageable.ctypes.data, made.ptr, 100, runtime.memcpyDefault, stream.ptr)
assert (pageable == 3).all()
del made
stream.synchronize()
assert machine().findings == []
""",
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", START + code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
