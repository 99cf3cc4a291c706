"""The CUDA device: what can be shown without a GPU (compilation), and what only a GPU shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_memory import view

from mpi_gpucomp.device import Device, as_buffer, order_after
from mpi_gpucomp.device import library as nvrtc
from mpi_gpucomp.errors import BufferSpecError, DeviceError


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile into an empty cache."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC comes with CuPy", exc_type=ImportError)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_kernel_belongs_to_the_longest_family_that_starts_its_name() -> None:
    families = ["pack", "pack_bucket", "reduce"]
    assert nvrtc.family_of("reduce_f32", families) == "reduce"
    assert nvrtc.family_of("pack_gather_4", families) == "pack"
    assert nvrtc.family_of("pack_bucket", families) == "pack_bucket"
    assert nvrtc.family_of("checksum_tiles") == "checksum"


def test_a_kernel_of_no_family_is_an_error() -> None:
    with pytest.raises(DeviceError) as caught:
        nvrtc.family_of("packer", ["pack", "reduce"])
    assert str(caught.value).startswith(
        "kernel packer: expected a name that starts with pack or reduce, got 'packer'. "
        "Check the name against the files in "
    )


def test_a_family_is_compiled_once_and_kept(compiler: Path) -> None:
    path = nvrtc.compiled("checksum", 80)
    assert path.parent == compiler
    code, made = path.read_bytes(), path.stat().st_mtime_ns
    assert code.startswith(b"\x7fELF")
    assert b"checksum_join" in code
    assert nvrtc.compiled("checksum", 80) == path
    assert path.stat().st_mtime_ns == made
    assert nvrtc.compiled("checksum", 90) != path
    assert sorted(compiler.iterdir()) == sorted([path, nvrtc.compiled("checksum", 90)])


def test_a_gpu_newer_than_the_compiler_gets_portable_code(compiler: Path) -> None:
    code = nvrtc.compiled("checksum", 999).read_bytes()
    assert b".visible .entry checksum_join" in code
    # Denormal numbers must survive, as on the host.
    assert b".ftz" not in nvrtc.compiled("reduce", 999).read_bytes()


def test_what_does_not_compile_says_why(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.cu").write_text("this is no kernel;")
    monkeypatch.setattr(nvrtc, "kernels_directory", lambda: tmp_path)
    with pytest.raises(DeviceError) as caught:
        nvrtc.compiled("broken", 80)
    text = str(caught.value)
    assert text.startswith(
        "kernels broken.cu for sm_80: expected code that NVRTC compiles, got NVRTC_ERROR_COMPILATION"
    )
    assert 'identifier "this" is undefined' in text or "broken.cu(1): error" in text
    assert text.endswith(" Install the NVRTC that belongs to your CuPy ('pip install mpi_gpucomp[cuda13]').")


def test_arrays_of_cupy_are_taken_as_they_are(gpu: Device) -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    buffer = as_buffer(array, writable=True)
    assert (buffer.address, buffer.count, buffer.dtype.name, buffer.device) == (array.data.ptr, 12, "float32", "cuda:0")
    assert as_buffer(array[:, ::2]).strides == (16, 8)
    assert as_buffer(array.T).shape == (3, 4)


class OnlyInterface:
    """An array that says no more than `__cuda_array_interface__`."""

    def __init__(self, array: object, stream: int | None) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "version": 3, "stream": stream}


class OnlyDlpack:
    """An array that speaks no more than DLPack."""

    def __init__(self, array: object) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize("kind", ["cupy", "torch", "interface", "dlpack"])
def test_our_stream_waits_for_the_producers(gpu: Device, kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    size = 1 << 24
    with cupy.cuda.Stream(non_blocking=True) as producer:
        array = cupy.zeros(size, cupy.uint8)
        for step in range(50):
            array.fill(step)
        if kind == "torch":
            torch = pytest.importorskip("torch")
            if not torch.cuda.is_available():
                pytest.skip("this torch has no CUDA")
            with torch.cuda.stream(torch.cuda.ExternalStream(producer.ptr)):
                buffer = as_buffer(torch.as_tensor(array, device="cuda"))
        else:
            wrap = {"cupy": lambda x: x, "interface": lambda x: OnlyInterface(x, producer.ptr), "dlpack": OnlyDlpack}
            buffer = as_buffer(wrap[kind](array))
        stream = gpu.stream()
        order_after(buffer, stream)
    with gpu.pinned(size) as result:
        stream.copy(result.address, buffer.address, size)
        stream.synchronize()
        assert np.array_equal(view(result), np.full(size, 49, np.uint8))


def test_streams_of_host_and_gpu_wait_for_each_other(gpu: Device, host: Device) -> None:
    ours, theirs, size = host.stream(), gpu.stream(), 1 << 20
    with gpu.pinned(size) as staging, gpu.alloc(size) as memory, gpu.pinned(size) as result:
        ours.fill(staging.address, 42, size)
        theirs.wait(ours.record())
        theirs.copy(memory.address, staging.address, size)
        theirs.copy(result.address, memory.address, size)
        ours.wait(theirs.record())
        seen: list[np.ndarray] = []
        ours.run(lambda: seen.append(view(result).copy()))
        ours.synchronize()
        assert np.array_equal(seen[0], np.full(size, 42, np.uint8))


def test_a_buffer_of_a_gpu_needs_a_stream_of_it(gpu: Device, host: Device) -> None:
    cupy = pytest.importorskip("cupy")
    with pytest.raises(BufferSpecError) as caught:
        order_after(as_buffer(cupy.zeros(3)), host.stream())
    assert str(caught.value) == (
        "buffer: expected a stream of cuda:0, where the buffer is, got a stream of host. "
        "Use a stream of get_device('cuda:0')."
    )
